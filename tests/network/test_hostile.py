"""Peers that know the secret and behave badly all the same; and any order of honest words."""

import asyncio
import contextlib
import time
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.network.conftest import HELLO, INCARNATION, PATIENCE_SECONDS, SECRET, Lender
from tests.support.waiting import wait_until
from tests.unit.test_protocol import POOL
from vllm_mc2.errors import MC2Error, PeerUnreachableError
from vllm_mc2.network.borrower import RemoteSession, open_remote_session
from vllm_mc2.network.loop import LoopThread
from vllm_mc2.network.stream import SecureStream
from vllm_mc2.protocol import (
    PROTOCOL_VERSION,
    Claim,
    Done,
    Heartbeat,
    InspectHello,
    LookUp,
    Message,
    Offered,
    Release,
    SchedulerWelcome,
    Ticket,
    Verdict,
    WorkerEndpoint,
)
from vllm_mc2.ticket import TcpAddress

TOKEN = b"t" * 16
TICKETS = st.builds(
    Ticket,
    version=st.sampled_from([PROTOCOL_VERSION, 0, 99]),
    incarnation=st.sampled_from([INCARNATION, "0" * 32]),
    slot=st.sampled_from(["00000000", "00000001", "0000000f", "00000010", "ffffffff"]),
    generation=st.sampled_from(["00000000", "00000001", "00000002", "ffffffff"]),
    token=st.sampled_from([TOKEN.hex(), "0" * 32]),
)
CALLS = st.integers(0, (1 << 62) - 1)
WORDS: st.SearchStrategy[Message] = st.one_of(
    st.builds(LookUp, CALLS, TICKETS),
    st.builds(Claim, CALLS, TICKETS),
    st.builds(Release, TICKETS),
    st.just(Heartbeat()),
    st.just(Done()),
    st.just(InspectHello(PROTOCOL_VERSION)),
    st.just(HELLO),
    st.builds(Offered, CALLS),
)
ANSWERS: st.SearchStrategy[Message] = st.one_of(
    st.builds(Offered, st.integers(0, 3), st.none() | st.binary(min_size=32, max_size=32), st.integers(0, 99)),
    st.builds(Verdict, st.integers(0, 3), st.booleans(), st.binary(max_size=40)),
    st.just(Heartbeat()),
    st.just(Done()),
)


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 90))


@settings(max_examples=60, deadline=None)
@given(st.lists(WORDS, max_size=12))
def test_prefill_survives_any_words_of_a_decode(words: list[Message]) -> None:
    lender = Lender()

    async def speak() -> None:
        stream = await SecureStream.connect(lender.address, SECRET, PATIENCE_SECONDS)
        stream.send(HELLO)
        await stream.receive()
        with contextlib.suppress(MC2Error):  # it may have ended the session, and nothing else
            for word in words:
                stream.send(word)
            stream.send(LookUp(7, Ticket.issue(INCARNATION, 0, 1, TOKEN)))
            while not (isinstance(answer := await stream.receive(), Offered) and answer.call == 7):
                pass
        stream.close()

    try:
        lender.book.publish(TOKEN, b"d" * 32, 16, [1], 60.0, "payload")
        run(speak())
        wait_until(lambda: lender.ledgers == {})
        # Whatever was claimed has been given back; another decode is served as if nothing had been.
        lender.book.sweep()
        ticket = lender.book.publish(TOKEN, b"d" * 32, 16, [2], 60.0, "another")
        assert ticket is not None
        loop = LoopThread()
        _, session = open_remote_session(
            loop, lender.address, SECRET, HELLO, SchedulerWelcome, PATIENCE_SECONDS, PATIENCE_SECONDS
        )
        verdict = session.claim(ticket).result(PATIENCE_SECONDS)
        assert isinstance(verdict, Verdict) and verdict.is_held
        session.close()
        loop.close()
    finally:
        lender.close()


