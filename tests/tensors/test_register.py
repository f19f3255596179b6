"""Which tensors are shared as they are, which are copied into shared memory, and when a copy is brought up to date."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.tensors.rig import SHAPE, Pair, same, same_layer
from vllm_mc2 import KVCacheManager
from vllm_mc2.errors import LayoutError, UsageError
from vllm_mc2.tensors import CopiedIntoPoolWarning, LayerKV

copied = pytest.warns(CopiedIntoPoolWarning, match="not in shared memory")


def foreign(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor in ordinary memory."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_allocated_tensors_are_zero_contiguous_and_shared(pair: Pair) -> None:
    key, value = pair.manager.allocate(3, [4, 5, 6], torch.bfloat16)
    for tensor in (key, value):
        assert tensor is not None
        assert tensor.shape == (4, 5, 6) and tensor.is_contiguous() and tensor.dtype is torch.bfloat16
        assert not tensor.any()
    assert pair.manager.layers == {3: LayerKV(key, value)}


def test_tensors_that_are_made_in_inference_mode_are_ordinary_ones(pair: Pair) -> None:
    """An engine starts in it, and what it makes there could be written to nowhere else."""
    with torch.inference_mode():
        key, _ = pair.manager.allocate(0, SHAPE, torch.float32)
        with copied:
            copy = pair.manager.register(1, torch.ones(SHAPE))
        mapped = pair.hand_over("r", [1])
    key.fill_(3)
    copy.key.add_(1)
    weights = torch.ones(SHAPE, requires_grad=True)
    (weights * mapped.layers[0].key).sum().backward()
    assert weights.grad is not None and torch.equal(weights.grad, key)
    assert same(mapped.layers[1].key, torch.full(SHAPE, 2.0))
    mapped.release()


def views(key: torch.Tensor, value: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor | None]]:
    """Tensors inside shared memory, as a model may have them."""
    pages = key.view(torch.uint8).view(8, 2, 48)
    return {
        "as allocated": (key, value),
        "one for both": (key, None),
        "heads first": (key.transpose(1, 2), value.transpose(1, 2)),
        "some blocks": (key[2:7], value[2:7]),
        "every other block": (key[::2], value[::2]),
        "one head": (key[:, :, 1:], value[:, :, 1:]),
        "reversed dimensions": (key.permute(3, 2, 1, 0), value.permute(3, 2, 1, 0)),
        "key and value in one": (pages[:, 0], pages[:, 1]),
        "other dtype": (key.view(torch.int16), value.view(torch.int16)),
        "expanded": (key[:1].expand(8, 4, 2, 3), value[:1].expand(8, 4, 2, 3)),
        "flat": (key.view(-1), value.view(-1)),
    }


@pytest.mark.parametrize("name", views(torch.empty(SHAPE), torch.empty(SHAPE)))
def test_tensors_in_shared_memory_are_not_copied(pair: Pair, name: str) -> None:
    source = pair.layer(99)
    assert source.value is not None
    key, value = views(source.key, source.value)[name]
    registered = pair.manager.register(0, key, value)
    assert registered.key.data_ptr() == key.data_ptr() and registered.key.stride() == key.stride()
    with pair.hand_over("r", {0: registered}) as mapped:
        there = mapped.layers[0]
        assert same_layer(there, LayerKV(key, value))
        assert there.key.stride() == key.stride()
        source.key.add_(1)  # on
        source.value.zero_()
        assert same_layer(there, LayerKV(key, value))
    assert pair.manager.registered_copies == 0


def test_tensors_elsewhere_are_copied_once_with_a_warning(pair: Pair) -> None:
    key, value = foreign(*SHAPE, seed=1), foreign(*SHAPE, seed=2)
    with copied as caught:
        registered = pair.manager.register(0, key_tensor=key, value_tensor=value)
    assert len(caught) == 1 and "384 bytes" not in str(caught[0].message)
    assert f"{2 * key.numel() * 4} bytes" in str(caught[0].message)
    assert caught[0].filename == __file__  # the caller's line, not ours
    assert pair.manager.registered_copies == 2
    assert registered.key.data_ptr() != key.data_ptr()
    assert same_layer(registered, LayerKV(key, value))
    assert pair.manager.register(0, key, value).key.data_ptr() == registered.key.data_ptr()
    with pair.hand_over("r", [1, 2]) as mapped:
        assert same_layer(mapped.layers[0], registered)
        registered.key.fill_(5)  # what register() returned is the shared one
        assert same(mapped.layers[0].key, registered.key)
    assert pair.manager.registered_copies == 2


def test_only_the_part_that_is_elsewhere_is_copied(pair: Pair) -> None:
    key, _ = pair.layer(9)
    value = foreign(*SHAPE)
    with copied:
        registered = pair.manager.register(0, key, value)
    assert pair.manager.registered_copies == 1
    assert registered.key.data_ptr() == key.data_ptr()
    with pair.hand_over("r", {0: registered}) as mapped:
        assert same_layer(mapped.layers[0], LayerKV(key, value))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2, torch.int8], ids=str)
def test_a_strided_tensor_elsewhere_arrives_with_its_values(pair: Pair, dtype: torch.dtype) -> None:
    cache = foreign(4, 6, 5, dtype=dtype).permute(2, 0, 1)[1:]
    with copied, pair.hand_over("r", {0: cache}) as mapped:
        assert same(mapped.layers[0].key, cache)


def test_strides_that_do_not_matter(pair: Pair) -> None:
    """A contiguous tensor whose last dimension is 1 may say any stride there."""
    cache = foreign(1, 4).t()
    assert cache.is_contiguous() and cache.stride() == (1, 4)
    pair.layer(5)
    with copied, pair.hand_over("r", {0: cache}) as mapped:
        assert same(mapped.layers[0].key, cache)
    pair.hand_over("again", {0: cache}).release()
    assert pair.manager.registered_copies == 1


def test_what_is_sent_again_unchanged_is_not_copied_again(pair: Pair) -> None:
    pair.layer(5)
    cache = {layer: (foreign(3, 4, seed=layer), foreign(3, 4, seed=layer + 10)) for layer in range(2)}
    with copied as caught:
        first = pair.hand_over("one", cache)
    assert caught[0].filename.endswith("rig.py")
    assert len(caught) == 2 and pair.manager.registered_copies == 4
    with pair.hand_over("two", cache) as second:
        assert second.layers[1].key.data_ptr() == first.layers[1].key.data_ptr()
    assert pair.manager.registered_copies == 4
    first.release()


def test_what_has_changed_is_brought_up_to_date(pair: Pair) -> None:
    pair.layer(5)
    key, value = foreign(3, 4), foreign(3, 4, seed=1)
    with copied:
        pair.hand_over("one", {0: (key, value)}).release()
    key[1, 1] = torch.nan
    pair.reap(1)
    with pair.hand_over("two", {0: (key, value)}) as mapped:
        assert same(mapped.layers[0].key, key) and same(mapped.layers[0].value, value)  # type: ignore[arg-type]
    assert pair.manager.registered_copies == 3  # of the key, once more
    with pair.hand_over("three", {0: (key, value)}) as mapped:  # not a number, and equal to itself
        assert same(mapped.layers[0].key, key)
    assert pair.manager.registered_copies == 3


@pytest.mark.parametrize("how", ["send", "register"])
def test_what_has_changed_while_it_is_lent_is_refused(pair: Pair, how: str) -> None:
    pair.layer(5)
    cache = foreign(3, 4)
    before = cache.clone()

    def again() -> object:
        return (
            pair.manager.register(0, cache) if how == "register" else pair.prefill.send_kv_metadata("two", {0: cache})
        )

    with copied:
        mapped = pair.hand_over("one", {0: cache})
    cache.zero_()
    for _ in range(2):
        with pytest.raises(LayoutError, match=r"layer 0 has changed .* lent"):
            again()
    assert same(mapped.layers[0].key, before)
    assert pair.prefill.num_leases == 1
    mapped.release()
    pair.reap(1)
    again()
    if how == "send":
        with pair.map_next() as second:
            assert not second.layers[0].key.any()


def test_lent_to_any_decode_counts(make_pair: Callable[..., Pair]) -> None:
    """The process's copies belong to all its communicators."""
    one, two = make_pair(), make_pair()
    cache = foreign(3, 4)
    with copied:
        mapped = one.hand_over("one", cache)
    two.hand_over("two", cache).release()
    two.reap(1)
    cache.zero_()
    with pytest.raises(LayoutError, match="lent"):
        two.prefill.send_kv_metadata("three", cache)
    mapped.release()
    one.reap(1)
    two.hand_over("three", cache).release()


