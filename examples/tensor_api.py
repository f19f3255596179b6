"""Hand a KV cache from one process to another, and run attention over it where it is. Needs no vLLM, only torch.

    .venv/bin/python -m examples.tensor_api        (or: .venv/bin/python examples/tensor_api.py)

The program is decode. It starts itself once more as prefill, which computes the keys and values of a prompt, layer by layer,
and hands them over twice: paged, in blocks of 16 tokens that lie scattered in a pool, and contiguous. Decode computes the
attention of its next token over prefill's memory, in two ways, and compares with attention over keys and values that it
computes itself from the same seed. At the end prefill is killed with one request under way. Exit status 0: all were equal.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from vllm_mc2 import KVCacheManager, KVCacheMapper, MC2Communicator
from vllm_mc2.errors import OrphanedKVError
from vllm_mc2.tensors import MappedKV

SEED, LAYERS, HIDDEN = 20240607, 4, 256
HEADS, KV_HEADS, HEAD_SIZE = 8, 2, 32  # grouped-query attention: four query heads share a key/value head
TOKENS, BLOCK_SIZE, POOL_BLOCKS = 1000, 16, 256
TOLERANCE = 1e-5  # float32 rounding: the ways below add up in different orders
TITLES = (
    "cache",
    "KV bytes in place",
    "metadata bytes",
    "send us",
    "receive and map us",
    "attention",
    "max difference",
)
ROW = "{:11} {:>17} {:>15} {:>8} {:>19}  {:20} {:>14}"


class Layer(NamedTuple):
    """The projections of one attention layer."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    output: torch.Tensor


def make_model() -> tuple[list[Layer], torch.Tensor, torch.Tensor]:
    """Layers with random weights, a prompt, and the token that comes after it; the same on both sides."""
    generator = torch.Generator().manual_seed(SEED)
    width, kv_width = HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE
    shapes = ((HIDDEN, width), (HIDDEN, kv_width), (HIDDEN, kv_width), (width, HIDDEN))
    layers = [
        Layer(*(torch.randn(shape, generator=generator) / shape[0] ** 0.5 for shape in shapes)) for _ in range(LAYERS)
    ]
    return layers, torch.randn(TOKENS, HIDDEN, generator=generator), torch.randn(1, HIDDEN, generator=generator)


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, causal: bool = False) -> torch.Tensor:
    """As torch computes it; all are ``[tokens, heads, head size]``."""
    query, key, value = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    return scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=True)[0].transpose(0, 1)


