"""The first contact of two communicators: over TCP, to find out that they are on one host and where to meet there.

Nothing that comes in here is trusted, and no path, address or descriptor is taken from it: prefill names its incarnation, and
decode looks for a socket of that name in its own socket directory, where the kernel vouches for the user.
"""

import errno
import hashlib
import logging
import selectors
import socket
import time
from collections.abc import Callable
from pathlib import Path

from vllm_mc2 import protocol
from vllm_mc2.channel import LENGTH, FrameSocket, first_frame
from vllm_mc2.errors import ConfigError, MC2Error, PeerRefusedError, PeerUnreachableError, ProtocolError
from vllm_mc2.protocol import PROTOCOL_VERSION, Done, Introduction, Message, Refusal

logger = logging.getLogger("vllm.mc2.tensors")

HELLO_SECONDS = 5.0
MAX_PENDING = 16
MAX_INTRODUCTION_BYTES = 1024
RETRY_SECONDS = 0.05


def host_id() -> str:
    """32 hex digits that are equal for all processes of one booted host, in whatever container (random(4): ``boot_id``)."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    return hashlib.sha256(b"vllm-mc2 host" + boot_id).hexdigest()[:32]


def introduce(address: str, port: int, message: Introduction, timeout_seconds: float) -> None:
    """Tell the decode that listens there who we are; returns when it has opened its session with us.

    Tries again while nobody listens, since the two are started in any order.

    Raises:
        PeerUnreachableError: nobody there, or no answer in time.
        PeerRefusedError: it is on another host, or another field does not fit.
        ProtocolError: whoever answers is no decode of ours.
    """
    deadline = time.monotonic() + timeout_seconds
    with _connect(address, port, deadline) as sock:
        channel = FrameSocket(sock)
        try:
            sock.settimeout(max(0.001, deadline - time.monotonic()))
            channel.send(message)
            answer, _ = channel.receive(deadline - time.monotonic())
        except PeerUnreachableError as error:
            raise _unreachable(
                address, port, f"is there, but: {error.strerror}; does it call accept()?", error
            ) from error
        except OSError as error:
            raise _unreachable(address, port, f"ended the connection: {error.strerror}", error) from error
    if isinstance(answer, Refusal):
        raise _refused(address, port, answer)
    if not isinstance(answer, Done):
        raise ProtocolError(f"decode at {address}:{port} answered {type(answer).__name__}")


def _unreachable(address: str, port: int, problem: str, error: OSError) -> PeerUnreachableError:
    return PeerUnreachableError(error.errno or errno.ETIMEDOUT, f"decode at {address}:{port} {problem}")


def _refused(address: str, port: int, refusal: Refusal) -> MC2Error:
    if refusal.field == "host":
        return PeerUnreachableError(
            errno.EHOSTUNREACH,
            f"decode at {address}:{port} runs on another host; its memory cannot be mapped from here",
        )
    return PeerRefusedError(refusal.field, refusal.yours, refusal.theirs)


def _connect(address: str, port: int, deadline: float) -> socket.socket:
    while True:
        try:
            return socket.create_connection((address, port), timeout=max(0.001, deadline - time.monotonic()))
        except OSError as error:
            # Refused: it is not up yet. A name that does not resolve, or no route, will not get better.
            if not isinstance(error, ConnectionRefusedError) or time.monotonic() + RETRY_SECONDS > deadline:
                raise _unreachable(address, port, f"cannot be reached: {error}", error) from error
        time.sleep(RETRY_SECONDS)


class _Guest:
    """A connection that has not introduced itself yet."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.buffer = bytearray()
        self.deadline = time.monotonic() + HELLO_SECONDS

    def read(self) -> Message | None:
        """Its message once it is complete.

        Raises:
            ProtocolError: oversize, malformed, or the connection has ended.
        """
        try:
            data = self.sock.recv(MAX_INTRODUCTION_BYTES)
        except BlockingIOError:
            return None
        except OSError as error:
            raise ProtocolError(str(error)) from error
        if not data:
            raise ProtocolError("it has hung up")
        self.buffer += data
        if len(self.buffer) > LENGTH.size + MAX_INTRODUCTION_BYTES:
            raise ProtocolError(f"more than {MAX_INTRODUCTION_BYTES} bytes of introduction")
        payload = first_frame(self.buffer, MAX_INTRODUCTION_BYTES)
        return protocol.decode(payload) if payload else None


