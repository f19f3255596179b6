"""The baseline of the hand-over: sending a KV cache from one process to another by copying it.

``shm``: the sender copies into a small staging buffer in shared memory, the receiver copies out of it. Both copies overlap:
the buffer is a ring of chunks, one byte over the socket says *full*, one says *free again*. It is small enough to stay
in the processors' cache, so that main memory sees one read and one write, as with a single copy.

``tcp``: large pieces through a TCP connection, straight out of and into the tensors.

Both do as little in Python as can be, and nothing with the interpreter lock held but bookkeeping for each chunk.
"""

import ctypes
import mmap
import os
import socket
import struct
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self

if TYPE_CHECKING:
    from torch import Tensor

# Tuned on two Zen 3 cores, whose second level cache has 512 KiB: a chunk should be found there, or near, by the receiver.
CHUNK_BYTES = {"shm": 512 << 10, "tcp": 64 << 20}
NUM_CHUNKS = 8
SOCKET_BUFFER_BYTES = 4 << 20

_HELLO = struct.Struct("<QI")  # bytes per chunk, number of chunks
_LENGTH = struct.Struct("<Q")  # precedes each tensor
_FULL, _FREE = b"f", b"e"


class TraditionalComm:
    """One end of a copying connection between two processes. Not thread-safe; the two ends work at the same time.

    Example (both ends have one socket of a connected pair)::

        with TraditionalComm("sender", "shm", sock=mine) as comm:
            comm.send(kv)
        with TraditionalComm("receiver", "shm", sock=theirs) as comm:
            comm.recv(own_kv)
    """

    def __init__(
        self,
        role: Literal["sender", "receiver"],
        transport: Literal["shm", "tcp"] = "shm",
        *,
        sock: socket.socket,
        chunk_bytes: int | None = None,
        num_chunks: int = NUM_CHUNKS,
        timeout_seconds: float = 30.0,
    ) -> None:
        """Take over a connected socket: a Unix one for ``shm``, since a descriptor goes over it, a TCP one for ``tcp``.

        With ``shm`` the receiver waits for the sender's buffer here, up to ``timeout_seconds``, which is also how long
        :meth:`send` and :meth:`recv` wait for the other side to go on. ``chunk_bytes`` and ``num_chunks`` are the
        sender's choice; the receiver's are ignored.

        Raises:
            ValueError: unknown role or transport, or a socket of the wrong family.
            TimeoutError: the sender did not come.
            OSError: the connection broke, or there is no memory for the buffer.
        """
        if role not in {"sender", "receiver"} or transport not in {"shm", "tcp"}:
            raise ValueError(f"no such role or transport: {role!r}, {transport!r}")
        if (transport == "shm") != (sock.family == socket.AF_UNIX):
            raise ValueError(f"transport {transport!r} over a socket of family {sock.family.name}")
        self.control_bytes = 0
        """Bytes that this end has sent besides the payload."""
        self.chunk_bytes = CHUNK_BYTES[transport] if chunk_bytes is None else chunk_bytes
        """How much is copied at a time."""
        self._is_sender = role == "sender"
        self._sock = sock
        self._sock.settimeout(timeout_seconds)
        self._num_chunks = num_chunks
        self._staging: mmap.mmap | None = None
        if transport == "tcp":
            self._tune()
        elif self._is_sender:
            self._offer_staging()
        else:
            self._take_staging()

    @property
    def staging_bytes(self) -> int:
        """Size of the shared buffer between the two; 0 with ``tcp``."""
        return len(self._staging) if self._staging is not None else 0

    def send(self, tensor: "Tensor") -> None:
        """Send a tensor's bytes; returns when all of them are on their way (``tcp``) or in the buffer (``shm``).

        Raises:
            ValueError: not contiguous, or not in host memory.
            TimeoutError: the receiver did not go on.
            OSError: the connection broke.
        """
        address, num_bytes = _memory(tensor)
        self._say(_LENGTH.pack(num_bytes))
        if self._staging is None:
            self._sock.sendall((ctypes.c_char * num_bytes).from_address(address))
        else:
            self._fill(address, num_bytes)

    def recv(self, into: "Tensor") -> None:
        """Receive exactly one tensor's bytes into ``into``.

        Raises:
            ValueError: not contiguous, not in host memory, or the sender's tensor has another size.
            TimeoutError: the sender did not go on.
            OSError: the connection broke.
        """
        address, num_bytes = _memory(into)
        (announced,) = _LENGTH.unpack(self._hear(_LENGTH.size))
        if announced != num_bytes:
            raise ValueError(f"the sender sends {announced} bytes, not {num_bytes}")
        if self._staging is None:
            self._read_into(memoryview((ctypes.c_char * num_bytes).from_address(address)).cast("B"))
        else:
            self._drain(address, num_bytes)

    def close(self) -> None:
        """Close the socket and give the buffer back; idempotent."""
        self._sock.close()
        self._staging = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _tune(self) -> None:
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)

    def _offer_staging(self) -> None:
        fd = os.memfd_create("mc2-bench-staging", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, self.chunk_bytes * self._num_chunks)
            self._map(fd)
            hello = _HELLO.pack(self.chunk_bytes, self._num_chunks)
            socket.send_fds(self._sock, [hello], [fd])
            self.control_bytes += len(hello)
        finally:
            os.close(fd)

    def _take_staging(self) -> None:
        hello, fds, _, _ = socket.recv_fds(self._sock, _HELLO.size, 1)
        if len(hello) != _HELLO.size or len(fds) != 1:
            raise ConnectionError("the sender went away")
        try:
            self.chunk_bytes, self._num_chunks = _HELLO.unpack(hello)
            self._map(fds[0])
        finally:
            os.close(fds[0])

    def _map(self, fd: int) -> None:
        self._staging = mmap.mmap(fd, self.chunk_bytes * self._num_chunks, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self._slots = [
            ctypes.addressof(ctypes.c_char.from_buffer(self._staging, index * self.chunk_bytes))
            for index in range(self._num_chunks)
        ]

    def _fill(self, address: int, num_bytes: int) -> None:
        num_free = self._num_chunks
        for index, offset in enumerate(range(0, num_bytes, self.chunk_bytes)):
            while num_free == 0:
                num_free += len(self._hear_any())
            # ctypes gives the interpreter lock back during the copy.
            ctypes.memmove(
                self._slots[index % self._num_chunks], address + offset, min(self.chunk_bytes, num_bytes - offset)
            )
            self._say(_FULL)
            num_free -= 1
        while num_free < self._num_chunks:  # all chunks are ours again before the next tensor
            num_free += len(self._hear_any())

    def _drain(self, address: int, num_bytes: int) -> None:
        num_full = 0
        for index, offset in enumerate(range(0, num_bytes, self.chunk_bytes)):
            while num_full == 0:
                num_full += len(self._hear_any())
            ctypes.memmove(
                address + offset, self._slots[index % self._num_chunks], min(self.chunk_bytes, num_bytes - offset)
            )
            self._say(_FREE)
            num_full -= 1

    def _read_into(self, view: memoryview) -> None:
        # In pieces: the kernel refuses none of this size, and waiting for each in full saves a return to Python.
        for start in range(0, len(view), self.chunk_bytes):
            piece = view[start : start + self.chunk_bytes]
            while piece:
                got = self._sock.recv_into(piece, 0, socket.MSG_WAITALL)
                if got == 0:
                    raise ConnectionError("the sender went away")
                piece = piece[got:]

    def _say(self, data: bytes) -> None:
        self._sock.sendall(data)
        self.control_bytes += len(data)

    def _hear_any(self) -> bytes:
        data = self._sock.recv(64)
        if not data:
            raise ConnectionError("the other side went away")
        return data

    def _hear(self, num_bytes: int) -> bytes:
        data = b""
        while len(data) < num_bytes:
            more = self._sock.recv(num_bytes - len(data))
            if not more:
                raise ConnectionError("the sender went away")
            data += more
        return data


def _memory(tensor: "Tensor") -> tuple[int, int]:
    if not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError("only contiguous tensors in host memory can be sent")
    return tensor.data_ptr(), tensor.numel() * tensor.element_size()
