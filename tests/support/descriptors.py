"""What a process has open."""

import os
from contextlib import suppress

from tests.support.waiting import wait_until


def open_descriptors(pid: int | str = "self") -> dict[int, str]:
    """What each descriptor leads to, as the kernel writes it."""
    found = {}
    for name in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):  # that of the listing itself, or one that is closed just now
            found[int(name)] = os.readlink(f"/proc/{pid}/fd/{name}")
    return found


def assert_none_new(before: dict[int, str]) -> None:
    """Nothing is open in this process that was not `before`, at the latest when its other threads are done.

    A count would not do: what earlier tests have left to the garbage collector may be closed meanwhile.
    """
    new: dict[int, str] = {}

    def is_done() -> bool:
        new.clear()
        new.update({fd: target for fd, target in open_descriptors().items() if before.get(fd) != target})
        return not new

    try:
        wait_until(is_done, timeout_seconds=20.0)
    except AssertionError:
        raise AssertionError(f"left open: {new}") from None
