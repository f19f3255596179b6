"""Decode's table of prefill engines: from a ticket's incarnation to a mapped pool.

Scheduler thread, but for one thing: when a peer ends while this engine is idle, the death watch's thread retires it. Hence
:attr:`PeerTable.lock`, which whoever uses a peer's leases or counts its loans must hold.

A peer goes through these states; every step is driven by :meth:`PeerTable.poll` from scheduler hooks, the only thing that
waits is a short-lived thread per handshake::

    CONNECTING --session--> MAPPING --all ranks mapped--> READY --peer gone, last loan ended--> (removed)
         \\---------------------\\-- refused, unreachable, too late --> FAILED

A failed peer is forgotten when its waiting requests have seen the reason, except a refusal, which will not change
for that incarnation.
"""

import functools
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Literal, ParamSpec, TypeVar

from vllm_mc2.channel import socket_path
from vllm_mc2.connector.deathwatch import DeathWatchThread
from vllm_mc2.connector.metadata import MapPeer, MapResult
from vllm_mc2.connector.peer import Connected, Dialer, OwnWorker, Peer, PeerState
from vllm_mc2.errors import LayoutError, PeerRefusedError, PeerUnreachableError, ProtocolError
from vllm_mc2.layout import AddressPlan, WindowAllocator, head_slices
from vllm_mc2.leases import LeaseId
from vllm_mc2.protocol import Done, RetirePool, SchedulerWelcome, Ticket
from vllm_mc2.session import open_session
from vllm_mc2.ticket import TcpAddress

logger = logging.getLogger("vllm.mc2.peers")

MAX_PEERS = 1024


R = TypeVar("R")
P = ParamSpec("P")


def _locked(method: Callable[P, R]) -> Callable[P, R]:
    """The method of :class:`PeerTable` runs with the table's lock held."""

    @functools.wraps(method)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        table = args[0]
        assert isinstance(table, PeerTable)
        with table.lock:
            return method(*args, **kwargs)

    return run


