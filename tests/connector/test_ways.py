"""Every shape of KV cache: in place, copied or refused, on vLLM's own allocation; and the table in ``docs/ways.md``.

``python -m tests.connector.test_ways`` rewrites the table.
"""

import ctypes
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheLayout,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.worker.utils import allocate_kv_cache

from vllm_mc2.connector import compat
from vllm_mc2.connector.host_memory import own_bytes, own_region
from vllm_mc2.connector.remote_pulling import pieces_of, strips_of
from vllm_mc2.layout import AddressPlan, HeadSlice, make_plan
from vllm_mc2.memory import OwnRegion, WorkerMemory, map_elsewhere
from vllm_mc2.protocol import RemoteGrant

WAYS = Path(__file__).resolve().parents[2] / "docs" / "ways.md"
MARKED = re.compile(r"(<!-- ways: begin.*?-->\n).*?(<!-- ways: end -->)", re.DOTALL)
REAL = "real servers: `tests/e2e/test_{}.py`"
SYNTHETIC = "synthetic bytes: `tests/connector/test_ways.py`"
CHECK = "the check alone: `tests/connector/test_ways.py`"


def full(block_size: int = 16, heads: int = 2, **more: Any) -> Any:
    return FullAttentionSpec(
        **{"block_size": block_size, "num_kv_heads": heads, "head_size": 32, "dtype": torch.float32, **more}
    )


def window(size: int, **more: Any) -> Any:
    return SlidingWindowSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.float32, sliding_window=size)


def latent() -> Any:
    return MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.float32)


def mamba() -> Any:
    return MambaSpec(block_size=16, shapes=((4, 8), (2, 8)), dtypes=(torch.float32, torch.float32))


def config(*groups: tuple[Any, int], layout: str = "LBHNC", num_blocks: int = 24) -> KVCacheConfig:
    """Groups of ``(spec, layers)``, laid over each other as vLLM does it."""
    page = max(spec.page_size_bytes for spec, _ in groups)
    most = max(count for _, count in groups)
    is_block_major = layout.startswith("B")
    tensors, specs = [], []
    for index, (spec, count) in enumerate(groups):
        layers = [f"group{index}.layer{layer}" for layer in range(count)]
        specs.append(KVCacheGroupSpec(layers, spec))
        strides = (page, page * most) if is_block_major else (page * num_blocks, page)
        size = page * num_blocks * most
        tensors.append(KVCacheTensor(size=size, layers=layers, layer_stride=strides[0], block_stride=strides[1]))
    return KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=tensors, kv_cache_groups=specs, kv_cache_layout=layout)


@dataclass(frozen=True)
class Cell:
    """One line of the table."""

    cache: str
    make: Callable[[], KVCacheConfig]
    way: str
    tested: str
    engine: dict[str, Any] = field(default_factory=dict)