def test_a_new_tensor_at_an_old_address_is_another(pair: Pair) -> None:
    """As long as its copy is kept, so is the original; a view of it is not it."""
    pair.layer(5)
    cache = foreign(4, 4)
    with copied:
        pair.hand_over("one", {0: cache}).release()
    with copied:
        with pair.hand_over("two", {0: cache[:2]}) as mapped:
            assert mapped.layers[0].key.shape == (2, 4)
    with copied:
        with pair.hand_over("three", {0: cache.t()}) as mapped:
            assert same(mapped.layers[0].key, cache.t())


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        ("text", "expected a torch tensor, got str"),
        (torch.empty(3, dtype=torch.complex64), "expected one of float64"),
        (torch.empty(3, dtype=torch.bool), "expected one of float64"),
        (torch.empty(3, 0), r"some elements, got shape \(3, 0\)"),
        (torch.tensor(1.0), "1 to 8 dimensions"),
        (torch.empty([1] * 9), "1 to 8 dimensions"),
        (torch.eye(3).to_sparse(), "dense tensor on cpu, got torch.sparse_coo"),
        (torch.empty(3, device="meta"), "got torch.strided on meta"),
    ],
    ids=["text", "complex", "bool", "empty", "scalar", "9 dimensions", "sparse", "other device"],
)
def test_what_cannot_be_shared_is_refused(pair: Pair, tensor: Any, message: str) -> None:
    good = pair.layer(1)
    for refused in (
        lambda: pair.manager.register(0, tensor),
        lambda: pair.manager.register(0, good.key, tensor),
        lambda: pair.prefill.send_kv_metadata("r", {0: (tensor, good.value)}),
    ):
        with pytest.raises(LayoutError, match=message):
            refused()
    assert list(pair.manager.layers) == [1] and pair.prefill.num_leases == 0


