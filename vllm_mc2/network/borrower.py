"""Decode's side: a session with a prefill on another host, and its leases.

:class:`RemoteLeases` says what :class:`~vllm_mc2.leases.PeerLeases` says, but later: the scheduler's thread asks, goes on, and
asks again in its next step.
"""

import asyncio
import concurrent.futures
import contextlib
import errno
import itertools
import os
import threading
from array import array
from collections import deque
from typing import Literal, TypeVar

from vllm_mc2.errors import PeerUnreachableError, ProtocolError
from vllm_mc2.leases import LeaseId, LeaseOffer
from vllm_mc2.network.loop import LoopThread
from vllm_mc2.network.stream import SecureStream
from vllm_mc2.protocol import Claim, LookUp, Message, Offered, Release, Ticket, Verdict, expect
from vllm_mc2.ticket import TcpAddress

T = TypeVar("T", bound=Message)
Answered = Offered | Verdict


class RemoteSession:
    """An open session with a prefill on another host; made by :func:`open_remote_session`. Any thread."""

    peer_pid = 0
    """Processes of other hosts have none here."""

    def __init__(self, loop: LoopThread, stream: SecureStream) -> None:
        """On the loop's thread."""
        self._loop = loop
        self._stream = stream
        self.local_host = stream.local_host
        self._calls: dict[int, concurrent.futures.Future[Answered]] = {}
        self._numbers = itertools.count()
        self._gone = threading.Event()
        self._gone_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()
        """Guards the descriptor, which the loop's thread writes to and :meth:`close` closes."""
        self._task = asyncio.get_running_loop().create_task(self._receive())

    def descriptors(self) -> list[int]:
        """What becomes readable when the peer is gone; borrowed, until :meth:`close`."""
        return [self._gone_fd]

    def is_gone(self) -> bool:
        """Whether the peer has ended the session, or is not heard of any more; once true it stays true."""
        return self._gone.is_set()

    looks_gone = is_gone

    def look_up(self, ticket: Ticket) -> "concurrent.futures.Future[Answered]":
        """Ask for an :class:`~vllm_mc2.protocol.Offered`; fails with ``PeerUnreachableError`` when the session ends."""
        return self._ask(LookUp(next(self._numbers), ticket))

    def claim(self, ticket: Ticket) -> "concurrent.futures.Future[Answered]":
        """Ask for a :class:`~vllm_mc2.protocol.Verdict`."""
        return self._ask(Claim(next(self._numbers), ticket))

    def release(self, ticket: Ticket) -> None:
        """Give one claim back."""
        self._loop.soon(self._send, Release(ticket))

    def _ask(self, message: LookUp | Claim) -> "concurrent.futures.Future[Answered]":
        future: concurrent.futures.Future[Answered] = concurrent.futures.Future()
        self._loop.soon(self._send_call, message, future)
        return future

    def _send_call(self, message: LookUp | Claim, future: "concurrent.futures.Future[Answered]") -> None:
        if self._gone.is_set():
            future.set_exception(PeerUnreachableError(errno.ECONNRESET, "the session has ended"))
            return
        self._calls[message.call] = future
        self._send(message)

    def _send(self, message: Message) -> None:
        if not self._gone.is_set():
            try:
                self._stream.send(message)
            except PeerUnreachableError:
                self._task.cancel()

    async def _receive(self) -> None:
        try:
            while True:
                message = await self._stream.receive()
                if not isinstance(message, Answered) or message.call not in self._calls:
                    raise ProtocolError(f"{type(message).__name__} out of turn")
                self._calls.pop(message.call).set_result(message)
        except (ProtocolError, PeerUnreachableError):
            pass  # whoever waits is told below; whoever has loans asks is_gone()
        finally:
            self._end()

    def _end(self) -> None:
        self._gone.set()
        self._stream.close()
        with self._lock:
            if self._gone_fd >= 0:
                os.eventfd_write(self._gone_fd, 1)
        calls, self._calls = self._calls, {}
        for future in calls.values():
            future.set_exception(PeerUnreachableError(errno.ECONNRESET, "the session has ended"))

    def close(self) -> None:
        """End the session; idempotent. Prefill then counts every claim of it as released."""
        self._gone.set()
        self._loop.soon(self._task.cancel)
        with self._lock:
            if self._gone_fd >= 0:
                os.close(self._gone_fd)
                self._gone_fd = -1


