"""Bytes that both sides can compute: every 64-bit word of every block is different from that of any other block.

``row(uid)[i] = i * A + uid * B`` in 64-bit arithmetic that wraps around. A stamp is added to the first and the last word of
each request, a new one for each repeat, so that bytes left over from an earlier transfer are found out.
"""

import mmap
from typing import Any

import torch

from vllm_mc2.bench.handoff.cases import BLOCK_BYTES

WORD_BYTES = 8
_A = 0x9E3779B97F4A7C15 - (1 << 64)
_B = 0xC2B2AE3D27D4EB4F - (1 << 64)
_CHUNK_BYTES = 4 << 20
CONTIGUOUS_UID = 1 << 40
"""Where the rows of the contiguous source begin, far from those of any cache."""


class Pattern:
    """Fills and checks rows of one width. Its scratch memory is allocated once, so that a check does not look like KV."""

    def __init__(self, row_bytes: int) -> None:
        self.row_words = row_bytes // WORD_BYTES
        self._rows = max(1, _CHUNK_BYTES // row_bytes)
        self._template = torch.arange(self.row_words, dtype=torch.int64) * _A
        self._expected = torch.empty((self._rows, self.row_words), dtype=torch.int64)
        self._found = torch.empty((self._rows, self.row_words), dtype=torch.int64)
        self._expected.zero_()
        self._found.zero_()

    def first(self, uid: int) -> int:
        """The first word of a row."""
        return _wrap(uid * _B)

    def last(self, uid: int) -> int:
        """The last word of a row."""
        return _wrap((self.row_words - 1) * _A + uid * _B)

    def fill(self, rows: Any, first_uid: int) -> None:
        """Write the pattern to ``rows``, int64 ``[n, row_words]``, of consecutive uids."""
        for start in range(0, len(rows), self._rows):
            part = rows[start : start + self._rows]
            torch.add(self._template, _uids(first_uid + start, len(part)), out=part)

    def is_in(self, rows: Any, first_uid: int) -> bool:
        """Whether consecutive ``rows`` hold the pattern of consecutive uids."""
        for start in range(0, len(rows), self._rows):
            part = rows[start : start + self._rows]
            expected = self._expected[: len(part)]
            torch.add(self._template, _uids(first_uid + start, len(part)), out=expected)
            if not torch.equal(part, expected):
                return False
        return True

    def is_at(self, rows: Any, indices: Any, uids: Any) -> bool:
        """Whether ``rows[indices[i]]`` holds the pattern of ``uids[i]`` for every i."""
        for start in range(0, len(indices), self._rows):
            part = indices[start : start + self._rows]
            expected, found = self._expected[: len(part)], self._found[: len(part)]
            torch.add(self._template, (uids[start : start + self._rows] * _B)[:, None], out=expected)
            torch.index_select(rows, 0, part, out=found)
            if not torch.equal(found, expected):
                return False
        return True


def _uids(first: int, count: int) -> Any:
    return (torch.arange(first, first + count, dtype=torch.int64) * _B)[:, None]


def _wrap(value: int) -> int:
    """As int64 arithmetic wraps."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def stamped(word: int, stamp: int) -> int:
    """A word with a stamp added, as int64."""
    return _wrap(word + stamp)


class PrivateBuffer:
    """Warm private memory in huge pages where the kernel has some: the best destination a copy can have."""

    def __init__(self, num_bytes: int) -> None:
        self._memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory.madvise(mmap.MADV_HUGEPAGE)
        self.bytes: Any = torch.frombuffer(self._memory, dtype=torch.uint8)
        self.bytes[:: mmap.PAGESIZE].zero_()
        self.words: Any = self.bytes.view(torch.int64)
        self.rows: Any = self.words.view(-1, BLOCK_BYTES // WORD_BYTES)
