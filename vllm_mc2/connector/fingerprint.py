"""Whatever changes the bytes of a block, by name: what two engines compare before one uses the other's blocks."""

import logging
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig

from vllm_mc2.connector import compat
from vllm_mc2.protocol import PROTOCOL_VERSION, Refusal, WorkerHello, first_difference

logger = logging.getLogger("vllm.mc2.fingerprint")


def fingerprint(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, model_identity: str | None) -> dict[str, str]:
    """Of one worker. Peers compare it field by field."""
    import vllm

    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    specs: list[Any] = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]

    def of_groups(name: str) -> str:
        return "|".join(str(getattr(spec, name, None)) for spec in specs)

    return {
        "vllm": vllm.__version__,
        "model": model_identity or f"{model.model}@{model.revision or 'default'}",
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "kv_cache_dtype": str(cache.cache_dtype),
        "kv_cache_groups": "|".join(compat.group_kinds(kv_cache_config)),
        "block_size": of_groups("block_size"),
        "num_kv_heads": of_groups("num_kv_heads"),
        "head_size": of_groups("head_size"),
        "sliding_window": of_groups("sliding_window"),
        "block_bytes": of_groups("page_size_bytes"),
        "head_bytes": "|".join(
            str(spec.page_size_bytes // (getattr(spec, "num_kv_heads", None) or 1)) for spec in specs
        ),
        "layers": "|".join(",".join(group.layer_names) for group in kv_cache_config.kv_cache_groups),
        "kv_cache_layout": str(getattr(kv_cache_config, "kv_cache_layout", None)),
        "attention": compat.attention_identity(vllm_config, kv_cache_config),
        "tensor_parallel_size": str(parallel.tensor_parallel_size),
        "kv_heads_of_all_ranks": str(model.get_total_num_kv_heads()),
        "speculative_config": str(vllm_config.speculative_config is not None),
    }


OF_A_RANK = ("rank", "tensor_parallel_size", "num_kv_heads", "block_bytes")
"""What of a fingerprint depends on the number of ranks."""


def refusal(own: dict[str, str], rank: int, hello: WorkerHello) -> Refusal | None:
    """Names the field in which a decode's worker differs from our worker ``rank``, of which ``own`` is; None if they fit."""
    mine = {**own, "protocol": str(PROTOCOL_VERSION), "rank": str(rank)}
    theirs = {**hello.fingerprint, "protocol": str(hello.protocol), "rank": str(hello.rank)}
    if hello.way == "pull":
        # Who copies slices may have another number of ranks; what a head's bytes are is compared all the same.
        is_same_size = mine.get("tensor_parallel_size") == theirs.get("tensor_parallel_size")
        for name in OF_A_RANK if is_same_size else (*OF_A_RANK, "cache_blocks"):
            mine.pop(name, None)
            theirs.pop(name, None)
    different = first_difference(mine, theirs)
    if different is None:
        return None
    field, here, there = different
    logger.warning("refused a decode: %s differs (here %r, there %r)", field, here, there)
    return Refusal(field[:4096], there[:4096], here[:4096])
