"""Ways ``mc2`` and ``mc2_sleep``: the tensor API. The block table changes hands, the KV stays where it is.

The two differ in how decode waits for the next request: looking for it all the time, as an engine with something to do does,
or asleep. Waking a process up takes longer than many hand-overs.
"""

import time
from collections.abc import Sequence
from typing import Any

import torch

from vllm_mc2 import KVCacheManager, KVCacheMapper, MC2Communicator
from vllm_mc2.bench.handoff.cases import HEAD_DIM, ITEM_BYTES, NUM_KV_HEADS, NUM_LAYERS, Case
from vllm_mc2.bench.handoff.messages import Link, Note, Turn
from vllm_mc2.bench.handoff.pattern import Pattern, stamped
from vllm_mc2.bench.handoff.ways import SETTLE_SECONDS, TRANSFER_SECONDS, Checked, own_memory_bytes, wait_until

CONNECT_SECONDS = 30.0
NUM_LEASE_SLOTS = 256
BUSY_POLL_SECONDS = {"mc2": 10e-3, "mc2_sleep": 0.0}
"""How long decode looks before it sleeps: longer than anything here takes to begin, or not at all."""

NOT_KV_FRACTION = 16
"""Growth below this part of the KV is Python's objects: the KV itself would not fit into it."""

_SHUFFLE_SEED = 20_260


class CacheView:
    """A paged cache as 64-bit words, the same on both sides: one row for each block of each layer's keys or values."""

    def __init__(self, index: int, case: Case) -> None:
        self.case = case
        self.shape = (case.num_blocks, case.block_tokens, NUM_KV_HEADS, HEAD_DIM)
        self.pattern = Pattern(case.block_tokens * NUM_KV_HEADS * HEAD_DIM * ITEM_BYTES)
        self._first_uid = index << 36
        generator = torch.Generator().manual_seed(_SHUFFLE_SEED + index)
        # As in an engine that has run for a while: no request's blocks are neighbours.
        self._order: Any = torch.randperm(case.num_blocks, generator=generator, dtype=torch.int32)

    def table(self, case: Case, request: int) -> Any:
        """Block ids of a request, int32."""
        return self._order[request * case.request_blocks : (request + 1) * case.request_blocks].contiguous()

    def first_uid(self, part: int) -> int:
        """Uid of block 0 of part ``2 * layer`` (keys) or ``2 * layer + 1`` (values)."""
        return self._first_uid + part * self.case.num_blocks

    def rows(self, tensor: Any) -> Any:
        """One of its tensors as int64 ``[num_blocks, words]``."""
        return tensor.view(self.case.num_blocks, -1).view(torch.int64)

    def ends(self, table: Any) -> tuple[tuple[int, int, int, int], tuple[int, int, int, int]]:
        """``(part, block, word index, word without stamp)`` of a request's first and last word."""
        last_part, first, last = 2 * NUM_LAYERS - 1, int(table[0]), int(table[-1])
        return (
            (0, first, 0, self.pattern.first(self.first_uid(0) + first)),
            (last_part, last, -1, self.pattern.last(self.first_uid(last_part) + last)),
        )


class _Sending:
    """One cache in shared memory, with a communicator for each way."""

    def __init__(self, view: CacheView, ways: Sequence[str], peer: Link, socket_dir: str) -> None:
        self.view = view
        self.mc2 = {way: self._connect(peer, socket_dir) for way in ways}
        self.managers = [KVCacheManager(mc2) for mc2 in self.mc2.values()]
        self.parts: list[Any] = []
        for layer in range(NUM_LAYERS):
            tensors = self.managers[0].allocate(layer, view.shape, torch.float16)
            for manager in self.managers[1:]:
                manager.register(layer, *tensors)
            for tensor in tensors:
                rows = view.rows(tensor)
                view.pattern.fill(rows, view.first_uid(len(self.parts)))
                self.parts.append(rows)

    def _connect(self, peer: Link, socket_dir: str) -> MC2Communicator:
        return MC2Communicator(
            local_rank=0,
            device="cpu",
            peer_addr="127.0.0.1",
            peer_port=int(peer.expect(Note, CONNECT_SECONDS).data),
            socket_dir=socket_dir,
            timeout_seconds=CONNECT_SECONDS,
            num_lease_slots=NUM_LEASE_SLOTS,
        )

    def close(self) -> None:
        """Disconnect, and forget the cache."""
        for mc2 in self.mc2.values():
            mc2.close()
        for manager in self.managers:
            manager.close()


