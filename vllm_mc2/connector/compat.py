"""Everything of vLLM that is not a documented connector hook, in one place.

Each function says what it relies on. :func:`check_contract` looks for all of it at start; whatever is missing turns
attach off with one clear log line, and requests are computed where they land. Tried with vLLM 0.32.0 (CPU build).
"""

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.core import block_pool
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock, make_block_hash_with_group_id
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheTensor

from vllm_mc2.digest import PromptExtras, prompt_digest
from vllm_mc2.errors import LayoutError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

try:  # 0.32; only a label in vLLM's own prefix-cache metrics
    from vllm.distributed.kv_transfer.kv_connector.v1.base import CacheHitSource

    CACHE_HIT_SOURCE: Any = CacheHitSource.P2P
except (ImportError, AttributeError):
    CACHE_HIT_SOURCE = None

try:  # 0.30
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

    TransferResults: Any = KVConnectorTransferResults
except ImportError:
    TransferResults = None


_BLOCK_FIELDS = ("block_id", "ref_cnt", "_block_hash", "_block_hash_num_tokens")


def check_allocation() -> list[str]:
    """What giving vLLM our memory for its KV cache needs and does not find, by name; empty when all is there (0.31)."""
    missing = []
    if not hasattr(KVConnectorBase_V1, "get_mem_pool_context"):
        missing.append("KVConnectorBase_V1.get_mem_pool_context")
    if not {"size", "layers", "layer_stride", "block_stride", "offset"} <= {f.name for f in fields(KVCacheTensor)}:
        missing.append("KVCacheTensor.{size,layers,layer_stride,block_stride,offset}")
    return missing


def check_contract() -> list[str]:
    """What attach needs of vLLM's inside and does not find, by name; empty when all is there."""
    missing = check_allocation()
    for hook in ("bind_kv_cache_manager", "get_transfer_results", "get_handshake_metadata"):
        if not hasattr(KVConnectorBase_V1, hook):
            missing.append(f"KVConnectorBase_V1.{hook}")
    cache_map = getattr(block_pool, "BlockHashToBlockMap", None)
    expected: tuple[tuple[Any, str, str, tuple[str, ...]], ...] = (
        (BlockPool, "BlockPool.", "_remove_cached_block_hashes", ("block",)),
        (BlockPool, "BlockPool.", "touch", ("blocks",)),
        (BlockPool, "BlockPool.", "free_blocks", ("ordered_blocks",)),
        (cache_map, "", "get_one_block", ("key",)),
        (cache_map, "", "insert", ("key", "block")),
        (KVCacheBlock, "", "set_block_hash", ("block_hash", "num_tokens")),
    )
    for owner, prefix, name, parameters in expected:
        method = getattr(owner, name, None)
        if method is None or tuple(inspect.signature(method).parameters)[1:] != parameters:
            missing.append(f"{prefix}{name}{parameters}")
    if tuple(inspect.signature(KVCacheBlock).parameters)[:4] != _BLOCK_FIELDS:
        missing.append(f"KVCacheBlock{_BLOCK_FIELDS}")
    code = getattr(BlockPool.__init__, "__code__", None)
    if code is None or "cached_block_hash_to_block" not in code.co_names:
        missing.append("BlockPool.cached_block_hash_to_block")
    sample: Any = bytes(range(32))
    if make_block_hash_with_group_id(sample, 0) != sample + PrefixCache.key_suffix:
        missing.append("make_block_hash_with_group_id")
    if "pool" not in {field.name for field in fields(KVCacheBlock)}:
        missing.append("KVCacheBlock.pool")
    return missing


COPIED_KINDS = ("FullAttentionSpec", "SlidingWindowSpec")
"""Kinds of KV cache whose blocks mean the same wherever they lie. Not MLA: vLLM 0.32's CPU kernels for it answer otherwise when a
prompt's last token is computed alone (without us, too), so that nobody could tell whether an answer is right."""
NPU_KINDS = (
    *COPIED_KINDS,
    "MLAAttentionSpec",
    "AscendMLAAttentionSpec",
    "SlidingWindowMLASpec",
    "AscendSlidingWindowMLASpec",
)
"""Those that vllm-ascend may have: its kernels for MLA have no such trouble as far as is known, and were never run here."""
ATTACHED_KINDS = ("FullAttentionSpec",)
"""Those of which a prefix-cache hit is a run of blocks from the first on."""


