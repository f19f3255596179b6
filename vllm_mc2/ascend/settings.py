"""What users of vllm-ascend's own connectors have in their configuration, and what of it changes the bytes of a block.

Their ``kv_connector_extra_config`` goes on working when ``kv_connector`` alone is changed. Nothing of it is needed here:
peers tell each other their sizes when they meet. So the sizes are only checked against the truth, and the rest is ignored.
``kv_port`` and ``engine_id`` of ``--kv-transfer-config`` are fields of vLLM's own.
"""

import importlib.metadata
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from vllm_mc2.config import wrong_value
from vllm_mc2.errors import ConfigError

MAX_SIZE = 65536
_SIZE = f"a whole number from 1 to {MAX_SIZE}"
Size = Annotated[int, Meta(ge=1, le=MAX_SIZE)]


class Sizes(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How one side is split, as announced; None is not said."""

    tp_size: Size | None = None
    """Tensor parallel."""
    dp_size: Size | None = None
    """Data parallel."""
    pp_size: Size | None = None
    """Pipeline parallel."""
    pp_layer_partition: Annotated[str, Meta(pattern=r"^[0-9]+(,[0-9]+)*\Z")] | None = None
    """Layers of each pipeline rank, such as ``30,31``."""


class AscendSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Keys that are accepted for the sake of configurations written for vllm-ascend 0.23."""

    prefill: Sizes | None = None
    """Of every prefill. Ours, when this engine is one, must be true."""
    decode: Sizes | None = None
    """Of every decode."""
    use_ascend_direct: bool | None = None
    """Of Mooncake: ignored."""
    ascend_local_comm_res_path: str | None = None
    """Read by vllm-ascend itself, whatever the connector is."""
    engine_id: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    """Ignored: ``engine_id`` of ``--kv-transfer-config`` is the one that counts."""
    mooncake_rpc_port: Annotated[int, Meta(ge=0, le=65535)] | Annotated[str, Meta(pattern=r"^[0-9]{1,5}\Z")] | None = (
        None
    )
    """Of the pool connectors: ignored."""


_ALLOWED = {
    "prefill": "an object with any of tp_size, dp_size, pp_size, pp_layer_partition",
    "decode": "an object with any of tp_size, dp_size, pp_size, pp_layer_partition",
    "tp_size": _SIZE,
    "dp_size": _SIZE,
    "pp_size": _SIZE,
    "pp_layer_partition": "numbers of layers with commas between them",
    "use_ascend_direct": "true or false",
    "ascend_local_comm_res_path": "a text",
    "engine_id": "a text of 1 to 256 characters",
    "mooncake_rpc_port": "a port from 0 to 65535",
}


def parse_foreign(extra: Mapping[str, object]) -> tuple[dict[str, object], AscendSettings]:
    """Splits ``kv_connector_extra_config``: what is left for :func:`vllm_mc2.config.parse_config`, and what is vllm-ascend's.

    Raises:
        ConfigError: a key of vllm-ascend's has a wrong value; the message names the key, the value and what is allowed.
    """
    foreign = {field.encode_name for field in msgspec.structs.fields(AscendSettings)}
    ours = {key: value for key, value in extra.items() if key not in foreign}
    theirs = {key: value for key, value in extra.items() if key in foreign and value is not None}
    for key, value in theirs.items():
        if key in {"prefill", "decode"}:
            _check_sizes_of(key, value)
        try:
            msgspec.convert({key: value}, AscendSettings, strict=True)
        except (msgspec.ValidationError, UnicodeError):  # half of a surrogate pair
            raise ConfigError(wrong_value(key, value, _ALLOWED[key])) from None
    return ours, msgspec.convert(theirs, AscendSettings, strict=True)


def _check_sizes_of(side: str, sizes: object) -> None:
    """Refuses what is wrong inside ``prefill`` or ``decode`` by its own name."""
    if not isinstance(sizes, Mapping):
        raise ConfigError(wrong_value(side, sizes, _ALLOWED[side]))
    known = [field.encode_name for field in msgspec.structs.fields(Sizes)]
    for key, value in sizes.items():
        if key not in known:
            raise ConfigError(wrong_value(f"{side}.{key}", value, f"no such key; known keys: {', '.join(known)}"))
        try:
            msgspec.convert({key: value}, Sizes, strict=True)
        except (msgspec.ValidationError, UnicodeError):  # half of a surrogate pair
            raise ConfigError(wrong_value(f"{side}.{key}", value, _ALLOWED[key])) from None
    partition, pp_size = sizes.get("pp_layer_partition"), sizes.get("pp_size")
    if isinstance(partition, str) and len(partition.split(",")) != (pp_size or 1):
        raise ConfigError(
            wrong_value(f"{side}.pp_layer_partition", partition, f"one number for each of {pp_size or 1} ranks")
        )


def check_sizes(settings: AscendSettings, role: str, tp_size: int, dp_size: int, pp_size: int) -> None:
    """Compares what is announced of this engine's own side with what it is. ``role`` is ``kv_role``; ``kv_both`` is both sides.

    Raises:
        ConfigError: they differ. Peers could not be wrong about it, they ask; but whoever wrote it was.
    """
    actual = {"tp_size": tp_size, "dp_size": dp_size, "pp_size": pp_size}
    sides = {"kv_producer": ("prefill",), "kv_consumer": ("decode",)}.get(role, ("prefill", "decode"))
    for side in sides:
        announced = getattr(settings, side)
        if announced is None:
            continue
        for key, value in actual.items():
            said = getattr(announced, key)
            if said is not None and said != value:
                raise ConfigError(wrong_value(f"{side}.{key}", said, f"{value}, which this {role} engine has"))


def environment_facts(vllm_config: Any) -> dict[str, str]:
    """What of vllm-ascend's settings changes the meaning of a block's bytes without a trace in its tensors; for the fingerprint.

    ``enable_kv_nz`` is one: the kernels of such a decode read and write FRACTAL_NZ in tensors that are labelled ND, and only
    a decode can have it, so no prefill has what it could use. Under context parallelism the ranks take turns with the tokens of
    a block. ``vllm_config`` is vLLM's, of any version.

    Raises:
        ConfigError: a decode keeps a second cache beside the one that a connector gets, and would find nothing in it.
    """
    additional = getattr(vllm_config, "additional_config", None)
    additional = additional if isinstance(additional, Mapping) else {}
    transfer = getattr(vllm_config, "kv_transfer_config", None)
    is_hashed = additional.get("enable_hamming_sparse") and not getattr(vllm_config, "speculative_config", None)
    if is_hashed and getattr(transfer, "is_kv_consumer", True):
        raise ConfigError(
            "additional_config.enable_hamming_sparse = True: expected False on a decode, whose hashes of keys no connector gets"
        )
    parallel = getattr(vllm_config, "parallel_config", None)
    facts = {
        f"ascend_{name}": str(getattr(parallel, name, 1))
        for name in ("prefill_context_parallel_size", "decode_context_parallel_size", "cp_kv_cache_interleave_size")
    }
    facts["ascend_enable_kv_nz"] = str(bool(additional.get("enable_kv_nz", False)))
    try:
        facts["vllm_ascend"] = importlib.metadata.version("vllm-ascend")
    except importlib.metadata.PackageNotFoundError:
        facts["vllm_ascend"] = "(absent)"
    return facts
