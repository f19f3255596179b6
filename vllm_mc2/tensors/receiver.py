"""Decode's half of a communicator: sessions with prefills, their mail, their pools mapped and made into tensors."""

import collections
import contextlib
import logging
import math
import os
import select
import socket
import threading
import time
from pathlib import Path
from typing import NamedTuple

import torch

from vllm_mc2.channel import DONTWAIT, LENGTH, close_all, prepare_socket_dir, receive_some, socket_path
from vllm_mc2.errors import LayoutError, MC2Error, PeerUnreachableError, ProtocolError, UsageError
from vllm_mc2.layout import mirror_plan
from vllm_mc2.leases import LeaseId, PeerLeases
from vllm_mc2.memory import WorkerMemory
from vllm_mc2.protocol import (
    MAX_FRAME_BYTES,
    PROTOCOL_VERSION,
    Introduction,
    TensorHello,
    TensorWelcome,
)
from vllm_mc2.session import Session, open_session
from vllm_mc2.tensors.host import HELLO_SECONDS, Reception
from vllm_mc2.tensors.manager import LayerKV
from vllm_mc2.tensors.messages import (
    MAX_LAYOUTS,
    MAX_POOLS,
    KvNotice,
    LayoutNotice,
    PoolNotice,
    TensorSpec,
    decode,
    unpack_ticket,
)
from vllm_mc2.tensors.pools import DTYPES, as_bytes, view_in

logger = logging.getLogger("vllm.mc2.tensors")

READ_BYTES = 1 << 16


class RemotePool:
    """A peer's pool, mapped here read-only."""

    def __init__(self, notice: PoolNotice, fd: int, *, prefault: bool) -> None:
        """Maps all of it; ``fd`` stays the caller's. Page tables are filled in on a thread of their own.

        Raises:
            LayoutError: the pool's description is not valid.
            ValueError: the descriptor is not a sealed memfd that is large enough.
            OSError: the kernel refused.
        """
        layout = notice.layout
        plan = mirror_plan(layout)
        if sum(layout.region_bytes(region) for region in layout.regions) != layout.pool_bytes:
            # What lies in no region is not mapped, and a tensor over it would end this process.
            raise LayoutError(f"a pool of {layout.pool_bytes} bytes with holes")
        self._memory = WorkerMemory(plan, shared=False, huge_pages="off")
        self._memory.map_peer(0, layout, fd)
        self.num_bytes = layout.pool_bytes
        self._base = as_bytes(self._memory)
        self._prefault: threading.Thread | None = None
        if prefault:
            self._prefault = threading.Thread(target=self._memory.prefault_peer, args=(0,), daemon=True)
            self._prefault.start()

    def wait_prefaulted(self, timeout_seconds: float) -> None:
        """Until the page tables are filled in."""
        if self._prefault is not None:
            self._prefault.join(timeout_seconds)

    def tensor(self, spec: TensorSpec) -> torch.Tensor:
        """The peer's tensor. A write to it faults.

        Raises:
            LayoutError: it is not inside the pool.
        """
        spec.check(self.num_bytes)
        return view_in(self._base, spec.offset_bytes, spec.shape, spec.strides, DTYPES[spec.dtype])


class RemoteLayout(NamedTuple):
    """A peer's set of tensors, ready to be used."""

    num_blocks: int
    layers: dict[int, LayerKV]


class RemoteKV(NamedTuple):
    """A request's KV cache at a prefill, not mapped yet: what :meth:`MC2Communicator.recv_kv_metadata` gives."""

    request_id: str
    peer: "Prefill"
    lease_id: LeaseId
    token: bytes
    layout: RemoteLayout


