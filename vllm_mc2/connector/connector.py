"""The facade that vLLM sees: forwards each hook to the half it belongs to, and decides nothing itself.

vLLM makes two instances: one in the scheduler's process and one in each worker. In the scheduler the halves exist only from
``set_xfer_handshake_metadata`` on, when all workers have said what they have; no request comes before that.
"""

import logging
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from vllm_mc2.ascend.settings import check_sizes, parse_foreign
from vllm_mc2.channel import prepare_socket_dir, sweep_at_exit, sweep_stale_sockets
from vllm_mc2.config import parse_config
from vllm_mc2.connector import compat
from vllm_mc2.connector.decode import DecodeHalf
from vllm_mc2.connector.inspecting import EngineInspector
from vllm_mc2.connector.metadata import MC2Handshake, MC2Metadata, MC2WorkerMetadata
from vllm_mc2.connector.metrics import MC2PromMetrics, MC2Stats
from vllm_mc2.connector.peer import Dialer, Network, OwnWorker
from vllm_mc2.connector.peers import PeerTable
from vllm_mc2.connector.prefill import PrefillHalf
from vllm_mc2.connector.remote_prefill import RemotePrefill
from vllm_mc2.connector.worker import WorkerHalf
from vllm_mc2.network.lender import Listening
from vllm_mc2.protocol import WorkerEndpoint
from vllm_mc2.ticket import TcpAddress

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import torch
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.mc2.connector")


