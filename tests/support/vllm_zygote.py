"""A process that has vLLM imported and forks every `vllm serve` of the tests; see `servers.py` for the other end.

    python -m tests.support.vllm_zygote FD

On a CPU, a vLLM server is three interpreters or more (front end, engine core, workers), and each imports vLLM for eight
seconds. Here they are forked from one that has done so. What runs in them is the real thing: vLLM's own entry point, as
`__main__`, with its command line and environment. multiprocessing's `spawn`, which vLLM uses on CPUs, stays `spawn`: the child
gets its pickled start-up data through the same pipe, and unpickles it in a process where nothing but imports has happened,
because that process was forked before its parent had begun. A parent keeps a few such spares; when none is left,
multiprocessing starts an interpreter as ever.

Only imports happen before the fork: there is one thread, no event loop, no engine. What is read from the environment at import
is the same for all servers (`servers.py` starts one that differs from it in the ordinary way).
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import random
import runpy
import select
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import spawn, util
from typing import Any, NoReturn

PRELOADED = (
    "vllm.entrypoints.cli.main",
    "vllm.entrypoints.cli.serve",
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.llama",
    "transformers.models.llama",
    "vllm_mc2.connector.connector",
)
READ_AT_IMPORT = ("PYTHONPATH", "OMP_", "MKL_", "OPENBLAS_", "LD_", "HF_HUB_", "VLLM_LOGGING_", "PROMETHEUS_")
"""Beginnings of the names of variables that libraries read when they are imported."""
NUM_SPARES = 4
"""A server has two to five children, an engine core one or two."""
MAX_MESSAGE_BYTES = 1 << 20
MAX_FDS = 32
REAP_SECONDS = 0.5
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_CLONE_NEWNET = 0x40000000


def set_process_option(option: int, value: int) -> None:
    """prctl(2)."""
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def enter_network(path: str) -> None:
    """setns(2) with a network namespace, as `nsenter --net=` does."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(path) as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {path}")


