"""A cache is handed over: its bytes stay where they are, in every form in which it can be given, and little is sent."""

import socket
from array import array
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.tensors.rig import SHAPE, Pair, bits, fill, same, same_layer
from vllm_mc2 import KVCacheManager
from vllm_mc2.tensors import LayerKV, receiver
from vllm_mc2.tensors.pools import DTYPES

BLOCKS = [5, 0, 7, 2]


@pytest.mark.parametrize(
    "blocks",
    [
        BLOCKS,
        tuple(BLOCKS),
        array("i", BLOCKS),
        array("q", BLOCKS),
        memoryview(array("i", BLOCKS)),
        torch.tensor(BLOCKS, dtype=torch.int32),
        torch.tensor(BLOCKS, dtype=torch.int64),
        torch.tensor([[block, 99] for block in BLOCKS], dtype=torch.int32)[:, 0],
    ],
    ids=["list", "tuple", "int32 array", "int64 array", "memoryview", "int32 tensor", "int64 tensor", "strided tensor"],
)
def test_a_paged_cache(pair: Pair, blocks: Any) -> None:
    layers = {layer: pair.layer(layer) for layer in (0, 1, 30)}
    with pair.hand_over("request", blocks, num_tokens=15) as mapped:
        assert (mapped.request_id, mapped.num_tokens, mapped.is_paged) == ("request", 15, True)
        assert mapped.block_ids.dtype is torch.int32 and mapped.block_ids.tolist() == BLOCKS
        assert mapped.block_table.tolist() == BLOCKS
        assert list(mapped.layers) == [0, 1, 30]
        for layer, (key, value) in layers.items():
            there = mapped.layers[layer]
            assert there.value is not None and value is not None
            assert same(there.key[mapped.block_ids], key[BLOCKS])
            assert same(there.value[mapped.block_ids], value[BLOCKS])
        block_bytes = 4 * 2 * 3 * 4
        assert mapped.num_bytes == 3 * 2 * len(BLOCKS) * block_bytes


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("is_paged", [True, False], ids=["paged", "contiguous"])
def test_every_dtype(pair: Pair, dtype: torch.dtype, is_paged: bool) -> None:
    kv = pair.layer(0, dtype=dtype)
    with pair.hand_over("r", BLOCKS if is_paged else None) as mapped:
        assert mapped.layers[0].key.dtype is dtype
        assert same_layer(mapped.layers[0], kv)


def contiguous_forms(kvs: dict[int, LayerKV]) -> dict[str, tuple[Any, dict[int, LayerKV]]]:
    """What may be given, and what decode then gets."""
    return {
        "one tensor": (kvs[0].key, {0: LayerKV(kvs[0].key, None)}),
        "dict of LayerKV": (kvs, kvs),
        "dict of pairs": ({layer: (key, value) for layer, (key, value) in kvs.items()}, kvs),
        "dict of tensors": ({7: kvs[1].key}, {7: LayerKV(kvs[1].key, None)}),
        "list of pairs": ([tuple(kv) for kv in kvs.values()], kvs),
        "list of tensors": ([kv.key for kv in kvs.values()], {n: LayerKV(kv.key, None) for n, kv in kvs.items()}),
        "list of both": ([kvs[0], kvs[1].key], {0: kvs[0], 1: LayerKV(kvs[1].key, None)}),
        "a layer": (kvs[0], {0: kvs[0]}),
        "what is registered": (None, kvs),
    }


FORMS = list(contiguous_forms({layer: LayerKV(torch.empty(1), torch.empty(1)) for layer in range(2)}))


@pytest.mark.parametrize("form", FORMS)
def test_a_contiguous_cache(pair: Pair, form: str) -> None:
    kvs = {layer: pair.layer(layer, (2, 3, 5), torch.bfloat16) for layer in range(2)}
    given, expected = contiguous_forms(kvs)[form]
    mapped = pair.hand_over("request", given, num_tokens=3)
    assert (mapped.num_tokens, mapped.is_paged, mapped.block_ids.tolist()) == (3, False, [])
    assert list(mapped.layers) == list(expected)
    assert all(same_layer(mapped.layers[layer], kv) for layer, kv in expected.items())
    assert mapped.num_bytes == sum(len(list(kv.parts())) for kv in expected.values()) * 2 * 3 * 5 * 2
    assert pair.manager.registered_copies == 0
    mapped.release()


@pytest.mark.parametrize("form", ["one tensor", "dict of LayerKV", "list of pairs"])
def test_a_request_id_is_made_where_none_is_given(pair: Pair, form: str) -> None:
    kvs = {layer: pair.layer(layer) for layer in range(2)}
    given, expected = contiguous_forms(kvs)[form]
    seen = set()
    for _ in range(3):
        sent = pair.prefill.send_kv_metadata(given, num_tokens=9)
        with pair.map_next() as mapped:
            assert mapped.request_id == sent.request_id and mapped.num_tokens == 9
            assert same_layer(mapped.layers[0], expected[0])
            seen.add(mapped.request_id)
    assert len(seen) == 3


def test_no_blocks_are_a_request_too(pair: Pair) -> None:
    pair.layer()
    with pair.hand_over("r", []) as mapped:
        assert mapped.is_paged and mapped.block_ids.tolist() == [] and mapped.num_bytes == 0


def test_what_decode_reads_is_prefills_memory(pair: Pair) -> None:
    """Not a copy of it: what prefill writes later shows, in the very object that decode has."""
    key, value = pair.layer()
    assert value is not None
    with pair.hand_over("r", BLOCKS) as mapped:
        remote_key, remote_value = mapped.layers[0]
        assert remote_value is not None
        for number in range(3):
            key.fill_(number)
            value[3].fill_(-number)
            assert torch.equal(remote_key, torch.full(SHAPE, float(number)))
            assert torch.equal(remote_value[3], torch.full(SHAPE[1:], float(-number)))
    assert key.data_ptr() != remote_key.data_ptr()  # and yet another mapping


