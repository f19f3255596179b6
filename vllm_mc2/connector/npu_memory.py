"""KV memory of an NPU: vllm-ascend's own tensors stay where they are; their allocations are shared, and peers' blocks are copied
straight from the mapped remote memory into our own, device to device.

Prefill's worker keeps a session open with each worker that has mapped its memory. Decode's believes what it has read only if
that session still is there afterwards, since whether an NPU's memory outlives the process that owned it is not documented. When
prefill stops, it says so first and waits until its importers have unmapped; the documentation wants it in that order.
"""

import hashlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig

from vllm_mc2._native import AclError
from vllm_mc2.ascend.acl import load_acl
from vllm_mc2.ascend.attach_probe import probe_attach
from vllm_mc2.ascend.caches import CacheLayout, read_caches, storages_of
from vllm_mc2.ascend.mapping import map_memory, strips_between
from vllm_mc2.ascend.settings import environment_facts
from vllm_mc2.ascend.sharing import Shared, grant_of, share_storages
from vllm_mc2.config import MC2Config
from vllm_mc2.connector import compat
from vllm_mc2.connector.backend import Ask
from vllm_mc2.connector.deathwatch import DeathWatchThread
from vllm_mc2.connector.metadata import MapPeer
from vllm_mc2.connector.npu_source import NpuPart, NpuSource
from vllm_mc2.connector.pulling import PullSource
from vllm_mc2.device_messages import DeviceGrant, DeviceHello
from vllm_mc2.errors import DeviceError, LayoutError
from vllm_mc2.layout import AddressPlan, HeadSlice, PoolLayout, head_slices, make_plan
from vllm_mc2.memory import OwnRegion, WorkerMemory
from vllm_mc2.protocol import MAX_FRAME_BYTES, Refusal, WorkerHello, encode
from vllm_mc2.session import Answer

logger = logging.getLogger("vllm.mc2.npu")


def why_npu_attach_off(config: MC2Config) -> str:
    """Why an NPU's blocks are copied, not used in place. There always is a reason today."""
    if not config.npu_attach:
        return "on NPUs it is off (npu_attach)"
    try:
        refused = probe_attach(load_acl(), int(torch.npu.current_device()))
    except DeviceError as error:
        refused = str(error)
    if refused:
        return f"this NPU does not pass the probe for it: {refused}"
    return "the probe for it has passed, but vllm-ascend has no hook through which its KV cache could be put into one range"


def cache_facts(layout: CacheLayout) -> dict[str, str]:
    """What must be equal on both sides for the bytes of a block to mean the same: in ``cache_formats`` for any number of ranks,
    in ``cache_blocks`` for equal ones.
    """
    signatures = sorted({strip.signature for strip in layout.strips})
    formats = {f"{each.split('[')[0]}{' NZ' if ' NZ' in each else ''}" for each in signatures}
    whole = "\n".join(f"{strip.name} {strip.block_bytes} {strip.signature}" for strip in layout.strips)
    return {
        "cache_formats": "|".join(sorted(formats))[:4096],
        "cache_blocks": f"{'|'.join(signatures)[:3000]} {hashlib.sha256(whole.encode()).hexdigest()[:16]}",
    }


