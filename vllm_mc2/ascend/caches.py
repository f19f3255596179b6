"""What one block of a vllm-ascend KV cache is made of, in bytes.

vLLM's own runners hand a connector one tensor for each layer. vllm-ascend hands over tuples and lists: keys and values apart,
latent and rotary parts, an indexer with its scales, a mamba layer's states; several of them views of one allocation, the
allocation longer than its views, a block spread over several rows. What a dimension means differs from one to the next, so
nothing here goes by shape alone: a view is a base address, strides and an item size, and a *strip* is a run of bytes that
lies in every block at the same place::

    block b of a strip = [address + b * block_stride_bytes, ... + block_bytes)

What the strips cover is exactly what the views of the layers cover: copying all strips of a block copies the block, and
touches no other. Whatever cannot be said that way is refused.
"""

import re
from collections.abc import Iterator, Mapping
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

from vllm_mc2.errors import LayoutError

if TYPE_CHECKING:
    import torch

MAX_STRIPS_PER_VIEW = 16
"""A view whose block lies in more pieces is refused: every piece is a copy of its own, and thousands of them are a mistake."""

_PLAIN_FORMATS = frozenset({0, 1, 2, 30})
"""Of torch_npu, NCHW, NHWC, ND and NCDHW: names for dimensions; the memory is as the strides say."""

_FRACTAL_NZ = 29
_NZ_ROWS = 16
_NZ_ROW_BYTES = 32


class CacheStrip(NamedTuple):
    """One run of bytes in every block."""

    name: str
    """``layer/index`` of the view that owns it: the first, in natural order, of those that have it in common."""

    address: int
    """Of block 0, as the device counts."""

    block_stride_bytes: int
    """From one block to the next."""

    block_bytes: int
    """Of each block that belong to the strip, contiguous; at most the stride."""

    signature: str
    """What must be equal on both sides for the bytes to mean the same: dtype, shape and, if not dense, strides of one block,
    and every view that has the strip in common."""

    num_heads: int | None
    """KV heads in the strip's ``[tokens, heads, dim]``, or None where this dimension is not known. Latent caches have one,
    which every rank holds whole."""


class CacheLayout(NamedTuple):
    """All strips of a cache. No two of them share a byte."""

    strips: tuple[CacheStrip, ...]
    """In natural order of their names, whatever the order of the layers was."""

    num_blocks: int


class _Piece(NamedTuple):
    """A contiguous part of every block of one view."""

    name: str
    address: int
    stride: int
    num_bytes: int
    signature: str
    num_heads: int | None

    @property
    def key(self) -> tuple[list[tuple[int, int, str]], int]:
        return natural_key(self.name), self.address


