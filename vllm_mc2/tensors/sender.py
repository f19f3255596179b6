"""Prefill's half of a communicator: publishes a lease per request and mails its name to decode."""

import contextlib
import secrets
import socket
import struct
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch

from vllm_mc2._native import IdSpan
from vllm_mc2.channel import prepare_socket_dir, sweep_stale_sockets
from vllm_mc2.errors import LayoutError, PeerUnreachableError, UsageError
from vllm_mc2.leases import LeaseBook
from vllm_mc2.protocol import (
    PROTOCOL_VERSION,
    InspectHello,
    Introduction,
    Message,
    Refusal,
    TensorHello,
    TensorWelcome,
    frame,
    new_incarnation,
)
from vllm_mc2.session import Answer, SessionServer
from vllm_mc2.tensors.host import host_id, introduce
from vllm_mc2.tensors.messages import (
    MAX_LAYOUTS,
    MAX_REQUEST_ID,
    KvNotice,
    LayoutNotice,
    Mail,
    PoolNotice,
    TensorSpec,
    pack_ticket,
)
from vllm_mc2.tensors.pools import REGISTRY, Layout
from vllm_mc2.tensors.reporting import reporter

Ids: TypeAlias = "array[int] | memoryview | IdSpan"
MAX_BLOCKS = 8192
"""Longest block table of a request."""

_NO_DIGEST = bytes(32)
"""What a tensor's KV cache was computed from is not ours to know: the notice names the request and its lease together."""

_TIMEVAL = struct.Struct("@ll")


class SentKV(NamedTuple):
    """What :meth:`MC2Communicator.send_kv_metadata` did."""

    request_id: str
    num_bytes: int
    """That went to decode for this request."""


class EndedKV(NamedTuple):
    """A request whose KV cache nobody reads any more: its blocks may be written to again."""

    request_id: str
    reason: str
    """``released``, ``expired`` (nobody mapped it in time) or ``peer_gone``"""


class _Payload(NamedTuple):
    request_id: str
    layout: Layout


def as_int32(blocks: "Sequence[int] | torch.Tensor | Ids") -> "Ids":
    """Block ids as int32 items; without a copy, and without an object per block, where they are int32 already.

    Raises:
        LayoutError: not a one-dimensional sequence of whole numbers that fit an int32.
    """
    if isinstance(blocks, torch.Tensor):
        if blocks.dim() != 1 or blocks.is_floating_point():
            raise LayoutError(
                f"blocks: expected one dimension of whole numbers, got {blocks.dtype} {tuple(blocks.shape)}"
            )
        if blocks.dtype is torch.int32 and blocks.is_contiguous() and blocks.is_cpu:
            return IdSpan(blocks.data_ptr(), blocks.numel(), blocks)
    if isinstance(blocks, IdSpan) or (isinstance(blocks, array) and blocks.typecode == "i"):
        return blocks
    if isinstance(blocks, memoryview) and blocks.format == "i" and blocks.ndim == 1 and blocks.c_contiguous:
        return blocks
    if isinstance(blocks, (str, bytes, bytearray)):  # which array() would take for the memory of block ids
        raise LayoutError(f"blocks: expected int32 block ids, got {type(blocks).__name__}")
    try:
        return array("i", blocks.tolist() if isinstance(blocks, (torch.Tensor, memoryview)) else blocks)
    except (TypeError, ValueError, OverflowError, NotImplementedError) as error:
        raise LayoutError(f"blocks: expected int32 block ids: {error}") from error


def _check_text(request_id: str) -> None:
    try:
        request_id.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"request_id {request_id!r}: expected a text that is UTF-8") from error


class _Tokens:
    """Lease tokens, drawn from the kernel many at a time: a system call for each would be a tenth of a hand-over."""

    def __init__(self) -> None:
        self._left: list[bytes] = []

    def draw(self) -> bytes:
        if not self._left:
            many = secrets.token_bytes(16 * 256)
            self._left = [many[at : at + 16] for at in range(0, len(many), 16)]
        return self._left.pop()


