"""One engine process on a simulated NPU: vLLM 0.23's real scheduler, block pool and hooks, real torch_npu tensors in one of
vllm-ascend's shapes, our connector.

    python -m tests.ascend.engine SOCKET MODEL SOCKET_DIR ROLE SHAPE DEVICE

with the environment of :mod:`tests.ascend.environment` and vLLM 0.23 in front of the path. Does as it is told on the socket
(:mod:`tests.ascend.told`).
"""

import ctypes
import gc
import json
import os
import sys
import zlib
from typing import Any
from unittest import mock

import torch
import torch_npu  # noqa: F401
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

from tests.ascend import told
from tests.ascend.shapes import BLOCK_SIZE, LATENT, LAYERS, SHAPES, Cache, token_values
from tests.connector import old_rig
from tests.support.fake_model import kv_value, next_token
from tests.support.waiting import wait_until
from vllm_mc2 import plugin
from vllm_mc2.ascend import sharing
from vllm_mc2.connector import compat
from vllm_mc2.errors import DeviceError

DEVICE_TO_DEVICE = 3
LIVE = ("reservations", "mappings", "physical", "imports", "exports", "ipc_imports", "ipc_exports", "streams", "events")


class NpuEngine(old_rig.OldEngine):
    """The next token depends on every byte of KV that it reads through its block table."""

    device = "npu"

    def __init__(self, *args: Any, shape: str, npu: int, **more: Any) -> None:
        self.shape = shape
        self.npu = f"npu:{npu}"
        self.set_copy_delay: Any = ctypes.CDLL("libascendcl.so").mc2_sim_set_copy_delay_us
        self.set_copy_delay.argtypes = [ctypes.c_int64]
        torch.npu.set_device(npu)
        self.caches: dict[str, Cache] = {}
        super().__init__(*args, **more)

    def spec(self) -> Any:
        if self.shape in LATENT:
            return MLAAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=80, dtype=torch.float32)
        return FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=2, head_size=32, dtype=torch.float32)

    def allocate(self) -> dict[str, Any]:
        self.caches = {layer: SHAPES[self.shape](self.npu) for layer in LAYERS}
        return {layer: cache.given for layer, cache in self.caches.items()}

    def write(self, layer: str, block: int, slot: int, value: float) -> None:
        self.set_copy_delay(0)  # only what a peer's blocks take was to be slow
        for part, tensor in enumerate(self.caches[layer].slots):
            place = tensor[block, slot]
            place.copy_(token_values(layer, int(value), part, tensor.dtype, place.shape))

    def read(self, layer: str, table: list[int], num_tokens: int) -> list[float]:
        sums: list[int] = [0] * num_tokens
        for tensor in self.caches[layer].slots:
            for index in range(-(-num_tokens // BLOCK_SIZE)):
                block = tensor[table[index]].cpu().contiguous().view(BLOCK_SIZE, -1)
                for slot in range(min(BLOCK_SIZE, num_tokens - index * BLOCK_SIZE)):
                    token = index * BLOCK_SIZE + slot
                    sums[token] = zlib.crc32(block[slot].contiguous().view(torch.uint8).numpy().tobytes(), sums[token])
        return [float(each) for each in sums]

    def expected(self, prompt: list[int], num_tokens: int) -> list[int]:
        """What must be sampled when every byte is right."""
        tokens = list(prompt)
        for _ in range(num_tokens):
            read = []
            for index, layer in enumerate(LAYERS):
                row = []
                for end in range(1, len(tokens) + 1):
                    digest, total = int(kv_value(index, tokens[:end])), 0
                    for part, tensor in enumerate(self.caches[layer].slots):
                        values = token_values(layer, digest, part, tensor.dtype, tensor.shape[2:])
                        total = zlib.crc32(values.contiguous().view(-1).view(torch.uint8).numpy().tobytes(), total)
                    row.append(float(total))
                read.append(row)
            tokens.append(next_token(read))
        return tokens[len(prompt) :]


def without_share(storage: Any) -> Any:
    """As with a torch_npu that has no such way."""
    raise DeviceError("this torch_npu has no storage._share_npu_")


class Server:
    """What a test can ask for."""

    def __init__(self, model: str, socket_dir: str, role: str, shape: str, npu: int) -> None:
        plugin.register()
        self.simulator = ctypes.CDLL("libascendcl.so")
        self.simulator.mc2_sim_live.restype = ctypes.c_int64
        self.simulator.mc2_sim_violations.restype = ctypes.c_int64
        self.simulator.mc2_sim_violation_text.restype = ctypes.c_char_p
        self.simulator.mc2_sim_calls.restype = ctypes.c_int64
        if os.environ.get("MC2_TEST_WITHOUT_SHARE"):
            sharing.share_storage = without_share
        self._make = (model, socket_dir, role), npu
        if shape != "none":
            self.open(shape)

    def open(self, shape: str) -> None:
        """A new engine; the one before has been closed."""
        arguments, npu = self._make
        policy = os.environ.get("MC2_TEST_POLICY", "recompute")
        extra = {"handshake_timeout_seconds": 30.0, **json.loads(os.environ.get("MC2_TEST_EXTRA", "{}"))}
        with mock.patch.object(compat, "tensor_parallel_rank", return_value=0):
            self.engine = NpuEngine(*arguments, policy, extra, shape=shape, npu=npu)
        self.at_start = self.live()

    def run(self, request_id: str, prompt: list[int], params: Any, num_tokens: int) -> dict[str, Any]:
        """One request to its end."""
        tokens, reason, answer = self.engine.run(request_id, prompt, params, num_tokens)
        return {
            "tokens": tokens, "reason": reason, "params": answer, "computed": self.engine.computed.get(request_id, 0),
            "is_right": tokens == self.engine.expected(prompt, num_tokens),
        }  # fmt: skip

    def idle(self, num_steps: int) -> None:
        """Steps without a request, as an engine with other things to do has them."""
        for _ in range(num_steps):
            self.engine.step()

    def off_reason(self) -> Any:
        return self.engine.worker._worker.off_reason

    def attach_off(self) -> str:
        return str(self.engine.worker._worker.attach_off)

    def num_free(self) -> int:
        return int(self.engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def num_leases(self) -> int:
        half = self.engine.scheduler.get_kv_connector()._prefill
        half.reap()
        return len(half.book)

    def wait_leases(self, wanted: int) -> int:
        """The number, once it is ``wanted``; a prefill reaps as it steps."""
        wait_until(lambda: self.num_leases() == wanted or self.idle(1), f"{wanted} leases", timeout_seconds=60)
        return self.num_leases()

    def way(self) -> str:
        return str(self.engine.worker._worker._backend._shared.way)

    def live(self) -> dict[str, int]:
        """What the simulator counts in this process."""
        return {name: int(self.simulator.mc2_sim_live(name.encode())) for name in LIVE}

    def idle_live(self) -> dict[str, int]:
        """The same without the streams of a copier, which are ours and end with it."""
        return self.at_start

    def violations(self) -> list[Any]:
        return [int(self.simulator.mc2_sim_violations()), (self.simulator.mc2_sim_violation_text() or b"").decode()]

    def fail(self, call: str, skip: int, code: int, times: int) -> None:
        self.simulator.mc2_sim_fail(call.encode(), skip, code, times)

    def calls(self, call: str) -> int:
        return int(self.simulator.mc2_sim_calls(call.encode()))

    def slow(self, delay_us: int) -> None:
        """Each copy takes so long, until the engine computes something."""
        self.engine.set_copy_delay(delay_us)

    def queue_zeros(self, delay_us: int) -> None:
        """Tell the device, and do not wait, to write zeros over the whole cache; every copy takes so long."""
        slots = [tensor for cache in self.engine.caches.values() for tensor in cache.slots]
        self.zeros = [torch.zeros_like(tensor) for tensor in slots]
        torch.npu.synchronize()
        self.slow(delay_us)
        copy: Any = self.simulator.aclrtMemcpyAsync
        copy.argtypes = [ctypes.c_void_p, ctypes.c_size_t] * 2 + [ctypes.c_int, ctypes.c_void_p]
        stream = torch.npu.current_stream().npu_stream
        for tensor, zero in zip(slots, self.zeros, strict=True):
            assert copy(tensor.data_ptr(), tensor.nbytes, zero.data_ptr(), zero.nbytes, DEVICE_TO_DEVICE, stream) == 0

    def clear(self) -> None:
        self.simulator.mc2_sim_clear_faults()

    def wait_live(self, name: str, wanted: int) -> int:
        """What it counts, once that is ``wanted``."""
        wait_until(lambda: self.live()[name] == wanted, f"{name}: {wanted}", timeout_seconds=60)
        return self.live()[name]

    def close(self) -> dict[str, int]:
        """As the engine core stops; what is left then."""
        self.engine.close()
        return self.live()

    def forget(self) -> int:
        """Give the closed engine's memory back to the device; physical allocations that are left."""
        del self.engine
        gc.collect()
        torch.npu.empty_cache()
        return self.live()["physical"]


def main(argv: list[str]) -> None:
    server = told.serve(int(argv[0]), lambda: Server(argv[1], argv[2], argv[3], argv[4], int(argv[5])))
    if hasattr(server, "engine"):
        server.engine.close()


if __name__ == "__main__":
    main(sys.argv[1:])
