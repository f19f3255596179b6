"""A progress bar on a terminal; silent everywhere else."""

import sys
import time
from types import TracebackType
from typing import Self, TextIO

WIDTH = 28
REDRAW_SECONDS = 0.1


class Progress:
    """``with Progress(total) as progress: progress.step("what")``. Draws on standard error, and only on a terminal."""

    def __init__(self, total: int, stream: TextIO | None = None) -> None:
        self._total = max(1, total)
        self._done = 0
        self._stream = sys.stderr if stream is None else stream
        self._is_shown = self._stream.isatty()
        self._begin = self._drawn = time.monotonic()

    def step(self, label: str, count: int = 1) -> None:
        """``count`` more of the total are done, the last of them being ``label``."""
        self._done = min(self._total, self._done + count)
        now = time.monotonic()
        if self._is_shown and now - self._drawn >= REDRAW_SECONDS:
            self._drawn = now
            filled = WIDTH * self._done // self._total
            bar = "#" * filled + "." * (WIDTH - filled)
            text = f"[{bar}] {self._done / self._total:4.0%} {now - self._begin:4.0f} s  {label}"
            self._stream.write(f"\r{text[:110]:<110}")
            self._stream.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._is_shown:
            self._stream.write(f"\r{'':<110}\r")
            self._stream.flush()
