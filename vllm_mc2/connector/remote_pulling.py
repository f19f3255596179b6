"""Pull from other hosts, in a worker: reads a request's blocks over the network into our own KV cache.

Each peer has a thread of its own, since a cut cable holds up a read for seconds, and nobody else's. After a read the worker asks
prefill whether the lease still is: if so its blocks were not reused meanwhile, and only then are they believed. No clock takes
part in this. A reader whose read has failed writes no more (:class:`~vllm_mc2.network.transport.Reader`), and only then may vLLM
have the request's blocks back.
"""

import logging
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from vllm_mc2.connector.metadata import PullOrder
from vllm_mc2.connector.pulling import PullResults
from vllm_mc2.errors import LayoutError, MC2Error, PeerUnreachableError
from vllm_mc2.layout import HeadSlice
from vllm_mc2.memory import OwnRegion
from vllm_mc2.network.borrower import RemoteSession
from vllm_mc2.network.transport import Piece, Reader
from vllm_mc2.protocol import Offered, RemoteGrant, Ticket

logger = logging.getLogger("vllm.mc2.pulling")

MAX_PIECE_BYTES = 64 << 20


class RemoteStrip(NamedTuple):
    """Equally spaced pieces on either side: a layer, or the heads of a layer that both sides have."""

    own_address: int
    own_stride: int
    peer_address: int
    peer_stride: int
    num_bytes: int


class Part(Protocol):
    """What comes from one of the peer's workers."""

    def read(self, own_ids: Sequence[int], peer_ids: Sequence[int]) -> None:
        """Read these blocks; one thread at a time.

        Raises:
            MC2Error, ValueError: not all of them are there.
        """
        ...

    def close(self) -> None:
        """Give up what it takes to read. Nothing is written by it any more then. Idempotent."""
        ...


class RemotePart(NamedTuple):
    """Read over the network by a transfer engine."""

    reader: Reader
    strips: Sequence[RemoteStrip]

    def read(self, own_ids: Sequence[int], peer_ids: Sequence[int]) -> None:
        """See :class:`Part`."""
        self.reader.read(pieces_of(self.strips, own_ids, peer_ids))

    def close(self) -> None:
        """See :class:`Part`."""
        self.reader.close()


def strips_of(own: Sequence[OwnRegion], grant: RemoteGrant, part: HeadSlice) -> list[RemoteStrip]:
    """How a peer's pool fits our own regions.

    Raises:
        LayoutError: its layers are not ours, or their blocks do not divide as ``part`` says.
    """
    grant.pool.check()
    theirs = grant.pool.regions
    if [region.name for region in own] != [region.name for region in theirs] or len(grant.addresses) != len(theirs):
        raise LayoutError("the peer's layers are not ours")
    strips = []
    for mine, region, address in zip(own, theirs, grant.addresses, strict=True):
        own_offset, peer_offset, num_bytes = part.cut(mine.block_bytes, region.block_bytes)
        own_address, peer_address = mine.address + own_offset, address + peer_offset
        strips.append(RemoteStrip(own_address, mine.block_bytes, peer_address, region.block_bytes, num_bytes))
    return strips