CELLS = [
    Cell("grouped-query attention (Llama, Qwen3)", lambda: config((full(), 3)), "attach", REAL.format("shapes")),
    Cell("multi-head attention", lambda: config((full(heads=4), 3)), "attach", REAL.format("shapes")),
    Cell("latent attention, MLA (DeepSeek)", lambda: config((latent(), 3)), "refused", REAL.format("shapes")),
    Cell("blocks of 32 tokens", lambda: config((full(32), 2)), "attach", REAL.format("shapes")),
    Cell("blocks of 64 tokens", lambda: config((full(64), 2)), "attach", REAL.format("shapes")),
    Cell("blocks of 128 tokens", lambda: config((full(128), 2)), "attach", REAL.format("tokens")),
    Cell("blocks of 256 tokens", lambda: config((full(256), 2)), "attach", SYNTHETIC),
    Cell("block-major layout", lambda: config((full(), 3), layout="BLHNC"), "attach", SYNTHETIC),
    Cell("tokens before heads (NHD)", lambda: config((full(), 3), layout="LBNHC"), "attach", SYNTHETIC),
    Cell("fp8 KV", lambda: config((full(dtype=torch.float8_e4m3fn), 3)), "attach", REAL.format("shapes")),
    Cell("float16 KV", lambda: config((full(dtype=torch.float16), 3)), "attach", SYNTHETIC),
    Cell("layers that share another layer's KV", lambda: config((full(), 2)), "attach", SYNTHETIC),
    Cell(
        "sliding windows, hybrid cache manager off", lambda: config((full(sliding_window=64), 3)), "attach", SYNTHETIC
    ),
    Cell(
        "sliding windows and full attention, hybrid cache manager on (Gemma 3)",
        lambda: config((full(), 2), (window(64), 2), (window(64), 1)), "pull", REAL.format("shapes"),
    ),
    Cell("sliding windows alone", lambda: config((window(64), 3)), "pull", SYNTHETIC),
    Cell("chunked local attention, hybrid cache manager on", lambda: config(
        (ChunkedLocalAttentionSpec(
            block_size=16, num_kv_heads=2, head_size=32, dtype=torch.float32, attention_chunk_size=64), 2)
    ), "refused", CHECK),
    Cell("Mamba layers, alone or in a hybrid", lambda: config((mamba(), 2)), "refused", REAL.format("shapes")),
    Cell("groups with blocks of different sizes", lambda: config((full(16), 2), (full(32, heads=1), 2)), "refused", CHECK),
    Cell("speculative decoding, with or without a draft model", lambda: config((full(), 2)), "refused", CHECK,
         {"speculative_config": object()}),
    Cell("pipeline parallel", lambda: config((full(), 2)), "refused", REAL.format("ranks"), {"pipeline_parallel_size": 2}),
    Cell("decode context parallel", lambda: config((full(), 2)), "refused", CHECK, {"decode_context_parallel_size": 2}),
    Cell("KV cache on a device", lambda: config((full(), 2)), "refused", CHECK, {"device_type": "cuda"}),
]  # fmt: skip
OTHERS = [
    ("tensor parallel, the same size on both sides", "attach", "", REAL.format("ranks")),
    ("tensor parallel, 2 to 1 and 1 to 2", "pull", "slices of heads; with other sizes one must be a multiple of the other",
     REAL.format("ranks")),
    ("data parallel 2 and two API servers on either side", "attach", "", REAL.format("data_parallel")),
    ("another host, whatever is not refused above", "pull", "memory is not shared: blocks are read over the network",
     REAL.format("other_host")),
    ("as a child of `MultiConnector`, first or second", "attach or pull", "",
     "the rig, without a model: `tests/connector/test_multi.py`"),
    ("vLLM 0.23 to 0.30", "pull", "attach needs hooks of 0.31",
     "0.23.0's own scheduler, without a model: `tests/packaging/test_old_vllm.py`"),
    ("prefix caching off on decode", "pull", "attached blocks are prefix-cache hits", "`tests/connector/test_pull.py`"),
]  # fmt: skip
SUPPORTED = [cell for cell in CELLS if cell.way != "refused"]


def classify(cell: Cell) -> tuple[str, str]:
    """What the connector's own checks say: the way, and why it is not the best one."""
    parallel = {"pipeline_parallel_size": 1, "decode_context_parallel_size": 1}
    parallel.update({name: value for name, value in cell.engine.items() if name in parallel})
    vllm_config: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(**parallel),
        speculative_config=cell.engine.get("speculative_config"),
        device_config=SimpleNamespace(device_type=cell.engine.get("device_type", "cpu")),
    )
    made = cell.make()
    refused = compat.unsupported_engine(vllm_config, made)
    if refused is not None:
        return "refused", refused
    obstacle = compat.why_not_in_place(made)
    return ("attach", "") if obstacle is None else ("pull", obstacle)


def table() -> str:
    """As it stands in the documentation."""
    rows = ["| KV cache or engine | way | why not in place | tested with |", "|---|---|---|---|"]
    for cell in CELLS:
        way, why = classify(cell)
        rows.append(f"| {cell.cache} | {way} | {why} | {cell.tested} |")
    rows += [f"| {cache} | {way} | {why} | {tested} |" for cache, way, why, tested in OTHERS]
    return "\n".join(rows) + "\n"


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.cache)
def test_each_shape_goes_the_way_that_the_table_says(cell: Cell) -> None:
    way, why = classify(cell)
    assert way == cell.way, why
    assert bool(why) == (way != "attach")


def test_the_table_in_the_docs_is_that_of_the_code() -> None:
    match = MARKED.search(WAYS.read_text())
    assert match is not None
    assert match[0] == match[1] + table() + match[2], "run: python -m tests.connector.test_ways"


