"""A warm process out of which engine processes are forked: importing vLLM 0.23 and torch_npu takes longer than most tests.

    python -m tests.ascend.nursery SOCKET

It has one thread and touches neither a device nor the simulator, so that an engine starts as if it had imported everything
itself. Each message is ``{"program": "engine", "arguments": [...], "environment": {...}}`` with the engine's socket and log; the
answer is its process id. When whoever started it is gone, so are it and its engines.
"""

import ctypes
import json
import os
import signal
import socket
import sys
from pathlib import Path

MAX_MESSAGE_BYTES = 1 << 20
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def become_engine(spec: dict[str, object], engine_fd: int, log_fd: int) -> None:
    from tests.ascend import engine, rank_side

    program = {"engine": engine.main, "rank_side": rank_side.main}[str(spec["program"])]
    os.dup2(log_fd, 1)
    os.dup2(log_fd, 2)
    os.environ.clear()
    os.environ.update(spec["environment"])  # type: ignore[arg-type]
    program([str(engine_fd), *spec["arguments"]])  # type: ignore[misc]


def serve(control: socket.socket) -> None:
    while True:
        message, fds, _, _ = socket.recv_fds(control, MAX_MESSAGE_BYTES, 2)
        if not message:
            return
        pid = os.fork()
        if pid == 0:
            code = 70
            try:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                die_with_parent()
                control.close()
                become_engine(json.loads(message), *fds)
                code = 0
            finally:
                sys.stdout.flush()
                os._exit(code)
        for fd in fds:
            os.close(fd)
        control.send(str(pid).encode())


def main() -> None:
    die_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how engines have ended
    import torch

    torch.set_num_threads(1)
    import tests.ascend.engine
    import tests.ascend.rank_side  # noqa: F401

    names = [Path(f"/proc/self/task/{thread}/comm").read_text().strip() for thread in os.listdir("/proc/self/task")]
    assert len(names) == 1, f"forking would lose threads: {names}"
    control = socket.socket(fileno=int(sys.argv[1]))
    control.send(b"ready")
    serve(control)


if __name__ == "__main__":
    main()
