"""What the tests of the tensor API share: connected pairs, processes of their own, and a look at what is left behind."""

import contextlib
import gc
import multiprocessing
import os
import re
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.support.waiting import wait_until
from vllm_mc2 import KVCacheManager, KVCacheMapper, MC2Communicator
from vllm_mc2.tensors import LayerKV, MappedKV, RemoteKV

WATCHDOG_SECONDS = 60.0
"""Nothing that is awaited takes anywhere near as long; the machine may be busy with other things."""

SHAPE = (8, 4, 2, 3)
"""Blocks, slots of a block, heads, head size."""

_SMALL = {"num_lease_slots": 64}


class Footprint(NamedTuple):
    """What a process has open."""

    descriptors: frozenset[tuple[str, str]]
    mappings: frozenset[str]
    threads: frozenset[str]

    def since(self, before: "Footprint") -> list[object]:
        """What is here and was not there ``before``."""
        return [
            *sorted(self.descriptors - before.descriptors),
            *sorted(self.mappings - before.mappings),
            *sorted(self.threads - before.threads),
        ]


def footprint() -> Footprint:
    descriptors = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            descriptors.append((fd, os.readlink(f"/proc/self/fd/{fd}")))
    # The identity of a thread: its name may be another's by now.
    threads = frozenset(f"{thread.name} ({thread.ident})" for thread in threading.enumerate())
    return Footprint(frozenset(descriptors), frozenset(pool_mappings("self")), threads)


def pool_mappings(pid: int | str) -> list[str]:
    """The lines of ``/proc/PID/maps`` that are shared memory of ours."""
    return [line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "/memfd:mc2" in line]


def private_bytes(pid: int) -> int:
    """Memory that only this process has."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return 1024 * sum(int(value) for value in re.findall(r"Private_\w+:\s+(\d+) kB", text))


def assert_nothing_left(before: Footprint, directory: Path) -> None:
    """No socket file, descriptor, mapping or thread that was not there before; garbage does not count."""

    def left() -> list[object]:
        gc.collect()
        return [*(path.name for path in directory.iterdir()), *footprint().since(before)]

    deadline = time.monotonic() + WATCHDOG_SECONDS  # page tables are filled in on threads of their own
    while (found := left()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not found, found


# --- connected pairs ---


def listen(directory: Path, **more: Any) -> MC2Communicator:
    return MC2Communicator(listen_port=0, socket_dir=str(directory), **more)


def dial(decode_or_port: MC2Communicator | int, directory: Path, **more: Any) -> MC2Communicator:
    """A prefill; returns when somebody else has called ``accept()``."""
    port = decode_or_port if isinstance(decode_or_port, int) else decode_or_port.listen_port
    arguments = {"peer_addr": "127.0.0.1", "peer_port": port, "socket_dir": str(directory), **_SMALL, **more}
    return MC2Communicator(**arguments)


@contextlib.contextmanager
def accepting(decode: MC2Communicator) -> Iterator[Future[str]]:
    """``accept()`` runs on a thread in the meantime."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(decode.accept, WATCHDOG_SECONDS)


def connect(decode: MC2Communicator, directory: Path, **more: Any) -> MC2Communicator:
    with accepting(decode) as accepted:
        prefill = dial(decode, directory, **more)
        assert re.fullmatch(r"[0-9a-f]{32}", accepted.result(WATCHDOG_SECONDS))
    return prefill