def unsupported_engine(vllm_config: "VllmConfig", kv_cache_config: KVCacheConfig) -> str | None:
    """Why this engine's KV cache cannot be handed over at all, or None. Same answer in the scheduler and in the workers."""
    parallel = vllm_config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        return f"pipeline_parallel_size {parallel.pipeline_parallel_size}: only 1 is supported"
    if getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        return f"prefill_context_parallel_size {parallel.prefill_context_parallel_size}: only 1 is supported"
    if getattr(parallel, "decode_context_parallel_size", 1) > 1:
        return f"decode_context_parallel_size {parallel.decode_context_parallel_size}: only 1 is supported"
    if not kv_cache_config.kv_cache_groups:
        return "a model without KV cache"
    device = vllm_config.device_config.device_type
    if device not in {"cpu", "npu"}:
        return f"device {device!r}: only host memory ('cpu') and Ascend NPUs ('npu') are supported"
    supported = NPU_KINDS if device == "npu" else COPIED_KINDS
    for kind in npu_kinds(kv_cache_config) if device == "npu" else group_kinds(kv_cache_config):
        if kind not in supported:
            return f"KV cache of kind {kind}: only {', '.join(supported)} are supported"
    sizes = sorted({group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups})
    if len(sizes) != 1:
        return f"KV cache groups with blocks of {sizes} tokens: only one size is supported"
    if vllm_config.speculative_config is not None:
        return "speculative decoding is not supported"
    return None if device == "npu" or check_allocation() else _unsupported_tensors(kv_cache_config)


def group_kinds(kv_cache_config: KVCacheConfig) -> list[str]:
    """The kind of each cache group, by its class's name, which is what differs between versions least."""
    return [type(group.kv_cache_spec).__name__ for group in kv_cache_config.kv_cache_groups]


def npu_kinds(kv_cache_config: KVCacheConfig) -> list[str]:
    """The kinds of the layers, also of a group whose layers have blocks of different size (as only some have an indexer). Not
    with sliding windows: of which length, the scheduler would not know.
    """
    kinds = []
    groups: list[Any] = kv_cache_config.kv_cache_groups
    for spec in (group.kv_cache_spec for group in groups):
        inside = sorted({type(each).__name__ for each in getattr(spec, "kv_cache_specs", {}).values()})
        is_mixed = not inside or any("SlidingWindow" in kind for kind in inside)
        kinds += [type(spec).__name__] if is_mixed else inside
    return kinds


def windows_of(kv_cache_config: KVCacheConfig) -> tuple[int | None, ...]:
    """For each cache group, how many tokens its blocks are kept for; None when for all."""
    groups: list[Any] = kv_cache_config.kv_cache_groups
    return tuple(
        group.kv_cache_spec.sliding_window if "SlidingWindow" in type(group.kv_cache_spec).__name__ else None
        for group in groups
    )


def why_not_in_place(kv_cache_config: KVCacheConfig) -> str | None:
    """Why blocks of this engine's KV cache can be copied but not used in place, or None."""
    kinds = group_kinds(kv_cache_config)
    if len(kinds) != 1:
        return f"{len(kinds)} KV cache groups ({', '.join(kinds)}): in place is for one group of full attention"
    if kinds[0] not in ATTACHED_KINDS:
        return f"KV cache of kind {kinds[0]}: in place is for full attention"
    size = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
    hashed = getattr(kv_cache_config, "hash_block_size", None)
    if hashed not in (None, size):
        return f"prefix hashes of {hashed} tokens on blocks of {size}"
    return None


def _unsupported_tensors(kv_cache_config: KVCacheConfig) -> str | None:
    """Why the tensors cannot be laid out anew, or None."""
    overlays = _overlays(kv_cache_config)
    for overlay in overlays:
        if len({(tensor.layer_stride, tensor.block_stride) for tensor in overlay}) != 1:
            return "KV cache groups that lie over each other with different strides"
        if len(overlays) > 1 and not _is_layer_major(overlay[0]):
            return f"{len(overlays)} kinds of layers in one block: only layer-major caches may have several"
    return None


def _overlays(kv_cache_config: KVCacheConfig) -> list[list[KVCacheTensor]]:
    """The tensors by where they begin, the one with the most layers first: cache groups lie over each other, since a block
    belongs to one group at a time.
    """
    places: dict[int, list[KVCacheTensor]] = {}
    for tensor in kv_cache_config.kv_cache_tensors:
        places.setdefault(tensor.offset, []).append(tensor)
    return [sorted(places[offset], key=lambda tensor: -len(tensor.layers)) for offset in sorted(places)]


# --- worker: the address plan -----------------------------------------------------------------------------------------


def region_sizes(kv_cache_config: KVCacheConfig) -> list[tuple[str, int]]:
    """``(first layer, block bytes)`` of each region, in the order in which :func:`apply_plan` lays them out.

    Relies on ``KVCacheTensor``: layer ``l`` of block ``b`` is at ``offset + l * layer_stride + b * block_stride``.
    """
    sizes = []
    for tensor, *_ in _overlays(kv_cache_config):
        sizes += [(name, tensor.block_stride) for name in _first_layers(tensor)]
    return sizes


