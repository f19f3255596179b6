"""What several test processes share: workers of one run, and runs beside each other."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

_held: list[IO[str]] = []


def _lock_of(target: Path) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    return target.with_name(f"{target.name}.lock")


@contextmanager
def alone(target: Path) -> Iterator[None]:
    """One process at a time is in here for the same `target`, which it makes or replaces. Not reentrant."""
    # The file stays: whoever removed it would let in one who waits for it, and one who makes it anew.
    with _lock_of(target).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def own_folder(wanted: Path) -> Path:
    """`wanted`, or if another process uses that, the first of `wanted-2`, `wanted-3` ... that nobody uses.

    It is this process's until its end; what an earlier one left is still in it. It may not exist yet.
    """
    number = 1
    while True:
        folder = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        lock = _lock_of(folder).open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            number += 1
        else:
            _held.append(lock)
            return folder
