"""For mkdocs: the pages' links to files of the repository work on the site too.

In the repository a page links to `../examples/proxy.py` as any Markdown file does, and the web view of the
repository follows that. A site has only what is below `docs/`, so each such file gets a page of its own
there, below `repository/`: Markdown as it is, a folder as the list of its files, anything else as it stands in
the file. The links are turned to these pages. `CHANGELOG.md` is there in any case, for the navigation.

Called by mkdocs (`hooks` in mkdocs.yml), on one thread.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
DOCS = "docs"
COPIES = "repository"
ALWAYS = ("CHANGELOG.md",)

# Code, fenced or between backticks, is passed over; the second group is a link's target, the third its anchor.
LINK = re.compile(r"^(```+).*?^\1\s*?$|`[^`\n]*`|\]\((?![a-z]+:|/)([^)#\s]+)(#[^)\s]*)?\)", re.MULTILINE | re.DOTALL)
LANGUAGES = {
    ".py": "python",
    ".h": "cpp",
    ".cpp": "cpp",
    ".yml": "yaml",
    ".yaml": "yaml",
    ".toml": "toml",
    ".json": "json",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for every file of the repository that a page links to, and that those pages link to."""
    pages = [(f"{DOCS}/{file.src_uri}", file.content_string) for file in files.documentation_pages()]
    wanted, added = list(ALWAYS), set[str]()
    while pages or wanted:
        for path in wanted:
            if path not in added:
                added.add(path)
                text = _content(path)
                files.append(File.generated(config, _uri_of(path), content=text))
                if path.endswith(".md"):
                    pages.append((path, text))
        wanted = list(_links(*pages.pop())) if pages else []
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001 - mkdocs names it
    """Turn the page's links to what `on_files` has added; all others stay as they are."""
    own = _path_of(page.file.src_uri)

    def turned(match: re.Match[str]) -> str:
        if match[2] is None:
            return match[0]
        uri = _uri_of(_target(own, match[2]))
        if files.get_file_from_path(uri) is None:
            return match[0]  # what is not there is mkdocs' to report
        return f"]({posixpath.relpath(uri, posixpath.dirname(page.file.src_uri))}{match[3] or ''})"

    return LINK.sub(turned, markdown)


def _links(page: str, text: str) -> Iterator[str]:
    """Files and folders outside `docs/` that this page links to, as paths from the root."""
    for match in LINK.finditer(text):
        if match[2] is not None:
            path = _target(page, match[2])
            if not path.startswith(("..", f"{DOCS}/")) and (ROOT / path).exists():
                yield path


def _content(path: str) -> str:
    source = ROOT / path
    if path.endswith(".md"):
        return source.read_text()
    if source.is_dir():
        names = sorted(str(entry.relative_to(source)) for entry in source.rglob("*") if entry.is_file())
        text = "\n".join(name for name in names if "__pycache__" not in name)
        language = "text"
    else:
        text = source.read_text()
        language = LANGUAGES.get(source.suffix, "text")
    # A fence longer than any in the text.
    fence = "`" * (3 + max((len(run) for run in re.findall(r"`+", text)), default=0))
    return f"# {path}\n\n{fence}{language}\n{text.rstrip()}\n{fence}\n"


def _target(page: str, link: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), link))


def _uri_of(path: str) -> str:
    """Where a path of the repository is in the site's sources."""
    if path.startswith(f"{DOCS}/"):
        return path.removeprefix(f"{DOCS}/")
    return f"{COPIES}/{path}" if path.endswith(".md") else f"{COPIES}/{path}.md"


def _path_of(uri: str) -> str:
    """Where a page of the site is in the repository; only asked for those that are Markdown there too."""
    return uri.removeprefix(f"{COPIES}/") if uri.startswith(f"{COPIES}/") else f"{DOCS}/{uri}"
