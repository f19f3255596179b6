"""A random Llama with much KV and little else, so that a hand-off shows beside the computing.

Four layers with 16 KV heads of 128: 64 KiB of KV for each token in float32, as much as a model of some ten
billion parameters has in half precision with grouped heads. It has no tokenizer: prompts are token ids.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

FAT = "fat-llama"
FAT_LAYERS = 4
FAT_HEADS = 16
FAT_HEAD_SIZE = 128
FAT_VOCABULARY = 2048
FAT_MAX_POSITIONS = 8192
FAT_KV_BYTES_PER_TOKEN = FAT_LAYERS * 2 * FAT_HEADS * FAT_HEAD_SIZE * 4
FAT_SEED = 5

# Logits of a random model are nearly normal; this gives the largest of 2048 a clear lead over the second,
# so that rounding cannot change a greedy token.
LOGIT_SCALE = 4.0


def fat_model(folder: Path) -> Path:
    """Folder of the model below ``folder``, made now if it does not exist; it takes a few seconds.

    Raises:
        ImportError: torch or transformers is not installed.
        OSError: ``folder`` cannot be written to.
    """
    place = folder / FAT
    if (place / "config.json").exists():
        return place
    make_once(place, _make)
    return place


def make_once(place: Path, make: Callable[[Path], None]) -> None:
    """Let ``make`` write a folder, beside ``place``, and rename it into it: a folder that exists is complete."""
    place.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{place.name}-", dir=place.parent))
    try:
        make(draft)
        draft.chmod(0o755)
        try:
            draft.rename(place)
        except OSError:
            # Another process was quicker; its folder is as complete as this one.
            if not place.exists():
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _make(target: Path) -> None:
    # By name: slow to import, and nothing else of the benchmark needs them.
    torch, transformers = import_module("torch"), import_module("transformers")
    transformers.utils.logging.disable_progress_bar()
    config = transformers.LlamaConfig(
        vocab_size=FAT_VOCABULARY,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=FAT_LAYERS,
        num_attention_heads=FAT_HEADS,
        num_key_value_heads=FAT_HEADS,
        head_dim=FAT_HEAD_SIZE,
        max_position_embeddings=FAT_MAX_POSITIONS,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
        dtype="float32",
    )
    torch.manual_seed(FAT_SEED)
    model = transformers.LlamaForCausalLM(config).to(torch.float32).eval()
    with torch.no_grad():
        scale_weights(model, LOGIT_SCALE)
    model.generation_config = transformers.GenerationConfig(bos_token_id=0, eos_token_id=1)
    model.save_pretrained(target)


def scale_weights(model: Any, logit_std: float) -> None:
    """Unit gain for every matrix of a random model, and attention sharp enough for old tokens to matter."""
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            weight.normal_(0.0, weight.shape[1] ** -0.5)
        if name.endswith("embed_tokens.weight"):
            weight.normal_(0.0, 1.0)
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            weight.mul_(2.0**0.5)
        if name.endswith(("v_proj.weight", "o_proj.weight")):
            weight.mul_(2.0)
    model.lm_head.weight.mul_(logit_std)