def layers_of_regions(kv_cache_config: KVCacheConfig) -> list[list[str]]:
    """For each region of :func:`region_sizes`, the layers that begin where it does: one of each cache group."""
    return [
        [name for name in names if name is not None]
        for overlay in _overlays(kv_cache_config)
        for names in itertools.zip_longest(*map(_first_layers, overlay))
    ]


def _first_layers(tensor: KVCacheTensor) -> list[str]:
    """The layers with which a region begins: each, or, where a block holds all layers, the first."""
    layers: list[str] = tensor.layers if _is_layer_major(tensor) else tensor.layers[:1]
    return layers


def _is_layer_major(tensor: KVCacheTensor) -> bool:
    return len(tensor.layers) == 1 or tensor.layer_stride >= tensor.block_stride


def apply_plan(kv_cache_config: KVCacheConfig, num_total: int, offsets: Sequence[int], range_bytes: int) -> None:
    """Tell vLLM's allocation, which follows with this very object, where blocks lie. The scheduler has its own copy.

    ``offsets`` are those of the regions of :func:`region_sizes`, equally spaced within one tensor.
    """
    cursor = 0
    for overlay in _overlays(kv_cache_config):
        num_regions = len(_first_layers(overlay[0]))
        for tensor in overlay:
            tensor.offset = offsets[cursor]
            if num_regions > 1:
                tensor.layer_stride = offsets[cursor + 1] - offsets[cursor]
            tensor.size = range_bytes
        cursor += num_regions
    kv_cache_config.num_blocks = num_total


class AllocateFrom(torch.overrides.TorchFunctionMode):
    """While entered, answers vLLM's one allocation of the KV cache (``torch.zeros`` of int8, 0.31+) from our memory.

    ``num_used`` tells afterwards whether vLLM asked exactly once.
    """

    def __init__(self, num_bytes: int, make_tensor: Callable[[], torch.Tensor]) -> None:
        super().__init__()
        self._num_bytes = num_bytes
        self._make_tensor = make_tensor
        self.num_used = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Intercept the call that matches by size and type; pass every other through."""
        kwargs = kwargs or {}
        if func is torch.zeros and kwargs.get("dtype") == torch.int8 and args == (self._num_bytes,):
            self.num_used += 1
            return self._make_tensor()
        return func(*args, **kwargs)


def tensor_sizes(kv_caches: Mapping[str, torch.Tensor]) -> tuple[list[tuple[str, int]], int]:
    """``([(layer, block bytes)], blocks)`` of caches that vLLM has allocated by itself, one dense tensor ``[B, ...]`` for each.

    Raises:
        LayoutError: they are something else.
    """
    sizes = []
    counts = set()
    for name, tensor in kv_caches.items():
        if not isinstance(tensor, torch.Tensor) or not tensor.is_contiguous() or tensor.dim() < 2:
            raise LayoutError(f"the KV cache of layer {name} is not one dense tensor of blocks")
        sizes.append((name, tensor.stride(0) * tensor.element_size()))
        counts.add(tensor.shape[0])
    if len(counts) != 1 or len({tensor.data_ptr() for tensor in kv_caches.values()}) != len(sizes):
        raise LayoutError(f"KV caches of {sorted(counts)} blocks, or that lie over each other")
    return sizes, counts.pop()


def move_tensors(kv_caches: Mapping[str, torch.Tensor], memory: torch.Tensor, offsets: Sequence[int]) -> None:
    """Let vLLM's own tensors lie in ``memory`` (bytes) from now on. Every holder of the same tensor object sees it, and vLLM's
    memory is free again when the last view of it is gone. They are zero before the first request, as ``memory`` is.
    """
    storage = memory.untyped_storage()
    for tensor, offset in zip(kv_caches.values(), offsets, strict=True):
        first = (memory.storage_offset() + offset) // tensor.element_size()
        tensor.set_(storage, first, tensor.shape, tensor.stride())


def attention_identity(vllm_config: "VllmConfig", kv_cache_config: KVCacheConfig) -> str:
    """What decides the layout inside a block: the attention backend and, on CPU, the instruction set it packs keys for.

    Relies on ``cpu_attn._get_attn_isa`` (0.32); without it, on torch's name for the CPU's capability.
    """
    spec: Any = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    if vllm_config.device_config.device_type == "npu":
        return "vllm-ascend"  # of which version, the NPU's own facts say
    try:
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        isa = _get_attn_isa(
            vllm_config.model_config.dtype, spec.block_size, spec.head_size, vllm_config.cache_config.cache_dtype
        )
    except (ImportError, TypeError):
        isa = "unknown"
    return f"CPU_ATTN/{isa}/{torch.backends.cpu.get_cpu_capability()}"


def tensor_parallel_rank() -> int:
    """This worker's rank among those that share one KV cache."""
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

    rank: int = get_tensor_model_parallel_rank()
    return rank