class Prefill:
    """One prefill that this decode has a session with. One thread at a time."""

    def __init__(self, incarnation: str, session: Session, fds: list[int], *, prefault: bool) -> None:
        """Takes the session and the descriptors, the latter also when it raises.

        Raises:
            ValueError: a lease segment is not what it claims to be.
        """
        index_fd, ledger_fd, mail_fd = fds
        self.incarnation = incarnation
        self.session = session
        self._prefault = prefault
        try:
            self.leases = PeerLeases(index_fd, ledger_fd)
            self.mail = socket.socket(fileno=mail_fd)
        except BaseException:
            close_all(fds)
            raise
        close_all([index_fd, ledger_fd])
        self._buffer = bytearray()
        self._fds: list[int] = []
        self._pools: dict[int, RemotePool] = {}
        self._layouts: dict[int, RemoteLayout] = {}
        self.unsettled: list[LeaseId] = []
        """Claims that were given up while prefill had yet to decide on them."""
        self._is_closed = False

    def is_gone(self) -> bool:
        """Whether its process has exited, or has ended the session."""
        return self.session.is_gone()

    def read_mail(self, inbox: "collections.deque[RemoteKV]") -> bool:
        """Take in what has arrived, without waiting.

        Returns:
            Whether more may come; False when the mail has ended.

        Raises:
            ProtocolError: it is not what a prefill sends. Nothing more is read from this one.
        """
        while True:
            try:
                data = receive_some(self.mail, READ_BYTES, self._fds, DONTWAIT)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not data:
                return False
            self._buffer += data
            is_cut = bool(self._fds)  # a read ends behind descriptors, whatever follows
            self._take_frames(inbox)
            if len(data) < READ_BYTES // 2 and not is_cut:
                return True

    def _take_frames(self, inbox: "collections.deque[RemoteKV]") -> None:
        begin, have = 0, len(self._buffer)
        with memoryview(self._buffer) as view:
            while have - begin >= LENGTH.size:
                (size,) = LENGTH.unpack_from(view, begin)
                if size > MAX_FRAME_BYTES:
                    raise ProtocolError(f"mail of {size} bytes, at most {MAX_FRAME_BYTES} are allowed")
                end = begin + LENGTH.size + size
                if have < end:
                    break
                mail = decode(view[begin + LENGTH.size : end])
                begin = end
                if type(mail) is KvNotice:
                    inbox.append(self._noted(mail))
                elif type(mail) is LayoutNotice:
                    self._add_layout(mail)
                elif type(mail) is PoolNotice:
                    self._add_pool(mail)
        del self._buffer[:begin]

    def _noted(self, mail: KvNotice) -> RemoteKV:
        lease_id, layout_id, token = unpack_ticket(mail.lease)
        layout = self._layouts.get(layout_id)
        if layout is None:
            raise ProtocolError(f"request {mail.request_id!r} has layout {layout_id}, which was not announced")
        return RemoteKV(mail.request_id, self, lease_id, token, layout)

    def _add_pool(self, mail: PoolNotice) -> None:
        if not self._fds:
            raise ProtocolError(f"pool {mail.pool} came without a descriptor")
        fd = self._fds.pop(0)
        try:
            if mail.pool in self._pools or len(self._pools) >= MAX_POOLS:
                raise ProtocolError(f"pool {mail.pool} was announced twice, or is one of more than {MAX_POOLS}")
            self._pools[mail.pool] = RemotePool(mail, fd, prefault=self._prefault)
        except (ValueError, OSError) as error:
            raise ProtocolError(f"pool {mail.pool} cannot be mapped: {error}") from error
        finally:
            os.close(fd)

    def _add_layout(self, mail: LayoutNotice) -> None:
        if mail.layout in self._layouts or len(self._layouts) >= MAX_LAYOUTS:
            raise ProtocolError(f"layout {mail.layout} was announced twice, or is one of more than {MAX_LAYOUTS}")
        tensors: dict[int, dict[str, torch.Tensor]] = {}
        for spec in mail.tensors:
            pool = self._pools.get(spec.pool)
            if pool is None:
                raise ProtocolError(f"layer {spec.layer} is in pool {spec.pool}, which was not announced")
            if mail.num_blocks and spec.shape[0] != mail.num_blocks:
                raise ProtocolError(f"layer {spec.layer} has {spec.shape[0]} blocks, not {mail.num_blocks}")
            tensors.setdefault(spec.layer, {})[spec.part] = pool.tensor(spec)
        layers = {}
        for layer, parts in tensors.items():
            key = parts.get("kv", parts.get("key"))
            if key is None or ("kv" in parts and len(parts) > 1):
                raise ProtocolError(f"layer {layer} has the parts {', '.join(parts)}")
            layers[layer] = LayerKV(key, parts.get("value"))
        self._layouts[mail.layout] = RemoteLayout(mail.num_blocks, layers)

    def wait_prefaulted(self, timeout_seconds: float) -> None:
        """Until the page tables of every pool are filled in."""
        for pool in self._pools.values():
            pool.wait_prefaulted(timeout_seconds)

    def release(self, lease_id: LeaseId) -> None:
        """Give a held lease back; a closed session has given back all."""
        if not self._is_closed:
            self.leases.release(lease_id)

    def close(self) -> None:
        """End the session: what was held of it counts as released. Idempotent."""
        self._is_closed = True
        self.session.close()
        self.mail.close()
        self.leases.close()
        close_all(self._fds)
        self._fds.clear()