class NpuMemory:
    """See :class:`~vllm_mc2.connector.backend.Backend`."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        config: MC2Config,
        *,
        is_producer: bool,
        forget: Callable[[int, PullSource], None],
    ) -> None:
        """``forget``: takes a peer away, with whatever is being copied from it.

        Raises:
            DeviceError: there is no usable ACL.
        """
        self.plan: AddressPlan | None = None
        self.gives_memory = False
        self.memory: WorkerMemory | None = None
        self.own: list[OwnRegion] = []
        self._acl = load_acl()
        self._device = int(torch.npu.current_device())
        self._soc = self._acl.soc_name() or "unknown"
        self._num_blocks = kv_cache_config.num_blocks
        self._tokens_per_block = int(kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size)
        self._is_replicated = all("MLA" in kind for kind in compat.npu_kinds(kv_cache_config))
        self._environment = environment_facts(vllm_config)
        self._num_streams = config.pull_threads
        self._has_remote_peers = config.tcp_address is not None and config.resolve_tcp_secret() is not None
        self._is_producer = is_producer
        self._forget = forget
        self._layout = CacheLayout((), 0)
        self._shared: Shared | None = None
        self._sources: dict[str, NpuSource] = {}
        self._lock = threading.Lock()
        self._deathwatch = DeathWatchThread(self._on_peer_gone)

    @contextmanager
    def allocation_context(self) -> Iterator[None]:
        """vllm-ascend allocates by itself."""
        yield

    def register(self, kv_caches: Mapping[str, Any]) -> None:
        """Understand where blocks lie; prefill shares the allocations.

        Raises:
            LayoutError: it is not understood.
            DeviceError: it cannot be shared.
        """
        self._layout = read_caches(kv_caches, self._num_blocks)
        blocks = [(strip.name, strip.block_bytes) for strip in self._layout.strips]
        self.plan = make_plan(blocks, self._num_blocks, 0.0)
        if not self._is_producer:
            return
        shared = share_storages(self._acl, self._device, storages_of(kv_caches), fabric=self._has_remote_peers)
        for reason in shared.passed_over:
            logger.info("not shared by %s", reason)
        logger.info(
            "KV cache on NPU %d is shared by %s: %d allocations", self._device, shared.way, len(shared.segments)
        )
        self._shared = shared
        if len(encode(grant_of(self._layout, shared))) > MAX_FRAME_BYTES:
            raise DeviceError(
                f"{len(shared.segments)} allocations do not fit in one message of {MAX_FRAME_BYTES} bytes"
            )

    def facts(self) -> dict[str, str]:
        """What the bytes of a block mean."""
        return {**self._environment, "device": f"npu {self._soc}", **cache_facts(self._layout)}

    def pool(self) -> PoolLayout | None:
        """As it would lie if it were packed: for its sizes, no address is counted from it."""
        assert self.plan is not None
        return self.plan.pool_layout() if self._shared is not None else None

    def summary(self) -> str:
        """Which device, and how it is shared."""
        return f"NPU {self._device}" + (f", shared by {self._shared.way}" if self._shared is not None else "")

    def device_hello(self) -> DeviceHello:
        """Our process, as the driver knows it.

        Raises:
            DeviceError: ACL does not say.
        """
        try:
            return DeviceHello(self._acl.bare_tgid())
        except AclError as error:
            raise DeviceError(str(error)) from error

    def slices(self, rank: int, size: int, peer_size: int) -> list[HeadSlice]:
        """All of a peer's ranks hold the same of a latent cache, so that one is enough."""
        found = head_slices(rank, size, peer_size)
        return found[:1] if self._is_replicated else found

    def grant(self, hello: WorkerHello) -> Answer:
        """How to map our memory. The session stays open for as long as it is mapped."""
        if self._shared is None:
            return Answer(Refusal("kv_role", "kv_consumer", "kv_consumer"), keep_open=False)
        if hello.device is None:
            return Answer(Refusal("device", "none", f"npu {self._soc}"), keep_open=False)
        try:
            self._shared.admit(hello.device.pid)
        except DeviceError as error:
            logger.warning("a decode cannot be let in: %s", error)
            return Answer(Refusal("device.pid", str(hello.device.pid), str(error)[:1000]), keep_open=False)
        return Answer(grant_of(self._layout, self._shared))

    def open_source(self, order: MapPeer, parts: Sequence[HeadSlice], ask: Ask) -> NpuSource:
        """Map the memory of the peer's workers that have our heads."""
        source = NpuSource(self._on_source_closed)
        try:
            for part in parts:
                grant, _, session = ask(part.peer_rank, DeviceGrant, 0)
                source.sessions.append(session)
                source.parts.append(self.open_remote(grant, part))
        except BaseException:
            source.close()
            raise
        return source

    def remote_grant(self) -> DeviceGrant | None:
        """Fabric handles can be imported by other servers of a SuperPoD."""
        shared = self._shared
        return grant_of(self._layout, shared) if shared is not None and shared.way == "fabric" else None

    def open_remote(self, grant: DeviceGrant, part: HeadSlice) -> NpuPart:
        """As on this host; there, whether the lease still is decides what is believed."""
        strips = strips_between(self._layout, grant, part, self._tokens_per_block, is_replicated=self._is_replicated)
        mapped = map_memory(self._acl, self._device, grant, strips, self._num_blocks, self._num_streams)
        blocks = [(strip.name, strip.num_bytes) for strip in grant.strips]
        return NpuPart(*mapped, make_plan(blocks, grant.num_blocks, 0.0).pool_layout())

    def watch(self, key: int, source: PullSource) -> None:
        """Unmap as soon as prefill has ended, or waits for that to be able to end."""
        assert isinstance(source, NpuSource)
        with self._lock:
            self._sources[str(key)] = source
        for session in source.sessions:
            self._deathwatch.watch(str(key), session)

    def _on_peer_gone(self, key: str) -> None:
        """Death watch's thread."""
        with self._lock:
            source = self._sources.get(key)
        if source is not None:
            logger.info("a prefill has ended or is about to: its memory is unmapped")
            self._forget(int(key), source)

    def _on_source_closed(self, source: NpuSource) -> None:
        for session in source.sessions:
            self._deathwatch.forget(session)
        with self._lock:
            self._sources = {key: other for key, other in self._sources.items() if other is not source}

    def fence(self) -> Callable[[], None]:
        """Kernels that are queued now may still use the blocks that are about to be written."""
        event = torch.npu.Event()
        event.record()

        def wait() -> None:
            try:
                event.synchronize()
            except RuntimeError as error:
                raise DeviceError(f"the NPU's queue has failed: {error}") from error

        return wait

    def prefault(self, base: int) -> None:
        """Nothing to do."""

    def copy_tails(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Nothing is used in place here."""
        raise LayoutError("tail copies belong to attach, which is off on NPUs")

    def close(self) -> None:
        """Unmap what is mapped, then share no more."""
        with self._lock:
            sources = list(self._sources.items())
        for key, source in sources:
            self._forget(int(key), source)
        self._deathwatch.close()
        if self._shared is not None:
            self._shared.close()
