"""KV memory of the host: vLLM's tensors lie in a pool that peers can map, and decode's have a window behind them."""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from vllm.v1.kv_cache_interface import KVCacheConfig

from vllm_mc2.channel import close_all
from vllm_mc2.config import MC2Config
from vllm_mc2.connector import compat
from vllm_mc2.connector.backend import Ask
from vllm_mc2.connector.metadata import MapPeer
from vllm_mc2.connector.pulling import PullSource
from vllm_mc2.connector.remote_pulling import Part
from vllm_mc2.device_messages import DeviceGrant
from vllm_mc2.errors import LayoutError
from vllm_mc2.layout import AddressPlan, HeadSlice, PoolLayout, head_slices, make_plan
from vllm_mc2.memory import Copier, OwnRegion, WorkerMemory, map_elsewhere
from vllm_mc2.protocol import PoolGrant, Refusal, WorkerHello
from vllm_mc2.session import Answer

logger = logging.getLogger("vllm.mc2.worker")


def own_bytes(tensor: torch.Tensor, num_bytes: int) -> torch.Tensor:
    """``num_bytes`` of the tensor's memory from its first element on, as bytes."""
    storage = tensor.untyped_storage()
    offset = tensor.data_ptr() - storage.data_ptr()
    return torch.empty(0, dtype=torch.uint8).set_(storage, offset, (num_bytes,), (1,))


def own_region(name: str, block_bytes: int, data: torch.Tensor) -> OwnRegion:
    """``data``: as :func:`own_bytes` gives it."""
    return OwnRegion(name, block_bytes, data, data.data_ptr(), data.numel())


class HostSource:
    """One peer's pool, mapped in the window or elsewhere."""

    def __init__(self, window: tuple[WorkerMemory, int] | None, num_threads: int) -> None:
        """``window``: our memory and the block there that is the peer's first, or None."""
        self.window = window
        self.copiers: list[Copier] = []
        self.memories: list[WorkerMemory] = []
        """Where it is mapped if not in the window."""
        self._num_threads = num_threads

    def copy(self, own_ids: Sequence[int], peer_ids: Sequence[int]) -> None:
        """Puller's thread."""
        for copier in self.copiers:
            copier.copy(list(own_ids), list(peer_ids), self._num_threads)

    def mapped(self) -> list[tuple[int, PoolLayout]]:
        """Pools outside the window, which says itself what is in it."""
        return [(-1, layout) for memory in self.memories for _, layout in memory.mapped_peers()]

    def close(self) -> None:
        """Unmap."""
        for memory in self.memories:
            memory.unmap_peer(0)
        if self.window is not None:
            memory, base = self.window
            memory.unmap_peer(base)


