"""Unix stream sockets between peers of one user on one host: frames, descriptors, credentials, death.

* Sockets live in a directory of mode 0700 that belongs to us; a file name is an incarnation or a random id.
* Both sides check the other's uid with ``SO_PEERCRED`` (unix(7)) before a byte is read.
* A frame is a 4-byte little-endian length and a payload of at most ``MAX_FRAME_BYTES``.
* Descriptors come with the first byte of a frame (``SCM_RIGHTS``); a truncated ancillary list is an error, since the
  kernel drops descriptors silently when the receiver may not open more.
* Every wait has a deadline.

A :class:`Channel` belongs to one thread at a time.
"""

import array
import atexit
import contextlib
import errno
import os
import re
import select
import signal
import socket
import stat
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from vllm_mc2 import protocol
from vllm_mc2.errors import ConfigError, PeerUnreachableError, ProtocolError
from vllm_mc2.protocol import MAX_FRAME_BYTES, Message

LENGTH = struct.Struct("<I")
_CREDENTIALS = struct.Struct("3i")
_SO_PEERPIDFD = 77  # Linux 6.5; not in the socket module yet
MAX_FRAME_FDS = 8
_FDS_ROOM = socket.CMSG_SPACE(MAX_FRAME_FDS * array.array("i").itemsize)
# As plain numbers: arithmetic on the socket module's flag enumerations takes longer than the system call.
_CMSG_CLOEXEC, _CTRUNC, DONTWAIT = int(socket.MSG_CMSG_CLOEXEC), int(socket.MSG_CTRUNC), int(socket.MSG_DONTWAIT)


def prepare_socket_dir(path: Path) -> None:
    """Make the socket directory, or check the one that is there.

    Raises:
        ConfigError: it is a link, belongs to somebody else, or others may enter it; or this process cannot tell its own user
            from others.
    """
    obstacle = why_uids_say_nothing()
    if obstacle is not None:
        raise ConfigError(f"socket_dir {path}: {obstacle}")
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    info = path.lstat()
    if not stat.S_ISDIR(info.st_mode):
        raise ConfigError(f"socket_dir {path}: not a directory (links are not followed)")
    if info.st_uid != os.geteuid():
        raise ConfigError(f"socket_dir {path}: belongs to uid {info.st_uid}, this process runs as {os.geteuid()}")
    if info.st_mode & 0o077:
        raise ConfigError(f"socket_dir {path}: mode {stat.S_IMODE(info.st_mode):04o} lets others in, expected 0700")


def why_uids_say_nothing() -> str | None:
    """Why other users would look like this process's own, or None.

    In a user namespace everybody whom it has no id for is shown as the overflow uid (user_namespaces(7)), 65534, which is
    also ``nobody``: a process that runs as that there could not be told from any stranger.
    """
    overflow = int(Path("/proc/sys/kernel/overflowuid").read_text())
    if os.geteuid() != overflow:
        return None
    ranges = Path("/proc/self/uid_map").read_text().split()
    if sum(int(count) for count in ranges[2::3]) >= _ALL_UIDS:
        return None
    return f"in this user namespace every unknown user is shown as uid {overflow}, as which this process runs; use another uid"


def socket_path(directory: Path, socket_id: str) -> Path:
    """Where the socket with this id is or would be: its first 16 hex digits, since Unix socket paths are short."""
    return directory / f"{socket_id[:16]}.sock"


_ALL_UIDS = (1 << 32) - 1
_PF_EXITING = 0x4
_SIGKILL_BIT = 1 << (signal.SIGKILL - 1)
_swept_at_exit: set[Path] = set()


def sweep_at_exit(directory: Path) -> None:
    """Sweep once more when this process exits; idempotent.

    For vLLM's front end: on SIGTERM it kills its engine processes without giving them time to clean up (unless it runs
    with ``--shutdown-timeout``), and exits in order itself.
    """
    if directory not in _swept_at_exit:
        _swept_at_exit.add(directory)
        atexit.register(sweep_stale_sockets, directory, patience_seconds=5.0)


