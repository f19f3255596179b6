"""Targets: how frames are cut out of what a connection brings, with descriptors, tags, pieces of any size and sudden ends."""

import array
import asyncio
import atexit
import os
import socket
from collections.abc import Sequence
from typing import Any

from tests.fuzz.messages import POOL
from tests.fuzz.samples import encoded
from tests.fuzz.target import Target, refused
from vllm_mc2 import protocol
from vllm_mc2.channel import LENGTH, MAX_FRAME_FDS, FrameSocket, close_all, first_frame
from vllm_mc2.errors import PeerRefusedError, PeerUnreachableError, ProtocolError
from vllm_mc2.network.secret import frame_tag, session_keys
from vllm_mc2.network.stream import MAX_GREETING_BYTES, SecureStream
from vllm_mc2.protocol import MAX_FRAME_BYTES, Done, Heartbeat, PoolGrant, Refusal, RetirePool, TcpChallenge, TcpProof

LONG_SECONDS = 3600.0
SECRET = b"correct horse battery staple"


class ScriptedSocket:
    """Plays a hostile peer: what each ``recvmsg`` brings is said by a script of ``(how many bytes, what else)``.

    Descriptors are real ones, so that a leak or a second close is seen.
    """

    def __init__(self, script: bytes, stream: bytes) -> None:
        self._script = script
        self._at = 0
        self._stream = stream
        self.given: list[int] = []
        self.num_reads = 0
        self.was_cut = False

    def settimeout(self, seconds: float) -> None:
        assert seconds > 0

    def recvmsg(self, size: int, room: int, flags: int) -> tuple[bytes, list[tuple[int, int, bytes]], int, Any]:
        assert 0 < size <= MAX_FRAME_BYTES
        assert flags & socket.MSG_CMSG_CLOEXEC
        self.num_reads += 1
        step = self._script[self._at % len(self._script)] if self._script else 0
        self._at += 1
        if step == 255:
            raise ConnectionResetError(104, "reset")
        if step == 254:
            raise TimeoutError
        piece = self._stream[: min(size, 1 + (step & 0x1F) ** 2)] if step & 0x1F else self._stream[:size]
        self._stream = self._stream[len(piece) :]
        ancillary: list[tuple[int, int, bytes]] = []
        flags = 0
        if step & 0xC0 == 0x40:  # descriptors: one, or more than anybody may send
            fds = [os.dup(2) for _ in range(1 if step & 0x20 else MAX_FRAME_FDS - 1)]
            self.given += fds
            ancillary.append(
                (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds).tobytes() + b"xx"[: step & 1])
            )
        elif step & 0xE0 == 0x80:
            flags = socket.MSG_CTRUNC
            self.was_cut = True
        elif step & 0xE0 == 0xA0:
            ancillary.append((socket.SOL_SOCKET, 2, b"\0" * 12))
        return piece, ancillary, flags, None


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def run_frame(data: bytes) -> str:
    """``FrameSocket.receive``: first a byte that says how long the script is, the script, then the stream."""
    length = data[0] % 16 if data else 0
    sock = ScriptedSocket(data[1 : 1 + length], data[1 + length :])
    frame = FrameSocket(sock)  # type: ignore[arg-type]
    try:
        message, fds = frame.receive(LONG_SECONDS)
    except (ProtocolError, PeerUnreachableError) as error:
        assert not any(map(is_open, sock.given)), "a refused frame leaves descriptors open"
        return refused(error)
    assert not sock.was_cut, "descriptors were lost on the way, and nobody noticed"
    assert fds == sock.given and len(fds) <= MAX_FRAME_FDS and all(map(is_open, fds)), "descriptors were lost"
    close_all(fds)
    return f"{type(message).__name__} {len(fds)} in {min(8, sock.num_reads)}"


