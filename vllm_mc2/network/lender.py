"""Prefill's side: a listener for decodes on other hosts, which claims and releases for them in the same tables.

A session gets a ledger as one on this host does, only that this process holds the pen: it reads the index table and writes the
ledger at the decode's word. So nothing else of prefill knows where a decode lives. When the session ends, by its socket or by
silence, the ledger is dropped and what only it held ends; the decode finds out before it believes what it has read, since it
asks once more afterwards (:meth:`~vllm_mc2.network.borrower.RemoteSession.look_up`).
"""

import asyncio
import contextlib
import itertools
import logging
from array import array
from collections.abc import Callable
from typing import NamedTuple

from vllm_mc2.errors import ConfigError, PeerUnreachableError, ProtocolError
from vllm_mc2.leases import PeerLeases
from vllm_mc2.network.address import resolve_own_address
from vllm_mc2.network.loop import LoopThread
from vllm_mc2.network.stream import SecureStream
from vllm_mc2.protocol import Claim, LookUp, Message, Offered, Release, Ticket, Verdict
from vllm_mc2.session import HELLO_TIMEOUT_SECONDS, MAX_PENDING, MAX_SESSIONS, Answer
from vllm_mc2.ticket import TcpAddress

logger = logging.getLogger("vllm.mc2.network")

VERDICT_SECONDS = 5.0
"""Prefill's scheduler decides in microseconds. Longer means that it has been stopped."""

MAX_TABLE_BLOCKS = 250_000
"""Of a lease; its block table goes into one message."""

_FIRST_KEY = 1 << 32
"""Keys of sessions on this host are below."""


class Listening(NamedTuple):
    """Where and how to listen."""

    address: TcpAddress
    secret: bytes
    timeout_seconds: float
    """After so much silence a decode is gone."""


class RemoteServer:
    """Listens on one address. The callbacks run on the server's thread, as those of :class:`~vllm_mc2.session.SessionServer`
    do on its own: ``on_hello(key, hello)`` answers, with an index table and a ledger for who may have them, and
    ``on_close(key)`` is called once for each of those.
    """

    def __init__(
        self, listening: Listening, on_hello: Callable[[int, Message], Answer], on_close: Callable[[int], None]
    ) -> None:
        """Raises:
        ConfigError: ``tcp_address`` is not one that can be listened on.
        """
        self._listening = listening
        self._on_hello = on_hello
        self._on_close = on_close
        self._keys = itertools.count(_FIRST_KEY)
        self._pending: dict[asyncio.StreamWriter, None] = {}
        """Who has not said a hello yet, the oldest first."""
        self._num_sessions = 0
        self.num_rejected = 0
        """Connections that came to nothing through their own fault; only grows. Any thread may read it."""
        self._loop = LoopThread()
        try:
            self._server = self._loop.submit(self._listen()).result()
        except OSError as error:
            self._loop.close()
            address = listening.address
            raise ConfigError(f"tcp_address {address.host}, tcp_port {address.port}: cannot listen: {error}") from error
        except ConfigError:
            self._loop.close()
            raise
        port = self._server.sockets[0].getsockname()[1]
        self.address = TcpAddress(listening.address.host, port)

    def close(self) -> None:
        """Stop listening and end every session; idempotent, any thread."""
        self._loop.soon(self._server.close)
        self._loop.close()

    async def _listen(self) -> asyncio.Server:
        host = resolve_own_address(self._listening.address.host)
        return await asyncio.start_server(self._connected, host, self._listening.address.port)

    # --- one connection ---

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # This server closes: asyncio would report a cancelled connection as an error, and leave it open.
        with contextlib.suppress(asyncio.CancelledError):
            try:
                await self._serve(reader, writer)
            finally:
                writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._num_sessions >= MAX_SESSIONS:
            self._reject(writer, f"{MAX_SESSIONS} sessions are open already")
            return
        if len(self._pending) >= MAX_PENDING:
            # Who has been silent for longest makes room, so that strangers keep nobody out.
            oldest = next(iter(self._pending))
            del self._pending[oldest]
            oldest.transport.abort()
        self._pending[writer] = None
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_SECONDS):
                listening = self._listening
                stream = await SecureStream.accept(reader, writer, listening.secret, listening.timeout_seconds)
                try:
                    hello = await stream.receive()
                except BaseException:
                    stream.close()
                    raise
        except (ProtocolError, PeerUnreachableError, TimeoutError) as error:
            self._reject(writer, str(error) or "said nothing in time")
            return
        finally:
            self._pending.pop(writer, None)
        self._num_sessions += 1
        try:
            await self._welcome(next(self._keys), stream, hello)
        except (ProtocolError, ValueError) as error:
            logger.warning("ended the session of a peer on another host: %s", error)
        except PeerUnreachableError as error:
            logger.info("the session of a peer on another host has ended: %s", error)
        finally:
            self._num_sessions -= 1
            stream.close()

    def _reject(self, writer: asyncio.StreamWriter, reason: str) -> None:
        self.num_rejected += 1
        # Powers of two only, so that a broken or hostile client cannot fill the log.
        if self.num_rejected & (self.num_rejected - 1) == 0:
            peer = writer.get_extra_info("peername")
            logger.warning("rejected a peer at %s (%d so far): %s", peer and peer[0], self.num_rejected, reason)

    async def _welcome(self, key: int, stream: SecureStream, hello: Message) -> None:
        try:
            answer = self._on_hello(key, hello)
        except Exception:
            # Session dispatch border: one hello must not end a session of another peer.
            logger.exception("a hello could not be answered")
            return
        if not answer.fds:
            stream.send(answer.message)
            return
        try:
            leases = PeerLeases(*answer.fds)
            try:
                stream.send(answer.message)
                while True:
                    await self._answer(stream, leases, await stream.receive())
            finally:
                leases.close()
        finally:
            self._on_close(key)

    async def _answer(self, stream: SecureStream, leases: PeerLeases, message: Message) -> None:
        match message:
            case LookUp(call=call, ticket=ticket):
                stream.send(_look_up(leases, call, ticket))
            case Claim(call=call, ticket=ticket):
                stream.send(await _claim(leases, call, ticket))
            case Release(ticket=ticket):
                leases.release(ticket.lease_id)
            case _:
                raise ProtocolError(f"{type(message).__name__} out of turn")


def _look_up(leases: PeerLeases, call: int, ticket: Ticket) -> Offered:
    offer = leases.look_up(ticket)
    return Offered(call) if offer is None else Offered(call, *offer)


async def _claim(leases: PeerLeases, call: int, ticket: Ticket) -> Verdict:
    # As on one host, only a ticket that was really issued may touch the ledger.
    if leases.look_up(ticket) is None:
        return Verdict(call, is_held=False)
    verdict = leases.claim(ticket.lease_id)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + VERDICT_SECONDS
    while verdict == "pending":
        if loop.time() > deadline:
            raise PeerUnreachableError("this prefill's scheduler does not decide")
        await asyncio.sleep(0.001)
        verdict = leases.poll(ticket.lease_id)
    if verdict == "dead":
        return Verdict(call, is_held=False)
    block_ids = leases.block_ids(ticket.lease_id)
    if len(block_ids) > MAX_TABLE_BLOCKS:
        leases.release(ticket.lease_id)
        logger.warning("a lease of %d blocks does not fit a message, at most %d do", len(block_ids), MAX_TABLE_BLOCKS)
        return Verdict(call, is_held=False)
    return Verdict(call, is_held=True, block_ids=array("i", block_ids).tobytes())
