"""One rank's KV memory on a simulated NPU, as a worker has it, without an engine: for hand-overs between other numbers of ranks.

    python -m tests.ascend.rank_side SOCKET ROLE NPU RANK SIZE KIND

Talks as :mod:`tests.ascend.engine` does.
"""

import sys
from types import SimpleNamespace
from typing import Any

import msgspec
import torch
import torch_npu  # noqa: F401
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

from tests.ascend import told
from tests.ascend.shapes import dense
from vllm_mc2.config import MC2Config
from vllm_mc2.connector.metadata import MapPeer
from vllm_mc2.connector.npu_memory import NpuMemory
from vllm_mc2.connector.npu_source import NpuSource
from vllm_mc2.device_messages import DeviceGrant, DeviceHello
from vllm_mc2.protocol import PROTOCOL_VERSION, WorkerHello
from vllm_mc2.session import Answer

TOKENS, DIM, HEADS, NUM_BLOCKS = 8, 16, 4, 32
PARTS = ("k", "v")


def block_of(part: int, block: int, first_head: int, num_heads: int) -> torch.Tensor:
    """``[tokens, heads, dim]`` of a block: every element of all ranks is another one."""
    token, head, place = torch.meshgrid(
        torch.arange(TOKENS), torch.arange(first_head, first_head + num_heads), torch.arange(DIM), indexing="ij"
    )
    return (((part * NUM_BLOCKS + block) * TOKENS + token) * HEADS + head) * DIM + place


class OpenSession:
    """Of a peer that lives."""

    def is_gone(self) -> bool:
        return False

    def descriptors(self) -> list[int]:
        return []

    def close(self) -> None:
        pass


class RankSide:
    def __init__(self, role: str, npu: int, rank: int, size: int, kind: str) -> None:
        torch.npu.set_device(npu)
        self.rank, self.size = rank, size
        self.heads = 1 if kind == "latent" else HEADS // size
        self.first_head = 0 if kind == "latent" else rank * self.heads
        spec_type: Any = MLAAttentionSpec if kind == "latent" else FullAttentionSpec
        spec = spec_type(block_size=TOKENS, num_kv_heads=self.heads, head_size=DIM, dtype=torch.float32)
        config: Any = SimpleNamespace(num_blocks=NUM_BLOCKS, kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)])
        engine: Any = SimpleNamespace(additional_config={}, parallel_config=SimpleNamespace(), kv_transfer_config=None)
        self.is_producer = role == "prefill"
        self.memory = NpuMemory(
            engine, config, MC2Config(), is_producer=self.is_producer,
            forget=lambda key, source: source.close(),
        )  # fmt: skip
        shape = (NUM_BLOCKS, TOKENS, self.heads, DIM)
        self.tensors = [dense(shape, torch.float32, f"npu:{npu}") for _ in PARTS]
        if self.is_producer:
            for part, tensor in enumerate(self.tensors):
                rows = [block_of(part, block, self.first_head, self.heads) for block in range(NUM_BLOCKS)]
                tensor.copy_(torch.stack(rows).float())
        torch.npu.synchronize()
        self.memory.register({"layer.0": tuple(self.tensors)})
        self.source: NpuSource | None = None

    def pid(self) -> int:
        return self.memory.device_hello().pid

    def grant(self, pid: int) -> bytes:
        answer: Answer = self.memory.grant(WorkerHello(PROTOCOL_VERSION, self.rank, "pull", {}, DeviceHello(pid)))
        return msgspec.msgpack.encode(answer.message)

    def wanted_ranks(self, peer_size: int) -> list[int]:
        return [part.peer_rank for part in self.memory.slices(self.rank, self.size, peer_size)]

    def pull(self, grants: dict[str, bytes], peer_size: int, own_ids: list[int], peer_ids: list[int]) -> int:
        """How many elements are not what they must be; the blocks that were not named included."""

        def ask(rank: int, expected: Any, num_fds: int) -> Any:
            return msgspec.msgpack.decode(grants[str(rank)], type=DeviceGrant), [], OpenSession()

        parts = self.memory.slices(self.rank, self.size, peer_size)
        source = self.memory.open_source(MapPeer("0" * 32, 0, None, ()), parts, ask)
        source.copy(own_ids, peer_ids)
        source.close()
        wrong = 0
        for part, tensor in enumerate(self.tensors):
            wanted = torch.zeros(tensor.shape)
            for own, peer in zip(own_ids, peer_ids, strict=True):
                wanted[own] = block_of(part, peer, self.first_head, self.heads)
            wrong += int((tensor.cpu() != wanted).sum())
        return wrong


def main(argv: list[str]) -> None:
    side = told.serve(int(argv[0]), lambda: RankSide(argv[1], *(int(each) for each in argv[2:5]), argv[5]))
    if side is not None:
        side.memory.close()


if __name__ == "__main__":
    main(sys.argv[1:])
