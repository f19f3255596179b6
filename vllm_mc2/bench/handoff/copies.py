"""Ways ``memcpy``, ``two_copy`` and ``tcp``: the receiver ends up with the KV in memory of its own."""

import ctypes
import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import torch

from vllm_mc2.bench.handoff.cases import BLOCK_BYTES, Case, human_bytes
from vllm_mc2.bench.handoff.messages import Link, Note, Turn
from vllm_mc2.bench.handoff.pattern import CONTIGUOUS_UID, Pattern, PrivateBuffer, stamped
from vllm_mc2.bench.handoff.source import ContiguousSource, end_words
from vllm_mc2.bench.handoff.ways import TRANSFER_SECONDS, Checked
from vllm_mc2.bench.traditional import TraditionalComm

CONNECT_SECONDS = 30.0
ALL_CORES = sorted(os.sched_getaffinity(0))
"""Those that this process had at its start."""

_WAKE_BYTES = 1 << 20
"""Copied first, so that threads are there when the clock starts."""


class Destination:
    """The receiver's own buffer, shared by all copying ways of a process, since only one of them works at a time."""

    def __init__(self, num_bytes: int) -> None:
        self.buffer = PrivateBuffer(num_bytes)
        self.pattern = Pattern(BLOCK_BYTES)

    def poison(self, turn: Turn) -> None:
        """Make sure that bytes of an earlier transfer cannot pass for those of this one."""
        if turn.check_all:
            self.buffer.bytes[: turn.case.kv_bytes].zero_()
        for request in range(turn.case.batch):
            for index, word in end_words(turn.case, request, self.pattern):
                self.buffer.words[index] = ~word

    def check(self, turn: Turn) -> Checked:
        """First and last word of each request, and all the rest if that is wanted (its stamp is 0 then)."""
        words, case = self.buffer.words, turn.case
        ends = [end_words(case, request, self.pattern) for request in range(case.batch)]
        begin = time.monotonic_ns()
        found = [(int(words[first]), int(words[last])) for (first, _), (last, _) in ends]
        read_ns = time.monotonic_ns() - begin
        verified = found == [(stamped(one, turn.stamp), stamped(other, turn.stamp)) for (_, one), (_, other) in ends]
        if turn.check_all:
            rows = self.buffer.rows[: case.kv_bytes // BLOCK_BYTES]
            verified = self.pattern.is_in(rows, CONTIGUOUS_UID) and verified
        return Checked(read_ns, verified)


class CopyReceiver:
    """What copying ways have in common. ``transfer`` of a subclass brings one request's bytes."""

    def __init__(self, destination: Destination) -> None:
        self.destination = destination

    def prepare(self, turn: Turn) -> None:
        """See :meth:`Destination.poison`."""
        self.destination.poison(turn)

    def run(self, turn: Turn) -> list[int]:
        """One request after the other."""
        ready = [0] * turn.case.batch
        for request in range(turn.case.batch):
            self.transfer(turn.case, request)
            ready[request] = time.monotonic_ns()
        return ready

    def transfer(self, case: Case, request: int) -> None:
        """Bring one request's bytes into the destination."""
        raise NotImplementedError

    def check(self, turn: Turn) -> Checked:
        """See :meth:`Destination.check`."""
        return self.destination.check(turn)

    def settle(self, turn: Turn) -> None:
        """Nothing was borrowed."""

    def kv_bytes(self, turn: Turn) -> int:
        """The copy."""
        return turn.case.kv_bytes

    def close(self) -> None:
        """Nothing is connected."""


def part_of(whole: Any, case: Case, request: int) -> Any:
    """A request's bytes in contiguous memory."""
    return whole[request * case.request_bytes : (request + 1) * case.request_bytes]


class Memcpy(CopyReceiver):
    """The lower bound for whatever copies: one copy out of the mapped source, unsignalled, by the fastest means there is.

    Which one that is depends on the processor, its C library and the size, so every turn tries all of them.
    """

    def __init__(self, destination: Destination, source: ContiguousSource) -> None:
        super().__init__(destination)
        self._source = source
        self._num_threads = len(ALL_CORES)
        self._pool = ThreadPoolExecutor(self._num_threads)
        self._means: list[tuple[str, int, Callable[[Any, Any], None]]] = [("memmove on 1 thread", 1, _memmove)]
        if self._num_threads > 1:
            self._means.append((f"memmove on {self._num_threads} threads", 1, self._split))
        self._means.append((f"torch copy_ on {self._num_threads} threads", self._num_threads, _torch_copy))
        self.took_ns: dict[str, int] = {}
        """What the last turn took, by means."""

    def run(self, turn: Turn) -> list[int]:
        """All requests by all means, each time beginning with another one."""
        self._means.append(self._means.pop(0))
        ready = [0] * turn.case.batch
        parts = [
            (
                part_of(self.destination.buffer.bytes, turn.case, request),
                part_of(self._source.bytes, turn.case, request),
            )
            for request in range(turn.case.batch)
        ]
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, ALL_CORES)  # the threads that this one starts inherit it
        for name, num_torch_threads, copy in self._means:
            torch.set_num_threads(num_torch_threads)
            copy(parts[0][0][:_WAKE_BYTES], parts[0][1][:_WAKE_BYTES])
            begin = time.monotonic_ns()
            for request, part in enumerate(parts):
                copy(*part)
                ready[request] = time.monotonic_ns()
            self.took_ns[name] = ready[-1] - begin
        torch.set_num_threads(1)
        os.sched_setaffinity(0, before)
        return ready

    def _split(self, into: Any, out_of: Any) -> None:
        parts = zip(into.chunk(self._num_threads), out_of.chunk(self._num_threads), strict=True)
        for future in [self._pool.submit(_memmove, *part) for part in parts]:
            future.result()

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()


