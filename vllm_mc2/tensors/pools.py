"""The pools of this process: memory that holds tensors and that peers can map.

A pool holds one or two tensors and is one *block* long: where a tensor's blocks, heads and elements lie is said by its
shape and strides (:class:`~vllm_mc2.tensors.messages.TensorSpec`), so a pool needs no idea of it.
"""

import itertools
import math
import threading
import weakref
from collections.abc import Sequence
from typing import Literal

import torch

from vllm_mc2.errors import LayoutError
from vllm_mc2.layout import PoolLayout, make_plan
from vllm_mc2.memory import WorkerMemory
from vllm_mc2.tensors.messages import ITEM_BYTES, Part, TensorSpec, span_bytes

HugePages = Literal["auto", "off", "require"]
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """The name under which a dtype travels.

    Raises:
        LayoutError: it is none that a KV cache is made of.
    """
    try:
        return DTYPE_NAMES[dtype]
    except KeyError:
        raise LayoutError(f"dtype {dtype}: expected one of {', '.join(DTYPES)}") from None


def check_tensor(tensor: torch.Tensor, what: str) -> None:
    """Refuse what cannot lie in a pool.

    Raises:
        LayoutError: not a dense, non-empty tensor in host memory of a dtype that a KV cache has.
    """
    if not isinstance(tensor, torch.Tensor):
        raise LayoutError(f"{what}: expected a torch tensor, got {type(tensor).__name__}")
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        raise LayoutError(f"{what}: expected a dense tensor on cpu, got {tensor.layout} on {tensor.device}")
    if not 1 <= tensor.dim() <= 8 or tensor.numel() == 0:
        raise LayoutError(f"{what}: expected 1 to 8 dimensions and some elements, got shape {tuple(tensor.shape)}")
    dtype_name(tensor.dtype)


def as_bytes(memory: WorkerMemory) -> torch.Tensor:
    """All of it as a uint8 tensor, and an ordinary one: also where inference mode is on, and would mark it for good."""
    with torch.inference_mode(False):
        return torch.frombuffer(memory.buffer(), dtype=torch.uint8)


def view_in(
    base: torch.Tensor, offset_bytes: int, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """A tensor over ``base``, the uint8 view of a pool; the caller has checked that it fits."""
    with torch.inference_mode(False):  # see as_bytes()
        typed = base.view(dtype)
        return typed.as_strided(tuple(shape), tuple(strides), offset_bytes // typed.element_size())


class SharedPool:
    """One pool; any thread. Its memory lives as long as this object or a tensor over it."""

    def __init__(self, pool_id: int, sizes: Sequence[tuple[str, int]], huge_pages: HugePages) -> None:
        """One region of ``(name, bytes)`` for each tensor.

        Raises:
            OSError: too little memory, or no huge pages though they are required.
        """
        self.pool_id = pool_id
        self._memory = WorkerMemory(make_plan(list(sizes), 1, 0.0), shared=True, huge_pages=huge_pages)
        self._base = as_bytes(self._memory)

    @property
    def layout(self) -> PoolLayout:
        """What a peer needs to map it."""
        return self._memory.layout

    @property
    def fd(self) -> int:
        """Descriptor of the sealed memory; borrowed."""
        fd = self._memory.pool_fd
        assert fd is not None
        return fd

    @property
    def address(self) -> int:
        """Of its first byte."""
        return self._memory.address

    def tensor(self, region: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor at the start of a region."""
        strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        return view_in(self._base, self.layout.regions[region].offset_bytes, shape, strides, dtype)


class Layout:
    """A set of tensors that one peer knows under a number."""

    def __init__(self, layout_id: int, num_blocks: int, pools: frozenset[int]) -> None:
        """``num_blocks`` is 0 for a contiguous cache, which has no block table."""
        self.layout_id = layout_id
        self.num_blocks = num_blocks
        self.pools = pools
        self.num_leases = 0
        """That have not been seen to end; the sender's thread counts."""


class PoolRegistry:
    """All pools of a process, so that a tensor can be found in one. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ids = itertools.count()
        self._pools: dict[int, SharedPool] = {}
        self._layouts: weakref.WeakSet[Layout] = weakref.WeakSet()

    def add(self, layout: Layout) -> Layout:
        """Remember a layout for as long as its sender does."""
        with self._lock:
            self._layouts.add(layout)
        return layout

    def is_lent(self, pool: SharedPool) -> bool:
        """Whether a lease covers tensors in it, of whatever peer."""
        with self._lock:
            return any(layout.num_leases and pool.pool_id in layout.pools for layout in self._layouts)

    def allocate(self, sizes: Sequence[tuple[str, int]], huge_pages: HugePages) -> SharedPool:
        """A new pool; see :class:`SharedPool`."""
        pool = SharedPool(next(self._ids), sizes, huge_pages)
        with self._lock:
            self._pools[pool.pool_id] = pool
        return pool

    def forget(self, pool: SharedPool) -> None:
        """Its memory goes when nothing refers to it any more, here or at a peer."""
        with self._lock:
            self._pools.pop(pool.pool_id, None)

    def get(self, pool_id: int) -> SharedPool:
        """The pool with this id.

        Raises:
            LayoutError: its manager has been closed.
        """
        with self._lock:
            pool = self._pools.get(pool_id)
        if pool is None:
            raise LayoutError(f"pool {pool_id} is no more: its KVCacheManager has been closed")
        return pool

    def find(self, tensor: torch.Tensor) -> tuple[SharedPool, int] | None:
        """The pool that contains all of ``tensor``, and the offset in it; None when there is none."""
        start, size = int(tensor.data_ptr()), span_bytes(tensor.shape, tensor.stride(), tensor.element_size())
        with self._lock:
            for pool in self._pools.values():
                offset = start - pool.address
                if offset >= 0 and offset + size <= pool.layout.pool_bytes:
                    return pool, offset
        return None

    def spec(self, layer: int, part: Part, tensor: torch.Tensor) -> TensorSpec | None:
        """How a peer finds ``tensor``; None when it is in no pool."""
        found = self.find(tensor)
        if found is None:
            return None
        pool, offset = found
        name = dtype_name(tensor.dtype)
        return TensorSpec(layer, part, pool.pool_id, offset, tuple(tensor.shape), tuple(tensor.stride()), name)  # type: ignore[arg-type]


REGISTRY = PoolRegistry()
"""This process's pools."""