def frame_seeds() -> Sequence[bytes]:
    """A frame in one piece, in pieces, with descriptors, and cut off."""
    done, pool = protocol.frame(Done()), protocol.frame(PoolGrant(POOL))
    return [
        b"\0" + done,
        b"\x02\x01\x02" + pool,
        b"\x01\x60" + pool,
        b"\x03\x41\x00\x00" + done,
        b"\x02\x00\x80" + done,
        b"\x01\xff" + done,
        b"\0" + done[:-1],
        b"\0" + LENGTH.pack(MAX_FRAME_BYTES + 1),
        b"\0\xff\xff\xff\xff",
    ]


def run_buffer(data: bytes) -> str:
    """``channel.first_frame`` over bytes that arrive in two parts."""
    most = 1 << (data[0] % 21) if data else 1
    cut = data[1] if len(data) > 1 else 0
    buffer, rest = bytearray(data[2 : 2 + cut]), data[2 + cut :]
    num_frames = 0
    while True:
        before = bytes(buffer)
        try:
            payload = first_frame(buffer, most)
        except ProtocolError as error:
            assert int.from_bytes(buffer[:4], "little") > most
            return refused(error)
        assert buffer == before, "looking changes nothing"
        if payload is not None:
            assert len(payload) <= most and bytes(buffer[:4]) == len(payload).to_bytes(4, "little")
            assert buffer[4 : 4 + len(payload)] == payload
            num_frames += 1
            del buffer[: 4 + len(payload)]
        elif rest:
            buffer, rest = buffer + rest, b""
        else:
            assert len(buffer) < 4 or len(buffer) < 4 + int.from_bytes(buffer[:4], "little")
            return f"{min(num_frames, 5)} frames"


def buffer_seeds() -> Sequence[bytes]:
    """Frames that the two parts cut anywhere."""
    frames = protocol.frame(Done()) + protocol.frame(Heartbeat())
    return [b"\x14\x04" + frames, b"\x14\xff" + frames, b"\x03\x05" + frames, b"\x14\x02" + frames[:-2], b""]


class Wire:
    """The writing half of a connection that nobody reads."""

    def __init__(self) -> None:
        self.written = 0
        self.is_ended = False
        self.transport = self

    def write(self, data: bytes) -> None:
        self.written += len(data)

    def is_closing(self) -> bool:
        return self.is_ended

    def get_write_buffer_size(self) -> int:
        return 0

    def close(self) -> None:
        self.is_ended = True

    abort = close


_loop: list[asyncio.AbstractEventLoop] = []


def loop() -> asyncio.AbstractEventLoop:
    """One for all inputs."""
    if not _loop:
        _loop.append(asyncio.new_event_loop())
        atexit.register(_loop[0].close)
    return _loop[0]


class QuietStream(SecureStream):
    """Without heartbeats, whose task takes longer than all the rest of an input."""

    def __init__(self, reader: Any, writer: Any, keys: tuple[bytes, bytes], timeouts: tuple[float, float]) -> None:
        self._reader, self._writer = reader, writer
        self._send_key, self._receive_key = keys
        self._timeout_seconds = timeouts[0]
        self._num_sent = self._num_received = 0

    def close(self) -> None:
        self._writer.close()


KEYS = (b"s" * 32, b"r" * 32)


