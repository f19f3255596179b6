"""The rig on a vLLM of before 0.29: its real scheduler, block pool and hooks, one tensor for each layer that vLLM allocates.

    PYTHONPATH=FOLDER_OF_THAT_VLLM python -m tests.connector.old_rig MODEL SOCKET_DIR

Prints one JSON object: what became of each request. :mod:`tests.packaging.test_old_vllm` runs it; nothing here may need the
installed vLLM.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import vllm
from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from tests.support.fake_model import EOS, expected_tokens, kv_value, next_token
from vllm_mc2 import plugin
from vllm_mc2.connector import compat

LAYERS = ["layer.0", "layer.1"]
BLOCK_SIZE = 16
NUM_BLOCKS = 64


class OldEngine:
    """One engine; the next token depends on every KV value that it reads through its block table."""

    device = "cpu"

    def __init__(
        self, model: str, socket_dir: str, role: str, policy: str, extra: dict[str, Any] | None = None
    ) -> None:
        extra = {"socket_dir": socket_dir, "huge_pages": "off", "report_in_response": True, **(extra or {})}
        model_config = ModelConfig(model=model, dtype="float32", seed=0, max_model_len=512)
        self.config = VllmConfig(
            model_config=model_config,
            cache_config=CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True),
            scheduler_config=SchedulerConfig(
                max_num_seqs=16,
                max_num_batched_tokens=512,
                max_model_len=512,
                is_encoder_decoder=False,
                disable_hybrid_kv_cache_manager=True,
            ),
            device_config=DeviceConfig("cpu"),
            kv_transfer_config=KVTransferConfig(
                kv_connector="MC2Connector",
                kv_role=role,
                kv_load_failure_policy=policy,
                kv_connector_extra_config=extra,
            ),
        )
        # The platform is the CPU's, whose configuration takes no other device.
        self.config.device_config.device_type = self.device
        self.config.cache_config.num_gpu_blocks = NUM_BLOCKS
        spec = self.spec()
        cache = KVCacheConfig(
            num_blocks=NUM_BLOCKS,
            kv_cache_tensors=[
                KVCacheTensor(size=spec.page_size_bytes * NUM_BLOCKS, shared_by=[layer]) for layer in LAYERS
            ],
            kv_cache_groups=[KVCacheGroupSpec(LAYERS, spec)],
        )
        with mock.patch.object(compat, "tensor_parallel_rank", return_value=0):
            self.worker: Any = KVConnectorFactory.create_connector(self.config, KVConnectorRole.WORKER, cache)
        self.worker.register_kv_caches(self.allocate())
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
        self.scheduler = Scheduler(
            vllm_config=self.config,
            kv_cache_config=cache,
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=BLOCK_SIZE,
            log_stats=True,
        )
        connector: Any = self.scheduler.get_kv_connector()
        connector.set_xfer_handshake_metadata({0: self.worker.get_handshake_metadata()})
        self.finished: dict[str, tuple[list[int], str, Any]] = {}
        self.computed: dict[str, int] = {}
        self.outputs: dict[str, list[int]] = {}
        self.tables: dict[str, list[int]] = {}

    def spec(self) -> Any:
        """Of the one cache group."""
        return FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=2, head_size=32, dtype=torch.float32)

    def allocate(self) -> dict[str, Any]:
        """What the runner gives to the connector."""
        self.kv = {layer: torch.zeros(NUM_BLOCKS, 2, BLOCK_SIZE, 64) for layer in LAYERS}
        return self.kv

    def write(self, layer: str, block: int, slot: int, value: float) -> None:
        """The KV of one token."""
        self.kv[layer][block, :, slot, :] = value

    def read(self, layer: str, table: list[int], num_tokens: int) -> list[float]:
        """The KV of the first tokens."""
        return [float(self.kv[layer][table[i // BLOCK_SIZE], 1, i % BLOCK_SIZE, -1]) for i in range(num_tokens)]

    def add(self, request_id: str, prompt: list[int], params: Any, max_tokens: int) -> None:
        """Add a request."""
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args={"kv_transfer_params": params})
        sampling.update_from_generation_config({}, EOS)
        request = Request(
            request_id=request_id, prompt_token_ids=prompt, sampling_params=sampling, pooling_params=None,
            block_hasher=self.hasher,
        )  # fmt: skip
        self.scheduler.add_request(request)

    def run(self, request_id: str, prompt: list[int], params: Any, max_tokens: int) -> tuple[list[int], str, Any]:
        """One request to its end, and all others with it."""
        self.add(request_id, prompt, params, max_tokens)
        deadline = time.monotonic() + 60
        while self.scheduler.has_requests():
            self.step()
            assert time.monotonic() < deadline, "still busy"
        return self.finished[request_id]

    def step(self) -> None:
        """One step, hooks in the order of that vLLM: loads begin before the forward pass."""
        output = self.scheduler.schedule()
        meta = output.kv_connector_metadata
        self.worker.handle_preemptions(meta)
        self.worker.bind_connector_metadata(meta)
        self.worker.start_load_kv(None)
        sampled = self.forward(output)
        self.worker.wait_for_save()
        sending, recving = self.worker.get_finished(output.finished_req_ids)
        connector_output = KVConnectorOutput(
            finished_sending=sending,
            finished_recving=recving,
            invalid_block_ids=self.worker.get_block_ids_with_load_errors(),
            kv_connector_worker_meta=self.worker.build_connector_worker_meta(),
        )
        self.worker.clear_connector_metadata()
        ids = list(sampled)
        result = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={req_id: index for index, req_id in enumerate(ids)},
            sampled_token_ids=[sampled[req_id] for req_id in ids],
            kv_connector_output=connector_output,
        )
        for batch in self.scheduler.update_from_output(output, result).values():
            for one in batch.outputs:
                self.outputs.setdefault(one.request_id, []).extend(one.new_token_ids)
                if one.finish_reason is not None:
                    reason = str(one.finish_reason)
                    self.finished[one.request_id] = (self.outputs[one.request_id], reason, one.kv_transfer_params)
        if not output.total_num_scheduled_tokens:
            time.sleep(0.001)

    def forward(self, output: Any) -> dict[str, list[int]]:
        """Write the scheduled positions and sample at the end."""
        starts: dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            self.tables[new.req_id], starts[new.req_id] = list(new.block_ids[0]), new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for index, req_id in enumerate(cached.req_ids):
            starts[req_id] = cached.num_computed_tokens[index]
            if cached.new_block_ids[index] is not None:
                self.tables[req_id] += cached.new_block_ids[index][0]
        sampled: dict[str, list[int]] = {}
        for req_id, count in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[req_id]
            tokens, start = list(request.all_token_ids), starts[req_id]
            end = start + count
            self.computed[req_id] = self.computed.get(req_id, 0) + max(0, min(end, request.num_prompt_tokens) - start)
            for position in range(start, end):
                block, slot = self.tables[req_id][position // BLOCK_SIZE], position % BLOCK_SIZE
                for index, layer in enumerate(LAYERS):
                    self.write(layer, block, slot, kv_value(index, tokens[: position + 1]))
            read = [self.read(layer, self.tables[req_id], end) for layer in LAYERS]
            sampled[req_id] = [next_token(read)] if end == len(tokens) else []
        return sampled

    def close(self) -> None:
        """Shut down as the engine core does."""
        self.scheduler.shutdown()
        self.worker.shutdown()


def expected(prompt: list[int], num_tokens: int) -> list[int]:
    """What must be sampled when every byte is right."""
    return expected_tokens(prompt, num_tokens, layers=len(LAYERS))


def main(model: str, socket_dir: str) -> dict[str, Any]:
    """Right tickets, and wrong ones under both policies."""
    plugin.register()
    prefill = OldEngine(model, socket_dir, "kv_producer", "recompute")
    decodes = {policy: OldEngine(model, socket_dir, "kv_consumer", policy) for policy in ("recompute", "fail")}
    requests: list[dict[str, Any]] = []
    for length in (1, 15, 16, 17, 100):
        prompt = [(length * 31 + 7 * i) % 997 for i in range(length)]
        name = f"r{length}"
        ticket = prefill.run(name, prompt, {"do_remote_decode": True}, 1)[2]
        tokens, _, answer = decodes["recompute"].run(name, prompt, ticket, 20)
        requests.append({
            "length": length, "is_right": tokens == expected(prompt, 20), "report": answer["mc2"],
            "computed": decodes["recompute"].computed[name],
        })  # fmt: skip
    wrong = {}
    for policy, decode in decodes.items():
        prompt = [(3 * i + 1) % 997 for i in range(50)]
        ticket = prefill.run(f"wrong-{policy}", prompt, {"do_remote_decode": True}, 1)[2]
        other = [*prompt[:-1], 5]
        tokens, reason, _ = decode.run(f"wrong-{policy}", other, ticket, 4)
        wrong[policy] = {"reason": reason, "is_right": tokens == expected(other, 4)}
    result = {
        "vllm": str(Path(vllm.__file__).parent),
        "missing": compat.check_contract(),
        "requests": requests,
        "wrong": wrong,
        "free": [engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() for engine in decodes.values()],
    }
    for engine in (*decodes.values(), prefill):
        engine.close()
    return result


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2])))
