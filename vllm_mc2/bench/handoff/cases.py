"""What is measured: amounts of KV as one request or as batches, and which of them this host has the memory for.

Pure arithmetic; imports nothing heavy, since the command line checks its arguments with it.
"""

from collections.abc import Sequence

import msgspec

NUM_LAYERS = 4
NUM_KV_HEADS = 8
HEAD_DIM = 128
ITEM_BYTES = 2
"""float16"""
TOKEN_BYTES = NUM_LAYERS * 2 * NUM_KV_HEADS * HEAD_DIM * ITEM_BYTES
"""KV bytes of one token over all layers, keys and values: 16 KiB."""
BLOCK_TOKENS = 16
BLOCK_BYTES = BLOCK_TOKENS * TOKEN_BYTES
REQUEST_TOKENS = 4096
REQUEST_BYTES = REQUEST_TOKENS * TOKEN_BYTES
BIG_BLOCK_FACTOR = 32

MIB = 1 << 20
GIB = 1 << 30
SINGLES = (16 * MIB, 64 * MIB, 256 * MIB, 512 * MIB, GIB, 2 * GIB)
BATCHES = (1, 8, 32, 128)
QUICK_SINGLES = (16 * MIB, 64 * MIB, 256 * MIB)
QUICK_BATCHES = (1, 32)
LARGEST_COMPARED = 2 * GIB
"""Beyond this a case is measured by itself, since every copying way needs the memory once more."""
MIN_BYTES = SINGLES[0]
RESERVE_BYTES = GIB
"""Left alone for everything else on the host."""

SLEEPING_WAY = "mc2_sleep"
WAYS = ("mc2", SLEEPING_WAY, "memcpy", "two_copy", "tcp", "nixl", "mooncake")
PEER_WAYS = ("nixl", "mooncake")
"""Foreign libraries: in processes of their own, with a buffer of their own."""
OUR_WAYS = WAYS[:2]
COPYING_WAYS = WAYS[2:]


class Case(msgspec.Struct, frozen=True):
    """``batch`` requests of equal size, together ``kv_bytes`` of KV, handed over one after the other without a pause."""

    kv_bytes: int
    batch: int = 1
    block_tokens: int = BLOCK_TOKENS

    @property
    def request_bytes(self) -> int:
        """KV bytes of one request."""
        return self.kv_bytes // self.batch

    @property
    def num_blocks(self) -> int:
        """Blocks of all requests together."""
        return self.kv_bytes // (self.block_tokens * TOKEN_BYTES)

    @property
    def request_blocks(self) -> int:
        """Blocks of one request: the length of its block table."""
        return self.num_blocks // self.batch

    @property
    def label(self) -> str:
        """For tables and messages."""
        return f"{self.batch} x {human_bytes(self.request_bytes)}" if self.batch > 1 else human_bytes(self.kv_bytes)


class Stage(msgspec.Struct, frozen=True):
    """Cases that share their memory. Those of one group are interleaved with each other, repeat by repeat."""

    groups: list[list[Case]]
    ways: list[str]

    @property
    def kv_bytes(self) -> int:
        """The largest case."""
        return max(case.kv_bytes for group in self.groups for case in group)

    @property
    def needed_bytes(self) -> int:
        """Memory that the stage takes at once."""
        return stage_bytes(self.kv_bytes, self.ways)


class LeftOut(msgspec.Struct, frozen=True):
    """Something that was not measured, and why."""

    what: str
    reason: str


class Plan(msgspec.Struct, frozen=True):
    """Everything that will be measured."""

    stages: list[Stage]
    block_sizes: list[Case]
    """The same number of blocks twice, the second time each of them 32 times larger; ours only."""
    left_out: list[LeftOut]


