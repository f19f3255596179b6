"""What the command and its worker processes say to each other, over socket pairs that only they have.

One message is one packet (``SOCK_SEQPACKET``), so that there is nothing to frame; descriptors travel with it. Every wait
has a deadline, and the end of a process is the end of its socket.
"""

import os
import socket
from collections.abc import Sequence
from typing import Literal, Self, TypeVar

import msgspec

from vllm_mc2.bench.handoff.cases import Case

MAX_PACKET_BYTES = 128 << 10


class Ask(msgspec.Struct, frozen=True, tag=True):
    """Base of what the command asks a worker."""


class Open(Ask, frozen=True):
    """Make or map all memory, connect, and get everything warm. Answered by :class:`Opened`."""

    ways: list[str]
    caches: list[Case]
    """One cache, with a communicator of its own, for each block size; the largest case that it must hold."""
    contiguous_bytes: int
    """Size of the source that all copying ways share; the first pair's sender makes it, others get its descriptor."""
    socket_dir: str


class Stamp(Ask, frozen=True):
    """Sender: change the first and the last word of every request, so that nobody can pass off an older transfer's bytes."""

    case: Case
    cache: int | None
    """None: the contiguous source."""
    stamp: int


class Turn(Ask, frozen=True):
    """Hand one case over, once. Both sides get it."""

    way: str
    case: Case
    cache: int
    stamp: int
    check_all: bool
    """Receiver: compare every byte with the pattern, not only the stamps."""


class Touch(Ask, frozen=True):
    """What the first touch of a newly mapped pool costs."""

    huge_pages: Literal["auto", "off"]
    num_bytes: int
    num_repeats: int


class Close(Ask, frozen=True):
    """Give back all that :class:`Open` made. Answered by :class:`Done`."""


class Answer(msgspec.Struct, frozen=True, tag=True):
    """Base of what a worker answers."""


class Opened(Answer, frozen=True):
    """Ready. The first pair's sender attaches the source's descriptor, if there is one."""

    notes: dict[str, str] = {}
    """What there is to say about a way: how it copies, which pages it has."""
    absent: dict[str, str] = {}
    """Ways that cannot be used here, with the reason."""


class Sent(Answer, frozen=True):
    """A sender's side of a turn. Times are ``CLOCK_MONOTONIC`` in nanoseconds, the same clock in all processes."""

    cold_started_ns: list[int]
    """When each hand-over that warms up began."""
    started_ns: list[int]
    """When each request's hand-over began; empty when this side has nothing to do."""
    ended_ns: int
    metadata_bytes: list[int]
    """What describes a request on the wire, for each."""
    control_bytes: int
    """Signals and headers besides the KV bytes, per turn."""


class Received(Answer, frozen=True):
    """A receiver's side of a turn."""

    cold_ready_ns: list[int]
    """When the KV of each hand-over that warms up was usable."""
    ready_ns: list[int]
    """When each request's KV was usable."""
    read_ns: int
    """Reading the first and the last byte of every request afterwards, all together."""
    verified: bool
    kv_bytes: int
    """Bytes of KV buffer that this way needed here."""
    grown_bytes: int | None
    """By how much this process's own memory grew, with all requests held and read; measured in full checks."""
    took_ns: dict[str, int] = {}
    """For a way that needs no sender: the whole turn's time, by each of several means. ``ready_ns`` means nothing then."""


class Touched(Answer, frozen=True):
    """First-touch costs, one sample for each repeat, in nanoseconds."""

    method: str
    page_bytes: int
    map_ns: list[int]
    cold_touch_ns: list[int]
    prefault_ns: list[int]
    warm_touch_ns: list[int]
    unmap_ns: list[int]


class Done(Answer, frozen=True):
    """Nothing more to say."""


class Failed(Answer, frozen=True):
    """The worker cannot go on; ``text`` is for the user."""

    text: str


class Note(msgspec.Struct, frozen=True, tag=True):
    """Between the two workers of a pair while they connect: a port, an address, an agent's metadata."""

    data: bytes = b""


Message = Open | Stamp | Turn | Touch | Close | Opened | Sent | Received | Touched | Done | Failed | Note
M = TypeVar("M", bound=Message)
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


class LinkClosedError(ConnectionError):
    """The process at the other end is gone."""


class Link:
    """One end of a packet socket pair. Owns the socket."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    @classmethod
    def pair(cls) -> tuple[Self, Self]:
        """Two connected ends."""
        one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(one), cls(other)

    def fileno(self) -> int:
        """The socket's descriptor, for the start of the process that gets it."""
        return self.sock.fileno()

    def send(self, message: Ask | Answer | Note, fds: Sequence[int] = ()) -> None:
        """Send one message; the descriptors stay the caller's.

        Raises:
            LinkClosedError: nobody is there any more.
        """
        try:
            socket.send_fds(self.sock, [_encoder.encode(message)], list(fds))
        except (BrokenPipeError, ConnectionResetError) as error:
            raise LinkClosedError(str(error)) from error

    def receive(self, timeout_seconds: float) -> tuple[Message, list[int]]:
        """The next message and its descriptors, now the caller's.

        Raises:
            LinkClosedError: the other end is gone.
            TimeoutError: nothing came in time.
        """
        self.sock.settimeout(timeout_seconds)
        try:
            data, fds, _, _ = socket.recv_fds(self.sock, MAX_PACKET_BYTES, 4)
        except ConnectionResetError as error:
            raise LinkClosedError(str(error)) from error
        if not data:
            raise LinkClosedError("the other end is gone")
        for fd in fds:
            os.set_inheritable(fd, False)
        return _decoder.decode(data), fds

    def expect(self, kind: type[M], timeout_seconds: float) -> M:
        """The next message, which must be of this kind and without descriptors.

        Raises:
            LinkClosedError: the other end is gone.
            TimeoutError: nothing came in time.
            TypeError: something else came.
        """
        message, fds = self.receive(timeout_seconds)
        for fd in fds:
            os.close(fd)
        if not isinstance(message, kind):
            raise TypeError(f"got {type(message).__name__}, expected {kind.__name__}")
        return message

    def close(self) -> None:
        """Close this end; idempotent."""
        self.sock.close()
