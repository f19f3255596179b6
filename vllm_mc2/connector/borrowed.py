"""Borrowed blocks: a peer's blocks as prefix-cache hits in vLLM's own block pool.

A :class:`Loan` is a claimed lease on the decode side. Its full blocks are entered into vLLM's prefix cache under the
hashes of the request that brought the ticket; from there the scheduler finds them by itself, so that allocation, sharing,
chunking and preemption need no special case. The rules (scheduler thread only):

* A borrowed block carries ``BIAS`` references of ours on top of vLLM's, so that it never looks free: at 0 vLLM would look
  for it in its free queue. The bias is large, since cascade attention compares counts with the number of requests.
* Loans that cover the same remote block share one object; it stays in the prefix cache while any of them has users.
* When a loan's last user ends, its blocks leave the prefix cache at once. A block that another request still reads keeps
  the loan until vLLM gives that reference back (:meth:`BorrowedBlocks.free_blocks`).
* The lease is released only after all of its blocks are out of the prefix cache and unread: never the other way round.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from vllm_mc2.connector import compat
from vllm_mc2.connector.compat import LentBlock
from vllm_mc2.leases import LeaseId

BIAS = 1 << 20


@dataclass(eq=False)
class Loan:
    """A lease that decode has claimed, with the requests that use it."""

    incarnation: str
    lease_id: LeaseId
    num_tokens: int
    """Tokens whose KV the lease covers."""
    block_ids: tuple[int, ...]
    """Global ids, one per block of the prompt, the partly filled last one included; one cache group's after the other's."""
    users: set[str] = field(default_factory=set)
    owned: set[int] = field(default_factory=set)
    """Blocks that are in the prefix cache on behalf of this loan."""
    lingering: set[int] = field(default_factory=set)
    """Blocks that outlive the last user, since another request reads them."""
    is_over: bool = False


class BorrowedBlocks:
    """All borrowed blocks of an engine. ``release(loan)`` is called once for each loan, when nothing uses it any more."""

    def __init__(self, block_pool: BlockPool, block_size: int, release: Callable[[Loan], None]) -> None:
        self._pool = block_pool
        self._block_size = block_size
        self._release = release
        self._borrowed: dict[int, LentBlock] = {}

    def __len__(self) -> int:
        return len(self._borrowed)

    def attach(self, loan: Loan, block_hashes: Sequence[bytes]) -> bool:
        """Make the loan's blocks hits for ``block_hashes`` (one per full block, from the first).

        A position that is cached already keeps its block. Calling it again restores what has left the cache.

        Returns:
            False when a block already stands for another prefix, which two honest tickets never cause.
        """
        # Runs in the scheduler's step, for thousands of blocks: what can be had outside the loop is.
        known, owned, only_this, nobody = self._borrowed, loan.owned, (loan,), ()
        cache, num_tokens = compat.PrefixCache(self._pool), 0
        find, insert, key_suffix = cache.find, cache.insert, cache.key_suffix
        for block_id, block_hash in zip(loan.block_ids, block_hashes, strict=False):
            num_tokens += self._block_size
            key = block_hash + key_suffix
            found = find(key)
            if found is not None and found.block_id != block_id:
                continue
            block = known.get(block_id)
            if block is None:
                block = known[block_id] = LentBlock(block_id, BIAS, key, num_tokens, pool=self)
                block.owners, block.lingering = only_this, nobody
                insert(key, block)
            else:
                if found is None and not cache.enter(block, key, num_tokens):
                    return False
                if loan not in block.owners:
                    block.owners += only_this
            owned.add(block_id)
        return True

    def end(self, loan: Loan) -> None:
        """The loan's last user has ended: take its blocks out of the prefix cache, and release it as soon as none is read."""
        loan.is_over = True
        for block_id in loan.owned:
            block = self._borrowed[block_id]
            if len(block.owners) > 1:
                # Another owner's lease keeps the block where it is.
                block.owners = tuple(owner for owner in block.owners if owner is not loan)
                continue
            block.owners = ()
            compat.leave_prefix_cache(self._pool, block)
            if block.ref_cnt == BIAS:
                self._forget(block)
            else:
                block.lingering += (loan,)
                loan.lingering.add(block_id)
        loan.owned.clear()
        if not loan.lingering:
            self._release(loan)

    def free_blocks(self, blocks: Sequence[KVCacheBlock]) -> None:
        """VLLM gives back references (``BlockPool.free_blocks``, for blocks whose ``pool`` is this object)."""
        for block in blocks:
            block.ref_cnt -= 1
            if block.ref_cnt == BIAS:
                lent = self._borrowed[block.block_id]
                if lent.owners:
                    self._let_go(lent)
                else:
                    self._forget(lent)

    def _forget(self, block: LentBlock) -> None:
        """Nobody reads the block and nobody wants it hit any more."""
        del self._borrowed[block.block_id]
        self._let_go(block)

    def _let_go(self, block: LentBlock) -> None:
        """The block is not read any more: loans that waited only for that are done."""
        for loan in block.lingering:
            loan.lingering.discard(block.block_id)
            if not loan.lingering:
                self._release(loan)
        block.lingering = ()
