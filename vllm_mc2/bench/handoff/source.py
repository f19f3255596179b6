"""The contiguous KV that every copying way reads: one shared pool, made by the first pair's sender, mapped by the others.

Contiguous per request, in the same pages as our pools, filled in advance: as easy to copy as memory can be.
"""

from typing import Any

import torch

from vllm_mc2._native import AddressRange, Pool
from vllm_mc2.bench.handoff.cases import BLOCK_BYTES, Case
from vllm_mc2.bench.handoff.pattern import CONTIGUOUS_UID, WORD_BYTES, Pattern, stamped


class ContiguousSource:
    """Request ``r`` of a case is bytes ``[r * request_bytes, (r + 1) * request_bytes)``."""

    def __init__(self, num_bytes: int, fd: int | None = None) -> None:
        """Make it, fill it and seal it; or map somebody else's, read-only, with ``fd``, which stays the caller's.

        Raises:
            OSError: too little memory.
        """
        self.num_bytes = num_bytes
        self._range = AddressRange(num_bytes)
        self._pool: Pool | None = None
        self.pages = ""
        if fd is None:
            self._pool = Pool(num_bytes, name="mc2-bench-source")
            self._range.map_pool(0, self._pool, 0, num_bytes)
            self._pool.seal()
            self.pages = f"{self._pool.huge_bytes / self._pool.num_bytes:.0%} in 2 MiB pages ({self._pool.method})"
        else:
            self._range.map_peer(0, fd, 0, num_bytes)
            self._range.prefault(0, num_bytes)
        self.bytes: Any = torch.frombuffer(self._range.buffer(), dtype=torch.uint8)
        self.words: Any = self.bytes.view(torch.int64)
        if fd is None:
            Pattern(BLOCK_BYTES).fill(self.words.view(-1, BLOCK_BYTES // WORD_BYTES), CONTIGUOUS_UID)

    @property
    def fd(self) -> int:
        """The descriptor for the other processes; borrowed. Only where it was made."""
        assert self._pool is not None
        return self._pool.fd

    @property
    def address(self) -> int:
        """Of the first byte, in this process."""
        return self._range.address

    def stamp(self, case: Case, stamp: int, pattern: Pattern) -> None:
        """Change the first and the last word of every request."""
        for request in range(case.batch):
            (first, first_word), (last, last_word) = end_words(case, request, pattern)
            self.words[first] = stamped(first_word, stamp)
            self.words[last] = stamped(last_word, stamp)


def end_words(case: Case, request: int, pattern: Pattern) -> tuple[tuple[int, int], tuple[int, int]]:
    """``(index, word without stamp)`` of the first and the last word of a request in contiguous memory."""
    blocks = case.request_bytes // BLOCK_BYTES
    first_block, last_block = request * blocks, (request + 1) * blocks - 1
    words = case.request_bytes // WORD_BYTES
    return (
        (request * words, pattern.first(CONTIGUOUS_UID + first_block)),
        ((request + 1) * words - 1, pattern.last(CONTIGUOUS_UID + last_block)),
    )