def make_plan(ways: Sequence[str], *, quick: bool, max_bytes: int, available_bytes: int) -> Plan:
    """What fits into ``available_bytes``. Whatever does not is named in ``left_out``."""
    left_out: list[LeftOut] = []
    usable = available_bytes - RESERVE_BYTES
    singles, batches = (QUICK_SINGLES, QUICK_BATCHES) if quick else (SINGLES, BATCHES)
    # One request of 4,096 tokens and a batch of one are the same thing.
    cases = {Case(num_bytes) for num_bytes in singles} | {Case(batch * REQUEST_BYTES, batch) for batch in batches}
    wanted = sorted(
        (case for case in cases if case.kv_bytes <= max_bytes), key=lambda case: (case.batch, case.kv_bytes)
    )
    compared = [case for case in wanted if case.kv_bytes <= LARGEST_COMPARED]
    stage_ways = list(ways)
    peers = [way for way in ways if way in PEER_WAYS]
    if peers and _too_large(compared, stage_ways, usable):
        # Their own buffer makes the difference: rather all sizes without them than small ones with them.
        stage_ways = [way for way in ways if way not in PEER_WAYS]
        left_out.append(LeftOut(", ".join(peers), f"their own buffers do not fit into {human_bytes(usable)} of memory"))
    for case in _too_large(compared, stage_ways, usable):
        left_out.append(_no_memory(case, stage_bytes(case.kv_bytes, stage_ways), usable))
        compared.remove(case)
    stages = [Stage([[case] for case in compared], stage_ways)] if compared and stage_ways else []
    for case in wanted:
        if case.kv_bytes > LARGEST_COMPARED:
            _add_large(case, compared, ways, usable, stages, left_out)
    return Plan(stages, _block_sizes(max_bytes, usable, ways, left_out, quick=quick), left_out)


def stage_bytes(kv_bytes: int, ways: Sequence[str]) -> int:
    """Memory for ``kv_bytes``: our pool; one source of all copying ways; a destination in each pair of processes."""
    num_buffers = int(any(way in OUR_WAYS for way in ways)) + int(any(way in COPYING_WAYS for way in ways))
    num_buffers += int(any(way in COPYING_WAYS and way not in PEER_WAYS for way in ways))
    num_buffers += int(any(way in PEER_WAYS for way in ways))
    return num_buffers * kv_bytes


def human_bytes(num_bytes: float) -> str:
    """``64 MiB``, ``2 GiB``, ``1.5 GiB``."""
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", 1024)):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes:.0f} B"


def _too_large(cases: Sequence[Case], ways: Sequence[str], usable: int) -> list[Case]:
    return [case for case in cases if stage_bytes(case.kv_bytes, ways) > usable]


def _no_memory(case: Case, needed: int, usable: int) -> LeftOut:
    return LeftOut(case.label, f"needs {human_bytes(needed)} of memory, {human_bytes(max(0, usable))} can be used")


def _add_large(
    case: Case, compared: Sequence[Case], ways: Sequence[str], usable: int, stages: list[Stage], left_out: list[LeftOut]
) -> None:
    """A stage for a large batch, beside the largest of the compared ones: only what runs side by side can be compared."""
    companions = [other for other in compared if other.batch > 1][-1:]
    for subset in (ways, [way for way in ways if way not in PEER_WAYS], [way for way in ways if way in OUR_WAYS]):
        if subset and stage_bytes(case.kv_bytes, subset) <= usable:
            stages.append(Stage([[*companions, case]], list(subset)))
            missing = [way for way in ways if way not in subset]
            if missing:
                left_out.append(_no_memory(case, stage_bytes(case.kv_bytes, ways), usable))
                left_out[-1] = LeftOut(f"{case.label} by {', '.join(missing)}", left_out[-1].reason)
            return
    left_out.append(_no_memory(case, case.kv_bytes, usable))


def _block_sizes(
    max_bytes: int, usable: int, ways: Sequence[str], left_out: list[LeftOut], *, quick: bool
) -> list[Case]:
    if "mc2" not in ways:
        return []
    big_bytes = BLOCK_BYTES * BIG_BLOCK_FACTOR
    limit = min(max_bytes, GIB // 2 if quick else LARGEST_COMPARED, usable * BIG_BLOCK_FACTOR // (BIG_BLOCK_FACTOR + 1))
    num_blocks = min(REQUEST_TOKENS // BLOCK_TOKENS, limit // big_bytes)
    if num_blocks < 1:
        left_out.append(LeftOut("blocks 32 times larger", f"one block needs {human_bytes(big_bytes)} of memory"))
        return []
    return [
        Case(num_blocks * BLOCK_BYTES),
        Case(num_blocks * big_bytes, block_tokens=BLOCK_TOKENS * BIG_BLOCK_FACTOR),
    ]