def open_remote_session(
    loop: LoopThread,
    address: TcpAddress,
    secret: bytes,
    hello: Message,
    expected: type[T],
    timeout_seconds: float,
    silence_seconds: float,
) -> tuple[T, RemoteSession]:
    """Connect, greet, say hello and wait for the answer. Blocks up to ``timeout_seconds``; any thread but the loop's.

    Raises:
        PeerUnreachableError: nobody there, or no answer in time.
        PeerRefusedError: another secret, or the peer named a field that differs.
        ProtocolError: an answer that the protocol does not allow.
    """

    async def open_it() -> tuple[T, RemoteSession]:
        try:
            async with asyncio.timeout(timeout_seconds):
                stream = await SecureStream.connect(address, secret, silence_seconds)
                try:
                    stream.send(hello)
                    return expect(await stream.receive(), expected), RemoteSession(loop, stream)
                except BaseException:
                    stream.close()
                    raise
        except TimeoutError:
            raise PeerUnreachableError(errno.ETIMEDOUT, f"{address}: no answer in time") from None

    try:
        return loop.submit(open_it()).result()
    except (RuntimeError, concurrent.futures.CancelledError) as error:
        raise PeerUnreachableError(errno.ECANCELED, "this process ends") from error


class RemoteLeases:
    """A remote prefill's leases. Scheduler thread only; every call returns at once."""

    def __init__(self, session: RemoteSession) -> None:
        self._session = session
        self._offers: dict[Ticket, concurrent.futures.Future[Answered]] = {}
        """Asked for, and not seen yet."""
        self._seen: tuple[Ticket, LeaseOffer] | None = None
        """What the last look was at: a claim follows at once or never."""
        self._claimed: dict[LeaseId, tuple[Ticket, LeaseOffer]] = {}
        """Of leases with claims that are pending or hold."""
        self._claims: dict[LeaseId, deque[concurrent.futures.Future[Answered]]] = {}
        self._held: dict[LeaseId, tuple[int, list[int]]] = {}
        """Claims that hold, and the block table."""

    def look_up(self, ticket: Ticket) -> LeaseOffer | Literal["pending"] | None:
        """The lease that ``ticket`` names, None when it is over or the token is wrong, or ``pending``: ask again."""
        claimed = self._claimed.get(ticket.lease_id)
        if ticket.lease_id in self._claims and claimed is not None and claimed[0] == ticket:
            return claimed[1]
        future = self._offers.get(ticket)
        if future is None:
            self._offers[ticket] = self._session.look_up(ticket)
            return "pending"
        if not future.done():
            return "pending"
        del self._offers[ticket]
        answer = _result(future)
        if not isinstance(answer, Offered) or answer.digest is None:
            return None
        offer = LeaseOffer(answer.digest, answer.num_tokens, answer.num_blocks, answer.is_copy_wanted)
        self._seen = ticket, offer
        return offer

    def claim(self, lease_id: LeaseId) -> Literal["held", "pending", "dead"]:
        """Claim the lease that was just looked at; the verdict comes from :meth:`poll`."""
        assert self._seen is not None and self._seen[0].lease_id == lease_id
        self._claimed[lease_id] = self._seen
        self._claims.setdefault(lease_id, deque()).append(self._session.claim(self._seen[0]))
        return "pending"

    def poll(self, lease_id: LeaseId) -> Literal["held", "pending", "dead"]:
        """The verdict on the oldest pending claim."""
        claims = self._claims[lease_id]
        if not claims[0].done():
            return "pending"
        answer = _result(claims.popleft())
        if not claims:
            del self._claims[lease_id]
        if not isinstance(answer, Verdict) or not answer.is_held or len(answer.block_ids) % 4:
            self._forget(lease_id)
            return "dead"
        num_held, _ = self._held.get(lease_id, (0, []))
        self._held[lease_id] = num_held + 1, array("i", answer.block_ids).tolist()
        return "held"

    def block_ids(self, lease_id: LeaseId) -> list[int]:
        """The remote block table of a held lease."""
        return list(self._held[lease_id][1])

    def release(self, lease_id: LeaseId) -> None:
        """Give one claim back; prefill may reuse the blocks from now on."""
        self._session.release(self._claimed[lease_id][0])
        num_held, block_ids = self._held[lease_id]
        if num_held > 1:
            self._held[lease_id] = num_held - 1, block_ids
        else:
            del self._held[lease_id]
            self._forget(lease_id)

    def _forget(self, lease_id: LeaseId) -> None:
        if lease_id not in self._held and lease_id not in self._claims:
            del self._claimed[lease_id]

    def close(self) -> None:
        """Nothing to unmap; the session's end is what prefill sees."""


def _result(future: "concurrent.futures.Future[Answered]") -> Answered | None:
    """What came, or None if the session has ended before."""
    with contextlib.suppress(PeerUnreachableError):
        return future.result()
    return None
