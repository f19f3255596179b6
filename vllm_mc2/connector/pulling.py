"""Pull, in a worker: copies a request's blocks out of a peer's mapped pool into our own KV cache, beside the forward pass.

Orders come with a step and are done in their order on one thread, which sleeps otherwise; the copying itself is native, uses
several threads or streams and does not hold the GIL. vLLM keeps a request waiting, and its blocks reserved, until its id is
reported: so every order is answered, whatever becomes of it.
"""

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from vllm_mc2.connector.metadata import PullOrder
from vllm_mc2.errors import MC2Error
from vllm_mc2.layout import PoolLayout

logger = logging.getLogger("vllm.mc2.pulling")


class PullSource(Protocol):
    """One peer, as far as this worker copies from it."""

    def copy(self, own_ids: Sequence[int], peer_ids: Sequence[int]) -> None:
        """Copy these blocks, and return when they are there. Puller's thread.

        Raises:
            MC2Error, ValueError: they are not, and nothing is written to them any more.
        """
        ...

    def mapped(self) -> list[tuple[int, PoolLayout]]:
        """``(-1, layout)`` of what is mapped outside the window."""
        ...

    def close(self) -> None:
        """Unmap. No copy is running."""
        ...


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

    def __init__(self, results: PullResults) -> None:
        self._results = results
        self._sources: dict[int, PullSource] = {}
        self._orders: queue.SimpleQueue[tuple[PullOrder, Callable[[], None] | None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        """Held while one order is done, so that nothing is unmapped under it."""
        self._thread: threading.Thread | None = None

    def add_source(self, key: int, source: PullSource) -> None:
        """From now on orders may name ``key``."""
        with self._lock:
            self._sources[key] = source

    def remove_source(self, key: int, source: PullSource | None = None) -> None:
        """Forget a peer and unmap it; only if it still is ``source``, where that is given. Waits for an order that is being
        done.
        """
        with self._lock:
            found = self._sources.get(key)
            if found is None or (source is not None and found is not source):
                return
            del self._sources[key]
            found.close()

    def mapped(self) -> list[tuple[int, PoolLayout]]:
        """``(-1, layout)`` of each pool that is mapped outside the window, for onlookers."""
        with self._lock:
            return [row for source in self._sources.values() for row in source.mapped()]

    def submit(self, order: PullOrder, fence: Callable[[], None] | None = None) -> None:
        """Begin to copy, once ``fence`` has returned. The thread starts with the first order: who never pulls has none."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="mc2-pull", daemon=True)
            self._thread.start()
        self._orders.put((order, fence))

    def _run(self) -> None:
        while (job := self._orders.get()) is not None:
            order, fence = job
            try:
                if fence is not None:
                    fence()
                self._copy(order)
            except (KeyError, ValueError, MC2Error) as error:
                logger.warning("request %s: its blocks could not be copied: %s", order.request_id, error)
                self._results.add_failure(order)
            else:
                self._results.add_success(order)

    def _copy(self, order: PullOrder) -> None:
        # Apart, so that the waiting thread keeps no peer's memory mapped by its local variables.
        with self._lock:
            self._sources[order.key].copy(order.own_ids, order.peer_ids)

    def close(self) -> None:
        """End the thread after the order that is being done."""
        self._orders.put(None)