def _torch_copy(into: Any, out_of: Any) -> None:
    into.copy_(out_of)


def _memmove(into: Any, out_of: Any) -> None:
    ctypes.memmove(into.data_ptr(), out_of.data_ptr(), out_of.numel())  # without the interpreter lock


class MemcpySender:
    """Does nothing: the source is mapped already, and no signal is counted."""

    def prepare(self, turn: Turn) -> None:
        """Nothing to prepare."""

    def run(self, turn: Turn) -> list[int]:
        """Nothing to send."""
        return []

    def settle(self, turn: Turn) -> None:
        """Nothing was lent."""

    def costs(self) -> tuple[list[int], int]:
        """Free of charge."""
        return [], 0

    def close(self) -> None:
        """Nothing is connected."""


class TraditionalReceiver(CopyReceiver):
    """``two_copy`` and ``tcp``."""

    def __init__(self, transport: Literal["shm", "tcp"], destination: Destination, peer: Link) -> None:
        super().__init__(destination)
        self._comm = TraditionalComm(
            "receiver", transport, sock=_give_socket(transport, peer), timeout_seconds=TRANSFER_SECONDS
        )

    def transfer(self, case: Case, request: int) -> None:
        """As it comes."""
        self._comm.recv(part_of(self.destination.buffer.bytes, case, request))

    def close(self) -> None:
        """Disconnect."""
        self._comm.close()


class TraditionalSender:
    """``two_copy`` and ``tcp``."""

    def __init__(self, transport: Literal["shm", "tcp"], source: ContiguousSource, peer: Link) -> None:
        self._source = source
        self._comm = TraditionalComm("sender", transport, sock=_get_socket(peer), timeout_seconds=TRANSFER_SECONDS)
        self._control_bytes = 0
        staging = f", through {self._comm.staging_bytes >> 20} MiB of shared memory" if transport == "shm" else ""
        self.description = f"chunks of {human_bytes(self._comm.chunk_bytes)}{staging}"

    def prepare(self, turn: Turn) -> None:
        """Count from here."""
        self._control_bytes = self._comm.control_bytes

    def run(self, turn: Turn) -> list[int]:
        """Send every request."""
        started = [0] * turn.case.batch
        for request in range(turn.case.batch):
            started[request] = time.monotonic_ns()
            self._comm.send(part_of(self._source.bytes, turn.case, request))
        return started

    def settle(self, turn: Turn) -> None:
        """Nothing was lent."""

    def costs(self) -> tuple[list[int], int]:
        """Headers and signals."""
        return [], self._comm.control_bytes - self._control_bytes

    def close(self) -> None:
        """Disconnect."""
        self._comm.close()


def _give_socket(transport: Literal["shm", "tcp"], peer: Link) -> socket.socket:
    """A connected pair of sockets, one of which goes to the sender."""
    if transport == "shm":
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            peer.send(Note(), (theirs.fileno(),))
        return mine
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(CONNECT_SECONDS)
        theirs = socket.create_connection(server.getsockname(), CONNECT_SECONDS)
        mine, address = server.accept()
        with theirs:
            if address != theirs.getsockname():
                raise ConnectionError("somebody else has connected to the benchmark's port")
            peer.send(Note(), (theirs.fileno(),))
        return mine


def _get_socket(peer: Link) -> socket.socket:
    _, fds = peer.receive(CONNECT_SECONDS)
    return socket.socket(fileno=fds[0])
