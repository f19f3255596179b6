"""What stands in for a model: a KV value that depends on every token before it, and a next token that depends on every value.

An engine writes :func:`kv_value` where a model would write KV and samples :func:`next_token` of all that it reads back. A wrong
block, a stale byte or a missed position therefore changes the tokens, and :func:`expected_tokens` says what they must be.
Nothing here needs vLLM.
"""

import itertools
import random
import zlib
from array import array
from collections.abc import Sequence

NUM_LAYERS = 3
VOCABULARY = 1000
EOS = VOCABULARY + 1


def kv_value(layer: int, tokens: Sequence[int]) -> float:
    """What stands in the KV cache for the last of ``tokens``: exact in float32, different for any other prefix."""
    return float(zlib.crc32(array("I", [layer, *tokens]).tobytes()) >> 8)


def next_token(values: Sequence[Sequence[float]]) -> int:
    """The token sampled from all KV values, per layer and position."""
    return zlib.crc32(array("d", itertools.chain.from_iterable(values)).tobytes()) % VOCABULARY


def first_in_window(layer: int, num_tokens: int, window: int | None) -> int:
    """The first position that a layer's attention reads; the later layers have the window."""
    return max(0, num_tokens - window) if window is not None and layer >= NUM_LAYERS else 0


def num_layers(window: int | None) -> int:
    """With a window as many again, in a cache group of their own."""
    return NUM_LAYERS if window is None else 2 * NUM_LAYERS


def expected_tokens(
    prompt: Sequence[int], num_tokens: int, window: int | None = None, *, layers: int | None = None
) -> list[int]:
    """What an engine must sample for ``prompt`` when every byte is right.

    Linear in the tokens: the checksums of :func:`kv_value` are continued from token to token.
    """
    count = layers or num_layers(window)
    sums = [zlib.crc32(array("I", [layer]).tobytes()) for layer in range(count)]
    values = [array("d") for _ in range(count)]
    answer: list[int] = []
    pending = list(prompt)
    while len(answer) < num_tokens:
        for token in pending:
            data = array("I", [token]).tobytes()
            for layer in range(count):
                sums[layer] = zlib.crc32(data, sums[layer])
                values[layer].append(float(sums[layer] >> 8))
        total = 0
        for layer, row in enumerate(values):
            total = zlib.crc32(row[first_in_window(layer, len(row), window) :].tobytes(), total)
        answer.append(total % VOCABULARY)
        pending = answer[-1:]
    return answer


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """A random prompt; the same for the same arguments, and prefixes of longer ones with the same seed."""
    return [random.Random(seed * 7919 + i).randrange(VOCABULARY) for i in range(length)]


def prompt_of_family(family: int, length: int, suffix: int = 0, suffix_length: int = 0) -> list[int]:
    """``length`` tokens that all prompts of the family begin with, then ``suffix_length`` of its own."""
    common, own = random.Random(family), random.Random(f"{family}:{suffix}")
    return [common.randrange(VOCABULARY) for _ in range(length)] + [
        own.randrange(VOCABULARY) for _ in range(suffix_length)
    ]
