"""What an engine of ``tests/connector/rig.py`` must sample, without importing vLLM; and the prompts of a round.

Same function as ``rig.expected_tokens``, but linear: ``crc32`` is continued from token to token. The zygote compares both at
start, so they cannot drift apart.
"""

import random
import zlib
from array import array
from collections.abc import Sequence

NUM_LAYERS = 3
VOCABULARY = 1000


def expected_tokens(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The tokens after ``prompt`` when every byte of its KV is right."""
    sums = [zlib.crc32(array("I", [layer]).tobytes()) for layer in range(NUM_LAYERS)]
    values = [array("d") for _ in range(NUM_LAYERS)]
    answer: list[int] = []
    pending = list(prompt)
    while len(answer) < num_tokens:
        for token in pending:
            data = array("I", [token]).tobytes()
            for layer in range(NUM_LAYERS):
                sums[layer] = zlib.crc32(data, sums[layer])
                values[layer].append(float(sums[layer] >> 8))
        total = 0
        for layer in range(NUM_LAYERS):
            total = zlib.crc32(values[layer].tobytes(), total)
        answer.append(total % VOCABULARY)
        pending = answer[-1:]
    return answer


def prompt_of(family: int, length: int, suffix: int = 0, suffix_length: int = 0) -> list[int]:
    """``length`` tokens that all prompts of the family begin with, then ``suffix_length`` of its own."""
    common, own = random.Random(family), random.Random(f"{family}:{suffix}")
    return [common.randrange(VOCABULARY) for _ in range(length)] + [
        own.randrange(VOCABULARY) for _ in range(suffix_length)
    ]