def data_parallel_rank(vllm_config: "VllmConfig") -> int:
    """This engine's rank among those that serve the same model, also where vLLM runs them as separate ones."""
    parallel = vllm_config.parallel_config
    rank: int = getattr(parallel, "data_parallel_index", parallel.data_parallel_rank)
    return rank


# --- scheduler: blocks and requests -----------------------------------------------------------------------------------


class LentBlock(KVCacheBlock):
    """A peer's block as vLLM's own kind of block: ``LentBlock(block_id, ref_cnt, key, num_tokens, pool=...)``.

    It is a hit for ``key`` from the start (private fields of ``KVCacheBlock``, by position), once it is in the map. vLLM hands
    it back to ``pool.free_blocks`` (0.30). One object with room for who keeps it, made in one call: a request brings
    thousands of them into the scheduler's step.
    """

    __slots__ = ("lingering", "owners")
    owners: tuple[Any, ...]
    """Who wants it to be a hit."""
    lingering: tuple[Any, ...]
    """Who has ended, and waits for its last reader."""


_NO_HASH: Any = b""


class PrefixCache:
    """vLLM's prefix cache as it is now: not to be kept, since ``reset_prefix_cache`` replaces the map.

    A key is a block hash with :attr:`key_suffix`; ``find(key)`` is its block, or None; ``insert(key, block)`` makes a block that
    has this hash a hit. ``BlockPool.get_cached_block`` and ``_insert_block_hash`` do the same with checks that are made here
    already: most of what attaching a block would cost.
    """

    __slots__ = ("_pool", "find", "insert")
    key_suffix: Any = make_block_hash_with_group_id(_NO_HASH, 0)
    """What makes a block hash a key of group 0; calling vLLM's function for each costs ten times as much."""

    def __init__(self, pool: BlockPool) -> None:
        blocks = pool.cached_block_hash_to_block
        self.find: Callable[[Any], KVCacheBlock | None] = blocks.get_one_block
        self.insert: Callable[[Any, KVCacheBlock], None] = blocks.insert
        self._pool = pool

    def enter(self, block: KVCacheBlock, key: Any, num_tokens: int) -> bool:
        """Make a block a hit for ``key`` again, which nothing is a hit for; False when it stands for another prefix."""
        if block.block_hash is not None:
            if block.block_hash != key:
                return False
            # After reset_prefix_cache the block keeps its hash while the new map does not know it.
            self._pool._remove_cached_block_hashes(block)
        block.set_block_hash(key, num_tokens=num_tokens)
        self.insert(key, block)
        return True


def cached_block_id(pool: BlockPool, request: "Request", index: int, group: int) -> int:
    """The request's block at ``index`` by its hash, after vLLM has taken it out of the request's table; 0 without one."""
    if index >= len(request.block_hashes):
        return 0
    found = pool.get_cached_block(request.block_hashes[index], [group])
    return found[0].block_id if found else 0


def leave_prefix_cache(pool: BlockPool, block: KVCacheBlock) -> None:
    """Take ``block`` out of the prefix cache; also right after ``reset_prefix_cache``, which replaces the map."""
    pool._remove_cached_block_hashes(block)


def transfer_params(request: "Request") -> dict[str, Any]:
    """The request's ``kv_transfer_params``; empty when there are none.

    Through ``vllm_xargs`` a client can put any JSON value there, and vLLM's scheduler (0.32) ends on one that is no object,
    right after the hook ``on_new_request``: so a malformed value is taken out of the request.
    """
    params = request.kv_transfer_params
    if isinstance(params, dict):
        return params
    request.kv_transfer_params = None
    return {}


def request_digest(request: "Request", token: bytes, num_tokens: int) -> bytes | None:
    """The prompt digest over the request's first ``num_tokens`` tokens; None when what determines their KV cannot be told."""
    if request.prompt_token_ids is None or request.prompt_embeds is not None:
        return None
    media = []
    for feature in request.mm_features:
        position = feature.mm_position
        if position.offset < num_tokens:
            media.append((str(feature.identifier), int(position.offset), int(position.length)))
    lora = request.lora_request
    extras = PromptExtras(lora.lora_name if lora is not None else None, request.cache_salt, tuple(media))
    try:
        return prompt_digest(token, request.prompt_token_ids[:num_tokens], extras)
    except OverflowError:
        return None  # a token id that no vocabulary has
