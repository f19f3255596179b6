"""A worker process: ``python -m vllm_mc2.bench.handoff.worker sender|receiver COMMAND_FD PEER_FD PARENT``.

Started by the command, one sender and one receiver for each pair. It does what it is asked, one thing at a time, and ends
with the command: at the end of its socket, or killed by the kernel if it is busy or stopped then.
"""

import contextlib
import ctypes
import os
import signal
import socket
import sys
from typing import Literal

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the command ends, however it ends, even if this process is stopped then."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        sys.exit("the command has ended already")


def main(role: Literal["sender", "receiver"], command_fd: int, peer_fd: int, parent: int) -> None:
    """Run until the command is gone."""
    die_with_parent(parent)
    # Only now: importing torch takes a while, in which the command may end.
    from vllm_mc2.bench.handoff.messages import Failed, Link, LinkClosedError
    from vllm_mc2.bench.handoff.sides import ReceiverWorker, SenderWorker

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the command's to handle; it ends us
    command, peer = Link(socket.socket(fileno=command_fd)), Link(socket.socket(fileno=peer_fd))
    worker = SenderWorker(command, peer) if role == "sender" else ReceiverWorker(command, peer)
    try:
        worker.serve()
    except LinkClosedError as error:
        # Either the command is gone, and nobody listens, or the other worker, and it will be asked for the cause.
        with contextlib.suppress(OSError):
            command.send(Failed(f"its counterpart has ended: {error}"))
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        with contextlib.suppress(OSError):
            command.send(Failed(f"{type(error).__name__}: {error}"))
        raise


if __name__ == "__main__":
    main("sender" if sys.argv[1] == "sender" else "receiver", int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