def test_the_same_blocks_in_many_requests(pair: Pair) -> None:
    """A shared prefix: nothing is announced twice, and both read the same memory."""
    kv = pair.layer()
    one, two = pair.hand_over("one", [1, 2, 3]), pair.hand_over("two", [1, 2, 6])
    assert one.layers[0].key.data_ptr() == two.layers[0].key.data_ptr()
    one.release()
    assert same_layer(two.layers[0], kv) and two.block_ids.tolist() == [1, 2, 6]
    two.release()


def test_layers_that_come_later(pair: Pair) -> None:
    """A request has the layers that there were when it was sent."""
    first = pair.layer(0)
    early = pair.hand_over("early", [1])
    second = pair.layer(1)
    with pair.hand_over("late", [1]) as late:
        assert list(early.layers) == [0] and list(late.layers) == [0, 1]
        assert same_layer(late.layers[0], first) and same_layer(late.layers[1], second)
    replaced = pair.layer(0, dtype=torch.float16)
    with pair.hand_over("latest", [1]) as latest:
        assert same_layer(latest.layers[0], replaced)
        assert same_layer(early.layers[0], first)
    early.release()


def test_many_requests_in_their_order(pair: Pair) -> None:
    kv = pair.layer()
    for index in range(50):
        pair.prefill.send_kv_metadata(f"request-{index}", [index % 8], num_tokens=index)
    for index in range(50):
        with pair.map_next() as mapped:
            assert (mapped.request_id, mapped.num_tokens) == (f"request-{index}", index)
            assert same(mapped.layers[0].key[mapped.block_ids], kv.key[[index % 8]])


def test_a_manager_without_a_communicator_serves_every_prefill(make_pair: Callable[..., Pair]) -> None:
    one, two = make_pair(), make_pair()
    kv = fill(KVCacheManager().allocate(0, SHAPE, torch.float32), 1)
    for pair in (one, two):
        with pair.hand_over("r", [1]) as mapped:
            assert same_layer(mapped.layers[0], kv)
    own = two.layer(0, dtype=torch.float16)
    with two.hand_over("r", [1]) as mapped:
        assert same_layer(mapped.layers[0], own)
    with one.hand_over("r", [1]) as mapped:
        assert same_layer(mapped.layers[0], kv)


class Meter:
    """Counts what really arrives at decode."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._bytes = 0
        original = receiver.receive_some

        def receive_some(*arguments: Any) -> bytes:
            data = original(*arguments)
            self._bytes += len(data)
            return data

        monkeypatch.setattr(receiver, "receive_some", receive_some)

    def take(self) -> int:
        taken, self._bytes = self._bytes, 0
        return taken


def test_a_request_costs_the_same_bytes_whatever_its_size(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    meter = Meter(monkeypatch)
    pair.manager.allocate(0, (8192, 1, 1, 16), torch.float16)
    pair.hand_over("request-0", [0]).release()
    assert meter.take() > 0  # pool, layout, and the request
    costs = set()
    for number, num_blocks in enumerate((0, 1, 17, 8192), 1):
        sent = pair.prefill.send_kv_metadata(f"request-{number}", list(range(num_blocks)), num_tokens=num_blocks)
        with pair.map_next() as mapped:
            assert mapped.block_ids.tolist() == list(range(num_blocks))
        assert meter.take() == sent.num_bytes
        costs.add(sent.num_bytes)
    assert len(costs) == 1 and costs.pop() < 64


def test_a_contiguous_cache_costs_the_same_bytes_whatever_its_size(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    meter = Meter(monkeypatch)
    costs = []
    for layer, num_bytes in enumerate((1 << 20, 64 << 20)):
        kv = pair.manager.allocate(layer, (num_bytes // 2,), torch.uint8)
        pair.hand_over("first", {0: kv}).release()  # announces pool and layout
        announced = meter.take()
        sent = pair.prefill.send_kv_metadata("again", {0: kv})
        with pair.map_next() as mapped:
            assert mapped.num_bytes == num_bytes
        assert meter.take() == sent.num_bytes
        costs.append((sent.num_bytes, announced // 16))  # numbers of more digits may take a byte or two more
    assert costs[0] == costs[1] and costs[0][0] < 64


def test_decode_has_no_memory_of_its_own_for_it(pair: Pair, own_pool_mappings: Callable[[], list[str]]) -> None:
    """In this process there are two mappings of one file, and nothing else of that size."""
    kv = pair.manager.allocate(0, (32 << 20,), torch.uint8)
    with pair.hand_over("r", {0: kv}) as mapped:
        inodes = [line.split()[4] for line in own_pool_mappings() if "mc2-kv-pool" in line]
        assert len(set(inodes)) == 1
        permissions = {line.split()[1] for line in own_pool_mappings() if "mc2-kv-pool" in line}
        assert permissions == {"rw-s", "r--s"}
        assert torch.equal(bits(mapped.layers[0].key), bits(kv.key))


def test_the_mail_is_not_a_way_back(pair: Pair) -> None:
    """Prefill never reads what decode might send on that socket."""
    pair.layer()
    receiver_ = pair.decode._receiver
    assert receiver_ is not None
    pair.prefill.send_kv_metadata("one", [1])
    (theirs,) = receiver_._prefills
    theirs.mail.send(b"anything", socket.MSG_DONTWAIT)
    pair.prefill.send_kv_metadata("two", [2])
    for expected in ("one", "two"):
        with pair.map_next() as mapped:
            assert mapped.request_id == expected
