"""The zygote: imports vLLM once (8 s), then forks an engine process in milliseconds whenever it is told to.

It has one thread, opens no session and makes no pool, so a forked engine starts as if it had imported everything itself. It
reaps all engines and, as subreaper, what they left behind. When the controller is gone, so are the zygote and its engines.
"""

import contextlib
import ctypes
import gc
import os
import select
import signal
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.chaos.wire import Message, Pipe

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "TOKENIZERS_PARALLELISM": "false",
}


def set_process_option(option: int, value: int) -> None:
    """prctl(2)."""
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def use_package(directory: str) -> None:
    """Take ``vllm_mc2`` from a directory instead of the installed one; the editable finder would win over ``sys.path``."""
    sys.meta_path = [finder for finder in sys.meta_path if "editable" not in type(finder).__module__]
    sys.path.insert(0, directory)
    import vllm_mc2

    assert str(vllm_mc2.__file__).startswith(directory), vllm_mc2.__file__


def warm_up(model: Path) -> None:
    """Import everything that engines import late, and fill vLLM's caches; a decode starts no thread and makes no socket."""
    import torch

    torch.set_num_threads(1)
    from tests.chaos import engine, oracle
    from tests.connector import rig

    for length in (1, 16, 37):
        prompt = oracle.prompt_of(length, length)
        assert oracle.expected_tokens(prompt, 5) == rig.expected_tokens(prompt, 5), "oracle.py and rig.py differ"
    assert (oracle.NUM_LAYERS, oracle.VOCABULARY) == (rig.NUM_LAYERS, rig.VOCABULARY)
    with tempfile.TemporaryDirectory() as directory:
        warm = rig.RigEngine(model, Path(directory) / "s", "kv_consumer", extra={"window_pool_factor": 8})
        warm.add("warm", [1, 2, 3], None, max_tokens=2)
        warm.run()
        warm.close()
    engine.check_points()
    del warm
    gc.collect()
    gc.freeze()
    num_threads = len(os.listdir("/proc/self/task"))
    assert num_threads == 1, f"{num_threads} threads: forking would lose them"


class Zygote:
    """The loop of the process."""

    def __init__(self, control: Pipe, model: Path) -> None:
        self._control = control
        self._model = model
        self._ended: dict[int, int] = {}

    def run(self) -> None:
        signal.signal(signal.SIGCHLD, lambda number, frame: self._reap())
        self._control.send({"type": "ready"})
        while True:
            with contextlib.suppress(InterruptedError):
                select.select([self._control], [], [])
            message, fds = self._control.receive()
            if message is None:
                return
            self._serve(message, fds)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
                self._ended[ended[0]] = os.waitstatus_to_exitcode(ended[1])

    def _serve(self, message: Message, fds: list[int]) -> None:
        match message["op"]:
            case "fork":
                self._fork(message["spec"], fds)
            case "status":
                self._reap()
                self._control.send({"type": "status", "code": self._ended.get(message["pid"])})
            case "children":
                self._reap()
                text = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
                self._control.send({"type": "children", "pids": [int(pid) for pid in text.split()]})

    def _fork(self, spec: dict[str, Any], fds: list[int]) -> None:
        # Not reaped before its pidfd is opened, however early it ends.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        pid = os.fork()
        if pid == 0:
            self._become_engine(spec, *fds)
        pidfd = os.pidfd_open(pid)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        self._control.send({"type": "forked", "pid": pid}, [pidfd])
        for fd in (*fds, pidfd):
            os.close(fd)

    def _become_engine(self, spec: dict[str, Any], pipe_fd: int, log_fd: int) -> None:
        from tests.chaos.engine import serve

        code = 70
        try:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
            set_process_option(_PR_SET_PDEATHSIG, signal.SIGKILL)
            set_process_option(_PR_SET_CHILD_SUBREAPER, 0)
            os.setsid()
            self._control.close()
            os.dup2(log_fd, 1)
            os.dup2(log_fd, 2)
            os.close(log_fd)
            code = serve(Pipe(socket.socket(fileno=pipe_fd)), self._model, spec)
        finally:
            os._exit(code)  # none of the zygote's exit handlers


def main() -> None:
    """``python -m tests.chaos.zygote FD MODEL [PACKAGE]``."""
    os.environ.update(SETTINGS)
    control = Pipe(socket.socket(fileno=int(sys.argv[1])))
    set_process_option(_PR_SET_PDEATHSIG, signal.SIGKILL)
    set_process_option(_PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if len(sys.argv) > 3:
        use_package(sys.argv[3])
    warm_up(Path(sys.argv[2]))
    Zygote(control, Path(sys.argv[2])).run()
    os._exit(0)


if __name__ == "__main__":
    main()
