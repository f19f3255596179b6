"""Runs vllm-ascend's real source on the real vLLM 0.23.0 source, in a process of its own; both are unpacked, not installed.

    PYTHONPATH=.:VLLM:VLLM_ASCEND python -m tests.ascend.real_runner [MODEL SOCKET_DIR]

prints what its allocation gives to a connector, or what its connector of connectors does with ours. What is not there and
not used by what runs (torch_npu, scipy, patches of models) is stood in for. :mod:`tests.ascend.test_vllm_ascend` runs it.
"""

import functools
import importlib
import importlib.metadata
import json
import sys
import traceback
from collections.abc import Callable, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch

from tests.ascend.source_text import wrong_calls
from tests.ascend.stand_ins import DEVICE, import_vllm_ascend
from tests.ascend.test_caches import check_copies, tensors_of
from vllm_mc2.ascend.caches import format_of, read_caches

BLOCK = 128


class Allocation:
    """One case: layers, their specs and allocations, run through the runner's own methods without a runner."""

    def __init__(
        self, num_blocks: int, *, is_producer: bool = True, runner_module: str = "worker.model_runner_v1"
    ) -> None:
        module = importlib.import_module(f"vllm_ascend.{runner_module}")
        cls: Any = module.NPUModelRunner310 if runner_module.startswith("_310p") else module.NPUModelRunner
        self.module = module
        self.num_blocks = num_blocks
        self.groups: list[Any] = []
        self.tensors: list[Any] = []
        self.backends: list[Any] = []
        self.forward_context: dict[str, Any] = {}
        runner = object.__new__(cls)
        transfer = SimpleNamespace(is_kv_consumer=not is_producer, is_kv_producer=is_producer)
        compilation = SimpleNamespace(static_forward_context=self.forward_context)
        text = SimpleNamespace(index_head_dim=128, model_type="llama")
        vars(runner).update(
            vllm_config=SimpleNamespace(
                kv_transfer_config=transfer, quant_config=None, compilation_config=compilation
            ),
            device=torch.device(DEVICE), use_compress=False, use_sparse=False, use_hybrid_blocks=False,
            runner_only_attn_layers=set(), shared_kv_cache_layers={}, enable_hamming_sparse=False, kv_caches=[],
            c8_k_cache_dtype=torch.int8, c8_k_scale_cache_dtype=torch.float16, compilation_config=compilation,
            model_config=SimpleNamespace(hf_text_config=text),
        )  # fmt: skip
        self.runner = runner

    def group(self, backend: object, spec: Any, *layers: str) -> None:
        from vllm.v1.kv_cache_interface import KVCacheGroupSpec

        self.groups.append(KVCacheGroupSpec(list(layers), spec))
        self.backends.append(backend)

    def tensor(self, page_bytes: int, *layers: str) -> None:
        from vllm.v1.kv_cache_interface import KVCacheTensor

        self.tensors.append(KVCacheTensor(size=page_bytes * self.num_blocks, shared_by=list(layers)))

    def latent_layer(self, name: str, lora: int, rope: int) -> None:
        """What the runner asks of a layer of MLA."""
        cls = self.module.MLAAttention
        layer = object.__new__(cls)
        layer.__dict__.update(kv_lora_rank=lora, qk_rope_head_dim=rope)
        self.forward_context[name] = layer

    def run(self) -> Mapping[str, Any]:
        """What ``register_kv_caches`` would be called with."""
        from vllm.v1.kv_cache_interface import KVCacheConfig
        from vllm.v1.worker.utils import AttentionGroup

        config = KVCacheConfig(self.num_blocks, kv_cache_tensors=self.tensors, kv_cache_groups=self.groups)
        runner = self.runner
        runner.kv_cache_config = config
        runner.attn_groups = [
            [AttentionGroup(backend, group.layer_names, group.kv_cache_spec, index)]
            for index, (backend, group) in enumerate(zip(self.backends, self.groups, strict=True))
        ]
        runner.attn_backend = self.backends[0]
        # What an NPU's memory holds at first does not matter, and zeroing it is an operator, which the simulator lacks.
        zeros = torch.zeros if DEVICE == "cpu" else torch.empty
        with mock.patch("vllm.v1.worker.utils.bind_kv_cache"), mock.patch.object(torch, "zeros", zeros):
            found: Mapping[str, Any] = runner.initialize_kv_cache_tensors(config)
        return found


