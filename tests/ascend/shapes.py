"""KV caches in every shape that vllm-ascend gives to a connector, small, with a way to write and read one token of each."""

import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

LAYERS = ["layer.0", "layer.1"]
BLOCK_SIZE = 16
NUM_BLOCKS = 64
ALIGNMENT = 2 << 20
HEADS, DIM = 2, 32


def aligned(num_bytes: int, device: str) -> torch.Tensor:
    """Bytes at a multiple of 2 MiB inside a longer allocation."""
    raw = torch.zeros(num_bytes + ALIGNMENT, dtype=torch.int8, device=device)
    skipped = -raw.data_ptr() % ALIGNMENT
    return raw[skipped : skipped + num_bytes]


def dense(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    return aligned(torch.Size(shape).numel() * dtype.itemsize, device).view(dtype).view(shape)


class Cache(NamedTuple):
    """One layer's."""

    given: Any
    """What the connector gets."""
    slots: list[torch.Tensor]
    """The same memory, each as ``[NUM_BLOCKS, BLOCK_SIZE, ...]``."""


Make = Callable[[str], Cache]
TOKENS = (NUM_BLOCKS, BLOCK_SIZE)


def _tuple_of(*parts: tuple[tuple[int, ...], torch.dtype]) -> Make:
    def make(device: str) -> Cache:
        tensors = [dense((*TOKENS, *inner), dtype, device) for inner, dtype in parts]
        return Cache(tuple(tensors), tensors)

    return make


def _split_blocks(device: str) -> Cache:
    """The kernels' blocks are half as long as the scheduler's."""
    slots = [dense((*TOKENS, HEADS, DIM), torch.float32, device) for _ in range(2)]
    return Cache(tuple(slot.view(NUM_BLOCKS * 2, BLOCK_SIZE // 2, HEADS, DIM) for slot in slots), slots)


def _strided_list(device: str) -> Cache:
    """Views side by side in each block of one allocation, with a rest that nobody owns."""
    first, second, rest = 64, 16, 48
    row = BLOCK_SIZE * (first + second) + rest
    raw = aligned(NUM_BLOCKS * row * 4, device).view(torch.float32)
    views = [
        raw.as_strided((*TOKENS, 1, first), (row, first, first, 1), raw.storage_offset()),
        raw.as_strided((*TOKENS, 1, second), (row, second, second, 1), raw.storage_offset() + BLOCK_SIZE * first),
    ]
    return Cache(list(views), views)


def _repeated_indexer(device: str) -> Cache:
    """An indexer with several rows for each block."""
    latent, rope = dense((*TOKENS, 1, 64), torch.float32, device), dense((*TOKENS, 1, 16), torch.float32, device)
    indexer = dense((NUM_BLOCKS * 2, BLOCK_SIZE, 1, 32), torch.bfloat16, device)
    return Cache((latent, rope, indexer), [latent, rope, indexer.view(NUM_BLOCKS, BLOCK_SIZE, 2, 32)])


F32, BF16, INT8, FP16 = torch.float32, torch.bfloat16, torch.int8, torch.float16
SHAPES: dict[str, Make] = {
    "keys and values": _tuple_of(((HEADS, DIM), F32), ((HEADS, DIM), F32)),
    "values of another size": _tuple_of(((HEADS, DIM), BF16), ((HEADS, DIM * 2), F32)),
    "latent and rope": _tuple_of(((1, 64), F32), ((1, 16), F32)),
    "sparse": _tuple_of(((1, 64), F32), ((1, 16), F32), ((1, 32), BF16)),
    "sparse with scales": _tuple_of(((1, 64), F32), ((1, 16), F32), ((1, 32), INT8), ((1, 1), FP16)),
    "one latent, indexer and scales": _tuple_of(((1, 80), INT8), ((1, 32), INT8), ((1, 1), F32)),
    "repeated indexer": _repeated_indexer,
    "split blocks": _split_blocks,
    "strided list": _strided_list,
}
LATENT = {
    "latent and rope",
    "sparse",
    "sparse with scales",
    "one latent, indexer and scales",
    "repeated indexer",
    "strided list",
}


def token_values(layer: str, tokens_digest: int, part: int, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    """What stands in one part of the cache for a token."""
    seed = zlib.crc32(f"{layer}/{part}/{tokens_digest}".encode())
    limit = 1 << 20 if dtype == torch.float32 else 120
    values = (torch.arange(shape.numel(), dtype=torch.int64) * 7 + seed) % limit
    return values.view(shape).to(dtype)