async def _receive_all(data: bytes) -> str:
    reader = asyncio.StreamReader(limit=1 << 16)
    begin, number, num_expected, is_intact = 0, 0, 0, True
    # Each piece: how the tag is, two bytes of length, payload. A tag cannot be guessed, so the script says which ones are right.
    while begin + 3 <= len(data):
        how, size = data[begin], int.from_bytes(data[begin + 1 : begin + 3], "little")
        payload = data[begin + 3 : begin + 3 + size]
        begin += 3 + size
        tag = frame_tag(KEYS[1], number, payload)
        claimed = len(payload)
        if how & 0xF0 == 0xF0:
            tag = (
                tag[:-1] + bytes([tag[-1] ^ 1]),
                frame_tag(KEYS[1], number + 1, payload),
                frame_tag(KEYS[0], number, payload),
                b"",
            )[how & 3]
            is_intact = False
        elif how & 0xF0 == 0xE0:
            claimed = (claimed + 1, 1 << 20, (1 << 20) + 1, (1 << 32) - 1)[how & 3]
            is_intact = False
        reader.feed_data(LENGTH.pack(claimed) + payload + tag)
        number += 1
        if is_intact:
            try:
                num_expected += not isinstance(protocol.decode(payload), Heartbeat)
            except ProtocolError:
                is_intact = False
    reader.feed_eof()
    stream = QuietStream(reader, Wire(), KEYS, (LONG_SECONDS, LONG_SECONDS))  # type: ignore[arg-type]
    num_messages = 0
    try:
        while True:
            message = await stream.receive()
            assert not isinstance(message, Heartbeat)
            num_messages += 1
    except (ProtocolError, PeerUnreachableError) as error:
        assert num_messages <= num_expected, "a frame was believed that the peer has not made"
        assert num_messages >= num_expected, "a frame was not believed that the peer has made"
        return f"{min(3, num_messages)} messages, {refused(error)}" if num_messages else refused(error)
    finally:
        stream.close()


def run_stream(data: bytes) -> str:
    """``SecureStream.receive`` of a peer that knows the secret, and of somebody who changes what it sends."""
    return loop().run_until_complete(_receive_all(data))


def stream_seeds() -> Sequence[bytes]:
    """Right tags, wrong ones, and lengths that lie."""

    def piece(how: int, payload: bytes) -> bytes:
        return bytes([how]) + len(payload).to_bytes(2, "little") + payload

    done, beat = protocol.encode(Done()), protocol.encode(Heartbeat())
    claim = encoded(protocol.Claim, 1)
    return [
        piece(0, done), piece(0, beat) + piece(0, done) + piece(0, claim), piece(0, done) + piece(0xF0, done),
        piece(0xF1, done), piece(0xF2, done), piece(0xF3, done), piece(0xE0, done), piece(0xE1, done), piece(0xE3, beat),
        piece(0, encoded(RetirePool, 1)) + piece(0, b"\xc1"),
    ]  # fmt: skip


async def _greet(data: bytes) -> str:
    reader = asyncio.StreamReader(limit=1 << 16)
    wire = Wire()
    reader.feed_data(data)
    reader.feed_eof()
    try:
        stream = await SecureStream.accept(reader, wire, SECRET, LONG_SECONDS)  # type: ignore[arg-type]
    except (ProtocolError, PeerUnreachableError, PeerRefusedError) as error:
        assert wire.written <= 2 * MAX_GREETING_BYTES, "a stranger gets next to nothing"
        return refused(error)
    stream.close()
    raise AssertionError("somebody who does not know the secret was let in")


def run_greeting(data: bytes) -> str:
    """``SecureStream.accept``: before the secret is proven. Nonces are random, so nothing that is fed can be right."""
    return loop().run_until_complete(_greet(data))


def greeting_seeds() -> Sequence[bytes]:
    """A proof under another challenge, and what else a greeting may be."""
    challenge = TcpChallenge(protocol.PROTOCOL_VERSION, b"n" * 32, 10.0)
    keys = session_keys(SECRET, challenge, b"m" * 32, 10.0)
    said = [TcpProof(b"m" * 32, 10.0, keys.client_proof), challenge, Refusal("f", "a", "b"), Heartbeat()]
    return [protocol.frame(each) for each in said] + [
        LENGTH.pack(MAX_GREETING_BYTES + 1),
        b"GET / HTTP/1.1\r\n\r\n",
        b"",
    ]


TARGETS = [
    Target("frame", "channel.FrameSocket.receive, receive_some", run_frame, frame_seeds),
    Target("buffer", "channel.first_frame", run_buffer, buffer_seeds),
    Target("stream", "network.stream.SecureStream.receive", run_stream, stream_seeds),
    Target("greeting", "network.stream.SecureStream.accept", run_greeting, greeting_seeds),
]