def attention_over_blocks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, blocks: Sequence[int]
) -> torch.Tensor:
    """One query over a paged cache, a block at a time and where it lies: nothing is gathered (online softmax)."""
    grouped = query.view(KV_HEADS, HEADS // KV_HEADS, HEAD_SIZE) * HEAD_SIZE**-0.5
    peak = torch.full((KV_HEADS, HEADS // KV_HEADS, 1), -torch.inf)
    total, output = torch.zeros_like(peak), torch.zeros_like(grouped)
    for number, block in enumerate(blocks):
        filled = min(BLOCK_SIZE, TOKENS - number * BLOCK_SIZE)  # the last block is not full
        scores = grouped @ key[block, :filled].permute(1, 2, 0)
        new_peak = torch.maximum(peak, scores.amax(-1, keepdim=True))
        weights, fade = (scores - new_peak).exp(), (peak - new_peak).exp()
        total = total * fade + weights.sum(-1, keepdim=True)
        output = output * fade + weights @ value[block, :filled].transpose(0, 1)
        peak = new_peak
    return (output / total).view(1, HEADS, HEAD_SIZE)


def compute_cache() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What prefill is for: each layer's keys and values of the prompt, ``[tokens, KV heads, head size]``."""
    layers, hidden, _ = make_model()
    cache = []
    for layer in layers:
        query = (hidden @ layer.query).view(TOKENS, HEADS, HEAD_SIZE)
        key, value = ((hidden @ weight).view(TOKENS, KV_HEADS, HEAD_SIZE) for weight in (layer.key, layer.value))
        cache.append((key, value))
        hidden = hidden + attention(query, key, value, causal=True).reshape(TOKENS, -1) @ layer.output
    return cache


def prefill(port: int, socket_dir: str) -> None:
    """Compute, hand over, and wait to be killed. Says on standard output what each hand-over took."""
    # Any blocks of the pool in any order, as an engine's allocator gives them.
    order = torch.randperm(POOL_BLOCKS, generator=torch.Generator().manual_seed(1))
    blocks = order[: -(-TOKENS // BLOCK_SIZE)].to(torch.int32)
    with MC2Communicator(0, "cpu", peer_addr="127.0.0.1", peer_port=port, socket_dir=socket_dir) as mc2:
        paged, whole = KVCacheManager(mc2), KVCacheManager()
        for layer, tensors in enumerate(compute_cache()):
            pools: Any = paged.allocate(layer, (POOL_BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD_SIZE), torch.float32)
            copies: Any = whole.allocate(layer, (TOKENS, KV_HEADS, HEAD_SIZE), torch.float32)
            for tensor, pool, copy in zip(tensors, pools, copies, strict=True):
                copy.copy_(tensor)
                for block, part in zip(blocks.tolist(), tensor.split(BLOCK_SIZE), strict=True):
                    pool[block, : len(part)] = part
        for name, what in (("paged", blocks), ("contiguous", whole.layers)):
            mc2.send_kv_metadata(f"{name}, first", what)  # tells decode of memory and tensors, which is done once
            begin = time.perf_counter()
            sent = mc2.send_kv_metadata(name, what, num_tokens=TOKENS)
            print(json.dumps([sent.num_bytes, (time.perf_counter() - begin) * 1e6]), flush=True)
        mc2.send_kv_metadata("late", blocks, num_tokens=TOKENS)
        print(flush=True)
        time.sleep(600)


class Reference:
    """The attention of the next token in each layer, over keys and values that are computed here."""

    def __init__(self) -> None:
        layers, _, token = make_model()
        self.queries = [(token @ layer.query).view(1, HEADS, HEAD_SIZE) for layer in layers]
        self.outputs = [attention(query, *kv) for query, kv in zip(self.queries, compute_cache(), strict=True)]

    def difference(self, outputs: Iterable[torch.Tensor]) -> float:
        """The largest, over all layers."""
        return max(float((mine - other).abs().max()) for mine, other in zip(self.outputs, outputs, strict=True))

    def compare(self, kv: MappedKV) -> dict[str, float]:
        """How far attention over prefill's memory is from it, by the way in which it is computed."""
        layers: list[Any] = [kv.layers[layer] for layer in range(LAYERS)]
        pairs = list(zip(self.queries, layers, strict=True))
        if not kv.is_paged:
            return {"torch's, in place": self.difference(attention(query, *layer) for query, layer in pairs)}
        blocks, ids = kv.block_table.tolist(), kv.block_ids
        in_place = (attention_over_blocks(query, key, value, blocks) for query, (key, value) in pairs)
        gathered = (attention(query, *(part[ids].flatten(0, 1)[:TOKENS] for part in layer)) for query, layer in pairs)
        return {"by block, in place": self.difference(in_place), "torch's, gathered": self.difference(gathered)}


def decode(mc2: MC2Communicator, child: "subprocess.Popen[str]") -> bool:
    """Whether everything was equal. Kills prefill on the way."""
    reference, mapper = Reference(), KVCacheMapper(mc2)
    mc2.accept(timeout_seconds=120)
    assert child.stdout is not None
    reports, kept, differences = [child.stdout.readline() for _ in range(3)][:2], [], []
    print(ROW.format(*TITLES))
    for num_bytes, send_us in map(json.loads, reports):
        mapper.map_remote_kv(
            mc2.recv_kv_metadata(timeout=30)
        ).release()  # the first one: its memory is mapped on the way
        begin = time.perf_counter()
        kv = mapper.map_remote_kv(mc2.recv_kv_metadata(timeout=30))
        map_us = (time.perf_counter() - begin) * 1e6
        kept.append(kv)
        for way, difference in reference.compare(kv).items():
            differences.append(difference)
            times = f"{send_us:.1f}", f"{map_us:.1f}"
            print(ROW.format(kv.request_id, f"{kv.num_bytes:,}", num_bytes, *times, way, f"{difference:.1e}"))
    child.kill()
    child.wait()
    for kv in kept:
        with kv:
            differences += reference.compare(kv).values()
    print(f"\nprefill was killed; what was mapped is still there, max difference {max(differences):.1e}")
    try:
        mapper.map_remote_kv(mc2.recv_kv_metadata(timeout=30))
    except OrphanedKVError as error:
        print(f"request {error.request_id!r} was not mapped: decode computes that prompt itself")
        return max(*differences, reference.difference(Reference().outputs)) <= TOLERANCE
    return False


def main() -> int:
    """Prefill when decode has started us with its port, else decode."""
    if len(sys.argv) == 3:
        prefill(int(sys.argv[1]), sys.argv[2])
        return 0
    with (
        tempfile.TemporaryDirectory(prefix="mc2-") as socket_dir,
        MC2Communicator(0, "cpu", listen_addr="127.0.0.1", listen_port=0, socket_dir=socket_dir) as mc2,
    ):
        command = [sys.executable, __file__, str(mc2.listen_port), socket_dir]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            try:
                equal = decode(mc2, child)
            finally:
                child.kill()
    print("equal" if equal else "NOT EQUAL")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