class Receiver:
    """One decode with any number of prefills. One thread at a time."""

    def __init__(
        self, directory: Path, local_rank: int, address: str, port: int, *, prefault: bool, busy_poll_seconds: float
    ) -> None:
        """Listens from here on; :meth:`accept` takes prefills in."""
        prepare_socket_dir(directory)
        self._directory = directory
        self._local_rank = local_rank
        self._prefault = prefault
        self._reception = Reception(address, port, local_rank)
        self.port = self._reception.port
        self._prefills: list[Prefill] = []
        """Those that have not ended."""
        self._has_met = False
        self._inbox: collections.deque[RemoteKV] = collections.deque()
        self._poll = select.poll()
        self._busy_poll_seconds = busy_poll_seconds

    def accept(self, timeout_seconds: float) -> str:
        """Wait for a prefill; its incarnation, 32 hex digits. See :meth:`MC2Communicator.accept`."""
        made: list[Prefill] = []

        def meet(introduction: Introduction) -> None:
            path = socket_path(self._directory, introduction.incarnation)
            if not path.is_socket():
                raise PeerUnreachableError(
                    f"this host has no {path.name} in {self._directory}: both sides need the same socket_dir, and"
                    " containers a common mount of it"
                )
            hello = TensorHello(PROTOCOL_VERSION, introduction.incarnation, self._local_rank)
            _, fds, session = open_session(path, hello, TensorWelcome, 3, min(timeout_seconds, HELLO_SECONDS))
            try:
                made.append(Prefill(introduction.incarnation, session, fds, prefault=self._prefault))
            except (ValueError, OSError) as error:
                session.close()
                raise ProtocolError(f"its lease segments are not valid: {error}") from error

        found = self._reception.accept(meet, timeout_seconds)
        for prefill in made:
            if prefill.incarnation == found.incarnation:
                self._prefills = [*self._prefills, prefill]
                self._has_met = True
                for fd in (prefill.mail.fileno(), *prefill.session.descriptors()):
                    self._poll.register(fd, select.POLLIN)
            else:  # it left before it heard that we had met
                prefill.close()
        logger.info("prefill %s has opened a session", found.incarnation)
        return found.incarnation

    def receive(self, timeout_seconds: float | None) -> RemoteKV:
        """The next request that a prefill has announced. See :meth:`MC2Communicator.recv_kv_metadata`."""
        inbox = self._inbox
        if inbox:
            return inbox.popleft()
        begin = time.monotonic()
        deadline = math.inf if timeout_seconds is None else begin + timeout_seconds
        sleep_at = min(begin + self._busy_poll_seconds, deadline)
        while True:
            for prefill in self._prefills:
                self._read(prefill)
            if inbox:
                return inbox.popleft()
            if not self._prefills:
                raise PeerUnreachableError("no prefill is connected, and nothing it sent is left")
            now = time.monotonic()
            if now < sleep_at:
                continue
            if now >= deadline:
                raise TimeoutError(f"no KV metadata in {timeout_seconds} s")
            # poll(2) counts in milliseconds; rounded up, so that it is not called again for the rest of one.
            self._poll.poll(None if deadline == math.inf else int(min(deadline - now, 3600.0) * 1000) + 1)
            for prefill in self._prefills:
                if prefill.is_gone():
                    # Its mail may not have ended: a forked child of it keeps the other end.
                    self._read(prefill)
                    self._drop(prefill)

    def _read(self, prefill: Prefill) -> None:
        try:
            goes_on = prefill.read_mail(self._inbox)
        except (ProtocolError, LayoutError) as error:
            logger.warning("a prefill is dropped for its mail: %s", error)
            goes_on = False
        if not goes_on:
            self._drop(prefill)

    def _drop(self, prefill: Prefill) -> None:
        """Forget one that has ended: its memory goes with the last tensor over it. Idempotent."""
        if prefill in self._prefills:
            self._prefills = [other for other in self._prefills if other is not prefill]
            for fd in (prefill.mail.fileno(), *prefill.session.descriptors()):
                self._poll.unregister(fd)
            prefill.close()

    def require_prefill(self) -> None:
        """Raise unless somebody was accepted.

        Raises:
            UsageError: nobody was.
        """
        if not self._has_met:
            raise UsageError("no prefill yet: call accept() first")

    def wait_prefaulted(self, timeout_seconds: float) -> None:
        """Until the page tables of everything that is mapped are filled in."""
        for prefill in self._prefills:
            prefill.wait_prefaulted(timeout_seconds)

    def close(self) -> None:
        """End every session and stop listening. Idempotent."""
        self._reception.close()
        for prefill in self._prefills:
            with contextlib.suppress(MC2Error, OSError):
                prefill.close()
        self._prefills = []
        self._inbox.clear()