class Pair:
    """A prefill and a decode in this process."""

    def __init__(self, directory: Path, **more: Any) -> None:
        self.directory = directory
        self.decode = listen(directory)
        self.prefill = connect(self.decode, directory, **more)
        self.manager = KVCacheManager(self.prefill)
        self.mapper = KVCacheMapper(self.decode)

    def layer(self, layer: int = 0, shape: Sequence[int] = SHAPE, dtype: torch.dtype = torch.float32) -> LayerKV:
        """A layer with random content."""
        return fill(self.manager.allocate(layer, shape, dtype), layer)

    def receive(self) -> RemoteKV:
        return self.decode.recv_kv_metadata(WATCHDOG_SECONDS)

    def map_next(self) -> MappedKV:
        return self.mapper.map_remote_kv(self.receive())

    def hand_over(self, *arguments: Any, **more: Any) -> MappedKV:
        sent = self.prefill.send_kv_metadata(*arguments, **more)
        mapped = self.map_next()
        assert mapped.request_id == sent.request_id
        return mapped

    def reap(self, number: int) -> list[tuple[str, str]]:
        """The next so many requests that end."""
        ended: list[tuple[str, str]] = []

        def enough() -> bool:
            ended.extend(tuple(each) for each in self.prefill.reap())
            return len(ended) >= number

        wait_until(enough)
        return ended

    def close(self) -> None:
        self.prefill.close()
        self.decode.close()
        self.manager.close()


# --- contents ---


def fill(kv: LayerKV, seed: int) -> LayerKV:
    """Random bytes, so that no two blocks, layers or parts are equal."""
    generator = torch.Generator().manual_seed(seed)
    for _, tensor in kv.parts():
        noise = torch.randint(0, 256, (tensor.numel() * tensor.element_size(),), dtype=torch.uint8, generator=generator)
        tensor.copy_(noise.view(tensor.dtype).view(tensor.shape))
    return kv


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The content as bytes: also what is not a number equals itself."""
    # A contiguous tensor may have any stride in a dimension of 1, which view(dtype) refuses.
    return tensor.detach().contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(bits(one), bits(other))


def same_layer(one: LayerKV, other: LayerKV) -> bool:
    if (one.value is None) != (other.value is None):
        return False
    pairs = zip(one.parts(), other.parts(), strict=True)
    return all(part == there and same(tensor, remote) for (part, tensor), (there, remote) in pairs)


# --- processes ---

_context = multiprocessing.get_context("forkserver")


def prepare_processes() -> None:
    """Start the server that children are forked from: it has imported torch once, and has neither threads nor sockets."""
    _context.set_forkserver_preload(["torch", "vllm_mc2.tensors"])
    child = Child(int, "0")
    assert child.result() == 0
    child.end()


def _run(connection: Connection, target: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    try:
        connection.send(("result", target(*arguments)))
    except BaseException:
        connection.send(("error", traceback.format_exc()))
        raise


class Child:
    """A function in a process of its own. Every wait has a deadline, and nothing but this process is ever killed."""

    def __init__(self, target: Callable[..., object], *arguments: Any, talks: bool = False) -> None:
        """With ``talks`` the function's first argument is a pipe, whose other end is :attr:`talk`."""
        self._connection, theirs = _context.Pipe()
        self.talk, their_talk = _context.Pipe() if talks else (None, None)
        if their_talk is not None:
            arguments = (their_talk, *arguments)
        self.process = _context.Process(target=_run, args=(theirs, target, arguments), daemon=True)
        self.process.start()
        theirs.close()
        if their_talk is not None:
            their_talk.close()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def hear(self) -> Any:
        """What it says next."""
        assert self.talk is not None
        if not self.talk.poll(WATCHDOG_SECONDS):
            raise AssertionError(f"process {self.pid} is silent")
        return self.talk.recv()

    def ask(self, *words: Any) -> Any:
        """Tell it something, and hear its answer."""
        assert self.talk is not None
        self.talk.send(words)
        return self.hear()

    def result(self) -> Any:
        """What the function has returned."""
        assert self._connection.poll(WATCHDOG_SECONDS), f"process {self.pid} does not end"
        kind, value = self._connection.recv()
        assert kind == "result", value
        return value

    def exit_code(self) -> int:
        """Once it has ended; minus the signal's number when one ended it."""
        self.process.join(WATCHDOG_SECONDS)
        assert self.process.exitcode is not None, f"process {self.pid} does not end"
        return self.process.exitcode

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.process.kill()
        self.process.join(WATCHDOG_SECONDS)

    def end(self) -> None:
        """Whatever it does, it is gone after this."""
        if self.process.is_alive():
            self.kill()
        self.process.join(WATCHDOG_SECONDS)
        self.process.close()
        self._connection.close()
        if self.talk is not None:
            self.talk.close()
