"""The lease protocol as Python sees it; interleavings are tested in csrc/tests."""

import os
import subprocess
import sys
from array import array
from collections.abc import Iterator

import pytest

from vllm_mc2._native import IdSpan, LeaseReader, LeaseTable

TOKEN = bytes(range(16))
DIGEST = bytes(range(32))

# A decode in a process of its own; ends without releasing.
DECODE = """
import os, sys
from vllm_mc2._native import LeaseReader
index_fd, ledger_fd, slot, generation = map(int, sys.argv[1:])
reader = LeaseReader(index_fd, ledger_fd)
os.close(index_fd)
os.close(ledger_fd)
assert reader.peek(slot, generation) == (bytes(range(16)), bytes(range(32)), 48, 3, False)
assert reader.claim(slot, generation) == "held"
assert reader.blocks(slot, generation) == [4, 5, 6]
"""


@pytest.fixture
def table() -> Iterator[LeaseTable]:
    with LeaseTable(4, 8) as made:
        yield made


def reader_of(table: LeaseTable) -> LeaseReader:
    _, ledger_fd = table.add_ledger()
    return LeaseReader(table.fd, ledger_fd)


def publish(table: LeaseTable, timeout_seconds: float = 1000.0) -> tuple[int, int]:
    lease = table.publish(TOKEN, DIGEST, 48, [4, 5, 6], timeout_seconds)
    assert lease is not None
    return lease


def test_life_of_a_lease(table: LeaseTable) -> None:
    reader = reader_of(table)
    assert (reader.num_slots, reader.max_blocks) == (4, 8)
    slot, generation = publish(table)
    assert generation == 1
    assert table.num_active == 1
    assert reader.peek(slot, generation) == (TOKEN, DIGEST, 48, 3, False)
    num_leases, [row] = table.view(4)
    assert num_leases == 1
    assert row[:7] == (slot, generation, "offered", 48, 3, 0, 0)
    assert row[7] >= 0 and row[8] == []
    assert reader.claim(slot, generation) == "held"
    assert reader.blocks(slot, generation) == [4, 5, 6]
    assert table.sweep() == []
    assert table.view(4)[1][0][2:7] == ("held", 48, 3, 1, 0)
    assert table.view(4)[1][0][8] == [(1, 1, 0)]
    assert table.view(0) == (1, [])
    reader.release(slot, generation)
    assert table.view(4)[1][0][2] == "released"  # over, but not swept yet
    assert table.sweep() == [(slot, generation, "released")]
    assert reader.peek(slot, generation) is None
    assert reader.claim(slot, generation) == "dead"


def test_expiry_and_full_table(table: LeaseTable) -> None:
    leases = [publish(table, timeout_seconds=0.0) for _ in range(4)]
    assert table.publish(TOKEN, DIGEST, 48, [], 0.0) is None
    assert sorted(table.sweep()) == sorted((*lease, "expired") for lease in leases)
    assert publish(table)[1] == 2


def test_decode_process_dies(table: LeaseTable) -> None:
    ledger_id, ledger_fd = table.add_ledger()
    lease = publish(table, timeout_seconds=0.0)
    command = [sys.executable, "-c", DECODE, *map(str, (table.fd, ledger_fd, *lease))]
    subprocess.run(command, pass_fds=[table.fd, ledger_fd], timeout=60, check=True)
    assert table.sweep() == []
    table.drop_ledger(ledger_id)
    assert table.sweep() == [(*lease, "peer_gone")]
    with pytest.raises(ValueError, match="no ledger"):
        table.drop_ledger(ledger_id)


def test_misuse_is_value_error(table: LeaseTable) -> None:
    reader = reader_of(table)
    slot, generation = publish(table)
    with pytest.raises(ValueError, match="token"):
        table.publish(b"short", DIGEST, 48, [], 1.0)
    with pytest.raises(ValueError, match="digest"):
        table.publish(TOKEN, TOKEN, 48, [], 1.0)
    with pytest.raises(ValueError, match="9 blocks"):
        table.publish(TOKEN, DIGEST, 48, list(range(9)), 1.0)
    with pytest.raises(ValueError, match="timeout"):
        table.publish(TOKEN, DIGEST, 48, [], float("nan"))
    with pytest.raises(ValueError, match="held"):
        reader.blocks(slot, generation)
    with pytest.raises(ValueError, match="held"):
        reader.release(slot, generation)
    with pytest.raises(ValueError, match="pending"):
        reader.poll(slot, generation)


def test_table_size_is_limited() -> None:
    with pytest.raises(ValueError, match=r"1000000.*1000") as caught:
        LeaseTable(1_000_000, 1_000)
    assert "num_slots" in str(caught.value)
    assert "max_blocks" in str(caught.value)


