"""KVCacheManager: puts a model's KV cache into memory that peers can map, layer by layer."""

import inspect
import math
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from vllm_mc2.errors import LayoutError
from vllm_mc2.tensors.messages import MAX_LAYERS, Part, TensorSpec
from vllm_mc2.tensors.pools import REGISTRY, HugePages, SharedPool, check_tensor, dtype_name

if TYPE_CHECKING:
    from vllm_mc2.tensors.communicator import MC2Communicator


class CopiedIntoPoolWarning(UserWarning):
    """A tensor was not in shared memory and had to be copied there, which takes time and memory."""


class LayerKV(NamedTuple):
    """A layer's cache. ``value`` is None when one tensor holds keys and values."""

    key: torch.Tensor
    value: torch.Tensor | None

    def parts(self) -> Iterator[tuple[Part, torch.Tensor]]:
        """Each tensor with its name."""
        yield ("kv" if self.value is None else "key"), self.key
        if self.value is not None:
            yield "value", self.value


class _Copy(NamedTuple):
    """A foreign tensor and its place in a pool. Keeping the original keeps its address from being reused."""

    original: torch.Tensor
    shared: torch.Tensor
    pool: SharedPool


class LayerTable:
    """The layers that a process, or one communicator, has made known. Any thread; KVCacheManager is its face."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.version = 0
        """Grows whenever a layer is added, replaced or removed."""
        self.layers: dict[int, LayerKV] = {}
        self.num_copies = 0
        self._pools: list[SharedPool] = []
        self._copies: dict[int, _Copy] = {}

    def allocate(
        self, layer: int, tensors: Sequence[tuple[Part, Sequence[int], torch.dtype]], huge_pages: HugePages
    ) -> list[torch.Tensor]:
        """Zeroed tensors in a new pool."""
        sizes = [
            (f"layer {layer} {part}", math.prod(shape) * int(torch.empty((), dtype=dtype).element_size()))
            for part, shape, dtype in tensors
        ]
        pool = REGISTRY.allocate(sizes, huge_pages)
        self._pools.append(pool)
        return [pool.tensor(region, shape, dtype) for region, (_, shape, dtype) in enumerate(tensors)]

    def put(self, layer: int, kv: LayerKV) -> None:
        """Make a layer known, in the place of what was known of it."""
        with self.lock:
            self.layers[layer] = kv
            self.version += 1

    def shared(self, layer: int, kv: LayerKV, huge_pages: HugePages) -> LayerKV:
        """The layer in shared memory: as it is when it is there, else its copy, made now unless it was made before.

        Raises:
            LayoutError: a tensor cannot be shared, or has changed since it was copied while its copy is lent.
        """
        with self.lock:
            missing = []
            for part, tensor in kv.parts():
                check_tensor(tensor, f"layer {layer} {part}")
                if REGISTRY.find(tensor) is None and not self._has_copy(tensor):
                    missing.append((part, tensor))
            if missing:
                self._copy(layer, missing, huge_pages)
            parts = [self._resolve(layer, tensor) for _, tensor in kv.parts()]
        return LayerKV(parts[0], parts[1] if kv.value is not None else None)

    def _has_copy(self, tensor: torch.Tensor) -> bool:
        copy = self._copies.get(int(tensor.data_ptr()))
        return copy is not None and _same_view(copy.original, tensor)

    def _copy(self, layer: int, tensors: Sequence[tuple[Part, torch.Tensor]], huge_pages: HugePages) -> None:
        num_bytes = sum(int(tensor.numel() * tensor.element_size()) for _, tensor in tensors)
        warnings.warn(
            f"layer {layer}: {num_bytes} bytes are not in shared memory and are copied into it, once; until the manager is"
            " closed they are held twice. Use KVCacheManager.allocate(), or the tensors that register() returns.",
            CopiedIntoPoolWarning,
            stacklevel=_stacklevel_outside(),
        )
        made = self.allocate(layer, [(part, tensor.shape, tensor.dtype) for part, tensor in tensors], huge_pages)
        for (_, tensor), shared in zip(tensors, made, strict=True):
            shared.copy_(tensor.detach())
            self._copies[int(tensor.data_ptr())] = _Copy(tensor, shared, self._pools[-1])
            self.num_copies += 1

    def _resolve(self, layer: int, tensor: torch.Tensor) -> torch.Tensor:
        copy = self._copies.get(int(tensor.data_ptr()))
        if copy is None or not _same_view(copy.original, tensor):
            return tensor
        if not torch.equal(_bytes(copy.shared), _bytes(tensor)):
            # Written to since: what is handed over must be what the caller sees.
            if REGISTRY.is_lent(copy.pool):
                raise LayoutError(
                    f"layer {layer} has changed since it was copied into shared memory, and the copy is lent"
                )
            copy.shared.copy_(tensor.detach())
            self.num_copies += 1
        return copy.shared

    def specs(self, layers: Mapping[int, LayerKV]) -> tuple[TensorSpec, ...]:
        """How a peer finds these layers, which are in shared memory.

        Raises:
            LayoutError: one is not there any more.
        """
        specs = []
        for layer, kv in sorted(layers.items()):
            for part, tensor in kv.parts():
                spec = REGISTRY.spec(layer, part, tensor)
                if spec is None:
                    raise LayoutError(f"layer {layer} is not in shared memory: its KVCacheManager has been closed")
                specs.append(spec)
        return tuple(specs)

    def close(self) -> None:
        """Forget every layer and pool. Tensors, and what peers have mapped, stay valid."""
        with self.lock:
            for pool in self._pools:
                REGISTRY.forget(pool)
            self._pools.clear()
            self._copies.clear()
            self.layers.clear()
            self.version += 1


def _stacklevel_outside() -> int:
    """The ``stacklevel`` with which a warning of this function's caller names the first line that is not of this package."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and str(frame.f_globals.get("__name__", "")).startswith("vllm_mc2."):
        frame, level = frame.f_back, level + 1
    return max(1, level)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's content, in which also what is not a number equals itself."""
    # Not view(): a contiguous tensor may have any stride in a dimension of 1, which view(dtype) refuses.
    return tensor.detach().contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _same_view(one: torch.Tensor, other: torch.Tensor) -> bool:
    same = one.shape == other.shape and one.stride() == other.stride() and one.dtype == other.dtype
    return bool(same and one.data_ptr() == other.data_ptr())