def dense() -> Allocation:
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm_ascend.attention.attention_v1 import AscendAttentionBackend

    case = Allocation(6)
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=4, head_size=128, head_size_v=64, dtype=torch.bfloat16)
    layers = [f"model.layers.{i}.self_attn.attn" for i in range(3)]
    case.group(AscendAttentionBackend, spec, *layers)
    for layer in layers:
        case.tensor(spec.page_size_bytes, layer)
    case.runner.shared_kv_cache_layers = {"model.layers.3.self_attn.attn": layers[0]}
    return case


def split_blocks() -> Allocation:
    """Two groups: the runner cuts the block manager's blocks to those of its kernels."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
    from vllm_ascend.attention.attention_v1 import AscendAttentionBackend

    case = Allocation(5)
    case.runner.use_hybrid_blocks = True
    size: dict[str, Any] = {"block_size": 2 * BLOCK, "num_kv_heads": 2, "head_size": 64, "dtype": torch.float16}
    full, window = FullAttentionSpec(**size), SlidingWindowSpec(**size, sliding_window=512)
    case.group(AscendAttentionBackend, full, "layers.0.attn")
    case.group(AscendAttentionBackend, window, "layers.1.attn")
    case.tensor(full.page_size_bytes, "layers.0.attn", "layers.1.attn")
    return case


def latent() -> Allocation:
    from vllm_ascend.attention.mla_v1 import AscendMLABackend
    from vllm_ascend.core.kv_cache_interface import AscendMLAAttentionSpec

    case = Allocation(7)
    spec = AscendMLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    for index in range(2):
        case.latent_layer(f"layers.{index}.self_attn.attn", 512, 64)
        case.tensor(spec.page_size_bytes, f"layers.{index}.self_attn.attn")
    case.group(AscendMLABackend, spec, *case.forward_context)
    return case


def sparse(*, sfa_c8: bool = False, li_c8: bool = False, has_indexer: bool = True, repl: int = 1) -> Allocation:
    from vllm_ascend.attention.sfa_v1 import AscendSFABackend
    from vllm_ascend.core.kv_cache_interface import AscendMLAAttentionSpec

    case = Allocation(5)
    dims = (656 if sfa_c8 else 512, 0 if sfa_c8 else 64, 128 if has_indexer else 0)
    spec = AscendMLAAttentionSpec(
        block_size=BLOCK, num_kv_heads=1, head_size=sum(dims), dtype=torch.bfloat16, sparse_head_dim=dims,
        cache_sparse_sfa_c8=sfa_c8, cache_sparse_li_c8=li_c8, sfa_dcp_replicated_indexer_size=repl,
    )  # fmt: skip
    case.runner.use_sparse = True
    case.latent_layer("layers.0.self_attn.attn", 512, 64)
    case.group(AscendSFABackend, spec, "layers.0.self_attn.attn")
    case.tensor(spec.page_size_bytes, "layers.0.self_attn.attn")
    return case


def compressed(*, device_type: str = "A2") -> Allocation:
    """Several views in each page of one allocation, which layers of other groups use for other blocks."""
    from vllm_ascend.attention.dsa_v1 import AscendDSABackend
    from vllm_ascend.core.kv_cache_interface import AscendMLAAttentionSpec, AscendSlidingWindowMLASpec
    from vllm_ascend.utils import AscendDeviceType

    case = Allocation(6)
    case.runner.use_compress = True
    mock.patch.object(case.module, "get_ascend_device_type", return_value=AscendDeviceType[device_type]).start()
    indexer = AscendMLAAttentionSpec(
        block_size=BLOCK, num_kv_heads=1, head_size=128, dtype=torch.int8, scale_dim=1, scale_dtype=torch.float16
    )
    state = AscendSlidingWindowMLASpec(
        block_size=8, num_kv_heads=1, head_size=256, dtype=torch.float32, sliding_window=8,
        page_size_padded=indexer.page_size_bytes,
    )  # fmt: skip
    window = AscendSlidingWindowMLASpec(
        block_size=16, num_kv_heads=1, head_size=512, dtype=torch.bfloat16, sliding_window=128,
        page_size_padded=indexer.page_size_bytes,
    )  # fmt: skip
    for spec, kind in ((indexer, "indexer.k_cache"), (state, "compressor.state"), (window, "swa_cache")):
        case.group(AscendDSABackend, spec, *(f"layers.{index}.attn.{kind}" for index in range(2)))
    for index in range(2):
        case.tensor(indexer.page_size_bytes, f"layers.{index}.attn.indexer.k_cache")
        case.tensor(
            indexer.page_size_bytes, *(f"layers.{index}.attn.{kind}" for kind in ("compressor.state", "swa_cache"))
        )
    return case


def hybrid(*, has_attention: bool = True) -> Allocation:
    """The sizes that ``patch_mamba_config`` makes: a block of keys is as large as one state of the model."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec
    from vllm_ascend.attention.attention_v1 import AscendAttentionBackend

    case = Allocation(5)
    shapes, dtypes = ((3, 512), (8, 128, 64)), (torch.bfloat16, torch.float32)
    conv, ssm = 3 * 512 * 2, 8 * 128 * 64 * 4
    block_size = ssm // (128 * 2)
    page = conv + 2 * ssm
    mamba = MambaSpec(shapes=shapes, dtypes=dtypes, block_size=block_size, page_size_padded=page)
    attention = FullAttentionSpec(
        block_size=block_size, num_kv_heads=1, head_size=128, dtype=torch.bfloat16, page_size_padded=page
    )
    case.runner.use_hybrid_blocks = True
    linear = [f"layers.{index}.linear_attn" for index in range(3)]
    if has_attention:
        case.group(AscendAttentionBackend, attention, "layers.3.self_attn.attn")
    for layer in linear:
        case.group(AscendAttentionBackend, mamba, layer)
    case.tensor(page, *linear, *(["layers.3.self_attn.attn"] if has_attention else []))
    return case