class Reception:
    """Decode's TCP listener. Guests cannot hold each other up: each has :data:`HELLO_SECONDS`, :data:`MAX_PENDING` at a time."""

    def __init__(self, address: str, port: int, local_rank: int) -> None:
        """Listens from here on; port 0 takes a free one.

        Raises:
            ConfigError: the address cannot be listened on.
        """
        self._local_rank = local_rank
        self._guests: list[_Guest] = []
        try:
            family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
            self._listener = socket.create_server((address, port), family=family, backlog=MAX_PENDING)
        except OSError as error:
            raise ConfigError(
                f"listen_addr = {address!r}, listen_port = {port}: cannot listen there: {error}"
            ) from error
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])

    def accept(self, meet: Callable[[Introduction], None], timeout_seconds: float) -> Introduction:
        """Wait for a prefill that fits and that ``meet`` has opened a session with.

        Raises:
            TimeoutError: none came in time.
        """
        deadline = time.monotonic() + timeout_seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            for guest in self._guests:  # who came while another was heard waits for the next call
                selector.register(guest.sock, selectors.EVENT_READ, guest)
            while time.monotonic() < deadline:
                for key, _ in selector.select(min(deadline - time.monotonic(), 1.0)):
                    if key.data is None:
                        self._admit(selector)
                    elif key.data in self._guests and (found := self._hear(key.data, meet)) is not None:
                        self._dismiss(selector, key.data)
                        if isinstance(found, Introduction):
                            return found
                for guest in [guest for guest in self._guests if guest.deadline < time.monotonic()]:
                    self._dismiss(selector, guest)
        raise TimeoutError(f"no prefill came to port {self.port} in {timeout_seconds} s")

    def _admit(self, selector: selectors.BaseSelector) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            logger.warning("cannot accept a prefill: %s", error)
            return
        if len(self._guests) >= MAX_PENDING:
            # Whoever has been silent the longest: a prefill speaks at once.
            self._dismiss(selector, self._guests[0])
        guest = _Guest(sock)
        self._guests.append(guest)
        selector.register(sock, selectors.EVENT_READ, guest)

    def _dismiss(self, selector: selectors.BaseSelector, guest: _Guest) -> None:
        self._guests.remove(guest)
        selector.unregister(guest.sock)
        guest.sock.close()

    def _hear(self, guest: _Guest, meet: Callable[[Introduction], None]) -> Message | None:
        """An :class:`Introduction` that led to a session, a :class:`Refusal` for one that did not, None: not complete yet."""
        try:
            message = guest.read()
            if message is None:
                return None
            answer = self._judge(message)
            if answer is None and isinstance(message, Introduction):
                meet(message)
        except (MC2Error, OSError) as error:
            logger.warning("turned a prefill away: %s", error)
            message, answer = None, Refusal("session", "", str(error)[:1024])
        guest.sock.settimeout(HELLO_SECONDS)
        try:
            FrameSocket(guest.sock).send(answer or Done())
        except OSError as error:
            logger.warning("a prefill left during the handshake: %s", error)
        return message if answer is None else answer

    def _judge(self, message: Message) -> Refusal | None:
        if not isinstance(message, Introduction):
            return Refusal("message", type(message).__name__, "Introduction")
        if message.protocol != PROTOCOL_VERSION:
            return Refusal("protocol", str(message.protocol), str(PROTOCOL_VERSION))
        if message.host_id != host_id():
            return Refusal("host", message.host_id, host_id())
        if message.local_rank != self._local_rank:
            return Refusal("local_rank", str(message.local_rank), str(self._local_rank))
        return None

    def close(self) -> None:
        """Stop listening; idempotent."""
        for guest in self._guests:
            guest.sock.close()
        self._guests.clear()
        self._listener.close()
