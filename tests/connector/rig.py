"""An engine without a model: vLLM's real Scheduler and block pool, our real connector halves, real memory.

Where the model would run, :class:`RigEngine` writes the KV values of :mod:`tests.support.fake_model`, and samples the next token
from *all KV values it reads back through the block table*.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheLayout,
    KVCacheTensor,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.utils import allocate_kv_cache

from tests.support.fake_model import EOS, NUM_LAYERS, first_in_window, kv_value, next_token, num_layers
from vllm_mc2 import plugin
from vllm_mc2.connector import compat
from vllm_mc2.connector.connector import MC2Connector

NUM_HEADS = 2
HEAD_SIZE = 32


def _vllm_config(
    model: Path, role: str | None, block_size: int, policy: str, extra: dict[str, Any], **more: Any
) -> VllmConfig:
    model_config = ModelConfig(model=str(model), dtype="float32", seed=0, max_model_len=more.pop("max_model_len", 512))
    transfer = None
    if role is not None:
        ours = {"kv_connector": "MC2Connector", "kv_role": role, "kv_connector_extra_config": extra}
        others = more.pop("others", None)
        if others is None:
            transfer = KVTransferConfig(kv_load_failure_policy=policy, **ours)
        else:
            children = {"connectors": [ours if child == "MC2Connector" else child for child in others]}
            transfer = KVTransferConfig(
                kv_connector="MultiConnector",
                kv_role=role,
                kv_load_failure_policy=policy,
                kv_connector_extra_config=children,
            )
    return VllmConfig(
        model_config=model_config,
        cache_config=CacheConfig(block_size=block_size, enable_prefix_caching=more.pop("enable_prefix_caching", True)),
        scheduler_config=SchedulerConfig(
            max_num_seqs=16,
            max_num_batched_tokens=more.pop("max_num_batched_tokens", 512),
            max_model_len=model_config.max_model_len,
            is_encoder_decoder=False,
            disable_hybrid_kv_cache_manager=not more.pop("is_hybrid", False),
        ),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=transfer,
    )


def _cache_config(num_blocks: int, block_size: int, window: int | None) -> KVCacheConfig:
    """One group of full attention; with a window a second group, which lies over the first."""
    shape: dict[str, Any] = {
        "block_size": block_size, "num_kv_heads": NUM_HEADS, "head_size": HEAD_SIZE, "dtype": torch.float32
    }  # fmt: skip
    specs: list[Any] = [FullAttentionSpec(**shape)]
    if window is not None:
        specs.append(SlidingWindowSpec(**shape, sliding_window=window))
    page = specs[0].page_size_bytes
    groups = []
    tensors = []
    for index, spec in enumerate(specs):
        layers = [f"layer.{index * NUM_LAYERS + layer}" for layer in range(NUM_LAYERS)]
        groups.append(KVCacheGroupSpec(layers, spec))
        size, stride = page * num_blocks * NUM_LAYERS, page * num_blocks
        tensors.append(KVCacheTensor(size=size, layers=layers, layer_stride=stride, block_stride=page))
    return KVCacheConfig(
        num_blocks=num_blocks, kv_cache_tensors=tensors, kv_cache_groups=groups, kv_cache_layout="LBHNC"
    )


class RigEngine:
    """One engine; ``role`` None is a plain one. ``finished`` collects each request's tokens, status and response params."""

    def __init__(
        self,
        model: Path,
        socket_dir: Path | None,
        role: str | None,
        *,
        num_blocks: int = 64,
        block_size: int = 16,
        policy: str = "recompute",
        extra: dict[str, Any] | None = None,
        window: int | None = None,
        **more: Any,
    ) -> None:
        """``window``: a second cache group of layers with a sliding window, vLLM's hybrid cache manager on."""
        plugin.register()
        self.window = window
        extra = {"socket_dir": str(socket_dir), "huge_pages": "off", "report_in_response": True, **(extra or {})}
        self.block_size = block_size
        self.config = _vllm_config(model, role, block_size, policy, extra, is_hybrid=window is not None, **more)
        self.config.cache_config.num_gpu_blocks = num_blocks
        worker_cache = _cache_config(num_blocks, block_size, window)
        self.worker: Any = None
        if role is not None:
            # One rank, and no distributed group to ask for it.
            with mock.patch.object(compat, "tensor_parallel_rank", return_value=0):
                self.worker = KVConnectorFactory.create_connector(self.config, KVConnectorRole.WORKER, worker_cache)
        context = self.worker.get_mem_pool_context() if self.worker is not None else None
        if context is not None:
            with context:
                self.kv = allocate_kv_cache(worker_cache, torch.device("cpu"), KVCacheLayout.LBHNC)
        else:
            self.kv = allocate_kv_cache(worker_cache, torch.device("cpu"), KVCacheLayout.LBHNC)
        if self.worker is not None:
            self.worker.register_kv_caches(self.kv)
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(block_size, sha256)
        self.scheduler = Scheduler(
            vllm_config=self.config,
            kv_cache_config=_cache_config(num_blocks, block_size, window),
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=block_size,
            log_stats=True,
        )
        top: Any = self.scheduler.get_kv_connector()
        if top is not None:
            top.set_xfer_handshake_metadata_pp_aware({(0, 0): self.worker.get_handshake_metadata()})
        children = getattr(top, "sub_connectors", [top])
        self.connector: MC2Connector = next(
            child for child in children if top is None or isinstance(child, MC2Connector)
        )
        self.num_steps = 0
        self.num_computed_prompt_tokens: dict[str, int] = {}
        self.finished: dict[str, tuple[list[int], Any, dict[str, Any] | None]] = {}
        self._tables: dict[str, list[list[int]]] = {}
        """Of each cache group."""
        self._outputs: dict[str, list[int]] = {}
        self.stats: dict[str, float] = {}

    @property
    def num_free_blocks(self) -> int:
        """Free blocks of vLLM's own pool."""
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def request(
        self,
        request_id: str,
        prompt: Sequence[int],
        params: dict[str, Any] | None = None,
        max_tokens: int = 4,
        **more: Any,
    ) -> Request:
        """A request as the API server would make it; not added yet."""
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args={"kv_transfer_params": params})
        for key in ("prompt_logprobs",):
            if key in more:
                setattr(sampling, key, more.pop(key))
        sampling.update_from_generation_config({}, EOS)
        return Request(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            sampling_params=sampling,
            pooling_params=None,
            block_hasher=self._hasher,
            **more,
        )

    def add(self, *args: Any, **kwargs: Any) -> Request:
        """Make a request and add it."""
        request = self.request(*args, **kwargs)
        self.scheduler.add_request(request)
        return request

    def step(self) -> int:
        """One engine step; the number of tokens that were computed."""
        self.num_steps += 1
        output = self.scheduler.schedule()
        connector_output = None
        if self.worker is not None:
            meta = output.kv_connector_metadata
            self.worker.handle_preemptions(meta)
            self.worker.bind_connector_metadata(meta)
            if output.has_sync_kv_loads:
                self.worker.start_load_kv(None)
        sampled = self._forward(output)
        if self.worker is not None:
            if not output.has_sync_kv_loads:
                self.worker.start_load_kv(None)
            self.worker.wait_for_save()
            results = self.worker.get_transfer_results(output.finished_req_ids)
            connector_output = KVConnectorOutput(
                finished_sending=results.finished_sending,
                finished_recving=results.finished_recving,
                failed_recving=results.failed_recving,
                kv_connector_stats=self.worker.get_kv_connector_stats(),
                kv_connector_worker_meta=self.worker.build_connector_worker_meta(),
            )
            self.worker.clear_connector_metadata()
        req_ids = list(sampled)
        result = ModelRunnerOutput(
            req_ids=req_ids,
            req_id_to_index={req_id: index for index, req_id in enumerate(req_ids)},
            sampled_token_ids=[sampled[req_id] for req_id in req_ids],
            kv_connector_output=connector_output,
        )
        self._collect(self.scheduler.update_from_output(output, result))
        return int(output.total_num_scheduled_tokens)

    def _forward(self, output: Any) -> dict[str, list[int]]:
        """Write KV of the scheduled positions and sample where the end of the request's tokens is reached."""
        starts: dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            self._tables[new.req_id] = [list(table) for table in new.block_ids]
            starts[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for index, req_id in enumerate(cached.req_ids):
            starts[req_id] = cached.num_computed_tokens[index]
            blocks = cached.new_block_ids[index]
            if req_id in cached.resumed_req_ids:
                self._tables[req_id] = [list(table) for table in blocks]
            elif blocks is not None:
                for table, added in zip(self._tables[req_id], blocks, strict=True):
                    table.extend(added)
        sampled: dict[str, list[int]] = {}
        for req_id, count in output.num_scheduled_tokens.items():
            tokens = list(self.scheduler.requests[req_id].all_token_ids)
            start, end = starts[req_id], starts[req_id] + count
            num_prompt = self.scheduler.requests[req_id].num_prompt_tokens
            computed = max(0, min(end, num_prompt) - start)
            self.num_computed_prompt_tokens[req_id] = self.num_computed_prompt_tokens.get(req_id, 0) + computed
            for position in range(start, end):
                self._slot_write(req_id, position, tokens[: position + 1])
            sampled[req_id] = [self._sample(req_id, end)] if end == len(tokens) else []
        return sampled

    def _slot_write(self, req_id: str, position: int, tokens: Sequence[int]) -> None:
        index, slot = position // self.block_size, position % self.block_size
        for layer in range(num_layers(self.window)):
            block = self._tables[req_id][layer // NUM_LAYERS][index]
            self.kv[f"layer.{layer}"][block, :, slot, :] = kv_value(layer, tokens)

    def _sample(self, req_id: str, num_tokens: int) -> int:
        values = []
        for layer in range(num_layers(self.window)):
            tensor, table = self.kv[f"layer.{layer}"], self._tables[req_id][layer // NUM_LAYERS]
            first = first_in_window(layer, num_tokens, self.window)
            blocks = range(first // self.block_size, -(-num_tokens // self.block_size))
            rows = torch.cat([tensor[table[index], 1, :, -1] for index in blocks])
            start = first - blocks.start * self.block_size
            values.append(rows[start : start + num_tokens - first].tolist())
        return next_token(values)

    def _collect(self, outputs: dict[int, Any]) -> None:
        for batch in outputs.values():
            if batch.scheduler_stats is not None and batch.scheduler_stats.kv_connector_stats:
                counts = batch.scheduler_stats.kv_connector_stats
                for key, value in counts.get("MC2Connector", counts).items():
                    self.stats[key] = self.stats.get(key, 0) + value
            for output in batch.outputs:
                tokens = self._outputs.setdefault(output.request_id, [])
                tokens += output.new_token_ids
                if output.finish_reason is not None:
                    self.finished[output.request_id] = (tokens, output.finish_reason, output.kv_transfer_params)

    def run(self, timeout_seconds: float = 60.0) -> None:
        """Step until nothing is left to do, as the engine core's loop does."""
        deadline = time.monotonic() + timeout_seconds
        while self.scheduler.has_requests():
            if self.step() == 0:
                time.sleep(0.001)  # a step of a real engine takes this long, and other threads get to run
            assert time.monotonic() < deadline, f"still busy: {list(self.scheduler.requests)}"

    def abort(self, request_id: str) -> None:
        """What a client's disconnect does."""
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def close(self) -> None:
        """Shut down as the engine core does."""
        self.scheduler.shutdown()
        if self.worker is not None:
            self.worker.shutdown()


MakeEngine = Callable[..., RigEngine]


def assert_clean(*engines: RigEngine) -> None:
    """Both pools are back to their start value and nothing is borrowed or lent."""
    for engine in engines:
        if engine.connector._prefill is not None:
            engine.connector._prefill.reap()
            assert len(engine.connector._prefill.book) == 0
        if engine.connector._decode is not None:
            assert engine.connector._decode.snapshot() == {"handoffs": 0, "loans": 0, "borrowed_blocks": 0}
        assert engine.scheduler.requests == {}
        assert engine.num_free_blocks == len(engine.scheduler.kv_cache_manager.block_pool.blocks) - 1


def step_until_running(engine: RigEngine, request_id: str) -> None:
    """Step until the request has its prompt's KV and is being computed."""
    while engine.num_computed_prompt_tokens.get(request_id) is None:
        engine.step()


def prefill(engine: RigEngine, request_id: str, prompt: Sequence[int], **more: Any) -> dict[str, Any]:
    """Run the prefill leg and return the ``kv_transfer_params`` of its response."""
    params = {"do_remote_decode": True, "do_remote_prefill": False}
    engine.add(request_id, prompt, params, max_tokens=1, **more)
    engine.run()
    _, _, answer = engine.finished.pop(request_id)
    engine._outputs.pop(request_id)
    assert answer is not None, "no ticket"
    return answer