PROCESS_TABLE = LayerTable()
"""The layers of ``KVCacheManager()`` without a communicator, and of communicators without layers of their own."""


class KVCacheManager:
    """Allocates or registers KV tensors so that a peer can use them in place.

    ::

        manager = KVCacheManager(mc2)
        key, value = manager.allocate(0, (num_blocks, block_size, num_kv_heads, head_dim), torch.float16)

    Without a communicator it manages the process's own cache, which every communicator without layers of its own sends.
    Memory is host memory (a memfd), committed when ``allocate`` returns. Any thread.
    """

    def __init__(self, mc2: "MC2Communicator | None" = None, *, huge_pages: HugePages = "auto") -> None:
        """``huge_pages``: 2 MiB pages where the host offers them (``auto``), never (``off``), or else an error (``require``).

        Raises:
            ValueError: ``huge_pages`` is something else.
        """
        if huge_pages not in {"auto", "off", "require"}:
            raise ValueError(f"huge_pages = {huge_pages!r}: expected 'auto', 'off' or 'require'")
        self._table = PROCESS_TABLE if mc2 is None else mc2.layers
        self._huge_pages: HugePages = huge_pages

    @property
    def layers(self) -> dict[int, LayerKV]:
        """What is known, by layer; a copy."""
        with self._table.lock:
            return dict(self._table.layers)

    @property
    def registered_copies(self) -> int:
        """How many tensors had to be copied into shared memory; 0 is what you want."""
        return self._table.num_copies

    def allocate(self, layer_idx: int, shape: Sequence[int], dtype: torch.dtype) -> LayerKV:
        """A layer's key and value tensor, both of this shape and dtype, zeroed, contiguous, in shared memory.

        For a paged cache the first dimension counts blocks: ``(num_blocks, block_size, num_kv_heads, head_dim)``, say.

        Raises:
            LayoutError: layer, shape or dtype that no KV cache has.
            OSError: too little memory.
        """
        check_layer(layer_idx)
        dtype_name(dtype)
        shape = tuple(int(size) for size in shape)
        if not 1 <= len(shape) <= 8 or min(shape) < 1:
            raise LayoutError(f"shape {shape}: expected 1 to 8 dimensions of at least 1")
        with self._table.lock:
            key, value = self._table.allocate(
                layer_idx, [("key", shape, dtype), ("value", shape, dtype)], self._huge_pages
            )
            kv = LayerKV(key, value)
            self._table.put(layer_idx, kv)
        return kv

    def register(self, layer_idx: int, key_tensor: torch.Tensor, value_tensor: torch.Tensor | None = None) -> LayerKV:
        """Make an existing layer known. Tensors inside shared memory are shared as they are, strides and all; others are
        copied into it, once, with a :class:`CopiedIntoPoolWarning`.

        ``value_tensor`` may be left out when ``key_tensor`` holds keys and values.

        Returns:
            The tensors that peers will read: yours, or their copies. Write to these from now on.

        Raises:
            LayoutError: not dense host tensors of a KV cache's dtype.
            OSError: too little memory for a copy.
        """
        check_layer(layer_idx)
        kv = self._table.shared(layer_idx, LayerKV(key_tensor, value_tensor), self._huge_pages)
        self._table.put(layer_idx, kv)
        return kv

    def close(self) -> None:
        """Forget all layers. The memory goes with the last tensor over it, and with the last peer that has mapped it."""
        self._table.close()


def check_layer(layer_idx: int) -> None:
    """Refuse a layer that no peer would take.

    Raises:
        LayoutError: not a number, or out of range.
    """
    if not isinstance(layer_idx, int) or not 0 <= layer_idx < MAX_LAYERS:
        raise LayoutError(f"layer_idx = {layer_idx!r}: expected a whole number from 0 to {MAX_LAYERS - 1}")