def sweep_stale_sockets(directory: Path, patience_seconds: float = 0.0) -> int:
    """Remove the sockets of processes that were killed. A socket that somebody listens on is left alone.

    ``patience_seconds``: how long to wait for listeners that have been killed and are still being torn down, which takes
    a moment for a process with much memory.

    Returns:
        How many were removed.
    """
    deadline = time.monotonic() + patience_seconds
    removed = _sweep_unnamed(directory)
    paths = list(directory.glob("*.sock"))
    while paths:
        states = {path: _listener_state(path) for path in paths}
        for path, state in states.items():
            if state == "dead":
                path.unlink(missing_ok=True)
                removed += 1
        paths = [path for path, state in states.items() if state == "dying"]
        if time.monotonic() >= deadline:
            break
        if paths:
            time.sleep(0.02)
    return removed


def _sweep_unnamed(directory: Path) -> int:
    """Sockets of processes that were killed between binding and naming them, a matter of microseconds: older ones are dead."""
    removed = 0
    for path in directory.glob("*.new"):
        with contextlib.suppress(OSError):
            if time.time() - path.lstat().st_mtime > 1.0:
                path.unlink()
                removed += 1
    return removed


def _listener_state(path: Path) -> Literal["alive", "dying", "dead"]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(0.2)
        try:
            probe.connect(os.fspath(path))
            pid, _ = peer_credentials(probe)
        except ConnectionRefusedError:
            return "dead"
        except OSError:
            return "alive"  # busy, or just gone: not proven dead, so not ours to remove
    return "dying" if _is_dying(pid) else "alive"


