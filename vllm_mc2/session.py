"""Sessions: one listener per process that owns something to share, one open connection per peer that uses it.

:class:`SessionServer` (prefill's scheduler and each of its workers) runs one thread. It answers each hello through a
callback and then watches the connection in silence; when the peer is gone, by pidfd or by the end of the socket, a second
callback says so. Both callbacks run on the server's thread, hold no lock of ours and must not block.

:class:`Session` (decode) is the other end: made by a blocking handshake with a deadline, then held open.

A bad or silent client costs one of ``MAX_PENDING`` places for at most ``HELLO_TIMEOUT_SECONDS``, and never the thread. When
they are all taken, the one that has been silent for longest makes room, so that strangers keep nobody out.
"""

import contextlib
import logging
import os
import select
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from vllm_mc2 import protocol
from vllm_mc2.channel import LENGTH, Channel, DeathWatch, close_all, first_frame, open_peer_pidfd, socket_path
from vllm_mc2.errors import ConfigError, PeerUnreachableError, ProtocolError
from vllm_mc2.protocol import MAX_FRAME_BYTES, Message

logger = logging.getLogger("vllm.mc2.session")

MAX_PENDING = 64
MAX_SESSIONS = 4096
HELLO_TIMEOUT_SECONDS = 5.0
T = TypeVar("T", bound=Message)


class Answer(NamedTuple):
    """What a server says to a hello. The descriptors stay the server's; the kernel duplicates them on the way."""

    message: Message
    fds: Sequence[int] = ()
    keep_open: bool = True


class _Connection:
    """A client of the server: first its hello is collected, then its end is awaited, or a long answer is sent."""

    def __init__(self, key: int, channel: Channel) -> None:
        self.key = key
        self.channel = channel
        self.buffer = bytearray()
        self.deadline = time.monotonic() + HELLO_TIMEOUT_SECONDS
        self.welcomed = False
        self.outgoing = memoryview(b"")
        self.pidfd: int | None = None

    def frame(self) -> bytes | None:
        """The payload of the first frame once it is complete.

        Raises:
            ProtocolError: oversize, or bytes after the frame (a client speaks once).
        """
        payload = first_frame(self.buffer, MAX_FRAME_BYTES)
        if payload is not None and len(self.buffer) > LENGTH.size + len(payload):
            raise ProtocolError("data after the hello")
        return payload


