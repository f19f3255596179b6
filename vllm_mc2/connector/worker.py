"""The worker half: the KV memory, its export to peers, the windows onto peers, and the copy of tails.

Life: constructed before vLLM allocates the KV cache (makes the plan and edits ``kv_cache_config``, which the allocation
then uses); ``allocation_context`` hands our memory to vLLM's one allocation; ``register_kv_caches`` checks where the
tensors came to lie and starts to listen. From then on each step brings orders in its metadata.

Where vLLM does not let us give it memory, or attach is off, a decode's cache is vLLM's own, and blocks are copied into it.

Peers are mapped on a short-lived thread each, since a stopped peer answers late; attention never reads a window before the
scheduler has heard that it is mapped. Everything else runs on the worker's main thread.
"""

import hmac
import logging
import queue
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig

from vllm_mc2.channel import close_all, socket_path
from vllm_mc2.config import MC2Config
from vllm_mc2.connector import compat
from vllm_mc2.connector.fingerprint import fingerprint, refusal
from vllm_mc2.connector.inspecting import answer_for_worker
from vllm_mc2.connector.metadata import MapPeer, MapResult, MC2Handshake, MC2Metadata, MC2WorkerMetadata
from vllm_mc2.connector.pulling import Puller, PullResults, PullSource
from vllm_mc2.connector.worker_network import WorkerNetwork
from vllm_mc2.errors import LayoutError, MC2Error, PeerRefusedError, PeerUnreachableError
from vllm_mc2.layout import AddressPlan, HeadSlice, head_slices, make_plan
from vllm_mc2.memory import OwnRegion, WorkerMemory, map_elsewhere
from vllm_mc2.protocol import (
    PROTOCOL_VERSION,
    Done,
    InspectHello,
    Message,
    PoolGrant,
    Refusal,
    RetirePool,
    WorkerHello,
    new_incarnation,
)
from vllm_mc2.session import Answer, SessionServer, open_session

logger = logging.getLogger("vllm.mc2.worker")


def why_attach_off(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: MC2Config) -> str | None:
    """Why this engine uses no peer's blocks in place, or None."""
    if config.mode == "pull":
        return "mode is pull"
    obstacle = compat.why_not_in_place(kv_cache_config)
    if obstacle is not None:
        return obstacle
    missing = compat.check_contract()
    if missing:
        return f"this vLLM lacks {', '.join(missing)}"
    transfer = vllm_config.kv_transfer_config
    if transfer is not None and transfer.is_kv_consumer and not vllm_config.cache_config.enable_prefix_caching:
        return "prefix caching is off (--no-enable-prefix-caching): attached blocks are prefix-cache hits"
    return None


def own_bytes(tensor: torch.Tensor, num_bytes: int) -> torch.Tensor:
    """``num_bytes`` of the tensor's memory from its first element on, as bytes."""
    storage = tensor.untyped_storage()
    offset = tensor.data_ptr() - storage.data_ptr()
    return torch.empty(0, dtype=torch.uint8).set_(storage, offset, (num_bytes,), (1,))


def own_region(name: str, block_bytes: int, data: torch.Tensor) -> OwnRegion:
    """``data``: as :func:`own_bytes` gives it."""
    return OwnRegion(name, block_bytes, data, data.data_ptr(), data.numel())