def pieces_of(strips: Sequence[RemoteStrip], own_ids: Sequence[int], peer_ids: Sequence[int]) -> list[Piece]:
    """What to read for these blocks: as few pieces as there can be."""
    runs = list(_runs(own_ids, peer_ids))
    pieces = []
    for strip in strips:
        is_dense = strip.num_bytes == strip.own_stride == strip.peer_stride
        most = max(1, MAX_PIECE_BYTES // strip.num_bytes) if is_dense else 1
        for own, peer, num_blocks in runs:
            for done in range(0, num_blocks, most):
                own_address = strip.own_address + (own + done) * strip.own_stride
                peer_address = strip.peer_address + (peer + done) * strip.peer_stride
                pieces.append(Piece(own_address, peer_address, min(most, num_blocks - done) * strip.num_bytes))
    return pieces


def _runs(own_ids: Sequence[int], peer_ids: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """``(own block, peer's block, number)`` of blocks that follow each other on both sides."""
    begin = 0
    for end in range(1, len(own_ids) + 1):
        steps = end - begin
        if end < len(own_ids) and own_ids[end] == own_ids[begin] + steps and peer_ids[end] == peer_ids[begin] + steps:
            continue
        yield own_ids[begin], peer_ids[begin], steps
        begin = end


class RemoteSource:
    """One peer on another host. ``on_broken(detail)`` is called on its thread when nothing can be read from it any more."""

    def __init__(
        self,
        session: RemoteSession,
        parts: Sequence[Part],
        results: PullResults,
        on_broken: Callable[[str], None],
    ) -> None:
        """Takes over the session and the parts."""
        self._session = session
        self._parts = parts
        self._results = results
        self._on_broken = on_broken
        self._orders: queue.SimpleQueue[PullOrder | None] = queue.SimpleQueue()
        self._broken = ""
        self._thread = threading.Thread(target=self._run, name="mc2-remote", daemon=True)
        self._thread.start()

    def submit(self, order: PullOrder) -> None:
        """Begin to read. Any thread."""
        self._orders.put(order)

    def close(self) -> None:
        """Begin to end: orders that are not done yet fail. Returns at once; any thread."""
        self._session.close()
        self._orders.put(None)

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            self._do(order)
        for part in self._parts:
            part.close()

    def _do(self, order: PullOrder) -> None:
        try:
            if self._broken or self._session.is_gone():
                raise PeerUnreachableError(self._broken or "the peer is gone")
            for part in self._parts:
                part.read(order.own_ids, order.peer_ids)
        except Exception as error:
            # Thread border: vLLM waits for an answer to every order, whatever happens in somebody else's engine.
            self._give_up(order, error)
            return
        assert order.ticket is not None
        if self._is_still_lent(order.ticket):
            self._results.add_success(order)
        else:
            logger.warning("request %s: its lease ended while its blocks were read", order.request_id)
            self._results.add_failure(order)

    def _give_up(self, order: PullOrder, error: Exception) -> None:
        known = isinstance(error, MC2Error)
        logger.warning("request %s: its blocks could not be read: %s", order.request_id, error, exc_info=not known)
        for part in self._parts:
            part.close()
        # From here on nothing is written any more.
        self._results.add_failure(order)
        if not self._broken:
            self._broken = str(error) or type(error).__name__
            self._on_broken(self._broken)

    def _is_still_lent(self, ticket: Ticket) -> bool:
        try:
            answer = self._session.look_up(ticket).result()
        except PeerUnreachableError:
            return False
        return isinstance(answer, Offered) and answer.digest is not None


class RemotePuller:
    """All peers on other hosts of one worker. Any thread."""

    def __init__(self, results: PullResults) -> None:
        self._results = results
        self._sources: dict[int, RemoteSource] = {}
        self._removed: set[int] = set()
        """Peers that the scheduler gave up before they were there."""
        self._lock = threading.Lock()

    def add_source(self, key: int, source: RemoteSource) -> None:
        """From now on orders may name ``key``."""
        with self._lock:
            if key in self._removed:
                self._removed.discard(key)
                source.close()
            else:
                self._sources[key] = source

    def remove_source(self, key: int, *, is_coming: bool) -> None:
        """Forget a peer. ``is_coming``: it is still being connected to, and is to be forgotten then."""
        with self._lock:
            source = self._sources.pop(key, None)
            if source is None and is_coming:
                self._removed.add(key)
        if source is not None:
            source.close()

    def submit(self, order: PullOrder) -> None:
        """Begin to read."""
        with self._lock:
            source = self._sources.get(order.key)
            if source is not None:
                source.submit(order)
                return
        self._results.add_failure(order)

    def close(self) -> None:
        """Forget everybody."""
        with self._lock:
            sources, self._sources = self._sources, {}
        for source in sources.values():
            source.close()
