"""Time to first token: one request at a time, every system in its turn, the same prompts for all.

A round is one repeat of one length. Its prompt is new, so that nobody has it cached by accident. The single
server computes it first, which also says what the right answer is. Then come the pairs, in another order each
time, and among them, as if it were one more, the single server again, now with the prompt in its own cache.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from vllm_mc2.bench.serve.client import Client
from vllm_mc2.bench.serve.fleet import Fleet, System
from vllm_mc2.bench.serve.legs import both_legs
from vllm_mc2.bench.serve.results import COLD, FLOOR, HIT, TAIL, TtftRow
from vllm_mc2.bench.serve.settings import ANSWER_TOKENS, SHORT_ANSWER_TOKENS, STEADY_TOKENS
from vllm_mc2.bench.stats import Spread, spread

# The single server is also prefill of the pair without hand-off; with a salt they share no cached block.
SINGLE_SALT = "single"
FIRST_TOKEN_ID = 2
"""Below are the ids with a meaning of their own, in the models made here."""


def random_prompt(num_tokens: int, vocabulary: int, *seed: object) -> list[int]:
    """The same ids for the same ``seed``."""
    source = random.Random(repr(seed))  # noqa: S311  not a secret
    return [source.randrange(FIRST_TOKEN_ID, vocabulary) for _ in range(num_tokens)]


@dataclass
class Samples:
    """What was measured of one system at one length, in seconds."""

    prefill: list[float] = field(default_factory=list)
    decode_ttft: list[float] = field(default_factory=list)
    ttft: list[float] = field(default_factory=list)
    itl: list[float] = field(default_factory=list)
    steady: list[float] = field(default_factory=list)
    """Time between tokens of long answers."""
    equal: list[bool] = field(default_factory=list)


class Rounds:
    """All rounds of one model with one group of systems."""

    def __init__(self, fleet: Fleet, client: Client, *, model: str, group: int, vocabulary: int, seed: int) -> None:
        self._fleet = fleet
        self._client = client
        self._model = model
        self._group = group
        self._vocabulary = vocabulary
        self._seed = seed
        self._samples: dict[tuple[str, int], Samples] = defaultdict(Samples)

    def warm_up(self, length: int) -> None:
        """Let every system do everything once, unmeasured: the first request opens sessions and allocates."""
        prompt = self._prompt("warm-up", length)
        for name in list(self._fleet.systems):
            self._fleet.attempt(name, lambda system: self._ask_anything(system, prompt))

    def _ask_anything(self, system: System, prompt: Sequence[int]) -> None:
        if system.name == COLD:
            self._client.complete(system.decode.url, prompt, SHORT_ANSWER_TOKENS, salt=SINGLE_SALT)
        else:
            both_legs(self._client, system, prompt, SHORT_ANSWER_TOKENS)
            system.hand_off.clear()

    def run(self, length: int, repeat: int) -> None:
        """One round. ``length`` is a multiple of the block size; prompts have one token more."""
        prompt = self._prompt(repeat, length)
        expected: list[int] | None = None
        if COLD in self._fleet.systems:
            expected = self._fleet.attempt(COLD, lambda system: self._cold(system, prompt))
        short: list[int] | None = None
        for name in self._order(repeat, length):
            if name == FLOOR:
                short = self._fleet.attempt(COLD, lambda system: self._cached(system, prompt, expected))
            else:
                self._fleet.attempt(name, lambda system: self._pair(system, prompt, expected))
        if "mc2" in self._fleet.systems:
            self._fleet.attempt("mc2", lambda system: self._tail(system, prompt[:-1], short))

    def compare_itl(self, length: int, turns: int) -> None:
        """Long answers to one prompt, ours and those of a pair without hand-off in turn: what is compared is a matter of
        percents, and the machine's speed changes by more within seconds.
        """
        if not {"mc2", "none"} <= set(self._fleet.systems):
            return
        prompt = self._prompt("steady", length)
        for turn in range(turns):
            for name in ("mc2", "none") if turn % 2 else ("none", "mc2"):
                self._fleet.attempt(name, lambda system: self._steady(system, prompt))

    def _steady(self, system: System, prompt: Sequence[int]) -> None:
        timing = both_legs(self._client, system, prompt, STEADY_TOKENS)
        system.hand_off.clear()
        self._samples[system.name, len(prompt)].steady.append(timing.answer.itl_seconds)

    def _order(self, repeat: int, length: int) -> list[str]:
        names = [name for name in self._fleet.systems if name != COLD]
        if COLD in self._fleet.systems:
            names.append(FLOOR)
        random.Random(repr((self._seed, repeat, length))).shuffle(names)  # noqa: S311  not a secret
        if {"mc2", "none"} <= set(names):
            # Neighbours, each as often the first: what the pair without hand-off says of ours is a matter of percents.
            names.remove("none")
            names.insert(names.index("mc2") + repeat % 2, "none")
        return names

    def rows(self) -> Iterator[TtftRow]:
        """What has been measured, without systems that were given up."""
        for (system, length), samples in sorted(self._samples.items(), key=lambda item: item[0][1]):
            owner = {FLOOR: COLD, HIT: COLD, TAIL: "mc2"}.get(system, system)
            if owner in self._fleet.left_out or not samples.ttft:
                continue
            yield TtftRow(
                model=self._model,
                group=self._group,
                system=system,
                prompt_tokens=length,
                prefill=spread(samples.prefill) if samples.prefill else None,
                decode_ttft=spread(samples.decode_ttft) if samples.decode_ttft else None,
                ttft=spread(samples.ttft),
                itl=spread(samples.itl) if samples.itl else None,
                prefill_over_none=self._over_none(system, length, "prefill"),
                itl_over_none=self._over_none(system, length, "steady"),
                tokens_equal=all(samples.equal) if samples.equal else None,
            )

    def _over_none(self, system: str, length: int, what: Literal["prefill", "steady"]) -> Spread | None:
        mine = getattr(self._samples[system, length], what)
        none = self._samples.get(("none", length))
        if system != "mc2" or none is None or "none" in self._fleet.left_out:
            return None
        theirs = getattr(none, what)
        # Of the same rounds only; a system that failed once is left out as a whole.
        return spread([a / b for a, b in zip(mine, theirs, strict=False)]) if mine and theirs else None

    def _cold(self, system: System, prompt: Sequence[int]) -> list[int]:
        answer = self._client.complete(system.decode.url, prompt, ANSWER_TOKENS, salt=SINGLE_SALT)
        samples = self._samples[COLD, len(prompt)]
        samples.ttft.append(answer.first - answer.started)
        samples.itl.append(answer.itl_seconds)
        return answer.token_ids

    def _cached(self, system: System, prompt: Sequence[int], expected: list[int] | None) -> list[int]:
        """All blocks but the last token; then a prompt of whole blocks, of which vLLM computes the last again."""
        for name, ids in ((FLOOR, prompt), (HIT, prompt[:-1])):
            answer = self._client.complete(system.decode.url, ids, SHORT_ANSWER_TOKENS, salt=SINGLE_SALT)
            samples = self._samples[name, len(prompt)]
            samples.decode_ttft.append(answer.first - answer.started)
            samples.ttft.append(answer.first - answer.started)
            if name == FLOOR and expected is not None:
                samples.equal.append(answer.token_ids == expected[:SHORT_ANSWER_TOKENS])
        return answer.token_ids

    def _pair(self, system: System, prompt: Sequence[int], expected: list[int] | None) -> None:
        self._measure(system, prompt, ANSWER_TOKENS, expected, self._samples[system.name, len(prompt)])
        system.hand_off.clear()

    def _tail(self, system: System, prompt: Sequence[int], expected: list[int] | None) -> None:
        """Prefill has the prompt cached but for its last block, which is full but for the token that decode computes."""
        samples = self._samples[TAIL, len(prompt) + 1]
        self._measure(system, prompt, SHORT_ANSWER_TOKENS, expected, samples)

    def _measure(
        self,
        system: System,
        prompt: Sequence[int],
        max_tokens: int,
        expected: list[int] | None,
        samples: Samples,
    ) -> None:
        timing = both_legs(self._client, system, prompt, max_tokens)
        samples.prefill.append(timing.prefill)
        samples.decode_ttft.append(timing.decode_ttft)
        samples.ttft.append(timing.ttft)
        if max_tokens == ANSWER_TOKENS:
            samples.itl.append(timing.answer.itl_seconds)
        if expected is not None:
            samples.equal.append(timing.answer.token_ids == expected)

    def _prompt(self, which: object, length: int) -> list[int]:
        return random_prompt(length + 1, self._vocabulary, self._seed, "ttft", which, length)