def _is_dying(pid: int) -> bool:
    """Whether the process has been killed (proc(5): ``PF_EXITING`` in its flags, or SIGKILL pending)."""
    if pid <= 0:
        return False  # in another PID namespace, from where it has just answered
    try:
        flags = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[6])
        pending = re.findall(r"^(?:Sig|Shd)Pnd:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    except (OSError, IndexError, ValueError):
        return True
    return bool(flags & _PF_EXITING) or any(int(mask, 16) & _SIGKILL_BIT for mask in pending)


def peer_credentials(sock: socket.socket) -> tuple[int, int]:
    """``(pid, uid)`` of the process at the other end, as the kernel recorded them; pid 0 when it is in another PID namespace."""
    pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid


def open_peer_pidfd(sock: socket.socket) -> int | None:
    """A pidfd of the process at the other end, readable once it has exited, or None where the kernel offers none.

    ``SO_PEERPIDFD`` cannot be fooled by a reused pid; ``pidfd_open`` on the recorded pid is the fallback.
    """
    try:
        return sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        pid, _ = peer_credentials(sock)
    if pid <= 0:
        return None
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


class FrameSocket:
    """Frames over one connected socket, whose other end may be anybody. Owns the socket; a context manager."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Send one frame. Raises ``OSError`` when the other end is gone or does not take it in time."""
        frame = protocol.frame(message)
        sent = socket.send_fds(self.sock, [frame], list(fds)) if fds else self.sock.send(frame)
        while sent < len(frame):
            sent += self.sock.send(memoryview(frame)[sent:])

    def receive(self, timeout_seconds: float) -> tuple[Message, list[int]]:
        """Wait for one frame and its descriptors, which the caller then owns.

        Raises:
            ProtocolError: oversize, truncated or malformed.
            PeerUnreachableError: the other end closed, or nothing came in time.
        """
        deadline = time.monotonic() + timeout_seconds
        fds: list[int] = []
        try:
            head = self._receive_exactly(LENGTH.size, deadline, fds)
            (size,) = LENGTH.unpack(head)
            if size > MAX_FRAME_BYTES:
                raise ProtocolError(f"frame of {size} bytes, at most {MAX_FRAME_BYTES} are allowed")
            message = protocol.decode(self._receive_exactly(size, deadline, fds))
        except BaseException:
            close_all(fds)
            raise
        return message, fds

    def _receive_exactly(self, size: int, deadline: float, fds: list[int]) -> bytes:
        chunks = bytearray()
        while len(chunks) < size:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise PeerUnreachableError(errno.ETIMEDOUT, "no answer in time")
            self.sock.settimeout(remaining)
            try:
                chunk = receive_some(self.sock, size - len(chunks), fds)
            except TimeoutError as error:
                raise PeerUnreachableError(errno.ETIMEDOUT, "no answer in time") from error
            except OSError as error:
                raise PeerUnreachableError(error.errno or errno.EIO, f"session broke: {error}") from error
            if not chunk:
                raise PeerUnreachableError(errno.ECONNRESET, "peer closed the session")
            chunks += chunk
        return bytes(chunks)

    def close(self) -> None:
        """Close the socket; idempotent."""
        self.sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Channel(FrameSocket):
    """One connected Unix socket whose other end runs as the same user."""

    def __init__(self, sock: socket.socket) -> None:
        """Checks who is there.

        Raises:
            ProtocolError: another user, or one that cannot be told; the socket is closed then.
        """
        pid, uid = peer_credentials(sock)
        refused = f"only {os.geteuid()} is served" if uid != os.geteuid() else why_uids_say_nothing()
        if refused is not None:
            sock.close()
            raise ProtocolError(f"peer runs as uid {uid}, {refused}")
        super().__init__(sock)
        self.peer_pid = pid

    @classmethod
    def connect(cls, path: Path, timeout_seconds: float) -> Self:
        """Connect to a listening socket.

        Raises:
            PeerUnreachableError: nobody listens there, or no answer in time.
            ProtocolError: the listener is of another user.
        """
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        deadline = time.monotonic() + timeout_seconds
        try:
            sock.settimeout(timeout_seconds)
            while True:
                try:
                    sock.connect(os.fspath(path))
                    break
                except BlockingIOError:
                    # The listener's queue is full: with a timeout, the kernel does not let us wait for a place in it.
                    if time.monotonic() >= deadline:
                        raise
                    time.sleep(0.005)
        except OSError as error:
            sock.close()
            raise PeerUnreachableError(error.errno or errno.ETIMEDOUT, f"{path.name}: {error}") from error
        return cls(sock)


def ask(path: Path, question: Message, timeout_seconds: float) -> Message:
    """Whoever listens there answers one question that keeps nothing open. Blocks up to the timeout.

    Raises:
        PeerUnreachableError: nobody listens there, or no answer in time.
        ProtocolError: another user, or an answer that the protocol does not allow.
        OSError: it did not take the question.
    """
    deadline = time.monotonic() + timeout_seconds
    with Channel.connect(path, timeout_seconds) as channel:
        channel.send(question)
        message, fds = channel.receive(deadline - time.monotonic())
    close_all(fds)
    return message


def first_frame(buffer: bytearray, max_bytes: int) -> bytes | None:
    """The payload of the first frame in ``buffer``, which may go on behind it; None while it is incomplete.

    Raises:
        ProtocolError: a payload of more than ``max_bytes``.
    """
    if len(buffer) < LENGTH.size:
        return None
    (size,) = LENGTH.unpack_from(buffer)
    if size > max_bytes:
        raise ProtocolError(f"frame of {size} bytes, at most {max_bytes} are allowed")
    end = LENGTH.size + size
    return bytes(buffer[LENGTH.size : end]) if len(buffer) >= end else None


def receive_some(sock: socket.socket, size: int, fds: list[int], flags: int = 0) -> bytes:
    """One ``recvmsg``; appends received descriptors. ``socket.recv_fds`` would hide a truncated list."""
    data, ancillary, flags, _ = sock.recvmsg(size, _FDS_ROOM, _CMSG_CLOEXEC | flags)
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            received = array.array("i")
            received.frombytes(payload[: len(payload) - len(payload) % received.itemsize])
            fds.extend(received)
    if flags & _CTRUNC or len(fds) > MAX_FRAME_FDS:
        raise ProtocolError("descriptors were lost on the way: too many, or no free descriptor here")
    return data


def close_all(fds: Sequence[int]) -> None:
    """Close descriptors that nobody took over."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


class DeathWatch:
    """Tells that a peer is gone: its pidfd is readable, or its socket has ended. Either alone can miss it
    (a forked child keeps the socket open; a pidfd may not be had across PID namespaces). No thread, no timeout.
    """

    def __init__(self, channel: Channel) -> None:
        self._socket_fd = channel.sock.fileno()
        self._pidfd = open_peer_pidfd(channel.sock)
        self._poll = select.poll()
        self._poll.register(channel.sock, select.POLLIN | select.POLLRDHUP)
        if self._pidfd is not None:
            self._poll.register(self._pidfd, select.POLLIN)

    def descriptors(self) -> list[int]:
        """What to wait on for the peer's end; borrowed, until :meth:`close`."""
        return [self._socket_fd] if self._pidfd is None else [self._socket_fd, self._pidfd]

    def is_gone(self) -> bool:
        """True once the peer has exited or ended the session. A silent, stopped peer is not gone. About a microsecond."""
        # After the handshake the peer never speaks: any event is its end, or a breach of the protocol.
        return bool(self._poll.poll(0))

    def close(self) -> None:
        """Close the pidfd; idempotent."""
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None
