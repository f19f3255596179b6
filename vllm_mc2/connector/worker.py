"""The worker half: the KV memory, its export to peers, the windows onto peers, and the copy of tails.

Life: constructed before vLLM allocates the KV cache (makes the plan and edits ``kv_cache_config``, which the allocation
then uses); ``allocation_context`` hands our memory to vLLM's one allocation; ``register_kv_caches`` checks where the
tensors came to lie and starts to listen. From then on each step brings orders in its metadata.

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

import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig

from vllm_mc2.channel import close_all, socket_path
from vllm_mc2.config import MC2Config
from vllm_mc2.connector import compat
from vllm_mc2.connector.inspecting import answer_for_worker
from vllm_mc2.connector.metadata import MapPeer, MapResult, MC2Handshake, MC2Metadata, MC2WorkerMetadata
from vllm_mc2.errors import LayoutError, MC2Error, PeerRefusedError, PeerUnreachableError
from vllm_mc2.layout import AddressPlan, make_plan
from vllm_mc2.memory import WorkerMemory
from vllm_mc2.protocol import (
    PROTOCOL_VERSION,
    Done,
    InspectHello,
    Message,
    PoolGrant,
    Refusal,
    RetirePool,
    WorkerHello,
    first_difference,
    new_incarnation,
)
from vllm_mc2.session import Answer, SessionServer, open_session

logger = logging.getLogger("vllm.mc2.worker")


def fingerprint(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, model_identity: str | None) -> dict[str, str]:
    """Whatever changes the bytes of a block, by name. Peers compare it field by field before anything is mapped."""
    import vllm

    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    group = kv_cache_config.kv_cache_groups[0]
    spec = group.kv_cache_spec
    return {
        "vllm": vllm.__version__,
        "model": model_identity or f"{model.model}@{model.revision or 'default'}",
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "kv_cache_dtype": str(cache.cache_dtype),
        "block_size": str(spec.block_size),
        "num_kv_heads": str(getattr(spec, "num_kv_heads", None)),
        "head_size": str(getattr(spec, "head_size", None)),
        "block_bytes": str(spec.page_size_bytes),
        "layers": ",".join(name for tensor in kv_cache_config.kv_cache_tensors for name in tensor.layers),
        "kv_cache_layout": str(kv_cache_config.kv_cache_layout),
        "attention": compat.attention_identity(vllm_config, kv_cache_config),
        "tensor_parallel_size": str(parallel.tensor_parallel_size),
        "speculative_config": str(vllm_config.speculative_config is not None),
    }


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
        self._failed: set[str] = set()
        self._meta: MC2Metadata | None = None
        self.off_reason = "; ".join(compat.check_contract()) or compat.unsupported_engine(vllm_config, kv_cache_config)
        if self.off_reason is not None:
            logger.warning("attach is off in this worker: %s", self.off_reason)
            return
        self._fingerprint = fingerprint(vllm_config, kv_cache_config, config.model_identity)
        factor = config.window_pool_factor if self._is_consumer else 0.0
        self._plan = make_plan(compat.region_sizes(kv_cache_config), kv_cache_config.num_blocks, factor)
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
        if self._plan is None:
            return
        assert self._memory is not None
        for region in self._plan.regions:
            tensor = kv_caches.get(region.name)
            expected = self._memory.address + region.offset_bytes
            if tensor is None or tensor.data_ptr() != expected:
                found = "nowhere" if tensor is None else hex(tensor.data_ptr())
                raise LayoutError(f"layer {region.name} lies at {found}, planned was {expected:#x}")
        self._server = SessionServer(self._directory, self._socket_id, self._on_hello, lambda key: None)

    def handshake(self) -> MC2Handshake:
        """What the scheduler half must know of this worker."""
        shared = self._is_producer and self._memory is not None
        return MC2Handshake(
            rank=self._rank,
            plan=self._plan,
            pool=self._memory.layout if shared and self._memory is not None else None,
            socket_id=self._socket_id if self._plan is not None else None,
            control_token=self._control_token,
            reason=self.off_reason,
        )

    def _on_hello(self, key: int, hello: Message) -> Answer:
        """Session thread: a decode's worker asks for the pool, or our own scheduler gives an order between steps."""
        if isinstance(hello, RetirePool):
            return self._retire(hello)
        if isinstance(hello, WorkerHello):
            return self._grant(hello)
        if isinstance(hello, InspectHello) and self._memory is not None:
            return answer_for_worker(hello, self._engine_id, self._rank, self._memory)
        return Answer(Refusal("message", type(hello).__name__, "WorkerHello"), keep_open=False)

    def _retire(self, order: RetirePool) -> Answer:
        if not hmac.compare_digest(order.control_token, self._control_token):
            return Answer(Refusal("control_token", "(not shown)", "(not shown)"), keep_open=False)
        self._unmap(order.base)
        return Answer(Done(), keep_open=False)

    def _grant(self, hello: WorkerHello) -> Answer:
        if self._memory is None or self._memory.pool_fd is None:
            return Answer(Refusal("kv_role", "kv_consumer", "kv_consumer"), keep_open=False)
        mine = {**self._fingerprint, "protocol": str(PROTOCOL_VERSION), "rank": str(self._rank)}
        theirs = {**hello.fingerprint, "protocol": str(hello.protocol), "rank": str(hello.rank)}
        difference = first_difference(mine, theirs)
        if difference is not None:
            field, here, there = difference
            logger.warning("refused a decode: %s differs (here %r, there %r)", field, here, there)
            return Answer(Refusal(field[:4096], there[:4096], here[:4096]), keep_open=False)
        return Answer(PoolGrant(self._memory.layout), (self._memory.pool_fd,), keep_open=False)

    # --- each step ---

    def begin_step(self, meta: MC2Metadata) -> None:
        """Orders of the step, before its forward pass."""
        self._meta = meta
        for base in meta.unmap_bases:
            self._unmap(base)
        for order in meta.map_peers:
            thread = threading.Thread(target=self._map, args=(order,), name="mc2-map", daemon=True)
            self._mapping[order.base] = thread
            thread.start()
        self._failed.update(meta.failed_requests)

    def load(self) -> None:
        """Copy the partly filled last blocks of this step's new requests. Before the forward pass; microseconds."""
        if self._meta is not None and self._meta.tail_copies:
            assert self._memory is not None
            self._memory.copy_blocks(self._meta.tail_copies)

    def end_step(self) -> None:
        """The step's metadata is over."""
        self._meta = None

    def take_failed(self) -> set[str]:
        """Requests to report as failed loads."""
        failed, self._failed = self._failed, set()
        return failed

    def take_results(self) -> MC2WorkerMetadata | None:
        """Answers to map orders since the last step."""
        results = []
        while not self._results.empty():
            results.append(self._results.get())
        return MC2WorkerMetadata(results) if results else None

    def _map(self, order: MapPeer) -> None:
        """On its own thread: fetch the counterpart's pool, map it, say so, then fill in the page tables."""
        assert self._memory is not None
        try:
            self._map_pool(order)
        except PeerRefusedError as error:
            self._results.put(MapResult(order.incarnation, self._rank, "peer_refused", str(error)))
            return
        except PeerUnreachableError as error:
            self._results.put(MapResult(order.incarnation, self._rank, "peer_unreachable", str(error)))
            return
        except (MC2Error, OSError, ValueError) as error:
            self._results.put(MapResult(order.incarnation, self._rank, "map_failed", str(error)))
            return
        self._results.put(MapResult(order.incarnation, self._rank))
        if self._config.prefault:
            try:
                self._memory.prefault_peer(order.base)
            except OSError as error:
                logger.warning("could not prefault a peer's pool, first touches will be slower: %s", error)

    def _map_pool(self, order: MapPeer) -> None:
        assert self._memory is not None
        hello = WorkerHello(PROTOCOL_VERSION, self._rank, self._fingerprint)
        path = socket_path(self._directory, order.socket_ids[self._rank])
        grant, fds, session = open_session(path, hello, PoolGrant, 1, self._config.handshake_timeout_seconds)
        session.close()
        try:
            self._memory.map_peer(order.base, grant.pool, fds[0])
        finally:
            close_all(fds)

    def _unmap(self, base: int) -> None:
        thread = self._mapping.pop(base, None)
        if thread is not None:
            thread.join()  # at most the handshake timeout; unmapping under a running prefault would be a race
        if self._memory is not None:
            self._memory.unmap_peer(base)

    def close(self) -> None:
        """Stop listening. The memory stays: vLLM's tensors point into it."""
        if self._server is not None:
            self._server.close()