class HostMemory:
    """See :class:`~vllm_mc2.connector.backend.Backend`."""

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        config: MC2Config,
        num_threads: int,
        *,
        is_producer: bool,
        is_consumer: bool,
        attach_off: str | None,
    ) -> None:
        """Plans the address range, and edits ``kv_cache_config`` where vLLM is to allocate in it."""
        self.memory: WorkerMemory | None = None
        self.plan: AddressPlan | None = None
        self.own: list[OwnRegion] = []
        self.gives_memory = False
        self._config = config
        self._num_threads = num_threads
        self._is_producer = is_producer
        self._is_consumer = is_consumer
        self._layers: list[list[str]] = []
        self._layout = str(getattr(kv_cache_config, "kv_cache_layout", None))
        if compat.check_allocation():
            return  # the plan is made when vLLM has allocated
        self._layers = compat.layers_of_regions(kv_cache_config)
        factor = config.window_pool_factor if is_consumer and attach_off is None else 0.0
        self.plan = make_plan(compat.region_sizes(kv_cache_config), kv_cache_config.num_blocks, factor)
        self.gives_memory = is_producer or attach_off is None
        if self.gives_memory:
            offsets = [region.offset_bytes for region in self.plan.regions]
            compat.apply_plan(kv_cache_config, self.plan.num_total, offsets, self.plan.range_bytes)

    @contextmanager
    def allocation_context(self) -> Iterator[None]:
        """VLLM gets our address range.

        Raises:
            OSError: too little memory, with wanted and available bytes.
            LayoutError: vLLM allocated in another way than it does in the versions we know.
        """
        assert self.plan is not None
        started = time.perf_counter()
        memory = self.memory = WorkerMemory(self.plan, shared=self._is_producer, huge_pages=self._config.huge_pages)
        logger.info(
            "KV pool of %.2f GiB ready in %.1f s: %s",
            memory.layout.pool_bytes / 2**30,
            time.perf_counter() - started,
            memory.page_summary,
        )
        mode = compat.AllocateFrom(
            self.plan.range_bytes,
            lambda: torch.frombuffer(memory.buffer(), dtype=torch.int8),
        )
        with mode:
            yield
        if mode.num_used != 1:
            raise LayoutError(f"vLLM allocated its KV cache {mode.num_used} times in the way that was expected once")

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Check that every layer lies where the plan says.

        Raises:
            LayoutError: a layer lies elsewhere.
        """
        if self.plan is None:
            self.plan = self._adopt(kv_caches)
        for region, layers in zip(self.plan.regions, self._layers, strict=True):
            found = {name: kv_caches[name].data_ptr() if name in kv_caches else 0 for name in layers}
            expected = found[region.name]
            if self.memory is not None:
                expected = self.memory.address + region.offset_bytes
            wrong = {name: hex(address) for name, address in found.items() if not address or address != expected}
            if wrong:
                raise LayoutError(f"layers lie at {wrong}, planned was {expected:#x}")
            if self._is_consumer:
                data = own_bytes(kv_caches[region.name], self.plan.num_local * region.block_bytes)
                self.own.append(own_region(region.name, region.block_bytes, data))

    def _adopt(self, kv_caches: Mapping[str, torch.Tensor]) -> AddressPlan:
        """What vLLM has allocated by itself; prefill moves it into memory that peers can map."""
        sizes, num_blocks = compat.tensor_sizes(kv_caches)
        plan = make_plan(sizes, num_blocks, 0.0)
        self._layers = [[name] for name, _ in sizes]
        if self._is_producer:
            self.memory = WorkerMemory(plan, shared=True, huge_pages=self._config.huge_pages)
            memory = torch.frombuffer(self.memory.buffer(), dtype=torch.uint8)
            compat.move_tensors(kv_caches, memory, [region.offset_bytes for region in plan.regions])
            logger.info("KV cache moved to shared memory: %s", self.memory.page_summary)
        return plan

    def facts(self) -> dict[str, str]:
        """Nothing that the configuration does not say."""
        return {}

    def pool(self) -> PoolLayout | None:
        """Prefill's pool."""
        return self.memory.layout if self._is_producer and self.memory is not None else None

    def summary(self) -> str:
        """Which pages it has."""
        return self.memory.page_summary if self.memory is not None else "vLLM's own"

    def device_hello(self) -> None:
        """There is no device."""

    def slices(self, rank: int, size: int, peer_size: int) -> list[HeadSlice]:
        """A rank's heads are in one piece where heads come before tokens."""
        if size != peer_size and "HN" not in self._layout:
            raise LayoutError(f"KV cache layout {self._layout}: a head's part of a block is not in one piece")
        return head_slices(rank, size, peer_size)

    def grant(self, hello: WorkerHello) -> Answer:
        """The pool's descriptor; the mapping outlives the session."""
        if self.memory is None or self.memory.pool_fd is None:
            return Answer(Refusal("kv_role", "kv_consumer", "kv_consumer"), keep_open=False)
        return Answer(PoolGrant(self.memory.layout), (self.memory.pool_fd,), keep_open=False)

    def open_source(self, order: MapPeer, parts: Sequence[HeadSlice], ask: Ask) -> HostSource:
        """In the window, or each by itself; from now on blocks can be copied from there in any case."""
        window = (self.memory, order.base) if self.memory is not None and order.base is not None else None
        source = HostSource(window, self._num_threads)
        try:
            for part in parts:
                source.copiers.append(self._copier(source, part, ask))
        except BaseException:
            source.close()
            raise
        return source

    def _copier(self, source: HostSource, part: HeadSlice, ask: Ask) -> Copier:
        assert self.plan is not None
        grant, fds, session = ask(part.peer_rank, PoolGrant, 1)
        session.close()
        try:
            if source.window is None:
                memory, base = map_elsewhere(grant.pool, fds[0]), 0
                source.memories.append(memory)
            else:
                memory, base = source.window
                memory.map_peer(base, grant.pool, fds[0])
        finally:
            close_all(fds)
        return memory.copier(base, self.own, self.plan.num_local, part)

    def remote_grant(self) -> None:
        """A transfer engine reads host memory."""

    def open_remote(self, grant: DeviceGrant, part: HeadSlice) -> Part:
        """A device's memory is not for the host."""
        raise LayoutError("the peer's blocks are a device's memory, ours are the host's")

    def watch(self, key: int, source: PullSource) -> None:
        """Pages live as long as they are mapped: whether the peer does is the scheduler's business."""

    def fence(self) -> None:
        """Kernels on the host have ended when vLLM goes on."""

    def prefault(self, base: int) -> None:
        """Fill in the page tables."""
        if self.memory is not None:
            self.memory.prefault_peer(base)

    def copy_tails(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Microseconds."""
        assert self.memory is not None
        self.memory.copy_blocks(pairs)

    def close(self) -> None:
        """The memory stays: vLLM's tensors point into it."""
