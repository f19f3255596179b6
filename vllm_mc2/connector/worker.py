"""The worker half: the export of its KV memory to peers, the way to theirs, and each step's orders.

Life: constructed before vLLM allocates the KV cache; ``allocation_context`` hands our memory to vLLM's one allocation, where the
backend gives it; ``register_kv_caches`` checks where the tensors came to lie and starts to listen. From then on each step
brings orders in its metadata. What the memory is made of is the backend's business (:mod:`.host_memory`, :mod:`.npu_memory`).

Where vLLM does not let us give it memory, or attach is off, a decode's cache is vLLM's own, and blocks are copied into it.

Peers are mapped on a short-lived thread each, since a stopped peer answers late; attention never reads a window before the
scheduler has heard that it is mapped. Everything else runs on the worker's main thread.
"""

import hmac
import logging
import os
import queue
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Literal

from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig

from vllm_mc2.channel import socket_path
from vllm_mc2.config import MC2Config
from vllm_mc2.connector import compat
from vllm_mc2.connector.backend import Backend, M
from vllm_mc2.connector.fingerprint import fingerprint, refusal
from vllm_mc2.connector.host_memory import HostMemory
from vllm_mc2.connector.inspecting import answer_for_worker
from vllm_mc2.connector.metadata import MapPeer, MapResult, MC2Handshake, MC2Metadata, MC2WorkerMetadata
from vllm_mc2.connector.pulling import Puller, PullResults
from vllm_mc2.connector.worker_network import WorkerNetwork
from vllm_mc2.errors import DeviceError, MC2Error, PeerRefusedError, PeerUnreachableError
from vllm_mc2.protocol import (
    PROTOCOL_VERSION,
    Done,
    InspectHello,
    Message,
    Refusal,
    RetirePool,
    WorkerHello,
    new_incarnation,
)
from vllm_mc2.session import Answer, Session, SessionServer, open_session

logger = logging.getLogger("vllm.mc2.worker")

CLOSE_SECONDS = 5.0
"""How long a worker that stops waits for those who have its device memory mapped."""


def why_attach_off(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: MC2Config) -> str | None:
    """Why this engine uses no peer's blocks in place, or None."""
    if config.mode == "pull":
        return "mode is pull"
    if vllm_config.device_config.device_type == "npu":
        from vllm_mc2.connector.npu_memory import why_npu_attach_off

        return why_npu_attach_off(config)
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


