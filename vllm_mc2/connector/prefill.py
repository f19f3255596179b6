"""Prefill's scheduler half: publish a finished request's block table, keep its blocks, give them back.

The request itself ends at once; only the blocks stay, pinned by one reference each. Nothing polls: ended leases are noticed
at the next scheduler hook, since an idle engine needs no blocks. Scheduler thread, but for the two session callbacks.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import RequestStatus

from vllm_mc2.config import MC2Config
from vllm_mc2.connector import compat
from vllm_mc2.connector.metrics import MC2Stats
from vllm_mc2.connector.remote_prefill import RemotePrefill
from vllm_mc2.errors import ConfigError
from vllm_mc2.leases import LeaseBook, LeaseId
from vllm_mc2.network.secret import address_proof
from vllm_mc2.protocol import (
    PROTOCOL_VERSION,
    CountsHello,
    InspectHello,
    Message,
    Refusal,
    SchedulerHello,
    SchedulerWelcome,
    WorkerEndpoint,
    WorkerHello,
    new_incarnation,
    new_token,
)
from vllm_mc2.session import Answer, SessionServer
from vllm_mc2.ticket import LOCAL_ADDRESS, TcpAddress, ticket_params

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
        windows: tuple[int | None, ...],
        max_model_len: int,
        stats: MC2Stats,
        network: RemotePrefill | None = None,
    ) -> None:
        """``windows``: of each cache group, which has a block table of its own for every request. ``network``: for decodes on
        other hosts.

        Raises:
            ConfigError: the sockets or ``tcp_address`` cannot be listened on.
        """
        self._windows = windows
        self._config = config
        self._engine_id = engine_id
        self._workers = workers
        self._block_pool = block_pool
        self._block_size = block_size
        self._stats = stats
        self._lent: Counter[int] = Counter()
        """Block id -> number of leases that cover it; a block that is not lent is not in it."""
        self._ledgers: dict[int, tuple[int, str]] = {}
        """Session key -> ledger id and decode's engine id; of the threads that serve sessions."""
        self._onlookers: dict[int, int] = {}
        """The same of workers on other hosts, which only ask."""
        self._address, self._address_proof = LOCAL_ADDRESS, None
        self.on_inspect: Callable[[InspectHello | CountsHello], Answer] | None = None
        """Answers an onlooker, on the session thread. Set once, by who can see the whole engine."""
        self.incarnation = new_incarnation()
        max_blocks = len(windows) * -(-max_model_len // block_size)
        num_blocks = len(block_pool.blocks) - 1  # without the null block
        # However much is lent, a request of any length can still be computed: lending must never stop prefill.
        self._max_pinned = num_blocks - max_blocks
        self._max_lent = min(int(config.max_lent_fraction * num_blocks), self._max_pinned)
        if config.mode == "attach":
            self._max_pinned = self._max_lent
        if self._max_lent < max_blocks:
            logger.warning(
                "of %d KV blocks only %d can be lent, since a request of %d tokens needs %d; more KV memory or a smaller"
                " --max-model-len lends more", num_blocks, max(0, self._max_lent), max_model_len, max_blocks,
            )  # fmt: skip
        self.book: LeaseBook[list[KVCacheBlock]] = LeaseBook(self.incarnation, config.num_lease_slots, max_blocks)
        self._server = SessionServer(directory, self.incarnation, self._on_hello, self._on_close)
        self._network = network
        if network is not None:
            try:
                self._address = network.listen(self._on_remote_hello, self._on_close)
            except ConfigError:
                self.close()
                raise
            self._address_proof = address_proof(network.listening.secret, self.incarnation, self._address)
            logger.info("prefill %s listens for other hosts at %s", engine_id, self._address)

    # --- session thread ---

    def _on_hello(self, key: int, hello: Message) -> Answer:
        if isinstance(hello, InspectHello | CountsHello) and self.on_inspect is not None:
            return self.on_inspect(hello)
        if not isinstance(hello, SchedulerHello):
            return Answer(Refusal("message", type(hello).__name__, "SchedulerHello"), keep_open=False)
        if hello.protocol != PROTOCOL_VERSION:
            refusal = Refusal("protocol", str(hello.protocol), str(PROTOCOL_VERSION))
            return Answer(refusal, keep_open=False)
        if hello.incarnation != self.incarnation:
            return Answer(Refusal("incarnation", hello.incarnation, self.incarnation), keep_open=False)
        # Registered before it is handed out: from here on no lease can end without this ledger being read.
        ledger_id, ledger_fd = self.book.add_ledger()
        self._ledgers[key] = ledger_id, hello.engine_id
        logger.info("decode %s has opened a session", hello.engine_id)
        welcome = SchedulerWelcome(self._engine_id, self._block_size, self._workers)
        return Answer(welcome, (self.book.index_fd, ledger_fd))

    def _on_remote_hello(self, key: int, hello: Message) -> Answer:
        """The network's thread: as above, but for decodes on other hosts, also for their workers."""
        if not isinstance(hello, WorkerHello):
            if isinstance(hello, SchedulerHello):
                return self._on_hello(key, hello)
            return Answer(Refusal("message", type(hello).__name__, "SchedulerHello"), keep_open=False)
        assert self._network is not None
        answer = self._network.grant(hello)
        if isinstance(answer, Refusal):
            return Answer(answer, keep_open=False)
        # Only to ask whether a lease still is: it claims nothing.
        self._onlookers[key], ledger_fd = self.book.add_ledger()
        return Answer(answer, (self.book.index_fd, ledger_fd))

    def _on_close(self, key: int) -> None:
        if key in self._onlookers:
            self.book.drop_ledger(self._onlookers.pop(key))
        ledger = self._ledgers.pop(key, None)
        if ledger is not None:
            logger.info("decode %s is gone; what only it held ends", ledger[1])
            self.book.drop_ledger(ledger[0])

    @property
    def num_lent_blocks(self) -> int:
        """Blocks under leases, each counted once. Any thread."""
        return len(self._lent)

    def num_lent_without(self, ended: Iterable[LeaseId]) -> int:
        """As :attr:`num_lent_blocks`, but of what is lent only until the next step takes it back. Any thread."""
        given_back = Counter(block.block_id for lease_id in ended for block in self.book.payload(lease_id) or ())
        num_back = sum(self._lent.get(block_id, 0) == count for block_id, count in given_back.items())
        return max(0, len(self._lent) - num_back)

    @property
    def num_rejected(self) -> int:
        """Connections that the listeners turned away so far. Any thread."""
        return self._server.num_rejected + (self._network.num_rejected if self._network is not None else 0)

    @property
    def address(self) -> TcpAddress | None:
        """Where decodes on other hosts find it, if it lets them."""
        return None if self._address_proof is None else self._address

    def decodes(self) -> dict[int, tuple[int, str]]:
        """Ledger id -> ``(pid, engine id)`` of the decodes that have a session. Session thread."""
        ledgers = self._ledgers.copy()  # the network's thread may change it meanwhile
        return {ledger_id: (self._server.peer_pid(key), name) for key, (ledger_id, name) in ledgers.items()}

    # --- scheduler thread ---

    def reap(self) -> None:
        """Unpin the blocks of leases that have ended."""
        for lease in self.book.sweep():
            # Last block first, as vLLM frees a request's blocks: the end of a prefix is evicted before its start.
            self._block_pool.free_blocks(reversed(lease.payload))
            self._take_back(lease.payload)
            self._stats.add("leases_ended", 1, lease.reason)
            if lease.reason == "expired":
                logger.warning("ticket %08x-%08x was not claimed in time", *lease.lease_id)

    def _take_back(self, blocks: list[KVCacheBlock]) -> None:
        for block in blocks:
            self._lent[block.block_id] -= 1
            if not self._lent[block.block_id]:
                del self._lent[block.block_id]

    def request_finished(self, request: "Request", tables: Sequence[list[int]]) -> dict[str, Any] | None:
        """``kv_transfer_params`` for the response of a prefill request, with a ticket unless there can be none.

        ``tables``: the block ids of each cache group, which cover the computed tokens; 0 where a window has passed. Called
        before vLLM frees the blocks.
        """
        if compat.transfer_params(request).get("do_remote_decode") is not True or request.status not in _FINISHED:
            return None
        num_tokens = min(request.num_prompt_tokens, request.num_computed_tokens)
        num_blocks = -(-num_tokens // self._block_size)
        block_ids = self._tables_for_decode(request, tables, num_blocks, num_tokens)
        own_ids = [block_id for block_id in block_ids if block_id or self._windows == (None,)]
        token = new_token()
        digest = compat.request_digest(request, token, num_tokens)
        num_lent = len(self._lent) + sum(block_id not in self._lent for block_id in own_ids)
        problem = None
        if num_tokens == 0 or len(block_ids) != len(self._windows) * num_blocks:
            problem = "its blocks are gone"
        problem = problem or self._why_not(own_ids, num_lent)
        if problem is not None or digest is None:
            self._refuse(request, problem or "its prompt has no token ids")
            return None
        blocks = [self._block_pool.blocks[block_id] for block_id in own_ids]
        self._block_pool.touch(blocks)
        # A copy takes milliseconds, where use in place lasts as long as decode's answer.
        is_copy_wanted = self._config.mode == "pull" or num_lent > self._max_lent
        ticket = self.book.publish(
            token,
            digest,
            num_tokens,
            block_ids,
            self._config.offer_timeout_seconds,
            blocks,
            is_copy_wanted=is_copy_wanted,
        )
        if ticket is None:
            self._block_pool.free_blocks(reversed(blocks))
            self._refuse(request, "no free lease slot; raise num_lease_slots")
            return None
        self._lent.update(own_ids)
        self._stats.add("leases_published")
        logger.debug("request %s is lease %s-%s", request.request_id, ticket.slot, ticket.generation)
        if self._address_proof is not None:
            ticket = msgspec.structs.replace(ticket, address_proof=self._address_proof)
        return ticket_params(ticket, self._engine_id, len(self._workers), self._address)

    def _tables_for_decode(
        self, request: "Request", tables: Sequence[list[int]], num_blocks: int, num_tokens: int
    ) -> list[int]:
        """The block ids of all groups, one group's after the other's.

        Decode computes the prompt's last token once more, so its window begins one token before the one that vLLM has just
        moved on to here. A block that was given up for this one token is still cached.
        """
        block_ids = []
        for group, (table, window) in enumerate(zip(tables, self._windows, strict=True)):
            lent = table[:num_blocks]
            first = 0 if window is None else max(0, num_tokens - window) // self._block_size
            if first < len(lent) and not lent[first]:
                lent[first] = compat.cached_block_id(self._block_pool, request, first, group)
            block_ids += lent
        return block_ids

    def _why_not(self, block_ids: list[int], num_lent: int) -> str | None:
        # 0 is the null block; what is beyond the pool is borrowed from another engine and not ours to lend.
        if not all(0 < block_id < len(self._block_pool.blocks) for block_id in block_ids):
            return "its blocks are not all our own"
        if self._server.failure is not None:
            return f"decodes cannot reach this engine any more, restart it ({self._server.failure})"
        if num_lent > self._max_pinned:
            return f"{len(self._lent)} blocks are lent already, and a request of the longest length must still fit"
        return None

    def _refuse(self, request: "Request", problem: str) -> None:
        self._stats.add("leases_refused")
        logger.warning("request %s gets no ticket: %s", request.request_id, problem)

    def close(self) -> None:
        """Stop listening. Decodes keep the memory that they have mapped."""
        self._server.close()
        if self._network is not None:
            self._network.close()
        self.book.close()
