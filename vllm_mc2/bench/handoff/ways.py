"""What every way of handing a KV cache over has in common, so that the worker can time them all in the same manner."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

from vllm_mc2.bench.handoff.messages import Turn

SETTLE_SECONDS = 10.0
TRANSFER_SECONDS = 60.0


class Checked(NamedTuple):
    """What a receiver found after a turn."""

    read_ns: int
    verified: bool
    grown_bytes: int | None = None


class SendingWay(Protocol):
    """The sender's side. ``prepare`` and ``settle`` are not timed."""

    def prepare(self, turn: Turn) -> None:
        """Have everything at hand that the turn needs."""

    def run(self, turn: Turn) -> list[int]:
        """Hand all requests over without a pause; the time at which each was begun, or nothing."""

    def settle(self, turn: Turn) -> None:
        """The receiver is done: get everything back."""

    def costs(self) -> tuple[list[int], int]:
        """``(metadata bytes of each request, control bytes)`` of the last turn."""

    def close(self) -> None:
        """Disconnect."""


class ReceivingWay(Protocol):
    """The receiver's side. Only ``run`` is timed."""

    def prepare(self, turn: Turn) -> None:
        """Make sure that what is found afterwards was brought by this turn."""

    def run(self, turn: Turn) -> list[int]:
        """Take all requests; the time at which each was ready."""

    def check(self, turn: Turn) -> Checked:
        """Read the first and last byte of each request, and compare."""

    def settle(self, turn: Turn) -> None:
        """Give everything back."""

    def kv_bytes(self, turn: Turn) -> int:
        """Bytes of KV buffer that this way needs here."""

    def close(self) -> None:
        """Disconnect."""


def wait_until(is_true: Callable[[], bool], seconds: float, what: str) -> None:
    """Look again and again.

    Raises:
        TimeoutError: ``what`` did not come true in time.
    """
    deadline = time.monotonic() + seconds
    while not is_true():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not in {seconds:.0f} s")
        time.sleep(50e-6)


def own_memory_bytes() -> int:
    """Memory that belongs to this process alone and is not a file's: what a KV buffer would show up in."""
    for line in Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) * 1024
    return 0