@settings(max_examples=60, deadline=None)
@given(st.lists(ANSWERS, max_size=8))
def test_decode_survives_any_answers_of_a_prefill(answers: list[Message]) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        stream = await SecureStream.accept(reader, writer, SECRET, PATIENCE_SECONDS)
        with contextlib.suppress(MC2Error, asyncio.CancelledError):
            await stream.receive()
            stream.send(SchedulerWelcome("prefill", 16, (WorkerEndpoint(0, "7" * 32, POOL),)))
            await stream.receive()
            for answer in answers:
                stream.send(answer)
            await asyncio.sleep(0.01)
        stream.close()

    loop = LoopThread()
    server = loop.submit(asyncio.start_server(serve, "127.0.0.1", 0)).result(PATIENCE_SECONDS)
    address = TcpAddress("127.0.0.1", server.sockets[0].getsockname()[1])
    _, session = open_remote_session(loop, address, SECRET, HELLO, SchedulerWelcome, PATIENCE_SECONDS, PATIENCE_SECONDS)
    future = session.look_up(Ticket.issue(INCARNATION, 0, 1, TOKEN))
    try:
        answer = future.result(PATIENCE_SECONDS)
    except PeerUnreachableError:
        pass
    else:
        assert answer.call == 0 and answer in answers
    wait_until(session.is_gone)
    with pytest.raises(PeerUnreachableError):
        session.claim(Ticket.issue(INCARNATION, 0, 1, TOKEN)).result(PATIENCE_SECONDS)
    session.close()
    loop.soon(server.close)
    loop.close()


class Model:
    """What leases do, in one page: one lease at a time, up to three decodes."""

    def __init__(self, lender: Lender, loop: LoopThread) -> None:
        self.lender, self.loop = lender, loop
        self.sessions: dict[int, RemoteSession] = {}
        self.held: dict[int, int] = {}
        self.ticket: Ticket | None = None
        self.was_claimed = False

    def session(self, number: int) -> RemoteSession:
        if number not in self.sessions:
            answer = open_remote_session(
                self.loop, self.lender.address, SECRET, HELLO, SchedulerWelcome, PATIENCE_SECONDS, 60.0
            )
            self.sessions[number] = answer[1]
        return self.sessions[number]

    def publish(self, number: int) -> None:
        if self.ticket is None:
            self.ticket = self.lender.book.publish(TOKEN, b"d" * 32, 16, [number], 3600.0, "payload")
            self.was_claimed = False

    def claim(self, number: int) -> None:
        if self.ticket is not None:
            verdict = self.session(number).claim(self.ticket).result(PATIENCE_SECONDS)
            assert isinstance(verdict, Verdict) and verdict.is_held
            self.held[number] = self.held.get(number, 0) + 1
            self.was_claimed = True

    def release(self, number: int) -> None:
        if self.held.get(number):
            assert self.ticket is not None
            self.session(number).release(self.ticket)
            self.session(number).look_up(self.ticket).result(PATIENCE_SECONDS)  # has arrived
            self.held[number] -= 1

    def leave(self, number: int) -> None:
        if number in self.sessions:
            self.sessions.pop(number).close()
            self.held.pop(number, None)
            wait_until(lambda: len(self.lender.ledgers) == len(self.sessions))

    def sweep(self, number: int) -> None:
        ended = self.lender.book.sweep()
        is_over = self.ticket is not None and self.was_claimed and not any(self.held.values())
        assert bool(ended) == is_over
        if is_over:
            self.ticket = None


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["publish", "claim", "claim", "release", "leave", "sweep"]), st.integers(0, 2)))
)
def test_any_order_of_honest_words_is_as_on_one_host(steps: list[tuple[str, int]]) -> None:
    lender, loop = Lender(), LoopThread()
    model = Model(lender, loop)
    try:
        for name, number in [("publish", 0), *steps, ("leave", 0), ("leave", 1), ("leave", 2), ("sweep", 0)]:
            getattr(model, name)(number)
        assert len(lender.book) == (model.ticket is not None)
    finally:
        loop.close()
        lender.close()


def test_a_decode_that_takes_no_answers_is_dropped() -> None:
    """It asks and asks, and reads nothing: the answers are not kept for it without end."""
    lender = Lender(max_blocks=8192)
    ticket = lender.book.publish(TOKEN, b"d" * 32, 8192, range(1, 8193), 60.0, "payload")
    assert ticket is not None

    async def flood() -> None:
        stream = await SecureStream.connect(lender.address, SECRET, 60.0)
        stream.send(HELLO)
        await stream.receive()
        deadline = time.monotonic() + PATIENCE_SECONDS
        with contextlib.suppress(PeerUnreachableError):
            for call in range(2000):  # 64 MB of answers
                stream.send(Claim(call, ticket))
        while lender.ledgers and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        stream.close()

    try:
        run(flood())
        assert lender.ledgers == {}
    finally:
        lender.close()
