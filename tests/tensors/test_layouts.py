"""Whatever way a model lays its cache out, decode gets a tensor of the same shape, strides and values over the same bytes."""

from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.tensors.rig import Pair, fill, same, same_layer
from vllm_mc2 import KVCacheManager
from vllm_mc2.tensors import LayerKV
from vllm_mc2.tensors.pools import DTYPES

POOL_BYTES = 1 << 19
"""More than the largest of the tensors below spans."""

several = settings(
    max_examples=60, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
"""One pair for all examples: each is a layout of its own in the same memory."""


@pytest.fixture
def memory(pair: Pair) -> torch.Tensor:
    """Shared bytes, for tensors to be cut out of."""
    return fill(pair.manager.allocate(0, (POOL_BYTES,), torch.uint8), 0).key


class Cut(NamedTuple):
    """A tensor in memory: any dtype and shape, dimensions stored in any order, with gaps, from anywhere on."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def of(self, memory: torch.Tensor) -> torch.Tensor:
        return memory.view(self.dtype).as_strided(self.shape, self.strides, self.offset)


@st.composite
def cuts(draw: st.DrawFn, shapes: st.SearchStrategy[list[int]]) -> Cut:
    shape = draw(shapes)
    gaps = draw(st.lists(st.integers(0, 2), min_size=len(shape), max_size=len(shape)))
    strides, stride = [0] * len(shape), 1
    for dimension in draw(st.permutations(range(len(shape)))):
        strides[dimension] = stride
        stride *= shape[dimension] + gaps[dimension]
    dtype = draw(st.sampled_from(list(DTYPES.values())))
    return Cut(dtype, tuple(shape), tuple(strides), draw(st.integers(0, 7)))


@several
@given(cut=cuts(st.lists(st.integers(1, 6), min_size=1, max_size=5)))
def test_any_layout_of_a_contiguous_cache(pair: Pair, memory: torch.Tensor, cut: Cut) -> None:
    tensor = cut.of(memory)
    with pair.hand_over("r", {7: tensor}) as mapped:
        there = mapped.layers[7].key
        assert there.stride() == tensor.stride()
        assert same(there, tensor)
        memory.bitwise_not_()
        assert same(there, tensor)
    assert pair.manager.registered_copies == 0


@several
@given(
    cut=cuts(
        st.tuples(st.integers(1, 9), st.just(2), st.integers(1, 4), st.integers(1, 3), st.integers(1, 5)).map(list)
    ),
    data=st.data(),
)
def test_any_layout_of_a_paged_cache_that_holds_keys_and_values(
    pair: Pair, memory: torch.Tensor, cut: Cut, data: st.DataObject
) -> None:
    """Blocks outside or inside, heads before or after the slots, keys and values side by side or far apart."""
    both = cut.of(memory)
    key, value = both[:, 0], both[:, 1]
    num_blocks = cut.shape[0]
    blocks = data.draw(st.lists(st.integers(0, num_blocks - 1), max_size=12))
    pair.manager.register(0, key, value)
    with pair.hand_over("r", blocks) as mapped:
        there = mapped.layers[0]
        assert same_layer(there, LayerKV(key, value)) and there.value is not None
        assert (there.key.stride(), there.value.stride()) == (key.stride(), value.stride())
        gathered = there.key.index_select(0, mapped.block_ids)
        assert same(gathered, key[torch.tensor(blocks, dtype=torch.int64)])
        assert mapped.num_bytes == 2 * len(blocks) * key[0].numel() * key.element_size()
    assert pair.manager.registered_copies == 0


def test_layouts_that_engines_have(pair: Pair) -> None:
    """All are (blocks, slots, heads, head size) to whoever reads them."""
    blocks, slots, heads, size = 6, 4, 2, 8
    allocator = KVCacheManager()
    pages = allocator.allocate(0, (blocks, 2, slots, heads, size), torch.bfloat16).key
    halves = allocator.allocate(1, (2, blocks, slots, heads, size), torch.bfloat16).key
    head_major = allocator.allocate(2, (blocks, heads, slots, size), torch.bfloat16)
    split = allocator.allocate(3, (blocks, heads, size // 4, slots, 4), torch.bfloat16)
    for seed, kv in enumerate((LayerKV(pages, None), LayerKV(halves, None), head_major, split)):
        fill(kv, seed)
    layers = {
        0: LayerKV(pages[:, 0], pages[:, 1]),
        1: LayerKV(halves[0], halves[1]),
        2: LayerKV(*(tensor.transpose(1, 2) for tensor in head_major)),  # type: ignore[union-attr]
        3: LayerKV(*(tensor.permute(0, 3, 1, 2, 4) for tensor in split)),  # type: ignore[union-attr]
    }
    for layer, (key, value) in layers.items():
        pair.manager.register(layer, key, value)
    with pair.hand_over("r", [5, 1]) as mapped:
        for layer, kv in layers.items():
            assert same_layer(mapped.layers[layer], kv)
            assert mapped.layers[layer].key.stride() == kv.key.stride()
        assert mapped.layers[0].key.is_contiguous() is False
    assert pair.manager.registered_copies == allocator.registered_copies == 0