def hidden_states() -> Allocation:
    from vllm.v1.kv_cache_interface import HiddenStateCacheSpec

    backend = SimpleNamespace(get_kv_cache_shape=lambda blocks, size, heads, head: (blocks, size, heads, head))
    case = Allocation(4)
    spec = HiddenStateCacheSpec(
        block_size=16, num_kv_heads=2, head_size=64, dtype=torch.bfloat16, page_size_padded=8192
    )
    case.group(backend, spec, "cache_only_layers.0")
    case.tensor(spec.page_size_bytes, "cache_only_layers.0")
    return case


def old_chip() -> Allocation:
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm_ascend._310p.attention.attention_v1 import AscendAttentionBackend310

    case = Allocation(4, runner_module="_310p.model_runner_310p")
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=4, head_size=128, dtype=torch.float16)
    case.group(AscendAttentionBackend310, spec, "layers.0.attn")
    case.tensor(spec.page_size_bytes, "layers.0.attn")
    return case


CASES: dict[str, Callable[[], Allocation]] = {
    "dense": dense,
    "split_blocks": split_blocks,
    "latent": latent,
    "sparse": sparse,
    "sparse_without_indexer": functools.partial(sparse, has_indexer=False),
    "sparse_replicated": functools.partial(sparse, repl=2),
    "sparse_c8": functools.partial(sparse, li_c8=True),
    "sparse_c8_replicated": functools.partial(sparse, li_c8=True, repl=2),
    "sfa_c8": functools.partial(sparse, sfa_c8=True),
    "sfa_c8_li_c8": functools.partial(sparse, sfa_c8=True, li_c8=True),
    "sfa_c8_without_indexer": functools.partial(sparse, sfa_c8=True, has_indexer=False),
    "compressed": compressed,
    "compressed_a5": functools.partial(compressed, device_type="A5"),
    "hybrid": hybrid,
    "mamba_only": functools.partial(hybrid, has_attention=False),
    "hidden_states": hidden_states,
    "old_chip": old_chip,
}


def real_formats() -> dict[str, str]:
    """What torch_npu says of tensors in both formats, and what becomes of it."""
    import torch_npu

    shape = (4, 32, 16, 16)
    plain = torch.empty(shape, dtype=torch.float16, device=DEVICE)
    fractal = torch_npu.empty_with_format(size=shape, dtype=torch.float16, device=DEVICE, acl_format=29)
    return {format_of(tensor): read_caches({"a": (tensor,)}, 4).strips[0].signature for tensor in (plain, fractal)}