class MC2Sender:
    """Prefill's side."""

    def __init__(self, caches: Sequence[Case], ways: Sequence[str], peer: Link, socket_dir: str) -> None:
        self._caches = [_Sending(CacheView(index, case), ways, peer, socket_dir) for index, case in enumerate(caches)]
        self._tables: dict[tuple[Case, int], list[Any]] = {}
        self._num_turns = 0
        self._ids: list[str] = []
        self._sent: list[Any] = []

    def stamp(self, cache: int, case: Case, stamp: int) -> None:
        """Change the first and the last word of every request of a case."""
        sending = self._caches[cache]
        for table in self._known_tables(case, cache):
            for part, block, word, value in sending.view.ends(table):
                sending.parts[part][block, word] = stamped(value, stamp)

    def _known_tables(self, case: Case, cache: int) -> list[Any]:
        tables = self._tables.get((case, cache))
        if tables is None:
            view = self._caches[cache].view
            tables = self._tables[case, cache] = [view.table(case, request) for request in range(case.batch)]
        return tables

    def prepare(self, turn: Turn) -> None:
        """Request ids of a fixed length, since they are part of the metadata."""
        self._num_turns += 1
        self._ids = [f"request-{self._num_turns:08d}-{request:04d}" for request in range(turn.case.batch)]
        self._sent = [None] * turn.case.batch

    def run(self, turn: Turn) -> list[int]:
        """Publish every request."""
        send, now = self._caches[turn.cache].mc2[turn.way].send_kv_metadata, time.monotonic_ns
        tables, ids, sent = self._known_tables(turn.case, turn.cache), self._ids, self._sent
        started = [0] * len(ids)
        for index, request_id in enumerate(ids):
            started[index] = now()
            sent[index] = send(request_id, tables[index])
        return started

    def settle(self, turn: Turn) -> None:
        """Take the slots back."""
        mc2 = self._caches[turn.cache].mc2[turn.way]
        ended: list[Any] = []

        def all_ended() -> bool:
            ended.extend(mc2.reap())
            return len(ended) >= turn.case.batch

        wait_until(all_ended, SETTLE_SECONDS, f"{turn.case.batch} requests released by the receiver")

    def costs(self) -> tuple[list[int], int]:
        """What the last turn put on the wire."""
        return [sent.num_bytes for sent in self._sent], 0

    def close(self) -> None:
        """Disconnect, and forget the caches."""
        for cache in self._caches:
            cache.close()
        self._caches.clear()
        self._tables.clear()


class _Receiving:
    """One cache's communicators."""

    def __init__(self, view: CacheView, ways: Sequence[str], peer: Link, socket_dir: str) -> None:
        self.view = view
        self.mc2 = {way: self._accept(BUSY_POLL_SECONDS[way], peer, socket_dir) for way in ways}
        self.mappers = {way: KVCacheMapper(mc2) for way, mc2 in self.mc2.items()}

    def _accept(self, busy_poll_seconds: float, peer: Link, socket_dir: str) -> MC2Communicator:
        mc2 = MC2Communicator(
            local_rank=0,
            device="cpu",
            listen_addr="127.0.0.1",
            listen_port=0,
            socket_dir=socket_dir,
            busy_poll_seconds=busy_poll_seconds,
        )
        peer.send(Note(b"%d" % mc2.listen_port))
        mc2.accept(timeout_seconds=CONNECT_SECONDS)
        return mc2


class MC2Receiver:
    """Decode's side. It allocates no KV memory at all."""

    def __init__(self, caches: Sequence[Case], ways: Sequence[str], peer: Link, socket_dir: str) -> None:
        self._caches = [_Receiving(CacheView(index, case), ways, peer, socket_dir) for index, case in enumerate(caches)]
        self._held: list[Any] = []
        self._tables: list[Any] = []
        self._own_bytes: int | None = None
        self._grown_bytes = 0

    def prepare(self, turn: Turn) -> None:
        """Room for what will be held."""
        self._held = [None] * turn.case.batch
        self._tables = [None] * turn.case.batch
        self._own_bytes = own_memory_bytes() if turn.check_all else None

    def run(self, turn: Turn) -> list[int]:
        """Map every request. It is ready when its block table is here."""
        cache, now = self._caches[turn.cache], time.monotonic_ns
        receive, map_remote_kv = cache.mc2[turn.way].recv_kv_metadata, cache.mappers[turn.way].map_remote_kv
        held, tables = self._held, self._tables
        ready = [0] * len(held)
        for index in range(len(held)):
            kv = map_remote_kv(receive(TRANSFER_SECONDS))
            tables[index] = kv.block_ids
            ready[index] = now()
            held[index] = kv
        return ready

    def check(self, turn: Turn) -> Checked:
        """Through the block table, as attention would read it."""
        view = self._caches[turn.cache].view
        parts = [[view.rows(tensor) for layer in sorted(kv.layers) for tensor in kv.layers[layer]] for kv in self._held]
        begin = time.monotonic_ns()
        found = [
            (int(rows[0][table[0], 0]), int(rows[-1][table[-1], -1]))
            for rows, table in zip(parts, self._tables, strict=True)
        ]
        read_ns = time.monotonic_ns() - begin
        verified = all(
            words == tuple(stamped(word, turn.stamp) for *_, word in view.ends(view.table(turn.case, request)))
            for request, words in enumerate(found)
        )
        if not turn.check_all:
            return Checked(read_ns, verified)
        # The pool was announced with the first request; its page tables are filled in once, before anything is timed.
        self._caches[turn.cache].mc2[turn.way].wait_prefaulted(TRANSFER_SECONDS)
        for request, rows in enumerate(parts):
            uids = view.table(turn.case, request).to(torch.int64)
            for part, tensor in enumerate(rows):
                is_right = view.pattern.is_at(tensor, self._tables[request], uids + view.first_uid(part))
                verified = verified and is_right
        assert self._own_bytes is not None
        self._grown_bytes = own_memory_bytes() - self._own_bytes
        return Checked(read_ns, verified, self._grown_bytes)

    def settle(self, turn: Turn) -> None:
        """Give the blocks back."""
        for kv in self._held:
            kv.release()
        self._held, self._tables = [], []

    def kv_bytes(self, turn: Turn) -> int:
        """By how much this process grew in the full check; nothing if that is too little to be KV."""
        return self._grown_bytes if self._grown_bytes > turn.case.kv_bytes // NOT_KV_FRACTION else 0

    def close(self) -> None:
        """Disconnect."""
        for cache in self._caches:
            for mc2 in cache.mc2.values():
                mc2.close()
        self._caches.clear()
