"""What the two worker processes of a pair do, one thing at a time, as the command asks."""

import gc
import os
import time
from collections.abc import Sequence
from math import gcd
from typing import Generic, TypeVar

import torch

from vllm_mc2.bench.handoff import touch
from vllm_mc2.bench.handoff.cases import BLOCK_BYTES, COPYING_WAYS, MIN_BYTES, OUR_WAYS, PEER_WAYS, Case
from vllm_mc2.bench.handoff.copies import (
    ALL_CORES,
    Destination,
    Memcpy,
    MemcpySender,
    TraditionalReceiver,
    TraditionalSender,
)
from vllm_mc2.bench.handoff.messages import (
    Ask,
    Close,
    Done,
    Link,
    Message,
    Note,
    Open,
    Opened,
    Received,
    Sent,
    Stamp,
    Touch,
    Turn,
)
from vllm_mc2.bench.handoff.ours import MC2Receiver, MC2Sender
from vllm_mc2.bench.handoff.pattern import Pattern
from vllm_mc2.bench.handoff.peers import PeerSender, connect_receiver, connect_sender
from vllm_mc2.bench.handoff.source import ContiguousSource
from vllm_mc2.bench.handoff.ways import TRANSFER_SECONDS, ReceivingWay, SendingWay

W = TypeVar("W", SendingWay, ReceivingWay)
IDLE_SECONDS = 3600.0
WARM_UP_REQUESTS = 8
HEAD_START_NS = 200_000
"""The receiver says that it is ready just before it waits; this long it gets to do so. A decode waits before prefill ends."""


def warm_up(turn: Turn) -> Turn:
    """A few small requests by the same way, which go before every turn.

    The other ways have just been through gigabytes: without it, whoever is fast would be measured by how long its code takes
    to come back from main memory. That is a cost too, so it is reported, but by itself.
    """
    block_tokens = turn.case.block_tokens
    num_bytes = min(MIN_BYTES, turn.case.request_bytes)
    batch = gcd(WARM_UP_REQUESTS, Case(num_bytes, block_tokens=block_tokens).num_blocks)
    return Turn(turn.way, Case(num_bytes, batch, block_tokens), turn.cache, 0, check_all=False)


def _ours(ask: Open) -> list[str]:
    return [way for way in ask.ways if way in OUR_WAYS]


class Worker(Generic[W]):
    """What both sides have in common.

    While turns are timed the main thread stays on one core, the sender's on another than the receiver's, as two engines have
    cores of their own: a process that is woken up is put on its waker's core, and then both wait for each other. Threads
    that libraries have started before, and those of a plain copy, may use all cores.
    """

    core: int

    def __init__(self, command: Link, peer: Link) -> None:
        # Patterns are faster made and compared on one thread here, and no thread of the library lingers busily after it.
        torch.set_num_threads(1)
        self._command = command
        self._peer = peer
        self._source: ContiguousSource | None = None
        self._ways: dict[str, W] = {}

    def serve(self) -> None:
        """Do what is asked until the command is gone.

        Raises:
            LinkClosedError: it is.
        """
        while True:
            ask, fds = self._command.receive(IDLE_SECONDS)
            assert isinstance(ask, Ask)
            try:
                answer, out = self.do(ask, fds)
            finally:
                for fd in fds:
                    os.close(fd)
            self._command.send(answer, out)

    def do(self, ask: Ask, fds: Sequence[int]) -> tuple[Message, Sequence[int]]:
        """One thing; the answer, and descriptors that go with it."""
        if isinstance(ask, Open):
            opened = self.open(ask, fds[0] if fds else None)
            os.sched_setaffinity(0, {self.core})
            # What lives from here on lives long: the collector must not look at it in the middle of a turn.
            gc.collect()
            gc.freeze()
            gc.disable()
            made_here = self._source is not None and not fds and isinstance(self, SenderWorker)
            return opened, [self._source.fd] if made_here and self._source is not None else []
        if isinstance(ask, Turn):
            return self.turn(ask), []
        if isinstance(ask, Touch):
            return self.touch(ask), []
        if isinstance(ask, Stamp):
            self.stamp(ask)
        elif isinstance(ask, Close):
            self.close()
        return Done(), []

    def open(self, ask: Open, fd: int | None) -> Opened:
        """Connect everything."""
        raise NotImplementedError

    def turn(self, turn: Turn) -> Message:
        """One side of a turn."""
        raise NotImplementedError

    def touch(self, ask: Touch) -> Message:
        """One side of the first-touch measurement."""
        raise NotImplementedError

    def stamp(self, ask: Stamp) -> None:
        """Change what is handed over next."""
        raise NotImplementedError

    def forget(self) -> None:
        """Drop what this side keeps besides its ways."""
        raise NotImplementedError

    def close(self) -> None:
        """Give back everything that :meth:`open` made."""
        os.sched_setaffinity(0, ALL_CORES)
        gc.enable()
        gc.unfreeze()
        for way in self._ways.values():
            way.close()
        self._ways.clear()
        self.forget()
        self._source = None
        gc.collect()


