"""Prefill's promise, checked on prefill's own side: the pages of a lease do not change while it lasts."""

import inspect
import zlib
from collections.abc import Callable
from typing import Any

from tests.connector.rig import RigEngine
from vllm_mc2.leases import LeaseBook


class PageWatch:
    """Wraps this process's lease book: remembers a checksum of the pages at publish, compares it when the lease ends."""

    def __init__(self, complain: Callable[..., None]) -> None:
        self._complain = complain
        self._engine: RigEngine | None = None
        self._live: dict[tuple[int, int], tuple[list[int], int]] = {}
        self._num_ended = 0
        self.offer_seconds: float | None = None
        """In place of the configured offer timeout."""
        self._wrap_publish()
        self._wrap_sweep()

    def watch(self, engine: RigEngine) -> None:
        """Its memory exists from here on."""
        self._engine = engine

    def _wrap_publish(self) -> None:
        publish = LeaseBook.publish
        signature = inspect.signature(publish)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            call = signature.bind(*args, **kwargs)
            if self.offer_seconds is not None:
                call.arguments["timeout_seconds"] = self.offer_seconds
            block_ids = list(call.arguments["block_ids"])
            checksum = self._checksum(block_ids)
            ticket = publish(*call.args, **call.kwargs)
            if ticket is not None:
                self._live[ticket.lease_id] = block_ids, checksum
            return ticket

        LeaseBook.publish = wrapper  # type: ignore[method-assign]

    def _wrap_sweep(self) -> None:
        sweep = LeaseBook.sweep

        def wrapper(book: Any) -> Any:
            ended = sweep(book)
            for lease in ended:
                self._check(lease.lease_id, f"ended as {lease.reason}")
                del self._live[lease.lease_id]
            self._num_ended += len(ended)
            return ended

        LeaseBook.sweep = wrapper  # type: ignore[method-assign, assignment]

    def take_ended(self) -> int:
        """Leases that ended since the last call."""
        count, self._num_ended = self._num_ended, 0
        return count

    def check_live(self) -> None:
        """Compare the pages of all live leases."""
        for lease_id in self._live:
            self._check(lease_id, "live")

    def _check(self, lease_id: tuple[int, int], state: str) -> None:
        block_ids, checksum = self._live[lease_id]
        if self._checksum(block_ids) != checksum:
            self._complain(what=f"pages of lease {lease_id} ({state}) changed: blocks {block_ids}")

    def _checksum(self, block_ids: list[int]) -> int:
        assert self._engine is not None
        total = 0
        for tensor in self._engine.kv.values():
            total = zlib.crc32(tensor[block_ids].numpy().tobytes(), total)
        return total