def read_at_import(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that must not change between import and fork."""
    return {name: value for name, value in environment.items() if name.startswith(READ_AT_IMPORT)}


def set_environment(environment: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)


def set_title(title: str) -> None:
    """What `ps` shows, until vLLM sets a title of its own."""
    import setproctitle

    setproctitle.setproctitle(title)


class Spares:
    """Forked processes in which nothing has happened yet; each becomes one child of this process.

    Replaces `multiprocessing.util.spawnv_passfds`, by which `spawn` starts its interpreters.
    """

    def __init__(self, num_spares: int = NUM_SPARES) -> None:
        """Fork them. Returns in this process alone; a spare ends in `_wait`."""
        self._start_interpreter = util.spawnv_passfds
        self._environment = read_at_import(os.environ)
        self._idle: list[tuple[int, socket.socket]] = []
        for _ in range(num_spares):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            pid = os.fork()
            if pid == 0:
                for _, other in self._idle:
                    other.close()
                ours.close()
                self._wait(theirs)
            theirs.close()
            self._idle.append((pid, ours))
        util.spawnv_passfds = self.spawn  # type: ignore[assignment]

    def spawn(self, path: Any, arguments: Sequence[Any], passfds: Sequence[int]) -> int:
        """Make a spare the child that `spawn` wants, or start an interpreter; return its process id."""
        words = [os.fsdecode(word) for word in arguments]
        is_for_spare = "--multiprocessing-fork" in words and read_at_import(os.environ) == self._environment
        if not is_for_spare or not self._idle:
            return self._start_interpreter(path, arguments, passfds)  # type: ignore[arg-type]
        (code,) = [word for word in words if "spawn_main(" in word]
        pid, control = self._idle.pop(0)
        message = {"code": code, "fds": list(passfds), "environment": dict(os.environ)}
        with control:
            socket.send_fds(control, [json.dumps(message).encode()], passfds)
        return pid

    @staticmethod
    def _wait(control: socket.socket) -> NoReturn:
        """Until this spare is wanted, or its parent has ended."""
        set_title("vllm spare")
        with control:
            message, received, _, _ = socket.recv_fds(control, MAX_MESSAGE_BYTES, MAX_FDS)
        if not message:
            os._exit(0)
        order = json.loads(message)
        # `spawn` names descriptors by their numbers in the parent. First out of the way of all of these.
        above = 1 + max(*order["fds"], *received)
        moved = [util_dup(fd, above) for fd in received]
        for fd, number in zip(moved, order["fds"], strict=True):
            os.dup2(fd, number)
            os.close(fd)
        set_environment(order["environment"])
        random.seed()
        Spares(2)
        set_title("python --multiprocessing-fork")
        sys.argv = ["-c", "--multiprocessing-fork"]
        # What multiprocessing would have an interpreter run: "...; spawn_main(tracker_fd=5, pipe_handle=9)".
        call = order["code"].partition("spawn_main(")[2].rpartition(")")[0]
        handles = dict(part.strip().split("=") for part in call.split(","))
        spawn.spawn_main(**{name: int(value) for name, value in handles.items()})
        raise AssertionError("spawn_main ends the process")


def util_dup(fd: int, above: int) -> int:
    """A duplicate of `fd` whose number is `above` or higher; `fd` is closed."""
    import fcntl

    duplicate = fcntl.fcntl(fd, fcntl.F_DUPFD, above)
    os.close(fd)
    return duplicate


def serve(order: dict[str, Any], log_fd: int) -> None:
    """Be `vllm` with the arguments of `order`; ends as its entry point ends."""
    os.setsid()
    set_process_option(_PR_SET_PDEATHSIG, signal.SIGKILL)
    set_process_option(_PR_SET_CHILD_SUBREAPER, 0)
    null = os.open(os.devnull, os.O_RDONLY)
    for fd, number in ((null, 0), (log_fd, 1), (log_fd, 2)):
        os.dup2(fd, number)
    os.close(null)
    os.close(log_fd)
    set_environment(order["environment"])
    if order["network"] is not None:
        enter_network(order["network"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    Spares()
    module, *arguments = order["command"]
    set_title(" ".join(["python", "-m", module, *arguments]))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def run(control: socket.socket) -> Callable[[], None]:
    """Answer orders until the tests are gone. Returns in every process that is to become something, with what it is to do."""
    ended: dict[int, int] = {}
    while True:
        readable = select.select([control], [], [], REAP_SECONDS)[0]
        with contextlib.suppress(ChildProcessError):
            # Also what servers that were killed have left behind.
            while (found := os.waitpid(-1, os.WNOHANG))[0] != 0:
                ended[found[0]] = os.waitstatus_to_exitcode(found[1])
        if not readable:
            continue
        message, fds, _, _ = socket.recv_fds(control, MAX_MESSAGE_BYTES, 1)
        if not message:
            return lambda: None
        order = json.loads(message)
        if "status" in order:
            control.send(json.dumps(ended.get(order["status"])).encode())
            continue
        pid = os.fork()
        if pid == 0:
            control.close()
            return lambda order=order, fds=fds: serve(order, *fds)  # type: ignore[misc]
        os.close(fds[0])
        pidfd = os.pidfd_open(pid)
        socket.send_fds(control, [str(pid).encode()], [pidfd])
        os.close(pidfd)


def main() -> None:
    set_process_option(_PR_SET_PDEATHSIG, signal.SIGKILL)
    set_process_option(_PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Now, since it looks for the room of the command line behind the environment, which servers replace.
    set_title("vllm zygote")
    control = socket.socket(fileno=int(sys.argv[1]))
    for name in PRELOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    num_threads = len(os.listdir("/proc/self/task"))
    assert num_threads == 1, f"{num_threads} threads: forking would lose them"
    control.send(b"ready")
    run(control)()


if __name__ == "__main__":
    main()
