"""A process that has vLLM imported and forks every `vllm serve` of the tests; see `servers.py` for the other end.

On a CPU, a vLLM server is three interpreters or more (front end, engine core, workers), and each imports vLLM for eight
seconds. Here they are forked from one that has done so. What runs in them is the real thing: vLLM's own entry point, as
`__main__`, with its command line and environment. multiprocessing's `spawn`, which vLLM uses on CPUs, stays `spawn`: the child
gets its pickled start-up data through the same pipe, and unpickles it in a process where nothing but imports has happened,
because that process was forked before its parent had begun. A parent keeps a few such spares; when none is left,
multiprocessing starts an interpreter as ever.

Only imports happen before the fork: there is one thread, no event loop, no engine. What is read from the environment at import
is the same for all servers (`servers.py` starts one that differs from it in the ordinary way).
"""

import atexit
import ctypes
import fcntl
import gc
import importlib
import os
import random
import runpy
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import spawn, util
from typing import Any, NoReturn

from tests.support.processes import Message, Pipe, Zygote

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
READ_AT_IMPORT = ("PYTHONPATH", "OMP_", "MKL_", "OPENBLAS_", "HF_HUB_", "VLLM_LOGGING_", "PROMETHEUS_")
"""Beginnings of the names of variables that libraries read when they are imported."""
NUM_SPARES = 4
"""A server has two to five children, an engine core one or two."""
_CLONE_NEWNET = 0x40000000


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


def enter_network(path: str) -> None:
    """setns(2) with a network namespace, as `nsenter --net=` does."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(path) as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {path}")


def interpreter(main: Callable[[], object]) -> int:
    """Run `main` as an interpreter runs a program, with all that happens at its end; return the exit status."""
    code: Any = 0
    try:
        main()
    except SystemExit as end:
        code = end.code
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if isinstance(code, str):
        print(code, file=sys.stderr)
    return code if isinstance(code, int) else int(code is not None)


class Spares:
    """Forked processes in which nothing has happened yet; each can become one child of this process.

    Replaces `multiprocessing.util.spawnv_passfds`, by which `spawn` starts its interpreters.
    """

    def __init__(self, num_spares: int) -> None:
        """Fork them. Returns in this process alone; a spare ends in `_wait`."""
        self._start_interpreter = util.spawnv_passfds
        self._environment = read_at_import(os.environ)
        self._idle: list[tuple[int, Pipe]] = []
        for _ in range(num_spares):
            ours, theirs = Pipe.pair()
            pid = os.fork()
            if pid == 0:
                for pipe in (ours, *(other for _, other in self._idle)):
                    pipe.close()
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
        pid, pipe = self._idle.pop(0)
        pipe.send({"code": code, "fds": list(passfds), "environment": dict(os.environ)}, passfds)
        pipe.close()
        return pid

    @staticmethod
    def _wait(pipe: Pipe) -> NoReturn:
        """Until this spare is wanted, or its parent has ended."""
        set_title("vllm spare")
        order, received = pipe.receive()
        pipe.close()
        if order is None:
            os._exit(0)
        # `spawn` names descriptors by their numbers in the parent. First out of the way of all of these.
        above = 1 + max(*order["fds"], *received)
        for fd, number in zip([_move(fd, above) for fd in received], order["fds"], strict=True):
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
        os._exit(interpreter(lambda: spawn.spawn_main(**{name: int(value) for name, value in handles.items()})))


def _move(fd: int, above: int) -> int:
    """The same file under a number of at least `above`."""
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD, above)
    os.close(fd)
    return moved


def become_server(spec: Message) -> int:
    """Be `python -m` with the module and the arguments of `spec["command"]`."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    set_environment(spec["environment"])
    if spec["network"] is not None:
        enter_network(spec["network"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    Spares(NUM_SPARES)
    module, *arguments = spec["command"]
    set_title(" ".join(["python", "-m", module, *arguments]))
    sys.argv = [module, *arguments]
    return interpreter(lambda: runpy.run_module(module, run_name="__main__", alter_sys=True))


def main() -> None:
    """`python -m tests.support.vllm_zygote FD`."""
    zygote = Zygote(int(sys.argv[1]), become_server)
    # Now, since it looks for the room of the command line behind the environment, which servers replace.
    set_title("vllm zygote")
    for name in PRELOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    zygote.run()


if __name__ == "__main__":
    main()
