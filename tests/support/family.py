"""Run a command to its end, and tell of processes that it leaves behind, without a look at anybody else's.

    python -m tests.support.family COMMAND ...

Ends as the command does; but with status 98 when it has left processes. These are named on standard error, and killed.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path

LEFT_BEHIND = 98
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def family(command: list[str]) -> list[str]:
    """The command line that runs `command` so."""
    return [sys.executable, "-m", "tests.support.family", *command]


def _children() -> list[int]:
    """Of this process: with the command gone, all of its descendants whose parents are gone too. Dead ones are taken away."""
    found = []
    for pid in map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()):
        if os.waitpid(pid, os.WNOHANG) == (0, 0):
            found.append(pid)
    return found


def main(command: list[str]) -> int:
    """The exit status."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # Whoever kills this process kills the command. There is one thread here, so something may run before it.
    die_too = lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    child = subprocess.Popen(command, preexec_fn=die_too)  # noqa: PLW1509
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: child.send_signal(number))
    status = child.wait()
    left = _children()
    for pid in left:
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            print(f"left behind: {pid} {text}", file=sys.stderr)
            os.kill(pid, signal.SIGKILL)
    if left:
        return LEFT_BEHIND
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
