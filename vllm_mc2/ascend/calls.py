"""Length-prefixed MessagePack between the selftest and the processes it starts."""

import socket
from typing import Any

import msgspec

MAX_CALL_BYTES = 64 << 20
_HEADER_BYTES = 4


def send(sock: socket.socket, value: object) -> None:
    """One value. Raises ``OSError`` when nobody reads."""
    payload = msgspec.msgpack.encode(value)
    sock.sendall(len(payload).to_bytes(_HEADER_BYTES, "little") + payload)


def receive(sock: socket.socket) -> Any | None:
    """One value; None when the other end is closed. Raises ``OSError`` when it does not come in time."""
    header = _exactly(sock, _HEADER_BYTES)
    payload = None if header is None else _exactly(sock, min(int.from_bytes(header, "little"), MAX_CALL_BYTES))
    return None if payload is None else msgspec.msgpack.decode(payload)


def _exactly(sock: socket.socket, num_bytes: int) -> bytes | None:
    data = bytearray()
    while len(data) < num_bytes:
        try:
            chunk = sock.recv(num_bytes - len(data))
        except ConnectionResetError:
            return None
        if not chunk:
            return None
        data += chunk
    return bytes(data)
