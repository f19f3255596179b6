"""What cannot be sent is refused before anything is published, mailed or lent."""

from array import array
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.tensors.rig import Pair
from vllm_mc2.errors import LayoutError, UsageError
from vllm_mc2.tensors import sender
from vllm_mc2.tensors.sender import MAX_BLOCKS

BAD_BLOCKS: dict[str, Any] = {
    "one behind the last": [8],
    "far behind": [1, 2**31 - 1],
    "negative": [-1],
    "negative tensor": torch.tensor([0, -1], dtype=torch.int32),
    "negative long tensor": torch.tensor([-1]),
    "no int32": [2**31],
    "no int32, in a tensor": torch.tensor([2**31]),
    "no int64": [2**64],
    "fractions": [0.5],
    "fractions in an array": array("d", [1.0]),
    "two dimensions": torch.tensor([[1, 2]], dtype=torch.int32),
    "two dimensions of int64": torch.tensor([[1, 2]]),
    "no dimension": torch.tensor(1, dtype=torch.int32),
    "nested": [[1, 2]],
    "complex": torch.tensor([1j]),
    "none among them": [1, None],
    "too many": [0] * (MAX_BLOCKS + 1),
    "too many in a tensor": torch.zeros(MAX_BLOCKS + 1, dtype=torch.int32),
    "text": "123",
    "bytes": b"\x01\x00\x00\x00",
    "bytes of other lengths": b"\x01\x00\x00",
    "a bytearray": bytearray(4),
    "memory of two dimensions": memoryview(bytes(32)).cast("i", (2, 4)),
    "a number": 7,
    "elsewhere": torch.zeros(3, dtype=torch.int32, device="meta"),
}


@pytest.fixture
def one_slot(make_pair: Callable[..., Pair]) -> Pair:
    """With a single lease slot, so that one that is lost is missed at once."""
    pair = make_pair(num_lease_slots=1)
    pair.layer()
    pair.hand_over("first", [1]).release()
    pair.reap(1)
    return pair


def assert_unharmed(pair: Pair) -> None:
    """Nothing is lent, nothing was mailed, and the slot is free."""
    assert pair.prefill.num_leases == 0 and pair.prefill.reap() == []
    with pytest.raises(TimeoutError):
        pair.decode.recv_kv_metadata(0)
    with pair.hand_over("good", [7, 0]) as mapped:
        assert mapped.block_ids.tolist() == [7, 0]


@pytest.mark.parametrize("name", BAD_BLOCKS)
def test_blocks(one_slot: Pair, name: str) -> None:
    for _ in range(2):
        with pytest.raises(LayoutError):
            one_slot.prefill.send_kv_metadata("bad", BAD_BLOCKS[name])
    assert_unharmed(one_slot)


def test_a_message_names_the_request_the_block_and_the_limit(one_slot: Pair) -> None:
    for block in (8, -1):
        with pytest.raises(LayoutError, match=f"request 'bad': lease over block {block}, the pool has 8"):
            one_slot.prefill.send_kv_metadata("bad", [block])
    with pytest.raises(LayoutError, match="lease of 8193 blocks, the table takes 8192"):
        one_slot.prefill.send_kv_metadata("bad", [0] * 8193)


def test_the_largest_block_table(pair: Pair) -> None:
    pair.manager.allocate(0, (MAX_BLOCKS, 1), torch.uint8)
    blocks = torch.randperm(MAX_BLOCKS, generator=torch.Generator().manual_seed(1)).to(torch.int32)
    with pair.hand_over("r", blocks) as mapped:
        assert torch.equal(mapped.block_ids, blocks)


@pytest.mark.parametrize("request_id", ["", "x" * 257, "\ud800", "ok\udcff"], ids=ascii)
def test_request_ids(one_slot: Pair, request_id: str) -> None:
    with pytest.raises(UsageError, match="request_id"):
        one_slot.prefill.send_kv_metadata(request_id, [1])
    assert_unharmed(one_slot)


@pytest.mark.parametrize("request_id", ["x", "x" * 256, "é" * 256, "\U0001f600" * 256, "\0", "a'b\"c\n"], ids=ascii)
def test_request_ids_that_are_texts(one_slot: Pair, request_id: str) -> None:
    with one_slot.hand_over(request_id, [1]) as mapped:
        assert mapped.request_id == request_id


@pytest.mark.parametrize("request_id", [7, None, b"r", ["r"]], ids=repr)
def test_a_request_id_that_is_no_text(one_slot: Pair, request_id: Any) -> None:
    with pytest.raises(UsageError, match=f"request_id: expected a text, got {type(request_id).__name__}"):
        one_slot.prefill.send_kv_metadata(request_id, [1])
    assert_unharmed(one_slot)


@pytest.mark.parametrize("num_tokens", [-1, 2**64, 1.5, "7", None], ids=repr)
def test_a_number_of_tokens_that_cannot_be(one_slot: Pair, num_tokens: Any) -> None:
    with pytest.raises(UsageError, match=r"num_tokens = .*: expected a whole number"):
        one_slot.prefill.send_kv_metadata("bad", [1], num_tokens=num_tokens)
    assert_unharmed(one_slot)


@pytest.mark.parametrize("num_tokens", [0, 1, 2**63])
def test_a_number_of_tokens(one_slot: Pair, num_tokens: int) -> None:
    with one_slot.hand_over("r", [1], num_tokens=num_tokens) as mapped:
        assert mapped.num_tokens == num_tokens


def test_a_block_table_that_changes_while_it_is_sent_has_been_copied(pair: Pair) -> None:
    """The table that decode gets is the one that was given, whatever the caller does with its tensor afterwards."""
    pair.layer()
    blocks = torch.tensor([1, 2, 3], dtype=torch.int32)
    pair.prefill.send_kv_metadata("r", blocks)
    blocks.fill_(7)
    with pair.map_next() as mapped:
        assert mapped.block_ids.tolist() == [1, 2, 3]
        mapped.block_ids.fill_(0)  # decode's own copy, which it may change
    with pair.hand_over("again", [4]) as mapped:
        assert mapped.block_ids.tolist() == [4]


def test_more_sets_of_tensors_than_decode_is_told_of(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "MAX_LAYOUTS", 3)
    key = pair.layer().key
    for size in (1, 2, 3, 2, 1):
        pair.hand_over("r", {0: key[:size]}).release()
    with pytest.raises(UsageError, match="register layers once, send blocks"):
        pair.prefill.send_kv_metadata("r", {0: key[:4]})
    pair.reap(5)
    assert pair.prefill.num_leases == 0
    pair.hand_over("r", {0: key[:3]}).release()