def child_allocations() -> dict[str, Any]:
    """Every case through the runner's allocation, then :func:`check_copies` on what came of it."""
    import_vllm_ascend(is_npu_platform=True)
    import vllm
    import vllm_ascend
    from vllm_ascend.platform import NPUPlatform
    from vllm_ascend.utils import refresh_block_size

    found: dict[str, Any] = {}
    for name, make in CASES.items():
        try:
            case = make()
            given = case.run()
            layout = check_copies(given, case.num_blocks)
            found[name] = {
                "strips": [strip._asdict() for strip in layout.strips],
                "given": {layer: type(cache).__name__ for layer, cache in given.items()},
                "devices": sorted({tensor.device.type for tensor in tensors_of(given)}),
            }
        except Exception as error:
            found[name] = {"error": repr(error), "traceback": traceback.format_exc()}
        finally:
            mock.patch.stopall()
    config = SimpleNamespace(cache_config=SimpleNamespace(block_size=None), scheduler_config=None, model_config=None)
    refresh_block_size(config)
    return {
        "vllm": vllm.__file__,
        "vllm_ascend": vllm_ascend.__file__,
        "cases": found,
        "device_type": NPUPlatform.device_type,
        "block_size": config.cache_config.block_size,
        "formats": {} if DEVICE == "cpu" else real_formats(),
    }


def child_connectors(model: str, folder: str) -> dict[str, Any]:
    """Registers as both plugins do, then hands requests over through vllm-ascend's connector of connectors."""
    import_vllm_ascend(is_npu_platform=False)
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm_ascend import register_connector

    from tests.connector import old_rig
    from vllm_mc2 import plugin
    from vllm_mc2.connector import MC2Connector

    register_connector()
    plugin.register()
    plugin.register()
    add_idle_connector()
    transfer_config = old_rig.KVTransferConfig

    def nested(**settings: Any) -> Any:
        ours = {key: settings[key] for key in ("kv_connector", "kv_role", "kv_connector_extra_config")}
        idle = {"kv_connector": "IdleConnector", "kv_role": settings["kv_role"]}
        return transfer_config(**{
            **settings, "kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [ours, idle]}
        })  # fmt: skip

    with mock.patch.object(old_rig, "KVTransferConfig", nested):
        prefill = old_rig.OldEngine(model, folder, "kv_producer", "recompute")
        decode = old_rig.OldEngine(model, folder, "kv_consumer", "recompute")
    requests = []
    for length in (1, 16, 100):
        prompt = [(length * 31 + 7 * index) % 997 for index in range(length)]
        ticket = prefill.run(f"r{length}", prompt, {"do_remote_decode": True}, 1)[2]
        tokens, _, answer = decode.run(f"r{length}", prompt, ticket, 10)
        requests.append({
            "ticket": sorted(ticket), "is_right": tokens == old_rig.expected(prompt, 10), "report": answer["mc2"],
            "computed": decode.computed[f"r{length}"],
        })  # fmt: skip
    connector: Any = decode.scheduler.get_kv_connector()
    found = {
        "plugins": {point.name: point.value for point in importlib.metadata.entry_points(group="vllm.general_plugins")},
        "registered": {name: name in KVConnectorFactory._registry for name in ("MC2Connector", "MooncakeConnectorV1")},
        "class": type(connector).__name__,
        "children": [type(child).__name__ for child in connector._connectors],
        "supports_hma": connector._all_support_hma,
        "requests": requests,
        "wrong_calls": wrong_calls(MC2Connector),
    }
    for engine in (decode, prefill):
        engine.close()
    return found


def add_idle_connector() -> None:
    """A second child, which has nothing."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA

    bodies = {name: lambda *args, **kwargs: None for name in KVConnectorBase_V1.__abstractmethods__}
    bodies["get_num_new_matched_tokens"] = lambda *args: (0, False)
    bodies["build_connector_meta"] = lambda *args: KVConnectorMetadata()
    bodies["request_finished_all_groups"] = lambda *args: (False, None)
    module: Any = ModuleType("idle_connector")
    module.IdleConnector = type("IdleConnector", (KVConnectorBase_V1, SupportsHMA), bodies)
    sys.modules["idle_connector"] = module
    KVConnectorFactory.register_connector("IdleConnector", "idle_connector", "IdleConnector")


if __name__ == "__main__":
    print(json.dumps(child_connectors(*sys.argv[1:]) if sys.argv[1:] else child_allocations()))