class WorkerHalf:
    """One worker's KV memory. ``off_reason`` says why it is vLLM's own instead, or is None."""

    def __init__(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: MC2Config, directory: Path
    ) -> None:
        """Plans the address range and edits ``kv_cache_config``, unless attach is off."""
        self._config = config
        self._directory = directory
        transfer = vllm_config.kv_transfer_config
        assert transfer is not None
        self._engine_id = str(transfer.engine_id)
        self._is_producer = transfer.is_kv_producer
        self._is_consumer = transfer.is_kv_consumer
        self._rank = compat.tensor_parallel_rank()
        self._memory: WorkerMemory | None = None
        self._plan: AddressPlan | None = None
        self._server: SessionServer | None = None
        self._socket_id = new_incarnation()
        self._control_token = new_incarnation()
        self._results: queue.SimpleQueue[MapResult] = queue.SimpleQueue()
        self._mapping: dict[int, threading.Thread] = {}
        self._failed: dict[str, list[int]] = {}
        self._meta: MC2Metadata | None = None
        self._own: list[OwnRegion] = []
        self._layers: list[list[str]] = []
        self.gives_memory = False
        """Whether vLLM allocates in our memory: on prefill if it can, on decode for the sake of the window."""
        self._pull_results = PullResults()
        self._puller = Puller(config.pull_threads, self._pull_results)
        self._network = WorkerNetwork(config, self._rank, self._pull_results, self._results.put)
        self._size = vllm_config.parallel_config.tensor_parallel_size
        self.attach_off = why_attach_off(vllm_config, kv_cache_config, config)
        self.off_reason = compat.unsupported_engine(vllm_config, kv_cache_config)
        if self.off_reason is None and self.attach_off is not None and config.mode == "attach":
            self.off_reason = self.attach_off
        if self.off_reason is not None:
            logger.warning("hand-off is off in this worker: %s", self.off_reason)
            return
        self._fingerprint = fingerprint(vllm_config, kv_cache_config, config.model_identity)
        self._layout = str(getattr(kv_cache_config, "kv_cache_layout", None))
        if compat.check_allocation():
            return  # the plan is made when vLLM has allocated
        self._layers = compat.layers_of_regions(kv_cache_config)
        has_window = self._is_consumer and self.attach_off is None
        factor = config.window_pool_factor if has_window else 0.0
        self._plan = make_plan(compat.region_sizes(kv_cache_config), kv_cache_config.num_blocks, factor)
        self.gives_memory = self._is_producer or self.attach_off is None
        if self.gives_memory:
            offsets = [region.offset_bytes for region in self._plan.regions]
            compat.apply_plan(kv_cache_config, self._plan.num_total, offsets, self._plan.range_bytes)

    # --- allocation ---

    @contextmanager
    def allocation_context(self) -> Iterator[None]:
        """Around vLLM's allocation of the KV cache: it gets our address range.

        Raises:
            OSError: too little memory, with wanted and available bytes.
            LayoutError: vLLM allocated in another way than it does in the versions we know.
        """
        assert self._plan is not None
        started = time.perf_counter()
        self._memory = WorkerMemory(self._plan, shared=self._is_producer, huge_pages=self._config.huge_pages)
        logger.info(
            "KV pool of %.2f GiB ready in %.1f s: %s",
            self._memory.layout.pool_bytes / 2**30,
            time.perf_counter() - started,
            self._memory.page_summary,
        )
        memory = self._memory
        mode = compat.AllocateFrom(
            self._plan.range_bytes,
            lambda: torch.frombuffer(memory.buffer(), dtype=torch.int8),
        )
        with mode:
            yield
        if mode.num_used != 1:
            raise LayoutError(f"vLLM allocated its KV cache {mode.num_used} times in the way that was expected once")

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Check that every layer lies where the plan says, then let peers in.

        Raises:
            LayoutError: a layer lies elsewhere. The engine must not start: it would serve wrong bytes.
        """
        if self.off_reason is not None:
            return
        if self._plan is None:
            self._adopt(kv_caches)
        assert self._plan is not None
        for region, layers in zip(self._plan.regions, self._layers, strict=True):
            found = {name: kv_caches[name].data_ptr() if name in kv_caches else 0 for name in layers}
            expected = found[region.name]
            if self._memory is not None:
                expected = self._memory.address + region.offset_bytes
            wrong = {name: hex(address) for name, address in found.items() if not address or address != expected}
            if wrong:
                raise LayoutError(f"layers lie at {wrong}, planned was {expected:#x}")
            if self._is_consumer:
                data = own_bytes(kv_caches[region.name], self._plan.num_local * region.block_bytes)
                self._own.append(own_region(region.name, region.block_bytes, data))
        self._network.share(self._memory, self._is_producer)
        self._server = SessionServer(self._directory, self._socket_id, self._on_hello, lambda key: None)

    def _adopt(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """What vLLM has allocated by itself; prefill moves it into memory that peers can map."""
        sizes, num_blocks = compat.tensor_sizes(kv_caches)
        self._plan = make_plan(sizes, num_blocks, 0.0)
        self._layers = [[name] for name, _ in sizes]
        if not self._is_producer:
            return
        self._memory = WorkerMemory(self._plan, shared=True, huge_pages=self._config.huge_pages)
        memory = torch.frombuffer(self._memory.buffer(), dtype=torch.uint8)
        compat.move_tensors(kv_caches, memory, [region.offset_bytes for region in self._plan.regions])
        logger.info("KV cache moved to shared memory: %s", self._memory.page_summary)

    def handshake(self) -> MC2Handshake:
        """What the scheduler half must know of this worker."""
        shared = self._is_producer and self._memory is not None
        return MC2Handshake(
            rank=self._rank,
            plan=self._plan,
            pool=self._memory.layout if shared and self._memory is not None else None,
            socket_id=self._socket_id if self._plan is not None else None,
            fingerprint=self._fingerprint if self.off_reason is None else {},
            remote=self._network.grant,
            control_token=self._control_token,
            reason=self.off_reason,
            attach_off=self.attach_off,
        )

    def _on_hello(self, key: int, hello: Message) -> Answer:
        """Session thread: a decode's worker asks for the pool, or our own scheduler gives an order between steps."""
        if isinstance(hello, RetirePool):
            return self._retire(hello)
        if isinstance(hello, WorkerHello):
            return self._grant(hello)
        if isinstance(hello, InspectHello) and self._plan is not None:
            return answer_for_worker(
                hello, self._engine_id, self._rank, self._plan, self._memory, self._puller.mapped()
            )
        return Answer(Refusal("message", type(hello).__name__, "WorkerHello"), keep_open=False)

    def _retire(self, order: RetirePool) -> Answer:
        if not hmac.compare_digest(order.control_token, self._control_token):
            return Answer(Refusal("control_token", "(not shown)", "(not shown)"), keep_open=False)
        self._unmap(order.key)
        return Answer(Done(), keep_open=False)

    def _grant(self, hello: WorkerHello) -> Answer:
        if self._memory is None or self._memory.pool_fd is None:
            return Answer(Refusal("kv_role", "kv_consumer", "kv_consumer"), keep_open=False)
        refused = refusal(self._fingerprint, self._rank, hello)
        if refused is not None:
            return Answer(refused, keep_open=False)
        return Answer(PoolGrant(self._memory.layout), (self._memory.pool_fd,), keep_open=False)

    # --- each step ---

    def begin_step(self, meta: MC2Metadata) -> None:
        """Orders of the step, before its forward pass."""
        self._meta = meta
        for key in meta.unmap_keys:
            self._unmap(key)
        for order in meta.map_peers:
            thread = threading.Thread(target=self._map, args=(order,), name="mc2-map", daemon=True)
            self._mapping[order.key] = thread
            if order.address is not None:
                self._network.expect(order.key)
            thread.start()
        for pull in meta.pulls:
            (self._puller if pull.ticket is None else self._network.puller).submit(pull)
        self._failed.update(meta.failed_requests)

    def load(self) -> None:
        """Copy the partly filled last blocks of this step's new requests. Before the forward pass; microseconds."""
        if self._meta is not None and self._meta.tail_copies:
            assert self._memory is not None
            self._memory.copy_blocks(self._meta.tail_copies)

    def end_step(self) -> None:
        """The step's metadata is over."""
        self._meta = None

    def take_loaded(self) -> tuple[set[str], dict[str, list[int]]]:
        """``(requests whose load has ended, those among them that failed, with their own blocks)``."""
        pulled, failed = self._pull_results.take()
        failed |= self._failed
        self._failed = {}
        return pulled | failed.keys(), failed

    def take_results(self) -> MC2WorkerMetadata | None:
        """Answers to map orders since the last step."""
        results = []
        while not self._results.empty():
            results.append(self._results.get())
        return MC2WorkerMetadata(results) if results else None

    def _map(self, order: MapPeer) -> None:
        """On its own thread: fetch the counterpart's pool, map it, say so, then fill in the page tables."""
        reason, detail = None, ""
        try:
            if order.address is not None:
                parts = self._parts(len(order.socket_ids))
                self._network.reach(order, order.address, parts, self._own, self._fingerprint)
            else:
                self._map_pools(order)
        except PeerRefusedError as error:
            reason, detail = "peer_refused", str(error)
        except PeerUnreachableError as error:
            reason, detail = "peer_unreachable", str(error)
        except (MC2Error, OSError, ValueError) as error:
            reason, detail = "map_failed", str(error)
        self._results.put(MapResult(order.incarnation, order.key, self._rank, reason, detail))
        if reason is not None:
            return
        if self._config.prefault and order.base is not None and self._memory is not None:
            try:
                self._memory.prefault_peer(order.base)
            except OSError as error:
                logger.warning("could not prefault a peer's pool, first touches will be slower: %s", error)

    def _map_pools(self, order: MapPeer) -> None:
        """In the window, or each by itself; from now on blocks can be copied from there in any case."""
        assert self._plan is not None
        copiers, memories = [], []
        for part in self._parts(len(order.socket_ids)):
            grant, fds = self._ask_for_pool(order, part.peer_rank)
            try:
                if order.base is None:
                    memory, base = map_elsewhere(grant.pool, fds[0]), 0
                    memories.append(memory)
                else:
                    assert self._memory is not None
                    memory, base = self._memory, order.base
                    memory.map_peer(base, grant.pool, fds[0])
            finally:
                close_all(fds)
            copiers.append(memory.copier(base, self._own, self._plan.num_local, part))
        self._puller.add_source(order.key, PullSource(order.base, copiers, memories))

    def _parts(self, num_ranks: int) -> list[HeadSlice]:
        if num_ranks != self._size and "HN" not in self._layout:
            raise LayoutError(f"KV cache layout {self._layout}: a head's part of a block is not in one piece")
        return head_slices(self._rank, self._size, num_ranks)

    def _ask_for_pool(self, order: MapPeer, rank: int) -> tuple[PoolGrant, list[int]]:
        way: Literal["attach", "pull"] = "pull" if order.base is None else "attach"
        hello = WorkerHello(PROTOCOL_VERSION, rank, way, self._fingerprint)
        path = socket_path(self._directory, order.socket_ids[rank])
        grant, fds, session = open_session(path, hello, PoolGrant, 1, self._config.handshake_timeout_seconds)
        session.close()
        return grant, fds

    def _unmap(self, key: int) -> None:
        thread = self._mapping.pop(key, None)
        if self._network.drop(key, is_coming=thread is not None and thread.is_alive()):
            return
        if thread is not None:
            thread.join()  # at most the handshake timeout; unmapping under a running prefault would be a race
        source = self._puller.remove_source(key)
        if source is None:
            return
        for memory in source.memories:
            memory.unmap_peer(0)
        if source.base is not None and self._memory is not None:
            self._memory.unmap_peer(source.base)

    def close(self) -> None:
        """Stop listening and copying. The memory stays: vLLM's tensors point into it."""
        self._puller.close()
        self._network.close()
        if self._server is not None:
            self._server.close()
