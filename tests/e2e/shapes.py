"""Tiny random models of real architectures, for their KV cache's shape alone. Prompts are token ids; the tokenizer is another's.

python -m tests.e2e.shapes FOLDER [NAME ...]
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from vllm_mc2.bench.serve.models import make_once

VOCABULARY = 1024
TOKENIZER = Path(__file__).resolve().parents[2] / "build" / "models" / "tiny-llama"
COMMON = {"vocab_size": VOCABULARY, "max_position_embeddings": 2048, "tie_word_embeddings": False}


def qwen3(transformers: Any) -> Any:
    """Grouped-query attention with normalised queries and keys."""
    return transformers.Qwen3Config(
        **COMMON, hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32,
    )  # fmt: skip


def multi_head(transformers: Any) -> Any:
    """As many KV heads as heads."""
    return transformers.LlamaConfig(
        **COMMON, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, head_dim=32,
    )  # fmt: skip


def gemma3(transformers: Any) -> Any:
    """Layers with a window of 96 tokens, and every third with full attention."""
    return transformers.Gemma3TextConfig(
        **{**COMMON, "tie_word_embeddings": True}, hidden_size=128, intermediate_size=256, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, sliding_window=96, query_pre_attn_scalar=32,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
    )  # fmt: skip


def deepseek(transformers: Any) -> Any:
    """Latent attention (MLA). Of the sizes that vLLM has kernels for on a CPU; these want bfloat16."""
    return transformers.DeepseekV2Config(
        **COMMON, hidden_size=128, intermediate_size=256, moe_intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2,
        first_k_dense_replace=2, kv_lora_rank=512, q_lora_rank=None, qk_rope_head_dim=64, qk_nope_head_dim=32,
        v_head_dim=32, n_group=1, topk_group=1, head_dim=64,
    )  # fmt: skip


def falcon_h1(transformers: Any) -> Any:
    """Attention and Mamba side by side in each layer."""
    return transformers.FalconH1Config(
        **COMMON, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, mamba_d_ssm=128, mamba_n_heads=4, mamba_d_head=32, mamba_d_state=16,
        mamba_n_groups=1,
    )  # fmt: skip


SHAPES: dict[str, Callable[[Any], Any]] = {
    "qwen3": qwen3, "multi-head": multi_head, "gemma3": gemma3, "deepseek": deepseek,
    "falcon-h1": falcon_h1,
}  # fmt: skip


def make(name: str, target: Path) -> None:
    """Write the model's folder."""
    torch: Any = import_module("torch")
    transformers: Any = import_module("transformers")
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(SHAPES[name](transformers)).to(torch.float32).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.normal_(0.0, 1.5 * weight.shape[1] ** -0.5)
    model.generation_config = transformers.GenerationConfig(bos_token_id=0, eos_token_id=1)
    model.save_pretrained(target)
    transformers.AutoTokenizer.from_pretrained(TOKENIZER).save_pretrained(target)


def ensure(name: str, folder: Path) -> Path:
    """The model's folder, made if it is not there."""
    place = folder / name
    if not (place / "config.json").exists():
        make_once(place, lambda target: make(name, target))
    return place


if __name__ == "__main__":
    for wanted in sys.argv[2:] or SHAPES:
        print(ensure(wanted, Path(sys.argv[1])))
