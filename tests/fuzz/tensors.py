"""Target: a prefill's mail as the tensor API takes it in, with real pools that are mapped and real tensors that are read."""

import array
import collections
import os
import socket
from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from tests.fuzz.mutate import MSGPACK
from tests.fuzz.samples import encoded
from tests.fuzz.target import Target, refused
from vllm_mc2 import protocol
from vllm_mc2.errors import LayoutError, ProtocolError
from vllm_mc2.tensors.messages import KvNotice, LayoutNotice, PoolNotice, TensorSpec, pack_ticket
from vllm_mc2.tensors.pools import REGISTRY, SharedPool
from vllm_mc2.tensors.receiver import Prefill, RemoteKV

MAX_POOLS_FED = 2
"""Mapping one takes much longer than all the rest of an input."""

_pool: list[SharedPool] = []


def real_pool() -> SharedPool:
    """4 MiB of ones, made when they are first needed."""
    if not _pool:
        pool = REGISTRY.allocate([("key", 2 << 20), ("value", 2 << 20)], "off")
        for region in range(2):
            pool.tensor(region, (2 << 20,), torch.uint8).fill_(1)
        _pool.append(pool)
    return _pool[0]


class MailSocket:
    """The end of the mail that decode reads: all at once, with a descriptor of the real pool for every pool that is announced."""

    def __init__(self, stream: bytes, num_fds: int) -> None:
        self._stream = stream
        self._num_fds = num_fds

    def recvmsg(self, size: int, room: int, flags: int) -> tuple[bytes, list[tuple[int, int, bytes]], int, Any]:
        piece, self._stream = self._stream[:size], self._stream[size:]
        if not piece:
            raise BlockingIOError
        ancillary = []
        if self._num_fds:
            fds = array.array("i", [os.dup(real_pool().fd) for _ in range(self._num_fds)])
            ancillary.append((socket.SOL_SOCKET, socket.SCM_RIGHTS, fds.tobytes()))
            self._num_fds = 0
        return piece, ancillary, 0, None


def decode_of(stream: bytes, num_fds: int) -> Prefill:
    """Decode's side of a session, of which only the mail is real."""
    prefill = Prefill.__new__(Prefill)
    prefill.incarnation = "a" * 32
    prefill._prefault = False
    prefill.mail = MailSocket(stream, num_fds)  # type: ignore[assignment]
    prefill._buffer, prefill._fds, prefill._pools, prefill._layouts = bytearray(), [], {}, {}
    prefill.unsettled, prefill._is_closed = [], False
    return prefill


def run_mailbox(data: bytes) -> str:
    """A list of letters: each is framed as it is, or goes as raw bytes where it is a binary."""
    try:
        letters = MSGPACK.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        letters = data
    if not isinstance(letters, list):
        letters = [data]
    stream = bytearray()
    num_fds = 0
    for letter in letters[:12]:
        if isinstance(letter, bytes):
            stream += letter
            continue
        payload = MSGPACK.encode(letter)
        is_pool = isinstance(letter, list) and bool(letter) and letter[0] == 1
        if is_pool and num_fds == MAX_POOLS_FED:
            continue
        num_fds += is_pool
        stream += len(payload).to_bytes(4, "little") + payload
    prefill = decode_of(bytes(stream), num_fds)
    inbox: collections.deque[RemoteKV] = collections.deque()
    try:
        assert prefill.read_mail(inbox)
    except (ProtocolError, LayoutError) as error:
        return refused(error)
    finally:
        for fd in prefill._fds:
            os.close(fd)
    for layout in prefill._layouts.values():
        for key, value in layout.layers.values():
            for tensor in (key, value):
                if tensor is not None:
                    read_corners(tensor)
    return f"{len(prefill._pools)} pools, {min(3, len(prefill._layouts))} layouts, {min(3, len(inbox))} requests"


def read_corners(tensor: torch.Tensor) -> None:
    """The first and the last element: outside of the pool they would end this process, or not be what was written."""
    assert tensor.is_inference() is False
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    flat = (
        tensor.as_strided((2,), (last,), tensor.storage_offset())
        if last
        else tensor.as_strided((1,), (1,), tensor.storage_offset())
    )
    whole = flat.contiguous().view(torch.uint8)
    assert bool((whole == 1).all()), "read something else than the peer's memory"


def mailbox_seeds() -> Sequence[bytes]:
    """A session as it should be, and pieces of one."""
    pool = PoolNotice(0, real_pool().layout)
    key = TensorSpec(0, "key", 0, 0, (8, 4, 2), (8, 2, 1), "bfloat16")
    value = msgspec.structs.replace(key, part="value", offset_bytes=2 << 20)
    whole = msgspec.structs.replace(key, part="kv", layer=1, dtype="uint8", shape=(8, 1 << 18), strides=(1 << 18, 1))
    layout = LayoutNotice(0, 8, (key, value, whole))
    note = KvNotice("request-1", pack_ticket((3, 4), 0, bytes(16)))
    sessions: list[list[Any]] = [
        [pool, layout, note],
        [pool, note],
        [layout],
        [pool, pool],
        [note, note],
        [pool, layout, layout],
    ]
    seeds = [protocol.encode(session) for session in sessions]  # type: ignore[arg-type]
    return [*seeds, MSGPACK.encode([b"\xff\xff\xff\x7f"]), MSGPACK.encode([b"\0\0", b"\0\0"]), encoded(PoolNotice, 3)]


TARGETS = [
    Target(
        "mailbox",
        "tensors.receiver.Prefill.read_mail, RemotePool, pools.view_in",
        run_mailbox,
        mailbox_seeds,
        MSGPACK,
        max_bytes=2048,
    )
]
