"""Pull, in a worker: copies a request's blocks out of a peer's mapped pool into our own KV cache, beside the forward pass.

Orders come with a step and are done in their order on one thread, which sleeps otherwise; the copying itself is native, uses
several threads and does not hold the GIL. vLLM keeps a request waiting, and its blocks reserved, until its id is reported:
so every order is answered, whatever becomes of it.
"""

import logging
import os
import queue
import threading
from collections.abc import Sequence
from typing import NamedTuple

from vllm_mc2.connector.metadata import PullOrder
from vllm_mc2.layout import PoolLayout
from vllm_mc2.memory import Copier, WorkerMemory

logger = logging.getLogger("vllm.mc2.pulling")


class PullSource(NamedTuple):
    """One peer, as far as this worker copies from it."""

    base: int | None
    """Where in our window it is mapped, or None."""
    copiers: Sequence[Copier]
    """One for each of the peer's workers whose heads we have."""
    memories: Sequence[WorkerMemory]
    """Where it is mapped if not in the window."""


class PullResults:
    """What has become of a worker's orders. Any thread."""

    def __init__(self) -> None:
        self._finished: set[str] = set()
        self._failed: dict[str, list[int]] = {}
        self._lock = threading.Lock()

    def add_success(self, order: PullOrder) -> None:
        """The request's blocks are there."""
        with self._lock:
            self._finished.add(order.request_id)

    def add_failure(self, order: PullOrder) -> None:
        """They are not, and nothing writes to them any more."""
        with self._lock:
            self._failed[order.request_id] = order.own_ids

    def take(self) -> tuple[set[str], dict[str, list[int]]]:
        """``(finished, failed)`` requests since the last call; a failed one comes with its own blocks, and is not among the
        finished.
        """
        with self._lock:
            results = self._finished, self._failed
            self._finished, self._failed = set(), {}
            return results


class Puller:
    """The pulls of one worker from peers on this host. Any thread may call."""

    def __init__(self, num_threads: int, results: PullResults) -> None:
        """``num_threads``: how many copy at a time; never more than there are processors for this process."""
        self._results = results
        self._num_threads = min(num_threads, len(os.sched_getaffinity(0)))
        self._sources: dict[int, PullSource] = {}
        self._orders: queue.SimpleQueue[PullOrder | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        """Held while one order is done, so that nothing is unmapped under it."""
        self._thread: threading.Thread | None = None

    def add_source(self, key: int, source: PullSource) -> None:
        """From now on orders may name ``key``."""
        with self._lock:
            self._sources[key] = source

    def remove_source(self, key: int) -> PullSource | None:
        """Forget a peer, and return what it was. Waits for an order that is being done."""
        with self._lock:
            return self._sources.pop(key, None)

    def mapped(self) -> list[tuple[int, PoolLayout]]:
        """``(-1, layout)`` of each pool that is mapped outside the window, for onlookers."""
        with self._lock:
            memories = [memory for source in self._sources.values() for memory in source.memories]
        return [(-1, layout) for memory in memories for _, layout in memory.mapped_peers()]

    def submit(self, order: PullOrder) -> None:
        """Begin to copy; the thread starts with the first order, so that who never pulls has none."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="mc2-pull", daemon=True)
            self._thread.start()
        self._orders.put(order)

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            try:
                self._copy(order)
            except (KeyError, ValueError) as error:
                logger.warning("request %s: its blocks could not be copied: %s", order.request_id, error)
                self._results.add_failure(order)
            else:
                self._results.add_success(order)

    def _copy(self, order: PullOrder) -> None:
        # Apart, so that the waiting thread keeps no peer's memory mapped by its local variables.
        with self._lock:
            for copier in self._sources[order.key].copiers:
                copier.copy(order.own_ids, order.peer_ids, self._num_threads)

    def close(self) -> None:
        """End the thread after the order that is being done."""
        self._orders.put(None)