def allocate(
    made: KVCacheConfig, factor: float, *, shared: bool
) -> tuple[AddressPlan, WorkerMemory, dict[str, torch.Tensor], list[list[str]]]:
    """As a worker does it: our plan, vLLM's allocation in our memory."""
    layers = compat.layers_of_regions(made)
    plan = make_plan(compat.region_sizes(made), made.num_blocks, factor)
    compat.apply_plan(made, plan.num_total, [region.offset_bytes for region in plan.regions], plan.range_bytes)
    memory = WorkerMemory(plan, shared=shared, huge_pages="off")
    mode = compat.AllocateFrom(plan.range_bytes, lambda: torch.frombuffer(memory.buffer(), dtype=torch.int8))
    with mode:
        views = allocate_kv_cache(made, torch.device("cpu"), KVCacheLayout[str(made.kv_cache_layout)])
    assert mode.num_used == 1
    return plan, memory, views, layers


def as_bytes(view: torch.Tensor, block: int) -> list[int]:
    content: list[int] = view[block].contiguous().view(torch.uint8).flatten().tolist()
    return content


def read_from_afar(own: list[OwnRegion], source: WorkerMemory, pairs: dict[int, int]) -> None:
    """As a worker on another host does it, but for the network."""
    addresses = tuple(source.address + region.offset_bytes for region in source.plan.regions)
    grant = RemoteGrant(source.layout, "memory", "here", addresses)
    strips = strips_of(own, grant, HeadSlice(peer_rank=0))
    for piece in pieces_of(strips, list(pairs), list(pairs.values())):
        ctypes.memmove(piece.own_address, piece.peer_address, piece.num_bytes)


@pytest.mark.parametrize("cell", SUPPORTED, ids=lambda cell: cell.cache)
def test_d12_every_layer_of_every_block_arrives(cell: Cell) -> None:
    """Copied into vLLM's own memory; in place too, where that is the way."""
    source_config = cell.make()
    num_blocks = source_config.num_blocks
    plan, source, source_views, layers = allocate(source_config, 0.0, shared=True)
    for region, names in zip(plan.regions, layers, strict=True):
        assert {source_views[name].data_ptr() for name in names} == {source.address + region.offset_bytes}
    generator = torch.Generator().manual_seed(3)
    whole = torch.frombuffer(source.buffer(), dtype=torch.uint8)
    for region in plan.regions:
        part = whole[region.offset_bytes : region.offset_bytes + num_blocks * region.block_bytes]
        part.copy_(torch.randint(0, 256, part.shape, dtype=torch.uint8, generator=generator))
    assert source.pool_fd is not None
    own_config = cell.make()
    own_layers = compat.layers_of_regions(own_config)
    views = allocate_kv_cache(own_config, torch.device("cpu"), KVCacheLayout[str(own_config.kv_cache_layout)])
    own = [
        own_region(region.name, region.block_bytes, own_bytes(views[names[0]], num_blocks * region.block_bytes))
        for region, names in zip(plan.regions, own_layers, strict=True)
    ]
    elsewhere = map_elsewhere(source.layout, source.pool_fd)
    copier = elsewhere.copier(0, own, num_blocks, HeadSlice(peer_rank=0))
    pairs = {3: 20, 4: 21, 9: 1, 23: 5}
    copier.copy(list(pairs), list(pairs.values()), 2)
    for name, view in views.items():
        for mine, theirs in pairs.items():
            assert as_bytes(view, mine) == as_bytes(source_views[name], theirs), name
        assert not any(as_bytes(view, 5))
    for region in own:
        region.data.zero_()  # type: ignore[attr-defined]
    read_from_afar(own, source, pairs)
    for name, view in views.items():
        for mine, theirs in pairs.items():
            assert as_bytes(view, mine) == as_bytes(source_views[name], theirs), name
        assert not any(as_bytes(view, 5))
    if cell.way == "attach":
        window_plan, memory, window_views, _ = allocate(cell.make(), 4.0, shared=False)
        base = window_plan.window_base
        memory.map_peer(base, source.layout, source.pool_fd)
        for name, view in window_views.items():
            for block in (1, 7, num_blocks - 1):
                assert as_bytes(view, base + block) == as_bytes(source_views[name], block), name


def rewrite() -> None:
    """Put the table into the documentation."""
    WAYS.write_text(MARKED.sub(lambda match: match[1] + table() + match[2], WAYS.read_text()))


if __name__ == "__main__":
    rewrite()
