"""Prefill's scheduler half: publish a finished request's block table, keep its blocks, give them back.

The request itself ends at once; only the blocks stay, pinned by one reference each. Nothing polls: ended leases are noticed
at the next scheduler hook, since an idle engine needs no blocks. Scheduler thread, but for the two session callbacks.
"""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import RequestStatus

from vllm_mc2.config import MC2Config
from vllm_mc2.connector import compat
from vllm_mc2.connector.metrics import MC2Stats
from vllm_mc2.leases import LeaseBook, new_token
from vllm_mc2.protocol import (
    PROTOCOL_VERSION,
    Message,
    Refusal,
    SchedulerHello,
    SchedulerWelcome,
    WorkerEndpoint,
    new_incarnation,
    ticket_params,
)
from vllm_mc2.session import Answer, SessionServer

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.mc2.prefill")

_FINISHED = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


class PrefillHalf:
    """Leases of one engine, and the listener where decodes get the index table and their ledger."""

    def __init__(
        self,
        config: MC2Config,
        engine_id: str,
        directory: Path,
        workers: tuple[WorkerEndpoint, ...],
        block_pool: BlockPool,
        block_size: int,
        max_model_len: int,
        stats: MC2Stats,
    ) -> None:
        self._config = config
        self._engine_id = engine_id
        self._workers = workers
        self._block_pool = block_pool
        self._block_size = block_size
        self._stats = stats
        self._ledgers: dict[int, int] = {}
        """Session key -> ledger id; the session thread's alone."""
        self.incarnation = new_incarnation()
        max_blocks = -(-max_model_len // block_size)
        self.book: LeaseBook[list[KVCacheBlock]] = LeaseBook(self.incarnation, config.num_lease_slots, max_blocks)
        self._server = SessionServer(directory, self.incarnation, self._on_hello, self._on_close)

    # --- session thread ---

    def _on_hello(self, key: int, hello: Message) -> Answer:
        if not isinstance(hello, SchedulerHello):
            return Answer(Refusal("message", type(hello).__name__, "SchedulerHello"), keep_open=False)
        if hello.protocol != PROTOCOL_VERSION:
            refusal = Refusal("protocol", str(hello.protocol), str(PROTOCOL_VERSION))
            return Answer(refusal, keep_open=False)
        if hello.incarnation != self.incarnation:
            return Answer(Refusal("incarnation", hello.incarnation, self.incarnation), keep_open=False)
        # Registered before it is handed out: from here on no lease can end without this ledger being read.
        ledger_id, ledger_fd = self.book.add_ledger()
        self._ledgers[key] = ledger_id
        logger.info("decode %s has opened a session", hello.engine_id)
        welcome = SchedulerWelcome(self._engine_id, self._block_size, self._workers)
        return Answer(welcome, (self.book.index_fd, ledger_fd))

    def _on_close(self, key: int) -> None:
        ledger_id = self._ledgers.pop(key, None)
        if ledger_id is not None:
            logger.info("a decode is gone; what only it held ends")
            self.book.drop_ledger(ledger_id)

    # --- scheduler thread ---

    def reap(self) -> None:
        """Unpin the blocks of leases that have ended."""
        for lease in self.book.sweep():
            # Last block first, as vLLM frees a request's blocks: the end of a prefix is evicted before its start.
            self._block_pool.free_blocks(reversed(lease.payload))
            self._stats.add("leases_ended", 1, lease.reason)
            if lease.reason == "expired":
                logger.warning("ticket %08x-%08x was not claimed in time", *lease.lease_id)

    def request_finished(self, request: "Request", block_ids: list[int]) -> dict[str, Any] | None:
        """``kv_transfer_params`` for the response of a prefill request, with a ticket unless there can be none.

        ``block_ids`` covers the computed tokens. Called before vLLM frees the blocks.
        """
        if compat.transfer_params(request).get("do_remote_decode") is not True or request.status not in _FINISHED:
            return None
        num_tokens = min(request.num_prompt_tokens, request.num_computed_tokens)
        block_ids = block_ids[: -(-num_tokens // self._block_size)]
        token = new_token()
        digest = compat.request_digest(request, token, num_tokens)
        problem = self._why_not(num_tokens, block_ids)
        if problem is not None or digest is None:
            self._refuse(request, problem or "its prompt has no token ids")
            return None
        blocks = [self._block_pool.blocks[block_id] for block_id in block_ids]
        self._block_pool.touch(blocks)
        ticket = self.book.publish(token, digest, num_tokens, block_ids, self._config.offer_timeout_seconds, blocks)
        if ticket is None:
            self._block_pool.free_blocks(reversed(blocks))
            self._refuse(request, "no free lease slot; raise num_lease_slots")
            return None
        self._stats.add("leases_published")
        logger.debug("request %s is lease %s-%s", request.request_id, ticket.slot, ticket.generation)
        return ticket_params(ticket, self._engine_id, len(self._workers))

    def _why_not(self, num_tokens: int, block_ids: list[int]) -> str | None:
        if num_tokens == 0 or len(block_ids) * self._block_size < num_tokens:
            return "its blocks are gone"
        # 0 is the null block; what is beyond the pool is borrowed from another engine and not ours to lend.
        if not all(0 < block_id < len(self._block_pool.blocks) for block_id in block_ids):
            return "its blocks are not all our own"
        return None

    def _refuse(self, request: "Request", problem: str) -> None:
        self._stats.add("leases_refused")
        logger.warning("request %s gets no ticket: %s", request.request_id, problem)

    def close(self) -> None:
        """Stop listening. Decodes keep the memory that they have mapped."""
        self._server.close()
        self.book.close()
