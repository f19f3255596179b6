"""Messages between the processes of the harness: one JSON object per packet of a ``SOCK_SEQPACKET`` pair.

A packet arrives whole or not at all, so a process may be killed while it sends, and its threads need no lock.
"""

import contextlib
import socket
from collections.abc import Sequence
from typing import Any, Self

import msgspec

MAX_PACKET_BYTES = 1 << 17
MAX_FDS = 4
Message = dict[str, Any]


class Pipe:
    """One end of a socket pair."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    @classmethod
    def pair(cls) -> tuple[Self, Self]:
        """Two connected ends."""
        left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(left), cls(right)

    def fileno(self) -> int:
        return self.sock.fileno()

    def send(self, message: Message, fds: Sequence[int] = ()) -> bool:
        """False when the other end is gone, or stopped and full: then it gets nothing more, as a real client."""
        data = msgspec.json.encode(message)
        assert len(data) <= MAX_PACKET_BYTES, len(data)
        with contextlib.suppress(OSError):
            socket.send_fds(self.sock, [data], list(fds))
            return True
        return False

    def receive(self) -> tuple[Message | None, list[int]]:
        """The next message and its descriptors; None at the end. ``BlockingIOError`` as the socket is set."""
        try:
            data, fds, _flags, _address = socket.recv_fds(self.sock, MAX_PACKET_BYTES, MAX_FDS)
        except ConnectionResetError:
            return None, []
        return (msgspec.json.decode(data) if data else None), fds

    def close(self) -> None:
        self.sock.close()
