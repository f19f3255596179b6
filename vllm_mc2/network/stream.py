"""Authenticated frames over one TCP connection, on an event loop's thread.

First both sides prove that they know the secret, the one that connects before the one that listens, so that a listener gives
nothing to strangers that a secret could be guessed from. From then on every frame carries a tag. Nothing is encrypted.

A side that has nothing to say sends a heartbeat; one that is silent for its timeout is gone, whatever its socket says: when a
cable is cut, nobody closes anything.
"""

import asyncio
import errno
import hmac
import secrets
from typing import Self, TypeVar

from vllm_mc2 import protocol
from vllm_mc2.channel import LENGTH
from vllm_mc2.errors import PeerRefusedError, PeerUnreachableError, ProtocolError
from vllm_mc2.network.secret import TAG_BYTES, frame_tag, session_keys
from vllm_mc2.protocol import (
    MAX_FRAME_BYTES,
    PROTOCOL_VERSION,
    Heartbeat,
    Message,
    Refusal,
    TcpAccept,
    TcpChallenge,
    TcpProof,
)
from vllm_mc2.ticket import TcpAddress

MAX_GREETING_BYTES = 1024
"""A frame before the secret is proven."""

MAX_UNSENT_BYTES = 4 << 20
"""A peer that takes its answers no more is dropped."""

BEATS_PER_TIMEOUT = 4
M = TypeVar("M", bound=Message)


class SecureStream:
    """One connection after both proofs. The loop's thread only."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        keys: tuple[bytes, bytes],
        timeouts: tuple[float, float],
    ) -> None:
        """``keys``: of what is sent, and of what is received. ``timeouts``: ours, and the peer's."""
        self._reader = reader
        self._writer = writer
        self._send_key, self._receive_key = keys
        self._timeout_seconds = timeouts[0]
        self._num_sent = 0
        self._num_received = 0
        self._is_fresh = False
        self._heart = asyncio.get_running_loop().create_task(self._beat(min(timeouts) / BEATS_PER_TIMEOUT))

    @property
    def local_host(self) -> str:
        """The address of this host on the connection."""
        return str(self._writer.get_extra_info("sockname")[0])

    def send(self, message: Message) -> None:
        """Send a frame as soon as the network takes it.

        Raises:
            PeerUnreachableError: the connection has ended, or the peer does not take what was sent before.
        """
        if self._writer.transport.is_closing():
            raise PeerUnreachableError(errno.ECONNRESET, "the connection has ended")
        payload = protocol.encode(message)
        self._writer.write(LENGTH.pack(len(payload)) + payload + frame_tag(self._send_key, self._num_sent, payload))
        self._num_sent += 1
        self._is_fresh = True
        if self._writer.transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            raise PeerUnreachableError(errno.ETIMEDOUT, "the peer takes nothing any more")

    async def receive(self) -> Message:
        """The next frame that is not a heartbeat.

        Raises:
            ProtocolError: a frame that the peer has not made, or that is none.
            PeerUnreachableError: the peer closed, or was silent for too long.
        """
        while True:
            try:
                async with asyncio.timeout(self._timeout_seconds):
                    payload = await _read_payload(self._reader, MAX_FRAME_BYTES)
                    tag = await self._reader.readexactly(TAG_BYTES)
            except TimeoutError:
                text = f"nothing was heard for {self._timeout_seconds:g} s"
                raise PeerUnreachableError(errno.ETIMEDOUT, text) from None
            except (asyncio.IncompleteReadError, OSError) as error:
                raise PeerUnreachableError(errno.ECONNRESET, f"the connection has ended: {error}") from error
            if not hmac.compare_digest(tag, frame_tag(self._receive_key, self._num_received, payload)):
                raise ProtocolError("a frame was changed on the way")
            self._num_received += 1
            message = protocol.decode(payload)
            if not isinstance(message, Heartbeat):
                return message

    async def _beat(self, seconds: float) -> None:
        while not self._writer.is_closing():
            self._is_fresh = False
            await asyncio.sleep(seconds)
            if not self._is_fresh:
                try:
                    self.send(Heartbeat())
                except PeerUnreachableError:
                    self.close()

    def close(self) -> None:
        """End the connection at once; idempotent. What was sent to a peer that still listens arrives all the same."""
        self._heart.cancel()
        if self._writer.transport.get_write_buffer_size():
            self._writer.transport.abort()
        else:
            self._writer.close()

    @classmethod
    async def accept(
        cls, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes, timeout_seconds: float
    ) -> Self:
        """The listening side's greeting; the caller sets a deadline.

        Raises:
            ProtocolError: whoever connected does not know the secret, or does not speak the protocol.
            PeerUnreachableError: it went away.
        """
        challenge = TcpChallenge(PROTOCOL_VERSION, secrets.token_bytes(32), timeout_seconds)
        writer.write(protocol.frame(challenge))
        answer = await _greeting(reader, TcpProof)
        keys = session_keys(secret, challenge, answer.nonce, answer.timeout_seconds)
        if not hmac.compare_digest(answer.proof, keys.client_proof):
            writer.write(protocol.frame(Refusal("tcp_secret", "(not shown)", "(not shown)")))
            raise ProtocolError("it does not know the secret")
        writer.write(protocol.frame(TcpAccept(keys.server_proof)))
        return cls(reader, writer, (keys.server_key, keys.client_key), (timeout_seconds, answer.timeout_seconds))

    @classmethod
    async def connect(cls, address: TcpAddress, secret: bytes, timeout_seconds: float) -> Self:
        """Connect to a listener; the caller sets a deadline.

        Raises:
            PeerRefusedError: it has another secret, or speaks another protocol version.
            ProtocolError: it does not know the secret although it says so, or is something else altogether.
            PeerUnreachableError: nobody is there.
        """
        try:
            reader, writer = await asyncio.open_connection(*address)
        except OSError as error:
            raise PeerUnreachableError(error.errno or errno.EHOSTUNREACH, f"{address}: {error}") from error
        try:
            challenge = await _greeting(reader, TcpChallenge)
            if challenge.protocol != PROTOCOL_VERSION:
                raise PeerRefusedError("protocol", str(PROTOCOL_VERSION), str(challenge.protocol))
            nonce = secrets.token_bytes(32)
            keys = session_keys(secret, challenge, nonce, timeout_seconds)
            writer.write(protocol.frame(TcpProof(nonce, timeout_seconds, keys.client_proof)))
            answer = await _greeting(reader, TcpAccept)
            if not hmac.compare_digest(answer.proof, keys.server_proof):
                raise ProtocolError(f"{address} does not know the secret")
            return cls(reader, writer, (keys.client_key, keys.server_key), (timeout_seconds, challenge.timeout_seconds))
        except BaseException:
            writer.transport.abort()
            raise


async def _greeting(reader: asyncio.StreamReader, expected: type[M]) -> M:
    """A frame without a tag."""
    try:
        message = protocol.decode(await _read_payload(reader, MAX_GREETING_BYTES))
    except (asyncio.IncompleteReadError, OSError) as error:
        raise PeerUnreachableError(errno.ECONNRESET, f"the connection has ended: {error}") from error
    return protocol.expect(message, expected)


async def _read_payload(reader: asyncio.StreamReader, max_bytes: int) -> bytes:
    (size,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    if size > max_bytes:
        raise ProtocolError(f"frame of {size} bytes, at most {max_bytes} are allowed")
    return await reader.readexactly(size)