@pytest.mark.parametrize("layer", [-1, 4096, 1.0, "0", None])
def test_a_layer_that_cannot_be(pair: Pair, layer: Any) -> None:
    key, value = pair.layer(0)
    with pytest.raises(LayoutError, match="expected a whole number from 0 to 4095"):
        pair.manager.allocate(layer, SHAPE, torch.float32)
    with pytest.raises(LayoutError, match="expected a whole number from 0 to 4095"):
        pair.manager.register(layer, key, value)
    with pytest.raises(LayoutError, match="expected a whole number from 0 to 4095"):
        pair.prefill.send_kv_metadata("r", {layer: (key, value)})
    with pair.hand_over("r", {4095: (key, value)}) as mapped:
        assert list(mapped.layers) == [4095]


@pytest.mark.parametrize("shape", [(), (0, 4), (4, -1), (1,) * 9])
def test_a_shape_that_cannot_be(pair: Pair, shape: tuple[int, ...]) -> None:
    with pytest.raises(LayoutError, match="expected 1 to 8 dimensions"):
        pair.manager.allocate(0, shape, torch.float32)


def test_too_little_memory_is_an_error_with_figures(pair: Pair) -> None:
    with pytest.raises(OSError, match=r"bytes wanted, \d+ bytes available"):
        pair.manager.allocate(0, (1 << 37,), torch.float32)
    pair.layer(0)
    pair.hand_over("r", [0]).release()


