"""Wait for something that another thread or process does."""

import time
from collections.abc import Callable

WATCHDOG_SECONDS = 30.0
"""Far longer than anything takes on a busy machine: it ends a test that hangs, and measures nothing.

Still shorter than the 60 seconds that an offer stands by default: what only the end of an offer brings about comes too late.
"""


def wait_until(
    condition: Callable[[], object],
    what: str = "the condition",
    *,
    timeout_seconds: float = WATCHDOG_SECONDS,
    poll_seconds: float = 0.005,
) -> None:
    """Return as soon as `condition()` is true; fail the test if it is not within `timeout_seconds`.

    Args:
        condition: Called every `poll_seconds`, in this thread.
        what: Named in the failure.
    """
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} was not reached within {timeout_seconds:.0f} s"
        time.sleep(poll_seconds)
