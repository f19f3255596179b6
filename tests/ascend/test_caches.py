"""Strips: what vllm-ascend's tensors are made of, block by block, and what is refused."""

import random
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm_mc2.ascend import caches
from vllm_mc2.ascend.caches import CacheLayout, format_of, natural_key, read_caches
from vllm_mc2.errors import LayoutError

ALIGNMENT = 2 << 20


def aligned(num_bytes: int) -> torch.Tensor:
    """Raw bytes as vllm-ascend takes them: more than needed, cut at 2 MiB."""
    whole = torch.zeros(num_bytes + ALIGNMENT, dtype=torch.int8)
    return whole[-whole.data_ptr() % ALIGNMENT :][:num_bytes]


def dense(shape: Sequence[int], dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    raw = aligned(int(np.prod(shape)) * torch.empty((), dtype=dtype).element_size())
    return raw.view(dtype).view(*shape)


def strided(raw: torch.Tensor, offset: int, shape: Sequence[int], page: int, dtype: torch.dtype) -> torch.Tensor:
    """A view of each page, ``offset`` bytes into it."""
    item = torch.empty((), dtype=dtype).element_size()
    inner = torch.empty(tuple(shape)).stride()[1:]
    start = raw.storage_offset() + offset
    assert not start % item
    return torch.as_strided(raw.view(dtype), tuple(shape), (page // item, *inner), start // item)


def tensors_of(kv_caches: Mapping[str, object]) -> list[torch.Tensor]:
    return [
        tensor for cache in kv_caches.values() for tensor in (cache if isinstance(cache, list | tuple) else [cache])
    ]


def places(tensor: torch.Tensor, block: int, num_blocks: int) -> np.ndarray:
    """Addresses of the bytes of one block of one view, in logical order, from shape and strides alone."""
    item, rows = tensor.element_size(), tensor.shape[0] // num_blocks
    at = tensor.data_ptr() + np.arange(block * rows, (block + 1) * rows, dtype=np.int64) * tensor.stride(0) * item
    for size, stride in zip(tensor.shape[1:], tensor.stride()[1:], strict=True):
        at = at[..., None] + np.arange(size, dtype=np.int64) * stride * item
    return (at[..., None] + np.arange(item, dtype=np.int64)).reshape(-1)


def check_copies(kv_caches: Mapping[str, object], num_blocks: int) -> CacheLayout:
    """Copies blocks strip by strip: every view's block arrives, and no other byte of any allocation changes.

    On whatever device the tensors are: it copies whole allocations to the host and back, and strips on the device.
    """
    layout = read_caches(kv_caches, num_blocks)
    tensors = tensors_of(kv_caches)
    whole: dict[int, torch.Tensor] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        whole[storage.data_ptr()] = flat.set_(storage, 0, (storage.nbytes(),), (1,))
    rng = np.random.default_rng(7)
    for flat in whole.values():
        flat.copy_(torch.from_numpy(rng.integers(0, 256, len(flat), dtype=np.uint8)))

    def at(address: int, num_bytes: int) -> torch.Tensor:
        (start,) = (start for start, flat in whole.items() if start <= address < start + len(flat))
        assert address + num_bytes <= start + len(whole[start])
        return whole[start][address - start :][:num_bytes]

    def snapshot() -> dict[int, np.ndarray]:
        return {start: flat.cpu().numpy().copy() for start, flat in whole.items()}

    def read(contents: Mapping[int, np.ndarray], tensor: torch.Tensor, block: int) -> np.ndarray:
        start = tensor.untyped_storage().data_ptr()
        return contents[start][places(tensor, block, num_blocks) - start]

    pairs = {(0, num_blocks - 1), (num_blocks - 1, 0), (num_blocks // 2, 0), (1 % num_blocks, num_blocks - 1)}
    for source, target in sorted(pairs):
        before = snapshot()
        allowed = {start: np.zeros(len(flat), dtype=bool) for start, flat in whole.items()}
        for strip in layout.strips:
            assert 0 < strip.block_bytes <= strip.block_stride_bytes
            there, here = (strip.address + block * strip.block_stride_bytes for block in (target, source))
            at(there, strip.block_bytes).copy_(at(here, strip.block_bytes))
        after = snapshot()
        for tensor in tensors:
            assert np.array_equal(read(after, tensor, target), read(before, tensor, source)), tensor.shape
            start = tensor.untyped_storage().data_ptr()
            allowed[start][places(tensor, target, num_blocks) - start] = True
        for start, contents in after.items():
            assert np.array_equal(contents[~allowed[start]], before[start][~allowed[start]])
    covered = sum(strip.block_bytes for strip in layout.strips)
    distinct = np.unique(np.concatenate([places(tensor, 0, num_blocks) for tensor in tensors]))
    assert covered == len(distinct), "strips overlap, or hold more than the views do"
    return layout


def names(layout: CacheLayout) -> list[str]:
    return [strip.name for strip in layout.strips]


def test_keys_and_values_apart() -> None:
    kv = {f"model.layers.{i}.self_attn.attn": (dense((9, 128, 8, 128)), dense((9, 128, 8, 64))) for i in (10, 9, 2)}
    layout = check_copies(kv, 9)
    assert layout.num_blocks == 9
    assert names(layout) == [f"model.layers.{i}.self_attn.attn/{part}" for i in (2, 9, 10) for part in (0, 1)]
    first, second = layout.strips[:2]
    assert (first.signature, second.signature) == ("bfloat16[128,8,128]", "bfloat16[128,8,64]")
    assert first.address % ALIGNMENT == 0 and first.num_heads == second.num_heads == 8
    assert first.block_bytes == first.block_stride_bytes == 128 * 8 * 128 * 2


def test_latent_sparse_and_quantized_caches() -> None:
    num_blocks, size, repl = 5, 128, 2
    raw = aligned(num_blocks * repl * size * (128 + 2))
    split = num_blocks * repl * size * 128
    indexer = raw[:split].view(num_blocks * repl, size, 1, 128)
    scale = raw[split:].view(torch.float16).view(num_blocks * repl, size, 1, 1)
    kv: dict[str, object] = {
        "mla": (dense((num_blocks, size, 1, 512)), dense((num_blocks, size, 1, 64))),
        "sparse": (dense((num_blocks, size, 1, 512)), dense((num_blocks, size, 1, 64)), indexer, scale),
        "sfa_c8": (dense((num_blocks, size, 1, 656), torch.int8), dense((num_blocks, size, 1, 128))),
        "alone": (dense((num_blocks, size, 1, 656), torch.int8),),
    }
    layout = check_copies(kv, num_blocks)
    assert names(layout) == [
        "alone/0", "mla/0", "mla/1", "sfa_c8/0", "sfa_c8/1", "sparse/0", "sparse/1", "sparse/2", "sparse/3",
    ]  # fmt: skip
    of = {strip.name: strip for strip in layout.strips}
    assert of["sparse/2"].signature == "int8[2x128,1,128]" and of["sparse/2"].block_bytes == 2 * 128 * 128
    assert of["sparse/3"].signature == "float16[2x128,1,1]" and of["sparse/3"].num_heads == 1


def interleaved(num_blocks: int, *, is_overlaid: bool) -> dict[str, object]:
    """Compressed caches: pages with a gap behind, several views in each, and two layers on one allocation."""
    page, size = 128 * (128 + 2) + 640, 128
    raw, other = aligned(num_blocks * page), aligned(num_blocks * 8192)
    views = [
        strided(raw, 0, (num_blocks, size, 1, 128), page, torch.int8),
        strided(raw, size * 128, (num_blocks, size, 1, 1), page, torch.float16),
    ]
    if is_overlaid:
        views.append(strided(raw, 0, (num_blocks, size, 1, 130), page, torch.int8))
    shared = [strided(other, 0, (num_blocks, 32, 1, 64), 8192, torch.bfloat16)]
    return {"layers.0.attn": views, "layers.1.attn": shared, "layers.2.attn": shared}


def test_views_interleaved_in_a_block() -> None:
    layout = check_copies(interleaved(6, is_overlaid=False), 6)
    assert names(layout) == ["layers.0.attn/0", "layers.0.attn/1", "layers.1.attn/0"]
    first, second, shared = layout.strips
    assert first.block_stride_bytes == second.block_stride_bytes == 128 * 130 + 640
    assert second.address - first.address == first.block_bytes == 128 * 128
    assert shared.signature == "bfloat16[32,1,64] = layers.2.attn/0"
    assert {strip.num_heads for strip in layout.strips} == {None}, "a list says nothing of heads"


def test_a_view_over_others_is_one_strip_with_them() -> None:
    layout = check_copies(interleaved(6, is_overlaid=True), 6)
    assert names(layout) == ["layers.0.attn/0", "layers.1.attn/0"]
    assert layout.strips[0].block_bytes == 128 * 130
    assert layout.strips[0].signature == (
        "layers.0.attn/0 int8[128,1,128] at 0 | layers.0.attn/1 float16[128,1,1] at 16384 | layers.0.attn/2 int8[128,1,130] at 0"
    )


def test_the_owner_may_begin_behind_the_others() -> None:
    raw = aligned(4 * 512)
    kv = {
        "layers.2.attn": [strided(raw, 0, (4, 300), 512, torch.int8)],
        "layers.1.attn": (strided(raw, 200, (4, 16, 2, 4), 512, torch.int8),),
    }
    (strip,) = check_copies(kv, 4).strips
    assert (strip.name, strip.address, strip.block_bytes) == ("layers.1.attn/0", raw.data_ptr(), 328)
    assert strip.signature == "layers.1.attn/0 int8[16,2,4] at 200 | layers.2.attn/0 int8[300] at 0"
    assert strip.num_heads is None, "it holds more than heads"


def hybrid(num_blocks: int, chunk: int = 4) -> dict[str, object]:
    """Attention on top of mamba, both the full length of one allocation: [pad|conv], [keys|ssm], [values|pad]."""
    ssm, conv, kernel = 64 * 128 * chunk * 2, 3 * 1024 * 2, 64
    raw = aligned(num_blocks * (conv + 2 * ssm))
    start, middle = num_blocks * conv, num_blocks * (conv + ssm)
    keys = raw[start:middle].view(torch.bfloat16).view(num_blocks * chunk, kernel, 1, 128)
    values = raw[middle:].view(torch.bfloat16).view(num_blocks * chunk, kernel, 1, 128)
    states = [
        raw[:start].view(torch.bfloat16).view(num_blocks, 3, 1024),
        raw[start:middle].view(torch.float32).view(num_blocks, chunk * 32, 128),
    ]
    return {"layers.3.attn": (keys, values), **{f"layers.{i}.linear_attn": states for i in (0, 1, 2)}}


def test_attention_on_top_of_mamba() -> None:
    layout = check_copies(hybrid(7), 7)
    assert names(layout) == ["layers.0.linear_attn/0", "layers.0.linear_attn/1", "layers.3.attn/1"]
    conv, both, values = layout.strips
    assert conv.signature.endswith("= layers.1.linear_attn/0 = layers.2.linear_attn/0") and conv.num_heads is None
    assert "layers.3.attn/0 bfloat16[4x64,1,128] at 0" in both.signature and both.num_heads is None
    assert values.block_bytes == values.block_stride_bytes == 4 * 64 * 128 * 2 and values.num_heads == 1


def test_states_whose_blocks_are_not_the_keys_are_refused() -> None:
    raw = aligned(4 * 1000)
    kv = {
        "layers.0.linear_attn": [raw[:3200].view(4, 800)],
        "layers.1.attn": (raw[:2400].view(4, 600), raw[2400:].view(4, 400)),
    }
    with pytest.raises(
        LayoutError, match=r"'layers\.0.linear_attn/0' and 'layers\.1\.attn/0' use .* blocks of 800 and 600 bytes"
    ):
        read_caches(kv, 4)


def test_same_blocks_shifted_against_each_other_are_refused() -> None:
    raw = aligned(5 * 1024)
    with pytest.raises(LayoutError, match="not within the same block"):
        read_caches({"a": raw[:4096].view(4, 1024), "b": raw[1024:].view(4, 1024)}, 4)
    with pytest.raises(LayoutError, match="not within the same block"):
        read_caches({"a": raw[:4096].view(4, 1024), "b": raw[512 : 512 + 4096].view(4, 1024)}, 4)


def test_one_tensor_with_and_without_padding() -> None:
    padded = strided(aligned(4 * 4096), 0, (4, 16, 2, 24), 4096, torch.float32)
    layout = check_copies({"cache_only_layers.0": padded, "plain": dense((4, 16, 2, 24))}, 4)
    assert [(strip.block_bytes, strip.block_stride_bytes) for strip in layout.strips] == [(3072, 4096), (1536, 1536)]


def test_a_block_in_pieces_is_split_in_few() -> None:
    outer = dense((2, 6, 8, 16)).transpose(0, 1)
    rows = dense((6, 8, 4, 32))[:, :, :, :16]
    layout = check_copies({"outer": outer, "rows": (rows[:, :3],)}, 6)
    assert names(layout) == ["outer/0"] * 2 + ["rows/0"] * 12
    assert layout.strips[0].signature == "bfloat16[2,8,16] strides [768,16,1] part 1/2"
    assert layout.strips[13].block_bytes == 16 * 2 and layout.strips[13].num_heads is None


def test_rows_of_a_padded_cache_are_split() -> None:
    """Two rows for each block, each with a gap behind."""
    layout = check_copies({"a": strided(aligned(8 * 512), 0, (8, 100), 512, torch.int8)}, 4)
    assert [(s.block_stride_bytes, s.block_bytes, s.signature) for s in layout.strips] == [
        (1024, 100, "int8[2x100] strides [1] part 1/2"),
        (1024, 100, "int8[2x100] strides [1] part 2/2"),
    ]


def cut_off() -> torch.Tensor:
    """Its last byte was taken away afterwards."""
    tensor = torch.zeros(6, 16, dtype=torch.int8)
    tensor.untyped_storage().resize_(95)
    return tensor


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: dense((6, 17, 4, 32))[:, :, :, :16], "lies in 68 pieces"),
        (lambda: dense((7, 4)), "7 rows are no multiple of 6"),
        (lambda: dense((3, 4)), "3 rows are no multiple of 6"),
        (lambda: torch.zeros(1, 4).expand(6, 4), "overlap"),
        (lambda: torch.zeros(6, 1).expand(6, 4), "overlap"),
        (lambda: torch.zeros(64).as_strided((6, 8), (4, 1)), "overlap"),
        (lambda: torch.zeros(()), "no dense memory"),
        (lambda: torch.zeros(6, 0), "no dense memory"),
        (lambda: torch.eye(6).to_sparse(), "no dense memory"),
        (cut_off, "outside of its storage of 95 bytes"),
        (lambda: "tensor", "str at index 0, expected a tensor"),
        (lambda: (dense((6, 4)), None), "NoneType at index 1"),
        (lambda: (), "no tensors"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(make: Callable[[], object], message: str) -> None:
    with pytest.raises(LayoutError, match=message) as raised:
        read_caches({"good": dense((6, 4)), "layers.7.odd": make()}, 6)
    assert "layers.7.odd" in str(raised.value)


def test_nothing_and_several_devices_are_refused() -> None:
    with pytest.raises(LayoutError, match="without tensors"):
        read_caches({}, 4)
    with pytest.raises(LayoutError, match="of 0 blocks"):
        read_caches({"a": dense((4, 4))}, 0)
    with pytest.raises(LayoutError, match=r"several devices: a/0 on cpu, b/0 on meta"):
        read_caches({"a": dense((4, 4)), "b": torch.zeros(4, 4, device="meta")}, 4)


def test_a_single_block() -> None:
    layout = check_copies({"a": (dense((1, 4, 2, 8)), dense((1, 4, 2, 8)))}, 1)
    assert [strip.block_bytes for strip in layout.strips] == [128, 128]


def test_order_of_layers_does_not_matter() -> None:
    kv = {**hybrid(3), **interleaved(3, is_overlaid=True), "z": dense((3, 4))}
    expected = read_caches(kv, 3)
    for seed in range(10):
        items = list(kv.items())
        random.Random(seed).shuffle(items)
        assert read_caches(dict(items), 3) == expected
    assert sorted(["l.10", "l.2", "l", "10"], key=natural_key) == ["10", "l", "l.2", "l.10"]


def test_any_strides_are_exact_or_refused() -> None:
    """Permuted, cut, stepped and sliced views; many are split, some refused, none wrong."""
    rng = random.Random(11)
    outcomes = {"exact": 0, "refused": 0}
    for _ in range(300):
        num_blocks, rows = rng.choice([1, 2, 3, 5]), rng.choice([1, 1, 2, 3])
        shape = [num_blocks * rows, *(rng.choice([1, 2, 3, 4]) for _ in range(rng.randint(0, 3)))]
        order = list(range(len(shape)))
        rng.shuffle(order)
        big = torch.zeros(
            [shape[axis] * rng.choice([1, 1, 2]) for axis in order], dtype=rng.choice([torch.int8, torch.float32])
        )
        cut = big[
            tuple(
                slice(None, None, big.shape[i] // shape[axis]) if rng.random() < 0.5 else slice(shape[axis])
                for i, axis in enumerate(order)
            )
        ]
        view = cut.permute([order.index(axis) for axis in range(len(shape))])
        assert list(view.shape) == shape
        try:
            read_caches({"a": view}, num_blocks)
        except LayoutError:
            outcomes["refused"] += 1
            continue
        check_copies({"a": view, "b": view}, num_blocks)
        outcomes["exact"] += 1
    assert outcomes["exact"] > 200 and outcomes["refused"] > 5, outcomes


def test_format_is_part_of_the_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = dense((4, 32, 16, 16), torch.float16)
    plain = read_caches({"a": (cache, cache)}, 4).strips[0]
    monkeypatch.setattr(caches, "format_of", lambda tensor: "NZ")
    fractal = read_caches({"a": (cache, cache)}, 4).strips[0]
    assert fractal.signature == "float16[32,16,16] NZ = a/1" and plain.signature == "float16[32,16,16] = a/1"
    assert (plain.num_heads, fractal.num_heads) == (16, None)
    for odd in (dense((4, 16)), dense((4, 16, 8)), dense((4, 8, 16)), dense((4, 16, 32))[:, :, :16]):
        with pytest.raises(LayoutError, match="FRACTAL_NZ tiles are padded"):
            read_caches({"a": odd}, 4)
    monkeypatch.setattr(caches, "format_of", lambda tensor: "format 4")
    with pytest.raises(LayoutError, match="format 4 of CANN"):
        read_caches({"a": cache}, 4)


def test_format_comes_from_torch_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    npu: Any = SimpleNamespace(device=SimpleNamespace(type="npu"), code=29)
    assert format_of(torch.zeros(2)) == "ND"
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    assert format_of(npu) == "ND"
    fake: Any = ModuleType("torch_npu")
    fake.get_npu_format = lambda tensor: tensor.code
    monkeypatch.setitem(sys.modules, "torch_npu", fake)
    for code, expected in {29: "NZ", 2: "ND", 0: "ND", 4: "format 4"}.items():
        npu.code = code
        assert format_of(npu) == expected


def test_pairs_of_blocks_are_really_checked() -> None:
    """The checker itself: it fails when a strip is too short, too long, or misplaced."""
    kv = {"a": strided(aligned(4 * 256), 0, (4, 200), 256, torch.int8)}
    good = read_caches(kv, 4)
    for change in ({"block_bytes": 199}, {"block_bytes": 201}, {"address": good.strips[0].address + 1}):
        bad = CacheLayout((good.strips[0]._replace(**change),), 4)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys.modules[__name__], "read_caches", lambda *_, bad=bad: bad)
            with pytest.raises(AssertionError):
                check_copies(kv, 4)
