"""What is in the pages: blocks of commands, and what is said about them."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])

FENCE = re.compile(
    r"^(?P<indent> *)(?P<fence>```+)(?P<language>\S*)[^\n]*\n(?P<body>.*?)^ *(?P=fence) *$", re.MULTILINE | re.DOTALL
)
MARK = re.compile(r"<!-- run by: (?P<tests>[^>]*?) -->")
SHELLS = {"bash", "console", "sh", "shell"}


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    page: str
    line: int
    language: str
    body: str
    before: str
    """The page up to the block."""

    @property
    def is_shell(self) -> bool:
        """Whether a reader may take it for commands."""
        return self.language in SHELLS or (not self.language and self.body.startswith("$ "))

    @property
    def run_by(self) -> list[str]:
        """The tests named in the invisible line right above."""
        match = MARK.fullmatch(self.before.rstrip("\n").rpartition("\n")[2].strip())
        if match is None:
            return []
        # A remark in parentheses may follow a name: what is different there.
        return [name.partition(" (")[0].strip() for name in match["tests"].split(",")]

    @property
    def is_said_not_to_be_run(self) -> bool:
        """In the paragraph right above, or in the block."""
        paragraph = self.before.rstrip("\n").rpartition("\n\n")[2]
        return "not run" in " ".join((paragraph + "\n" + self.body).lower().split()).replace("*", "")

    @property
    def commands(self) -> list[list[str]]:
        """Its commands as the shell would split them; a console's prompts and answers are left out."""
        body = self.body
        if self.language == "console" or body.startswith("$ "):
            body = "\n".join(line[2:] for line in body.splitlines() if line.startswith("$ "))
        commands, pending = [], ""
        for line in body.replace("\\\n", " ").splitlines():
            pending += line + "\n"
            try:
                words = shlex.split(pending, comments=True)
            except ValueError:
                continue  # a quotation goes on in the next line
            pending = ""
            commands.append(words)
        assert not pending, f"{self.page}:{self.line}: not a shell's words"
        return [words for words in commands if words]


def blocks(path: Path) -> Iterator[Block]:
    """All fenced blocks of a page."""
    text = path.read_text()
    for match in FENCE.finditer(text):
        before = text[: match.start()]
        name = str(path.relative_to(ROOT))
        yield Block(name, before.count("\n") + 1, match["language"], match["body"], before)


def shell_blocks() -> list[Block]:
    """Of all pages."""
    return [block for path in PAGES for block in blocks(path) if block.is_shell]


def block_of(page: str, beginning: str) -> Block:
    """The one block of a page that begins so."""
    (found,) = [block for block in blocks(ROOT / page) if block.body.startswith(beginning)]
    return found