class WorkerHalf:
    """One worker's KV memory. ``off_reason`` says why it is vLLM's own instead, or is None."""

    def __init__(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: MC2Config, directory: Path
    ) -> None:
        """May edit ``kv_cache_config``, so that vLLM allocates in our memory."""
        self._config = config
        self._directory = directory
        transfer = vllm_config.kv_transfer_config
        assert transfer is not None
        self._engine_id = str(transfer.engine_id)
        self._is_producer = transfer.is_kv_producer
        self._is_consumer = transfer.is_kv_consumer
        self._rank = compat.tensor_parallel_rank()
        self._size = vllm_config.parallel_config.tensor_parallel_size
        self._server: SessionServer | None = None
        self._socket_id = new_incarnation()
        self._control_token = new_incarnation()
        self._results: queue.SimpleQueue[MapResult] = queue.SimpleQueue()
        self._mapping: dict[int, threading.Thread] = {}
        self._failed: dict[str, list[int]] = {}
        self._meta: MC2Metadata | None = None
        self._pull_results = PullResults()
        self._puller = Puller(self._pull_results)
        is_device = vllm_config.device_config.device_type == "npu"
        self._network = WorkerNetwork(config, self._rank, self._pull_results, self._results.put, is_device=is_device)
        self._backend: Backend | None = None
        self.attach_off = why_attach_off(vllm_config, kv_cache_config, config)
        self.off_reason = compat.unsupported_engine(vllm_config, kv_cache_config)
        if self.off_reason is None and self.attach_off is not None and config.mode == "attach":
            self.off_reason = self.attach_off
        if self.off_reason is None:
            self._fingerprint = fingerprint(vllm_config, kv_cache_config, config.model_identity)
            try:
                self._backend = self._make_backend(vllm_config, kv_cache_config)
            except DeviceError as error:
                self.off_reason = str(error)
        if self.off_reason is not None:
            logger.warning("hand-off is off in this worker: %s", self.off_reason)

    def _make_backend(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> Backend:
        if vllm_config.device_config.device_type == "npu":
            # Only here, so that nothing of it is needed on a host.
            from vllm_mc2.connector.npu_memory import NpuMemory

            return NpuMemory(
                vllm_config,
                kv_cache_config,
                self._config,
                is_producer=self._is_producer,
                forget=self._puller.remove_source,
            )
        return HostMemory(
            kv_cache_config,
            self._config,
            min(self._config.pull_threads, len(os.sched_getaffinity(0))),
            is_producer=self._is_producer,
            is_consumer=self._is_consumer,
            attach_off=self.attach_off,
        )

    # --- allocation ---

    @property
    def gives_memory(self) -> bool:
        """Whether vLLM is to allocate inside :meth:`allocation_context`."""
        return self._backend is not None and self._backend.gives_memory

    def allocation_context(self) -> AbstractContextManager[None]:
        """Around vLLM's allocation of the KV cache: it gets our address range."""
        assert self._backend is not None
        return self._backend.allocation_context()

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """Check where every layer lies, then let peers in.

        Raises:
            LayoutError: a layer lies where it must not. The engine must not start: it would serve wrong bytes.
        """
        if self._backend is None:
            return
        try:
            self._backend.register(kv_caches)
        except DeviceError as error:
            self.off_reason = str(error)
            self._backend = None
            logger.warning("hand-off is off in this worker: %s", error)
            return
        self._fingerprint |= self._backend.facts()
        self._network.share(self._backend, self._is_producer)
        self._server = SessionServer(self._directory, self._socket_id, self._on_hello, lambda key: None)

    def handshake(self) -> MC2Handshake:
        """What the scheduler half must know of this worker."""
        backend = self._backend
        plan = backend.plan if backend is not None else None
        return MC2Handshake(
            rank=self._rank,
            plan=plan,
            pool=backend.pool() if backend is not None else None,
            socket_id=self._socket_id if plan is not None else None,
            fingerprint=self._fingerprint if self.off_reason is None else {},
            remote=self._network.grant,
            control_token=self._control_token,
            reason=self.off_reason,
            attach_off=self.attach_off,
        )

    def _on_hello(self, key: int, hello: Message) -> Answer:
        """Session thread: a decode's worker asks for the pool, or our own scheduler gives an order between steps."""
        backend = self._backend
        assert backend is not None
        if isinstance(hello, RetirePool):
            return self._retire(hello)
        if isinstance(hello, WorkerHello):
            refused = refusal(self._fingerprint, self._rank, hello)
            return Answer(refused, keep_open=False) if refused is not None else backend.grant(hello)
        if isinstance(hello, InspectHello) and backend.plan is not None:
            return answer_for_worker(hello, self._engine_id, self._rank, backend, self._puller.mapped())
        return Answer(Refusal("message", type(hello).__name__, "WorkerHello"), keep_open=False)

    def _retire(self, order: RetirePool) -> Answer:
        if not hmac.compare_digest(order.control_token, self._control_token):
            return Answer(Refusal("control_token", "(not shown)", "(not shown)"), keep_open=False)
        self._unmap(order.key)
        return Answer(Done(), keep_open=False)

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
        fence = self._backend.fence() if meta.pulls and self._backend is not None else None
        for pull in meta.pulls:
            if pull.ticket is None:
                self._puller.submit(pull, fence)
            else:
                self._network.puller.submit(pull)
        self._failed.update(meta.failed_requests)

    def load(self) -> None:
        """Copy the partly filled last blocks of this step's new requests. Before the forward pass; microseconds."""
        if self._meta is not None and self._meta.tail_copies:
            assert self._backend is not None
            self._backend.copy_tails(self._meta.tail_copies)

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
        assert self._backend is not None
        reason, detail = None, ""
        try:
            parts = self._backend.slices(self._rank, self._size, len(order.socket_ids))
            if order.address is not None:
                self._network.reach(order, order.address, parts, self._backend, self._fingerprint)
            else:
                source = self._backend.open_source(order, parts, partial(self.ask, order))
                self._puller.add_source(order.key, source)
                self._backend.watch(order.key, source)
        except PeerRefusedError as error:
            reason, detail = "peer_refused", str(error)
        except PeerUnreachableError as error:
            reason, detail = "peer_unreachable", str(error)
        except (MC2Error, OSError, ValueError) as error:
            reason, detail = "map_failed", str(error)
        self._results.put(MapResult(order.incarnation, order.key, self._rank, reason, detail))
        if reason is not None:
            return
        if self._config.prefault and order.base is not None:
            try:
                self._backend.prefault(order.base)
            except OSError as error:
                logger.warning("could not prefault a peer's pool, first touches will be slower: %s", error)

    def ask(self, order: MapPeer, rank: int, expected: type[M], num_fds: int) -> tuple[M, list[int], Session]:
        """Say hello to the peer's worker ``rank``. See :class:`~vllm_mc2.connector.backend.Ask`."""
        assert self._backend is not None
        way: Literal["attach", "pull"] = "pull" if order.base is None else "attach"
        hello = WorkerHello(PROTOCOL_VERSION, rank, way, self._fingerprint, self._backend.device_hello())
        path = socket_path(self._directory, order.socket_ids[rank])
        return open_session(path, hello, expected, num_fds, self._config.handshake_timeout_seconds)

    def _unmap(self, key: int) -> None:
        thread = self._mapping.pop(key, None)
        if self._network.drop(key, is_coming=thread is not None and thread.is_alive()):
            return
        if thread is not None:
            thread.join()  # at most the handshake timeout; unmapping under a running prefault would be a race
        self._puller.remove_source(key)

    def close(self) -> None:
        """Stop listening and copying. The memory stays: vLLM's tensors point into it."""
        self._puller.close()
        self._network.close()
        if self._server is not None:
            self._server.close(CLOSE_SECONDS)
        if self._backend is not None:
            self._backend.close()