def test_huge_pages_is_one_of_three(pair: Pair) -> None:
    with pytest.raises(ValueError, match="huge_pages = 'yes': expected 'auto', 'off' or 'require'"):
        KVCacheManager(pair.prefill, huge_pages="yes")  # type: ignore[arg-type]
    key, _ = KVCacheManager(pair.prefill, huge_pages="off").allocate(0, SHAPE, torch.float32)
    with pair.hand_over("r", [0]) as mapped:
        assert same(mapped.layers[0].key, key)


@pytest.mark.parametrize("value", [[], {}, (), [1.5], {"a": 1}, [(1, 2, 3)], [[]], Ellipsis, "text", 7], ids=repr)
def test_what_is_no_cache_and_no_block_table(pair: Pair, value: Any) -> None:
    pair.layer(0)
    if value in ([], ()):
        pair.hand_over("r", value).release()  # a request of no blocks
        return
    with pytest.raises(LayoutError):
        pair.prefill.send_kv_metadata("r", value)
    assert pair.prefill.num_leases == 0


def test_nothing_registered(pair: Pair) -> None:
    for blocks in ([1], None):
        with pytest.raises(UsageError, match="no layers yet"):
            pair.prefill.send_kv_metadata("r", blocks)


def test_layers_of_different_numbers_of_blocks_take_no_block_table(pair: Pair) -> None:
    pair.layer(0, (8, 4))
    pair.layer(1, (9, 4))
    with pytest.raises(LayoutError, match=r"these have \[8, 9\]"):
        pair.prefill.send_kv_metadata("r", [1])
    with pair.hand_over("r") as mapped:
        assert [kv.key.shape[0] for kv in mapped.layers.values()] == [8, 9]


def test_a_closed_manager_forgets_but_what_is_mapped_stays(pair: Pair) -> None:
    kv = pair.layer(0)
    before = LayerKV(kv.key.clone(), kv.value.clone())  # type: ignore[union-attr]
    mapped = pair.hand_over("r", [1])
    pair.manager.close()
    assert pair.manager.layers == {}
    with pytest.raises(UsageError, match="no layers yet"):
        pair.prefill.send_kv_metadata("r", [1])
    with pytest.warns(CopiedIntoPoolWarning):  # its pool is known no more, so it is as any other tensor
        pair.hand_over("again", {0: kv}).release()
    del kv
    assert same_layer(mapped.layers[0], before)
    again = pair.layer(0, dtype=torch.float16)
    with pair.hand_over("r2", [1]) as mapped_again:
        assert same_layer(mapped_again.layers[0], again)
    mapped.release()


def test_the_memory_goes_with_the_manager_and_the_tensors(
    directory: Any, own_pool_mappings: Callable[[], list[str]]
) -> None:
    manager = KVCacheManager()
    kv = manager.allocate(0, SHAPE, torch.float32)
    assert len(own_pool_mappings()) >= 1
    manager.close()
    assert not kv.key.any()  # still there
    del kv
    assert own_pool_mappings() == []


def test_a_decode_may_allocate_but_not_send(pair: Pair) -> None:
    KVCacheManager(pair.decode).allocate(0, SHAPE, torch.float32)
    with pytest.raises(UsageError, match="is for prefill; this communicator is decode's"):
        pair.decode.send_kv_metadata("r", [1])
    KVCacheManager(pair.decode).close()


def test_tensors_that_want_gradients(pair: Pair) -> None:
    """What is copied must not become a part of a graph."""
    cache = torch.zeros(3, 4, requires_grad=True)
    with copied:
        registered = pair.manager.register(0, cache)
    assert not registered.key.requires_grad and registered.key.grad_fn is None
    registered.key.fill_(1)