def natural_key(text: str) -> list[tuple[int, int, str]]:
    """Sorts ``layers.2`` before ``layers.10``."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", text) if part]


def read_caches(kv_caches: Mapping[str, object], num_blocks: int) -> CacheLayout:
    """The strips of what vllm-ascend gives to ``register_kv_caches``: a tensor, or a tuple or list of them, for each layer.

    ``num_blocks`` is what the block manager counts (``kv_cache_config.num_blocks``); a tensor with a multiple of that many rows
    holds one block in consecutive rows. Only addresses and strides are read, never the memory.

    Raises:
        LayoutError: something here is not understood. The message names the layer, and the shape and strides, or the
            layers whose views overlap in a way that is not one block on top of the same block.
    """
    if num_blocks < 1:
        raise LayoutError(f"a KV cache of {num_blocks} blocks")
    views = [
        (f"{layer}/{index}", tensor, is_attention)
        for layer, cache in kv_caches.items()
        for index, tensor, is_attention in _views(layer, cache)
    ]
    if not views:
        raise LayoutError("a KV cache without tensors")
    devices = {str(tensor.device): name for name, tensor, _ in views}
    if len(devices) > 1:
        raise LayoutError("a KV cache on several devices: " + ", ".join(f"{n} on {d}" for d, n in devices.items()))
    pieces: list[_Piece] = []
    for name, tensor, is_attention in views:
        pieces += _pieces_of(name, tensor, num_blocks, is_attention=is_attention)
    strips = [_merge(group) for cluster in _clusters(pieces, num_blocks) for group in _overlapping(cluster)]
    strips.sort(key=lambda strip: (natural_key(strip.name), strip.address))
    return CacheLayout(tuple(strips), num_blocks)


def storages_of(kv_caches: Mapping[str, object]) -> list["torch.UntypedStorage"]:
    """What the tensors of :func:`read_caches` lie in, each once."""
    views = (tensor for layer, cache in kv_caches.items() for _, tensor, _ in _views(layer, cache))
    storages = (tensor.untyped_storage() for tensor in views)
    return list({storage.data_ptr(): storage for storage in storages}.values())


def format_of(tensor: "torch.Tensor") -> str:
    """How an NPU tensor's memory is arranged: ``ND`` is as its strides say, ``NZ`` is CANN's FRACTAL_NZ, anything else
    is ``format`` and CANN's number. ``ND`` on other devices, and without torch_npu.
    """
    if tensor.device.type != "npu":
        return "ND"
    try:
        import torch_npu  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        return "ND"
    code = int(torch_npu.get_npu_format(tensor))
    if code in _PLAIN_FORMATS:
        return "ND"
    return "NZ" if code == _FRACTAL_NZ else f"format {code}"


def _views(layer: str, cache: object) -> Iterator[tuple[int, "torch.Tensor", bool]]:
    """A layer's tensors, each with its index and whether its dimensions are attention's. Mamba states come as a list."""
    import torch

    members = list(cache) if isinstance(cache, list | tuple) else [cache]
    if not members:
        raise LayoutError(f"layer {layer!r}: no tensors")
    for index, member in enumerate(members):
        if not isinstance(member, torch.Tensor):
            raise LayoutError(f"layer {layer!r}: {type(member).__name__} at index {index}, expected a tensor")
        yield index, member, isinstance(cache, tuple)


def _describe(name: str, tensor: "torch.Tensor") -> str:
    return f"KV cache {name!r}, {tensor.dtype} of shape {tuple(tensor.shape)} and strides {tuple(tensor.stride())}"


def _pieces_of(name: str, tensor: "torch.Tensor", num_blocks: int, *, is_attention: bool) -> list[_Piece]:
    shape, item = tuple(tensor.shape), tensor.element_size()
    if tensor.layout.__str__() != "torch.strided" or not shape or not tensor.numel():
        raise LayoutError(f"{_describe(name, tensor)}: no dense memory to share")
    rows, rest = divmod(shape[0], num_blocks)
    if rest or not rows:
        raise LayoutError(f"{_describe(name, tensor)}: {shape[0]} rows are no multiple of {num_blocks} blocks")
    strides = [stride * item for stride in tensor.stride()]
    block_stride = rows * strides[0]
    dims = [(size, stride) for size, stride in zip((rows, *shape[1:]), strides, strict=True) if size > 1]
    dims.sort(key=lambda dim: dim[1])
    extent = _extent(name, tensor, dims, (num_blocks, block_stride))
    if num_blocks == 1:
        block_stride = max(block_stride, extent)
    _check_bounds(name, tensor, extent)
    run = item
    while dims and dims[0][1] == run:
        run *= dims.pop(0)[0]
    offsets = sorted(sum(place) for place in product(*(range(0, size * step, step) for size, step in dims)))
    signature, is_plain = _signature(name, tensor, rows, is_dense=not dims)
    is_known = is_attention and is_plain and not dims and len(shape) == 4
    parts = [f" part {index + 1}/{len(offsets)}" for index in range(len(offsets))] if len(offsets) > 1 else [""]
    return [
        _Piece(name, tensor.data_ptr() + offset, block_stride, run, signature + part, shape[2] if is_known else None)
        for offset, part in zip(offsets, parts, strict=True)
    ]


def _extent(name: str, tensor: "torch.Tensor", dims: list[tuple[int, int]], blocks: tuple[int, int]) -> int:
    """Bytes from the view's first to its last, once it is certain that no two of its elements share a byte."""
    run = extent = int(tensor.element_size())
    pieces, is_run = 1, True
    for size, stride in sorted([*dims, blocks] if blocks[0] > 1 else dims, key=lambda dim: dim[1]):
        if stride < extent:
            raise LayoutError(f"{_describe(name, tensor)}: its blocks or their elements overlap")
        extent += (size - 1) * stride
    for size, stride in dims:
        is_run = is_run and stride == run
        run, pieces = (run * size, pieces) if is_run else (run, pieces * size)
    if pieces > MAX_STRIPS_PER_VIEW:
        raise LayoutError(
            f"{_describe(name, tensor)}: a block of it lies in {pieces} pieces, at most {MAX_STRIPS_PER_VIEW} are handled"
        )
    return extent