class SessionServer:
    """Listens on ``directory/<socket_id>.sock``. ``close()`` removes the file and ends the thread."""

    def __init__(
        self,
        directory: Path,
        socket_id: str,
        on_hello: Callable[[int, Message], Answer],
        on_close: Callable[[int], None],
    ) -> None:
        """``on_hello(key, hello)`` answers; ``on_close(key)`` is called once for each key that was welcomed, when its client is
        gone or :meth:`close` ends its session.

        Raises:
            ConfigError: the socket cannot be bound.
        """
        self._on_hello = on_hello
        self._on_close = on_close
        self.path = socket_path(directory, socket_id)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        try:
            # Only a socket that listens gets the final name: a sweep takes one that refuses connections for dead.
            unnamed = self.path.with_suffix(".new")
            self._listener.bind(os.fspath(unnamed))
            unnamed.chmod(0o600)
            self._listener.listen(1024)
            unnamed.rename(self.path)
        except OSError as error:
            self._listener.close()
            raise ConfigError(f"socket_dir: cannot listen on {self.path}: {error}") from error
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._selector = selectors.DefaultSelector()
        self._connections: dict[int, _Connection] = {}
        self._next_key = 0
        self.num_rejected = 0
        """Connections that came to nothing through their own fault; only grows. Any thread may read it."""
        self.failure: str | None = None
        """The bug that has ended the thread, if one has: nobody is let in any more. Any thread may read it."""
        self._num_failed_accepts = 0
        self._linger_seconds = 0.0
        self._thread = threading.Thread(target=self._run, name=f"mc2-{socket_id[:8]}", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the thread serves; False after ``close()``."""
        return self._thread.is_alive()

    def close(self, linger_seconds: float = 0.0) -> None:
        """Stop serving and end every session; idempotent, any thread. With ``linger_seconds``, the clients are told first and
        have that long to end their sessions themselves.
        """
        if self._thread.is_alive():
            self._linger_seconds = linger_seconds
            with contextlib.suppress(OSError):
                os.write(self._wake_write, b"x")
            self._thread.join(timeout=5.0 + linger_seconds)

    def _run(self) -> None:
        self._selector.register(self._listener, selectors.EVENT_READ, "accept")
        self._selector.register(self._wake_read, selectors.EVENT_READ, "stop")
        is_in_order = False
        try:
            while self._serve_once():
                pass
            self._linger()
            is_in_order = True
        finally:
            if not is_in_order:
                self._fail()
            self._tear_down()

    def _fail(self) -> None:
        """The thread is about to end by a bug of ours; the exception goes on to ``threading.excepthook``."""
        error = sys.exception()
        self.failure = f"{type(error).__name__}: {error}"
        logger.critical("sessions at %s have ended by a bug, restart this engine: %s", self.path.name, self.failure)
        # Clients that are alive still use what they were given, so nobody must hear of an end of theirs.
        for connection in self._connections.values():
            connection.welcomed = False

    def _linger(self) -> None:
        """Say that the sessions are over, and wait for the clients to let go."""
        deadline = time.monotonic() + self._linger_seconds
        self._selector.unregister(self._wake_read)
        self._selector.unregister(self._listener)
        for connection in list(self._connections.values()):
            if connection.welcomed:
                with contextlib.suppress(OSError):
                    connection.channel.sock.shutdown(socket.SHUT_WR)
            else:
                self._drop(connection)
        while self._connections and (left := deadline - time.monotonic()) > 0:
            for event, _ in self._selector.select(left):
                if event.data.key in self._connections:
                    self._advance(event.data)

    def _serve_once(self) -> bool:
        for event, _ in self._selector.select(self._next_timeout()):
            if event.data == "stop":
                return False
            if event.data == "accept":
                self._accept()
            elif event.data.key in self._connections:
                self._advance(event.data)
        now = time.monotonic()
        for connection in [c for c in self._connections.values() if not c.welcomed and c.deadline <= now]:
            self._reject(connection, "said nothing in time, or did not take its answer")
        return True

    def _next_timeout(self) -> float | None:
        """Seconds to the next hello deadline; None (sleep until something happens) when every client is welcomed."""
        deadlines = [c.deadline for c in self._connections.values() if not c.welcomed]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            self._num_failed_accepts += 1
            if _is_worth_a_line(self._num_failed_accepts):
                logger.warning("cannot accept a peer (%d times so far): %s", self._num_failed_accepts, error)
            time.sleep(0.05)  # out of descriptors: the pending connection would wake us at once again
            return
        try:
            channel = Channel(sock)
        except ProtocolError as error:
            self._count_rejected(str(error))
            return
        if len(self._connections) >= MAX_SESSIONS:
            self._count_rejected(f"{MAX_SESSIONS} sessions are open already")
            channel.close()
            return
        pending = [c for c in self._connections.values() if not c.welcomed]
        if len(pending) >= MAX_PENDING:
            self._reject(pending[0], "it has been silent for longest, and others wait")
        sock.setblocking(False)
        connection = _Connection(self._next_key, channel)
        self._next_key += 1
        self._connections[connection.key] = connection
        self._selector.register(sock, selectors.EVENT_READ, connection)

    def _advance(self, connection: _Connection) -> None:
        if connection.welcomed:
            # The peer's exit, its end of the session, or a word out of turn: all three end the session.
            self._drop(connection)
            return
        try:
            if connection.outgoing:
                self._send_on(connection)
                return
            data = connection.channel.sock.recv(65536)
            if not data:
                if connection.buffer:
                    raise ProtocolError("it left in the middle of its hello")
                self._drop(connection)
                return
            connection.buffer += data
            payload = connection.frame()
            if payload is not None:
                self._welcome(connection, protocol.decode(payload))
        except BlockingIOError:
            return
        except (ProtocolError, OSError) as error:
            self._reject(connection, str(error))

    def _welcome(self, connection: _Connection, hello: Message) -> None:
        try:
            answer = self._on_hello(connection.key, hello)
        except Exception:
            # Session dispatch border: one hello must not end the thread that serves all peers.
            logger.exception("a hello could not be answered")
            self._reject(connection, "internal error")
            return
        sock = connection.channel.sock
        if not answer.keep_open and not answer.fds:
            # A report may be longer than what the kernel buffers, and its reader may be stopped: the thread waits for no one.
            connection.outgoing = memoryview(protocol.frame(answer.message))
            self._selector.modify(sock, selectors.EVENT_WRITE, connection)
            self._send_on(connection)
            return
        connection.welcomed = True
        sock.settimeout(HELLO_TIMEOUT_SECONDS)
        connection.channel.send(answer.message, answer.fds)
        sock.setblocking(False)
        if not answer.keep_open:
            self._drop(connection)
            return
        connection.pidfd = open_peer_pidfd(sock)
        if connection.pidfd is not None:
            self._selector.register(connection.pidfd, selectors.EVENT_READ, connection)

    def _send_on(self, connection: _Connection) -> None:
        """Send as much of the last answer as goes without waiting; its deadline stays the hello's."""
        connection.outgoing = connection.outgoing[connection.channel.sock.send(connection.outgoing) :]
        if not connection.outgoing:
            connection.welcomed = True
            self._drop(connection)

    def peer_pid(self, key: int) -> int:
        """Process id of an open session's client; 0 when it is gone or in another PID namespace. The callbacks' thread only."""
        connection = self._connections.get(key)
        return connection.channel.peer_pid if connection is not None else 0

    def _reject(self, connection: _Connection, reason: str) -> None:
        self._count_rejected(reason)
        self._drop(connection)

    def _count_rejected(self, reason: str) -> None:
        self.num_rejected += 1
        if _is_worth_a_line(self.num_rejected):
            logger.warning("rejected a peer (%d so far): %s", self.num_rejected, reason)

    def _drop(self, connection: _Connection) -> None:
        del self._connections[connection.key]
        self._selector.unregister(connection.channel.sock)
        if connection.pidfd is not None:
            self._selector.unregister(connection.pidfd)
            os.close(connection.pidfd)
        connection.channel.close()
        if connection.welcomed:
            self._on_close(connection.key)

    def _tear_down(self) -> None:
        self.path.unlink(missing_ok=True)
        for connection in list(self._connections.values()):
            self._drop(connection)
        self._selector.close()
        self._listener.close()
        os.close(self._wake_read)
        os.close(self._wake_write)


def _is_worth_a_line(count: int) -> bool:
    """Powers of two only, so that a broken or hostile client cannot fill the log."""
    return count & (count - 1) == 0


class Session:
    """Decode's end of an open session with one peer process. Owns the connection; made by :func:`open_session`."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._watch = DeathWatch(channel)
        self.peer_pid = channel.peer_pid
        self._gone = False

    def descriptors(self) -> list[int]:
        """What becomes readable when the peer is gone; borrowed, until :meth:`close`."""
        return self._watch.descriptors()

    def is_gone(self) -> bool:
        """Whether the peer has exited or ended the session; once true it stays true."""
        self._gone = self._gone or self._watch.is_gone()
        return self._gone

    def looks_gone(self) -> bool:
        """As :meth:`is_gone`, for onlookers on other threads; changes nothing. May be wrong for a moment while it closes."""
        poll = select.poll()  # one of its own: a poll object refuses to be used by two threads
        for fd in self.descriptors():
            poll.register(fd, select.POLLIN | select.POLLRDHUP)
        return self._gone or bool(poll.poll(0))

    def close(self) -> None:
        """End the session; idempotent."""
        self._gone = True
        self._watch.close()
        self._channel.close()


def open_session(
    path: Path, hello: Message, expected: type[T], num_fds: int, timeout_seconds: float
) -> tuple[T, list[int], Session]:
    """Connect, say hello, and wait for the answer. Blocks up to the timeout; any thread.

    Returns:
        The answer, its descriptors (now the caller's) and the open session.

    Raises:
        PeerUnreachableError: nobody there, or no answer in time.
        PeerRefusedError: the peer named a field that differs.
        ProtocolError: an answer that the protocol does not allow.
    """
    channel = Channel.connect(path, timeout_seconds)
    fds: list[int] = []
    try:
        try:
            channel.send(hello)
        except OSError as error:
            raise PeerUnreachableError(error.errno, f"peer did not take the hello: {error}") from error
        message, fds = channel.receive(timeout_seconds)
        answer = protocol.expect(message, expected)
        if len(fds) != num_fds:
            raise ProtocolError(f"answer {expected.__name__} with {len(fds)} descriptors, expected {num_fds}")
        return answer, fds, Session(channel)
    except BaseException:
        close_all(fds)
        channel.close()
        raise