class PeerTable:
    """All peers, the window they are mapped in, and the orders for the workers."""

    def __init__(
        self,
        dialer: Dialer,
        directory: Path,
        plan: AddressPlan,
        num_ranks: int,
        block_size: int,
        timeout_seconds: float,
        workers: tuple[OwnWorker, ...] = (),
        *,
        mode: Literal["auto", "attach", "pull"] = "auto",
        attach_off: str | None = None,
        on_mapped: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        """``workers``: where this engine's own workers listen, for orders between steps. ``attach_off``: why this engine attaches
        nothing, whoever the peer is. ``on_mapped``: told how many seconds it took from a peer's first ticket to its mapped pool.
        """
        self._on_mapped = on_mapped
        self._mode = mode
        self._attach_off = attach_off
        self._next_key = 0
        self.lock = threading.RLock()
        self._workers = workers
        self._deathwatch = DeathWatchThread(self._retire)
        self._dialer = dialer
        self._directory = directory
        self._plan = plan
        self._num_ranks = num_ranks
        self._block_size = block_size
        self._timeout_seconds = timeout_seconds
        self._peers: dict[str, Peer] = {}
        self._window = WindowAllocator(plan.window_base, plan.num_window, plan.granularity)
        self._connected: queue.SimpleQueue[tuple[Peer, Connected | Exception]] = queue.SimpleQueue()
        self._map_orders: list[MapPeer] = []
        self._unmap_orders: list[int] = []

    def __iter__(self) -> Iterator[Peer]:
        """Of a copy, so that onlookers on other threads may iterate too."""
        with self.lock:
            return iter(list(self._peers.values()))

    @property
    def window(self) -> tuple[int, int, int]:
        """``(first block id, block ids, free ones)``; for onlookers, any thread."""
        return self._plan.window_base, self._plan.num_window, self._window.num_free

    @_locked
    def get(self, ticket: Ticket, address: TcpAddress | None) -> Peer:
        """The peer that issued the ticket; starts a handshake with one that is not known yet. ``address``: where the request says
        that it listens, if it says so.

        Raises:
            PeerUnreachableError: nobody with that name can be found, or the table is full.
        """
        incarnation = ticket.incarnation
        peer = self._peers.get(incarnation)
        if peer is not None:
            return peer
        address = self._dialer.find(ticket, address)
        if len(self._peers) >= MAX_PEERS:
            self._forget_oldest_refused()
        if len(self._peers) >= MAX_PEERS:
            raise PeerUnreachableError(f"{MAX_PEERS} peers are known already")
        peer = Peer(incarnation, self._next_key, time.monotonic() + self._timeout_seconds, address=address)
        self._next_key += 1
        self._peers[incarnation] = peer
        threading.Thread(target=self._connect, args=(peer,), name="mc2-connect", daemon=True).start()
        return peer

    def _connect(self, peer: Peer) -> None:
        """On its own thread, since a stopped peer answers late or never."""
        try:
            self._connected.put((peer, self._dialer.dial(peer.incarnation, peer.address)))
        except (PeerUnreachableError, PeerRefusedError, ProtocolError, OSError) as error:
            self._connected.put((peer, error))

    @_locked
    def poll(self) -> None:
        """Take in what the handshake threads brought, give up on what is late, remove peers that are gone and unused."""
        while not self._connected.empty():
            peer, outcome = self._connected.get()
            # A later attempt to reach the same engine is another peer.
            is_awaited = self._peers.get(peer.incarnation) is peer and peer.state is PeerState.CONNECTING
            if isinstance(outcome, Exception):
                if is_awaited:
                    refused = isinstance(outcome, PeerRefusedError)
                    self._fail(peer, "peer_refused" if refused else "peer_unreachable", str(outcome))
            elif not is_awaited:
                outcome.close()
            else:
                self._begin_mapping(peer, outcome)
        now = time.monotonic()
        for peer in list(self._peers.values()):
            if peer.state in (PeerState.CONNECTING, PeerState.MAPPING) and now > peer.deadline:
                self._fail(peer, "handshake_timeout", f"no answer in {self._timeout_seconds} s")
            elif peer.state is PeerState.READY and peer.is_gone():
                if peer.address is not None:
                    # It has nothing mapped here, and may be heard of again.
                    logger.info("prefill %s at %s is not heard of any more", peer.engine_id, peer.address)
                    self._remove(peer)
                elif peer.num_loans == 0:
                    logger.info("prefill %s is gone and nothing of it is in use: unmapped", peer.engine_id)
                    self._remove(peer)

    def _begin_mapping(self, peer: Peer, connected: Connected) -> None:
        welcome, peer.leases, peer.session = connected
        peer.engine_id = welcome.engine_id
        try:
            peer.num_blocks = self._check_welcome(welcome)
            peer.pool_bytes = 0 if peer.address else sum(worker.pool.pool_bytes for worker in welcome.workers)
        except ValueError as error:
            self._fail(peer, "peer_refused", str(error))
            return
        obstacle = self._why_not_attach(peer, welcome)
        if obstacle is not None:
            reason, detail = obstacle
            if self._mode == "attach":
                self._fail(peer, reason, detail)
                return
            peer.way, peer.way_reason = "pull", reason
            logger.info("prefill %s: its blocks are copied, not used in place: %s (%s)", peer.engine_id, reason, detail)
        peer.state = PeerState.MAPPING
        peer.ranks_left = set(range(self._num_ranks))
        by_rank = sorted(welcome.workers, key=lambda worker: worker.rank)
        base = peer.base if peer.way == "attach" else None
        sockets = tuple(worker.socket_id for worker in by_rank)
        self._map_orders.append(MapPeer(peer.incarnation, peer.key, base, sockets, peer.address))

    def _why_not_attach(self, peer: Peer, welcome: SchedulerWelcome) -> tuple[str, str] | None:
        """``(reason, detail)``, or None with a place in the window that is the peer's from now on."""
        if self._mode == "pull":
            return "mode", "mode is pull here"
        if peer.address is not None:
            return "other_host", f"it is at {peer.address}"
        if self._attach_off is not None:
            return "attach_off", self._attach_off
        if len(welcome.workers) != self._num_ranks:
            return "tensor_parallel", f"{len(welcome.workers)} ranks there, {self._num_ranks} here"
        base = self._window.claim(peer.num_blocks)
        if base is None:
            self._drop_idle_peers()
            base = self._window.claim(peer.num_blocks)
        if base is None:
            detail = f"{peer.num_blocks} blocks, {self._window.num_free} free; raise window_pool_factor"
            return "window_full", detail
        peer.base = base
        return None

    def _check_welcome(self, welcome: SchedulerWelcome) -> int:
        """The pool's number of blocks, the same on every rank.

        Raises:
            LayoutError: what the peer announced does not fit ours. Workers compare everything else.
        """
        num_ranks = len(welcome.workers)
        if sorted(worker.rank for worker in welcome.workers) != list(range(num_ranks)):
            raise LayoutError(f"ranks {sorted(worker.rank for worker in welcome.workers)}")
        head_slices(0, self._num_ranks, num_ranks)
        if welcome.block_size != self._block_size:
            raise LayoutError(f"block_size differs: {welcome.block_size} there, {self._block_size} here")
        for worker in welcome.workers:
            worker.pool.check()
        sizes = {worker.pool.num_blocks for worker in welcome.workers}
        if len(sizes) != 1:
            raise LayoutError(f"ranks of different sizes: {sorted(sizes)} blocks")
        return sizes.pop()

    @_locked
    def on_map_results(self, results: Iterable[MapResult]) -> None:
        """Take in the workers' answers to map orders."""
        for result in results:
            peer = self._peers.get(result.incarnation)
            if peer is None or peer.key != result.key or peer.state not in (PeerState.MAPPING, PeerState.READY):
                continue
            if result.reason is not None:
                self._fail(peer, result.reason, f"rank {result.rank}: {result.detail}")
                continue
            peer.ranks_left.discard(result.rank)
            if not peer.ranks_left and peer.state is PeerState.MAPPING:
                peer.state = PeerState.READY
                self._on_mapped(time.monotonic() - peer.started)
                assert peer.session is not None
                self._deathwatch.watch(peer.incarnation, peer.session)
                what = f"mapped at {peer.base}" if peer.way == "attach" else "to be copied from"
                if peer.address is not None:
                    what = f"to be read from {peer.address}"
                logger.info("met prefill %s: %d blocks %s", peer.engine_id, peer.num_blocks, what)

    @_locked
    def forget_failed(self) -> None:
        """Drop failed peers whose reason may change, once everybody who waited for them has been told."""
        for peer in list(self._peers.values()):
            if peer.state is PeerState.FAILED and peer.reason != "peer_refused":
                del self._peers[peer.incarnation]

    @_locked
    def take_orders(self) -> tuple[list[MapPeer], list[int]]:
        """``(pools to map, keys of peers to unmap)`` for the workers; the latter come first."""
        orders = self._map_orders, self._unmap_orders
        self._map_orders, self._unmap_orders = [], []
        return orders

    @_locked
    def give_back(self, peer: Peer, lease_id: LeaseId) -> None:
        """A loan of this peer is over: say so in its ledger; if it was the last one of a dead peer, retire that."""
        if peer.leases is not None:
            peer.leases.release(lease_id)
        peer.num_loans -= 1
        is_known = self._peers.get(peer.incarnation) is peer
        if is_known and peer.num_loans == 0 and peer.session is not None and peer.is_gone():
            # This engine may be about to fall asleep, so it is not left to the next step.
            self._deathwatch.watch(peer.incarnation, peer.session)

    @property
    def is_settling(self) -> bool:
        """Whether a handshake or a mapping is under way: bounded by the handshake timeout."""
        with self.lock:
            return any(peer.state in {PeerState.CONNECTING, PeerState.MAPPING} for peer in self._peers.values())

    def close(self) -> None:
        """End every session."""
        self._deathwatch.close()
        with self.lock:
            for peer in self._peers.values():
                peer.close()
            self._peers.clear()
        self._dialer.close()

    def _retire(self, incarnation: str) -> None:
        """Death watch's thread: give back a dead peer's window if nothing of it is in use; else the scheduler will."""
        with self.lock:
            peer = self._peers.get(incarnation)
            if peer is None or peer.state is not PeerState.READY or peer.num_loans or not peer.is_gone():
                return
            del self._peers[incarnation]
        logger.info("prefill %s is gone and nothing of it is in use: unmapped", peer.engine_id)
        is_unmapped = all(self._order_unmap(worker, peer.key) for worker in self._workers)
        with self.lock:
            if not is_unmapped:
                self._unmap_orders.append(peer.key)
            # Only now may the window's range be given to somebody else.
            if peer.base >= 0:
                self._window.release(peer.base, peer.num_blocks)
            self._close(peer)

    def _order_unmap(self, worker: OwnWorker, key: int) -> bool:
        order = RetirePool(worker.control_token, key)
        path = socket_path(self._directory, worker.socket_id)
        try:
            _, _, session = open_session(path, order, Done, 0, self._timeout_seconds)
        except (PeerUnreachableError, PeerRefusedError, ProtocolError, OSError) as error:
            logger.warning("a worker did not unmap a dead peer's pool, its next step will: %s", error)
            return False
        session.close()
        return True

    def _close(self, peer: Peer) -> None:
        if peer.session is not None:
            self._deathwatch.forget(peer.session)
        peer.close()

    def _forget_oldest_refused(self) -> None:
        refused = [peer for peer in self._peers.values() if peer.state is PeerState.FAILED]
        for peer in refused[: MAX_PEERS // 2]:
            del self._peers[peer.incarnation]

    def _drop_idle_peers(self) -> None:
        for peer in list(self._peers.values()):
            if peer.state is PeerState.READY and peer.num_loans == 0 and peer.base >= 0:
                self._remove(peer)

    def _remove(self, peer: Peer) -> None:
        del self._peers[peer.incarnation]
        self._order_to_unmap(peer)
        self._close(peer)

    def _fail(self, peer: Peer, reason: str, detail: str) -> None:
        logger.warning("cannot take over from prefill %s: %s (%s)", peer.engine_id or peer.incarnation, reason, detail)
        is_ordered = peer.state in (PeerState.MAPPING, PeerState.READY)
        peer.state = PeerState.FAILED
        peer.reason = reason
        if is_ordered:
            self._order_to_unmap(peer)
        self._close(peer)

    def _order_to_unmap(self, peer: Peer) -> None:
        order = next((order for order in self._map_orders if order.key == peer.key), None)
        if order is not None:
            self._map_orders.remove(order)
        else:
            self._unmap_orders.append(peer.key)
        if peer.base >= 0:
            self._window.release(peer.base, peer.num_blocks)
            peer.base = -1
