"""Results go to standard output and nothing else does, so that a script can read them."""

import contextlib
import os
import sys
from collections.abc import Iterator

import msgspec


def shown(name: str | os.PathLike[str]) -> str:
    """A file's name as text that UTF-8 can say: names may be any bytes, and JSON may not."""
    return os.fsencode(name).decode(errors="replace")


def print_json(data: object) -> None:
    """One indented JSON document."""
    print(msgspec.json.format(msgspec.json.encode(data), indent=2).decode())


@contextlib.contextmanager
def results_only() -> Iterator[None]:
    """While entered, whatever is written to standard output goes to standard error.

    Libraries greet there when they are imported (torch_npu does), some from C, so it is the descriptor that is turned.
    """
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