class MC2Connector(KVConnectorBase_V1, SupportsHMA):
    """Hands a request's KV cache from prefill to decode without copying it. See ``docs/how-it-works.md``."""

    if compat.CACHE_HIT_SOURCE is not None:
        _cache_hit_source = compat.CACHE_HIT_SOURCE

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        """Hook: once per process, before the KV cache is allocated.

        Raises:
            ConfigError: a setting is wrong, named with what is allowed.
        """
        super().__init__(vllm_config, role, kv_cache_config)
        own_settings, foreign = parse_foreign(self._kv_transfer_config.kv_connector_extra_config)
        self._config = parse_config(own_settings)
        parallel = vllm_config.parallel_config
        check_sizes(
            foreign,
            str(self._kv_transfer_config.kv_role),
            parallel.tensor_parallel_size,
            parallel.data_parallel_size,
            parallel.pipeline_parallel_size,
        )
        self._directory = self._config.resolve_socket_dir()
        prepare_socket_dir(self._directory)
        self._stats = MC2Stats()
        self._prefill: PrefillHalf | None = None
        self._decode: DecodeHalf | None = None
        self._worker: WorkerHalf | None = None
        self._block_pool: BlockPool | None = None
        self._load_errors: set[int] = set()
        self._inspector: EngineInspector | None = None
        self._num_rejected = 0
        """As far as it is in the statistics."""
        if role is KVConnectorRole.WORKER:
            self._worker = WorkerHalf(vllm_config, kv_cache_config, self._config, self._directory)
        else:
            sweep_stale_sockets(self._directory)

    # --- worker ---

    def get_mem_pool_context(self) -> "AbstractContextManager[None] | None":
        """Hook: entered around the allocation of the KV cache."""
        assert self._worker is not None
        return self._worker.allocation_context() if self._worker.gives_memory else None

    def register_kv_caches(self, kv_caches: "dict[str, torch.Tensor]") -> None:
        """Hook: the KV cache is allocated."""
        assert self._worker is not None
        self._worker.register_kv_caches(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Hook: what the scheduler must know of this worker."""
        assert self._worker is not None
        return self._worker.handshake()

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Hook: begin of a step, before its forward pass."""
        super().bind_connector_metadata(connector_metadata)
        assert self._worker is not None and isinstance(connector_metadata, MC2Metadata)
        self._worker.begin_step(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Hook: before the forward pass of a step with external tokens; later otherwise, when there is nothing to do."""
        assert self._worker is not None
        self._worker.load()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Hook: nothing to wait for, loads are done in ``start_load_kv``."""

    def save_kv_layer(self, layer_name: str, kv_layer: "torch.Tensor", attn_metadata: Any, **kwargs: Any) -> None:
        """Hook: nothing to save, the KV stays where it is."""

    def wait_for_save(self) -> None:
        """Hook: nothing to save."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Hook: requests whose blocks are there now, and those whose load has failed."""
        assert self._worker is not None
        loaded, failed = self._worker.take_loaded()
        return compat.TransferResults(finished_sending=set(), finished_recving=loaded, failed_recving=set(failed))

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Hook, before 0.30: requests whose load has ended, in whatever way."""
        assert self._worker is not None
        loaded, failed = self._worker.take_loaded()
        for block_ids in failed.values():
            self._load_errors.update(block_ids)
        return None, loaded or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Hook: blocks of failed loads, for a vLLM that does not know failed requests (before 0.30)."""
        block_ids, self._load_errors = self._load_errors, set()
        return block_ids

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Hook: answers to the scheduler's orders."""
        assert self._worker is not None
        return self._worker.take_results()

    def clear_connector_metadata(self) -> None:
        """Hook: end of a step."""
        super().clear_connector_metadata()
        assert self._worker is not None
        self._worker.end_step()

    # --- scheduler ---

    def bind_gpu_block_pool(self, gpu_block_pool: "BlockPool") -> None:
        """Hook: vLLM's blocks, before any request. Since 0.30 by way of ``bind_kv_cache_manager``."""
        self._block_pool = gpu_block_pool

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Hook: as below, by pipeline and tensor rank. A pipeline's workers say themselves that they cannot hand over."""
        self.set_xfer_handshake_metadata(dict(enumerate(metadata[rank] for rank in sorted(metadata))))

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """Hook: every worker has said what it has; the halves can be made."""
        workers = [worker for worker in metadata.values() if isinstance(worker, MC2Handshake)]
        workers.sort(key=lambda worker: worker.rank)
        off_reason = next((worker.reason for worker in workers if worker.reason), None)
        if off_reason is None and not workers:
            off_reason = "no worker answered"
        if off_reason is not None:
            logger.warning("hand-off is off: %s", off_reason)
        transfer = self._kv_transfer_config
        attach_off = None
        if transfer.is_kv_producer and off_reason is None:
            self._prefill = self._make_prefill(workers)
        if transfer.is_kv_consumer:
            attach_off = next((worker.attach_off for worker in workers if worker.attach_off), None)
            self._decode = self._make_decode(workers, off_reason, attach_off)
        if self._block_pool is not None:
            pool, decode = self._block_pool, self._decode
            self._inspector = EngineInspector(
                self._engine_id(),
                self._directory,
                pool,
                self._block_size(),
                off_reason,
                attach_off if off_reason is None else None,
                self._prefill,
                decode,
            )

    def _block_size(self) -> int:
        size: int = self._kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        return size

    def _make_prefill(self, workers: list[MC2Handshake]) -> PrefillHalf:
        assert self._block_pool is not None
        endpoints = tuple(
            WorkerEndpoint(worker.rank, worker.socket_id, worker.pool)
            for worker in workers
            if worker.socket_id is not None and worker.pool is not None
        )
        half = PrefillHalf(
            self._config,
            self._engine_id(),
            self._directory,
            endpoints,
            self._block_pool,
            self._block_size(),
            compat.windows_of(self._kv_cache_config),
            self._vllm_config.model_config.max_model_len,
            self._stats,
            self._remote_prefill(workers),
        )
        logger.info("prefill %s hands over; sockets in %s", self._engine_id(), self._directory)
        return half

    def _remote_prefill(self, workers: list[MC2Handshake]) -> RemotePrefill | None:
        config, secret = self._config, self._config.resolve_tcp_secret()
        if config.tcp_address is None or secret is None:
            if config.tcp_address is not None:
                logger.warning(
                    "tcp_address is set, but there is no secret (tcp_secret_file): peers on other hosts are not served"
                )
            return None
        port = config.tcp_port
        if port:
            port += compat.data_parallel_rank(self._vllm_config)
        listening = Listening(TcpAddress(config.tcp_address, port), secret, config.tcp_timeout_seconds)
        return RemotePrefill(listening, workers)

    def _dialer(self) -> Dialer:
        config, secret = self._config, self._config.resolve_tcp_secret()
        network = None
        if secret is not None:
            network = Network(secret, config.tcp_timeout_seconds)
        return Dialer(self._engine_id(), self._directory, config.handshake_timeout_seconds, network)

    def _make_decode(self, workers: list[MC2Handshake], off_reason: str | None, attach_off: str | None) -> DecodeHalf:
        assert self._block_pool is not None
        peers = None
        bytes_per_block = 0
        plan = workers[0].plan if workers else None
        if off_reason is None and plan is not None:
            if attach_off is not None and self._config.mode != "pull":
                logger.warning("attach is off, blocks are copied: %s", attach_off)
            bytes_per_block = len(workers) * plan.pool_layout().bytes_per_block
            peers = PeerTable(
                self._dialer(),
                self._directory,
                plan,
                len(workers),
                self._block_size(),
                self._config.handshake_timeout_seconds,
                tuple(OwnWorker(worker.socket_id or "", worker.control_token) for worker in workers),
                mode=self._config.mode,
                attach_off=attach_off,
                on_mapped=lambda seconds: self._stats.observe("map_seconds", seconds),
            )
            logger.info(
                "decode %s takes prefills from %s, mode %s", self._engine_id(), self._directory, self._config.mode
            )
        return DecodeHalf(
            peers,
            self._block_pool,
            self._block_size(),
            compat.windows_of(self._kv_cache_config),
            bytes_per_block,
            off_reason=off_reason,
            allows_pull=self._config.mode != "attach",
            fails_on_error=self._kv_transfer_config.kv_load_failure_policy == "fail",
            stats=self._stats,
        )

    def _engine_id(self) -> str:
        return str(self._kv_transfer_config.engine_id)

    def on_new_request(self, request: "Request") -> None:
        """Hook: a request has arrived."""
        compat.transfer_params(request)  # takes out what vLLM itself could not bear
        if self._prefill is not None:
            self._prefill.reap()
        if self._decode is not None:
            self._decode.on_new_request(request)

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        """Hook: what comes from outside beyond the prefix-cache hits."""
        if self._decode is None:
            return 0, False
        return self._decode.num_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        """Hook: the request's blocks are allocated."""
        if self._decode is not None:
            self._decode.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        """Hook: end of ``schedule()``, every step."""
        meta = MC2Metadata()
        if self._prefill is not None:
            self._prefill.reap()
        if self._decode is not None:
            self._decode.build_meta(meta)
        return meta

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        """Hook: the workers' answers of a step."""
        if self._decode is None:
            return
        worker_meta = connector_output.kv_connector_worker_meta
        if isinstance(worker_meta, MC2WorkerMetadata):
            self._decode.on_worker_meta(worker_meta)
        # Failed requests by name since 0.30; before, by their blocks.
        failed, invalid = getattr(connector_output, "failed_recving", ()), connector_output.invalid_block_ids
        for request_id in connector_output.finished_recving or ():
            self._decode.on_loaded(request_id, request_id in failed, invalid)

    def request_finished(self, request: "Request", block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Hook: a request has ended, where vLLM knows one cache group only."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Hook: a request has ended; its blocks are freed right after, hence the pin."""
        params: dict[str, Any] | None = None
        if self._decode is not None:
            report = self._decode.request_finished(request)
            if report is not None and self._config.report_in_response:
                params = {"mc2": report}
        if self._prefill is not None:
            ticket = self._prefill.request_finished(request, block_ids)
            params = {**(params or {}), **ticket} if ticket is not None else params
        return False, params

    def has_pending_push_work(self) -> bool:
        """Hook: whether the engine must step although it has no request: for a moment, to decline a ticket."""
        return self._decode is not None and self._decode.has_pending_work()

    def get_kv_connector_stats(self) -> MC2Stats | None:
        """Hook: counts since the last call. The worker's instance counts nothing."""
        num_rejected = sum(half.num_rejected for half in (self._prefill, self._inspector) if half is not None)
        if num_rejected > self._num_rejected:
            self._stats.add("connections_rejected", num_rejected - self._num_rejected)
            self._num_rejected = num_rejected
        if self._stats.is_empty():
            return None
        stats, taken = self._stats, MC2Stats(dict(self._stats.data))
        stats.reset()
        if self._inspector is not None:
            taken.name_engine(self._inspector.socket_id)
        return taken

    def shutdown(self) -> None:
        """Hook: the engine stops."""
        for half in (self._inspector, self._prefill, self._decode, self._worker):
            if half is not None:
                half.close()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> MC2Stats:
        """Hook: statistics from their serialized form."""
        return MC2Stats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: "VllmConfig",
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> MC2PromMetrics:
        """Hook: the Prometheus side of the statistics. The one hook that vLLM's front end calls with the configuration."""
        assert vllm_config.kv_transfer_config is not None
        config = parse_config(parse_foreign(vllm_config.kv_transfer_config.kv_connector_extra_config)[0])
        directory = config.resolve_socket_dir()
        sweep_at_exit(directory)
        return MC2PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues, directory)