class SenderWorker(Worker[SendingWay]):
    """Prefill's place."""

    core = ALL_CORES[0]

    def __init__(self, command: Link, peer: Link) -> None:
        super().__init__(command, peer)
        self._pattern = Pattern(BLOCK_BYTES)
        self._stamped: dict[int | None, Case] = {}

    def open(self, ask: Open, fd: int | None) -> Opened:
        """The sender is first everywhere: it has the memory."""
        notes: dict[str, str] = {}
        absent: dict[str, str] = {}
        if any(way in COPYING_WAYS for way in ask.ways):
            self._source = ContiguousSource(ask.contiguous_bytes, fd)
            self._peer.send(Note(), (self._source.fd if fd is None else fd,))
            notes["source"] = self._source.pages
        if _ours(ask):
            self._ways |= dict.fromkeys(_ours(ask), MC2Sender(ask.caches, _ours(ask), self._peer, ask.socket_dir))
        for way in ask.ways:
            if way in OUR_WAYS:
                continue
            assert self._source is not None
            if way in PEER_WAYS:
                sender = connect_sender(way, self._source, self._peer)
                if isinstance(sender, str):
                    absent[way] = sender
                else:
                    self._ways[way] = sender
            elif way == "memcpy":
                self._ways[way] = MemcpySender()
            else:
                traditional = TraditionalSender("tcp" if way == "tcp" else "shm", self._source, self._peer)
                self._ways[way] = traditional
                notes[way] = traditional.description
        return Opened(notes, absent)

    def turn(self, turn: Turn) -> Sent:
        """Once to warm up, once for the clock."""
        way = self._ways[turn.way]
        cold, _ = self._hand_over(way, warm_up(turn))
        started, ended = self._hand_over(way, turn)
        metadata, control = way.costs()
        return Sent(cold, started, ended, metadata, control)

    def _hand_over(self, way: SendingWay, turn: Turn) -> tuple[list[int], int]:
        """Wait for the receiver, go, wait for it again."""
        way.prepare(turn)
        self._peer.expect(Note, TRANSFER_SECONDS)
        go_ns = time.monotonic_ns() + HEAD_START_NS
        while time.monotonic_ns() < go_ns:
            pass
        started = way.run(turn)
        ended = time.monotonic_ns()
        if isinstance(way, PeerSender):
            way.await_receiver()
        else:
            self._peer.expect(Note, TRANSFER_SECONDS)
        way.settle(turn)
        return started, ended

    def touch(self, ask: Touch) -> Done:
        """Lend a pool."""
        touch.offer(ask, self._peer)
        return Done()

    def stamp(self, ask: Stamp) -> None:
        """In our cache, or in the source of all copies."""
        before = self._stamped.get(ask.cache)
        if before is not None and before != ask.case:
            # Requests of another size end elsewhere: the pattern must be whole again there.
            self._stamp(ask.cache, before, 0)
        self._stamped[ask.cache] = ask.case
        self._stamp(ask.cache, ask.case, ask.stamp)

    def _stamp(self, cache: int | None, case: Case, stamp: int) -> None:
        if cache is None:
            assert self._source is not None
            self._source.stamp(case, stamp, self._pattern)
        else:
            ours = next(way for way in self._ways.values() if isinstance(way, MC2Sender))
            ours.stamp(cache, case, stamp)

    def forget(self) -> None:
        """What was stamped."""
        self._stamped.clear()


class ReceiverWorker(Worker[ReceivingWay]):
    """Decode's place."""

    core = ALL_CORES[len(ALL_CORES) // 2]

    def __init__(self, command: Link, peer: Link) -> None:
        super().__init__(command, peer)
        self._destination: Destination | None = None

    def open(self, ask: Open, fd: int | None) -> Opened:
        """In the same order as the sender."""
        notes: dict[str, str] = {}
        absent: dict[str, str] = {}
        if any(way in COPYING_WAYS for way in ask.ways):
            self._destination = Destination(ask.contiguous_bytes)
            _, fds = self._peer.receive(TRANSFER_SECONDS)
            try:
                self._source = ContiguousSource(ask.contiguous_bytes, fds[0])
            finally:
                os.close(fds[0])
        if _ours(ask):
            self._ways |= dict.fromkeys(_ours(ask), MC2Receiver(ask.caches, _ours(ask), self._peer, ask.socket_dir))
        for way in ask.ways:
            if way in OUR_WAYS:
                continue
            assert self._source is not None
            assert self._destination is not None
            if way in PEER_WAYS:
                receiver = connect_receiver(way, self._destination, ask.contiguous_bytes, self._peer)
                if isinstance(receiver, str):
                    absent[way] = receiver
                else:
                    self._ways[way] = receiver
            elif way == "memcpy":
                self._ways[way] = Memcpy(self._destination, self._source)
            else:
                self._ways[way] = TraditionalReceiver("tcp" if way == "tcp" else "shm", self._destination, self._peer)
        return Opened(notes, absent)

    def turn(self, turn: Turn) -> Received:
        """Say that we are ready, take everything, and only then look at it."""
        way = self._ways[turn.way]
        before = warm_up(turn)
        way.prepare(before)
        self._peer.send(Note())
        cold = way.run(before)
        way.settle(before)
        self._peer.send(Note())
        way.prepare(turn)
        self._peer.send(Note())
        ready = way.run(turn)
        found = way.check(turn)
        way.settle(turn)
        self._peer.send(Note())
        took = dict(way.took_ns) if isinstance(way, Memcpy) else {}
        return Received(cold, ready, found.read_ns, found.verified, way.kv_bytes(turn), found.grown_bytes, took)

    def touch(self, ask: Touch) -> Message:
        """Measure."""
        return touch.measure(ask, self._peer)

    def stamp(self, ask: Stamp) -> None:
        """Is for senders."""
        raise TypeError("a receiver stamps nothing")

    def forget(self) -> None:
        """The buffer of all copies."""
        self._destination = None
