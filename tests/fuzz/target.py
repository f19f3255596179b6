"""What a target is, and what all of them watch for."""

import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tests.fuzz.mutate import Format

# Greedy where a text of the input's may end in anything, the very character that closes it included.
_OF_THE_INPUT = re.compile(
    r"unknown field `.*|extra_config\..* = .*: expected|Invalid value .* - at|field `[^`]*`|'.*'|\"[^\"]*\"|\d+",
    re.DOTALL,
)


class Target(NamedTuple):
    """A decoder under attack."""

    name: str
    what: str
    """The functions, for ``--list`` and the documentation."""
    run: Callable[[bytes], str]
    """Takes any bytes; what came of them in a few words, which count as coverage. Raises when the decoder is wrong."""
    seeds: Callable[[], Sequence[bytes]]
    form: Format | None = None
    """How to change an input; None for bytes only."""
    max_bytes: int = 4096
    may_open: frozenset[str] = frozenset()
    """Files that the decoder opens for a reason."""


def refused(error: Exception) -> str:
    """The kind of a refusal, without what differs from input to input."""
    return f"{type(error).__name__} {_OF_THE_INPUT.sub('#', str(error))[-120:]}"


class Watch:
    """Tells of what no decoder may do. An audit hook cannot be removed, so there is one of these in a process."""

    FORBIDDEN = (
        "open", "socket.", "os.", "subprocess.", "pickle.", "shutil.", "ctypes.", "exec", "compile", "tempfile.", "glob.",
        "urllib.", "http.", "ssl.", "marshal.", "import", "mmap.", "fcntl.",
    )  # fmt: skip

    def __init__(self, may_open: frozenset[str]) -> None:
        self.is_armed = False
        self.seen: list[str] = []
        self._may_open = may_open
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.is_armed or not event.startswith(self.FORBIDDEN):
            return
        if event == "open" and args[0] in self._may_open:
            return
        self.seen.append(f"{event}{args!r:.200}")

    def run(self, target: Target, data: bytes) -> str:
        """The target's answer.

        Raises:
            AssertionError: it opened or started something.
        """
        self.is_armed = True
        try:
            answer = target.run(data)
        finally:
            self.is_armed = False
        if self.seen:
            seen, self.seen = self.seen, []
            raise AssertionError(f"{target.name} did what no decoder may: {seen[:3]}")
        return answer