@pytest.mark.parametrize("slot", [4, 2**32, 2**64 - 1])
def test_impossible_tickets_are_dead(table: LeaseTable, slot: int) -> None:
    reader = reader_of(table)
    publish(table)
    assert reader.peek(slot, 1) is None
    assert reader.claim(slot, 1) == "dead"
    assert reader.claim(0, 2**32 + 1) == "dead"


def test_foreign_segments_are_refused(table: LeaseTable) -> None:
    other = LeaseTable(4, 8)
    _, foreign_ledger = other.add_ledger()
    with pytest.raises(ValueError, match="not one of"):
        LeaseReader(table.fd, foreign_ledger)
    with pytest.raises(ValueError, match="magic"):
        LeaseReader(foreign_ledger, foreign_ledger)
    read_end, write_end = os.pipe()
    try:
        with pytest.raises(ValueError, match="memfd"):
            LeaseReader(read_end, foreign_ledger)
    finally:
        os.close(read_end)
        os.close(write_end)


def test_closed_objects_refuse(table: LeaseTable) -> None:
    reader = reader_of(table)
    slot, generation = publish(table)
    reader.close()
    reader.close()
    with pytest.raises(ValueError, match="closed"):
        reader.claim(slot, generation)
    table.close()
    with pytest.raises(ValueError, match="closed"):
        table.sweep()
    with pytest.raises(ValueError, match="closed"):
        table.view(1)


@pytest.mark.parametrize(
    "block_ids",
    [[7, 0, 3], array("i", [7, 0, 3]), memoryview(array("i", [7, 0, 3]))],
    ids=["list", "array", "memoryview"],
)
def test_block_ids_come_as_lists_or_buffers(table: LeaseTable, block_ids: "list[int] | array[int]") -> None:
    reader = reader_of(table)
    lease = table.publish(TOKEN, DIGEST, 48, block_ids, 1000.0, num_pool_blocks=8)
    assert lease is not None
    assert reader.claim(*lease) == "held"
    assert reader.blocks(*lease) == [7, 0, 3]


def test_block_ids_come_as_memory(table: LeaseTable) -> None:
    reader = reader_of(table)
    ids = array("i", [5, 6])
    lease = table.publish(TOKEN, DIGEST, 32, IdSpan(ids.buffer_info()[0], 2, ids), 1000.0)
    assert lease is not None
    assert reader.claim(*lease) == "held"
    assert reader.blocks(*lease) == [5, 6]


@pytest.mark.parametrize("block_ids", [[8], array("i", [8]), array("i", [-1]), [(1 << 32) - 1]])
def test_blocks_that_the_pool_does_not_have_are_not_published(
    table: LeaseTable, block_ids: "list[int] | array[int]"
) -> None:
    with pytest.raises(ValueError, match="the pool has 8"):
        table.publish(TOKEN, DIGEST, 16, block_ids, 1000.0, num_pool_blocks=8)
    assert table.num_active == 0


def test_a_block_table_is_in_the_readers_own_terms(table: LeaseTable) -> None:
    reader = reader_of(table)
    lease = publish(table)
    with pytest.raises(ValueError, match="no held claim"):
        reader.block_table(*lease, 100, 7)
    assert reader.claim(*lease) == "held"
    ids = reader.block_table(*lease, 100, 7)
    assert (ids.format, ids.itemsize, ids.tolist()) == ("i", 4, [104, 105, 106])
    with pytest.raises(ValueError, match="names block 6 of a pool of 6"):
        reader.block_table(*lease, 100, 6)
    with pytest.raises(ValueError, match="do not fit an int32"):
        reader.block_table(*lease, (1 << 31) - 7, 7)
    reader.release(*lease)
    reader.close()
    assert ids.tolist() == [104, 105, 106]  # its own memory


def test_a_block_table_of_no_blocks(table: LeaseTable) -> None:
    reader = reader_of(table)
    lease = table.publish(TOKEN, DIGEST, 3, [], 1000.0)
    assert lease is not None
    assert reader.claim(*lease) == "held"
    assert reader.block_table(*lease, 0, 0).tolist() == []


def test_take_looks_before_it_claims(table: LeaseTable) -> None:
    reader = reader_of(table)
    slot, generation = publish(table)
    assert reader.take(slot, generation, bytes(16)) is None
    assert reader.take(slot, generation + 1, TOKEN) is None
    assert reader.take(1 << 40, generation, TOKEN) is None
    assert table.view(1)[1][0][5] == 0  # no claim was written
    with pytest.raises(ValueError, match="token has 3 bytes"):
        reader.take(slot, generation, b"abc")
    assert reader.take(slot, generation, TOKEN) == ("held", 48)
    reader.release(slot, generation)
    assert [reason for *_, reason in table.sweep()] == ["released"]
    assert reader.take(slot, generation, TOKEN) is None