def _check_bounds(name: str, tensor: "torch.Tensor", extent: int) -> None:
    storage = tensor.untyped_storage()
    start, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    if not start or not start <= tensor.data_ptr() <= tensor.data_ptr() + extent <= end:
        raise LayoutError(f"{_describe(name, tensor)}: outside of its storage of {storage.nbytes()} bytes")


def _signature(name: str, tensor: "torch.Tensor", rows: int, *, is_dense: bool) -> tuple[str, bool]:
    """What one block is, in words, and whether its memory is as the strides say."""
    inner = ",".join(str(size) for size in tensor.shape[1:])
    text = f"{str(tensor.dtype).removeprefix('torch.')}[{f'{rows}x' if rows > 1 else ''}{inner}]"
    if not is_dense or not tensor[:1].is_contiguous():
        text += f" strides [{','.join(str(stride) for stride in tensor.stride()[1:])}]"
    layout = format_of(tensor)
    if layout == "ND":
        return text, True
    if layout != "NZ":
        raise LayoutError(f"{_describe(name, tensor)}: {layout} of CANN is not handled")
    # FRACTAL_NZ rearranges the two last dimensions in tiles. A block stays one run of bytes if the tiles are full.
    is_full = tensor.dim() >= 3 and not tensor.shape[-2] % _NZ_ROWS
    if not is_full or tensor.shape[-1] * tensor.element_size() % _NZ_ROW_BYTES or not tensor.is_contiguous():
        raise LayoutError(f"{_describe(name, tensor)}: its FRACTAL_NZ tiles are padded, or it is not contiguous")
    return f"{text} NZ", False


def _clusters(pieces: list[_Piece], num_blocks: int) -> Iterator[list[_Piece]]:
    """Pieces whose ranges, from the first block to the last, intersect: they must be blocks of one and the same stride."""
    cluster: list[_Piece] = []
    end = 0
    for piece in sorted(pieces, key=lambda piece: (piece.address, piece.key)):
        if cluster and piece.address >= end:
            yield cluster
            cluster = []
        if cluster:
            first = cluster[0]
            if piece.stride != first.stride:
                raise LayoutError(
                    f"KV caches {first.name!r} and {piece.name!r} use one memory with blocks of "
                    f"{first.stride} and {piece.stride} bytes"
                )
            if piece.address + piece.num_bytes > first.address + first.stride:
                raise LayoutError(
                    f"KV caches {first.name!r} and {piece.name!r} use one memory, and a block of one is not within "
                    f"the same block of the other: {piece.num_bytes} bytes at {piece.address - first.address} of {first.stride}"
                )
        cluster.append(piece)
        end = max(end, piece.address + (num_blocks - 1) * piece.stride + piece.num_bytes)
    yield cluster


def _overlapping(cluster: list[_Piece]) -> Iterator[list[_Piece]]:
    """Splits a cluster, sorted by address, where no piece crosses. Within one block: ``_clusters`` has made sure."""
    group: list[_Piece] = []
    end = 0
    for piece in cluster:
        if group and piece.address >= end:
            yield group
            group = []
        group.append(piece)
        end = max(end, piece.address + piece.num_bytes)
    yield group


def _merge(group: list[_Piece]) -> CacheStrip:
    """One strip for all views that have its bytes in common. Which they are, and where, is part of the signature."""
    owner = min(group, key=lambda piece: piece.key)
    start = min(piece.address for piece in group)
    end = max(piece.address + piece.num_bytes for piece in group)
    same = {(piece.address, piece.num_bytes, piece.signature) for piece in group}
    others = sorted((piece for piece in group if piece is not owner), key=lambda piece: piece.key)
    if len(same) == 1:
        signature = owner.signature + "".join(f" = {piece.name}" for piece in others)
        heads = {piece.num_heads for piece in group}
    else:
        members = [owner, *others]
        signature = " | ".join(f"{piece.name} {piece.signature} at {piece.address - start}" for piece in members)
        heads = {None}
    return CacheStrip(owner.name, start, owner.stride, end - start, signature, heads.pop() if len(heads) == 1 else None)