class Sender:
    """One prefill, connected to one decode. One thread at a time, besides the session's own."""

    def __init__(self, directory: Path, local_rank: int, offer_timeout_seconds: float, num_lease_slots: int) -> None:
        """Listens in ``directory`` from here on; :meth:`connect` does the rest."""
        prepare_socket_dir(directory)
        sweep_stale_sockets(directory)
        self._local_rank = local_rank
        self._offer_timeout_seconds = offer_timeout_seconds
        self.incarnation = new_incarnation()
        self._book: LeaseBook[_Payload] = LeaseBook(self.incarnation, num_lease_slots, MAX_BLOCKS)
        self._mail, self._remote_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._session: tuple[int, int] | None = None
        """Session key and ledger id of the one decode; the session thread's."""
        self._tokens = _Tokens()
        self._is_peer_gone = False
        self._is_broken = False
        """A mail went out in part: nothing that follows could be understood."""
        self._announced_pools: set[int] = set()
        self._layouts: dict[tuple[tuple[TensorSpec, ...], int], Layout] = {}
        self._ended: list[EndedKV] = []
        self._on_inspect = reporter(self)
        self._server = SessionServer(directory, self.incarnation, self._on_hello, self._on_close)

    def connect(self, address: str, port: int, timeout_seconds: float) -> None:
        """Introduce ourselves to decode; it has a session with us when this returns. See :func:`~.host.introduce`."""
        introduction = Introduction(PROTOCOL_VERSION, host_id(), self.incarnation, self._local_rank)
        introduce(address, port, introduction, timeout_seconds)
        # Decode has its descriptor by now; with ours closed, its end shows as the end of the mail.
        self._remote_end.close()
        # Not settimeout(): that would cost a poll(2) before each send.
        seconds = int(timeout_seconds)
        timeval = _TIMEVAL.pack(seconds, max(1, int((timeout_seconds - seconds) * 1e6)))
        self._mail.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)

    # --- session thread ---

    def _on_hello(self, key: int, hello: Message) -> Answer:
        if isinstance(hello, InspectHello):
            return self._on_inspect(hello)
        if not isinstance(hello, TensorHello):
            return Answer(Refusal("message", type(hello).__name__, "TensorHello"), keep_open=False)
        mine = (PROTOCOL_VERSION, self.incarnation, self._local_rank)
        theirs = (hello.protocol, hello.incarnation, hello.local_rank)
        for name, here, there in zip(("protocol", "incarnation", "local_rank"), mine, theirs, strict=True):
            if here != there:
                return Answer(Refusal(name, str(there), str(here)), keep_open=False)
        if self._session is not None or self._is_peer_gone:
            return Answer(Refusal("session", "a second decode", "one decode for each communicator"), keep_open=False)
        ledger_id, ledger_fd = self._book.add_ledger()
        self._session = key, ledger_id
        return Answer(TensorWelcome(), (self._book.index_fd, ledger_fd, self._remote_end.fileno()))

    def _on_close(self, key: int) -> None:
        if self._session is not None and self._session[0] == key:
            self._is_peer_gone = True
            self._book.drop_ledger(self._session[1])
            self._session = None
            with contextlib.suppress(OSError):
                self._mail.shutdown(socket.SHUT_RDWR)  # wakes a send that waits for a decode that is no more

    def decodes(self) -> dict[int, tuple[int, str]]:
        """Ledger id -> ``(pid, name)`` of the decode that has a session."""
        if self._session is None:
            return {}
        key, ledger_id = self._session
        return {ledger_id: (self._server.peer_pid(key), "tensors")}

    # --- the caller's thread ---

    @property
    def num_leases(self) -> int:
        """Leases that have not been seen to end."""
        return len(self._book)

    @property
    def book(self) -> LeaseBook[_Payload]:
        """For onlookers."""
        return self._book

    @property
    def is_peer_gone(self) -> bool:
        """Whether decode has ended its session."""
        return self._is_peer_gone

    def layout(self, specs: tuple[TensorSpec, ...], num_blocks: int) -> Layout:
        """The number under which decode knows these tensors; announces them, and their pools, the first time.

        Raises:
            PeerUnreachableError: decode is gone.
            UsageError: too many different sets of tensors.
        """
        known = self._layouts.get((specs, num_blocks))
        if known is not None:
            return known
        if len(self._layouts) >= MAX_LAYOUTS:
            raise UsageError(
                f"{MAX_LAYOUTS} different sets of tensors were sent already; register layers once, send blocks"
            )
        pools = frozenset(spec.pool for spec in specs)
        for pool_id in sorted(pools):
            if pool_id not in self._announced_pools:
                pool = REGISTRY.get(pool_id)
                self._send(PoolNotice(pool_id, pool.layout), (pool.fd,))
                self._announced_pools.add(pool_id)
        layout = REGISTRY.add(Layout(len(self._layouts), num_blocks, pools))
        self._send(LayoutNotice(layout.layout_id, num_blocks, specs))
        self._layouts[specs, num_blocks] = layout
        return layout

    def send(self, request_id: str, layout: Layout, blocks: "Ids", num_tokens: int) -> SentKV:
        """Publish a lease over ``blocks`` and mail its name. See :meth:`MC2Communicator.send_kv_metadata`."""
        if not 0 < len(request_id) <= MAX_REQUEST_ID:
            raise UsageError(f"request_id of {len(request_id)} characters: expected 1 to {MAX_REQUEST_ID}")
        if not request_id.isascii():
            _check_text(request_id)
        if self._is_peer_gone or self._is_broken:
            raise PeerUnreachableError("decode has ended its session, or could not be told something earlier")
        token = self._tokens.draw()
        payload = _Payload(request_id, layout)
        num_pool_blocks = layout.num_blocks
        for _ in range(2):
            lease_id = self._book.offer(
                token, _NO_DIGEST, num_tokens, blocks, self._offer_timeout_seconds, payload, num_pool_blocks
            )
            if lease_id is not None:
                break
            self._sweep()
        else:
            raise UsageError("every lease slot is taken: decode must release, or num_lease_slots must be larger")
        layout.num_leases += 1
        return SentKV(request_id, self._send(KvNotice(request_id, pack_ticket(lease_id, layout.layout_id, token))))

    def _send(self, mail: Mail, fds: Sequence[int] = ()) -> int:
        data = frame(mail)
        sent = 0
        try:
            sent = socket.send_fds(self._mail, [data], list(fds)) if fds else self._mail.send(data)
            while sent < len(data):
                sent += self._mail.send(memoryview(data)[sent:])
        except BlockingIOError as error:
            self._is_broken = bool(sent)
            raise PeerUnreachableError(
                error.errno, "decode does not take its mail: does it call recv_kv_metadata()?"
            ) from error
        except OSError as error:
            self._is_broken = True
            raise PeerUnreachableError(error.errno, f"decode is gone: {error.strerror}") from error
        return len(data)

    def _sweep(self) -> None:
        # Looked at first: what decode did before it went is in the ledger then.
        is_peer_gone = self._is_peer_gone
        ended = [(lease.payload, lease.reason) for lease in self._book.sweep()]
        if is_peer_gone:
            # A communicator has one decode, and nobody else can ever claim what it has not.
            ended += [(payload, "peer_gone") for payload in self._book.abandon()]
        for payload, reason in ended:
            payload.layout.num_leases -= 1
            self._ended.append(EndedKV(payload.request_id, reason))

    def reap(self) -> list[EndedKV]:
        """What has ended since the last call."""
        self._sweep()
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        """End the session; decode keeps what it has mapped. Idempotent."""
        self._server.close()
        self._mail.close()
        self._remote_end.close()
        self._book.close()
