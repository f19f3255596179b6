"""The whole run: for each model its servers, then the rounds, the loads, memory and idle CPU, then the next.

All systems stay up together if memory allows. If not, peers come in groups, one after another, and single, none and
mc2 are measured again in each group, so that what is compared was always measured side by side.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import msgspec

from vllm_mc2.bench.serve.client import Client
from vllm_mc2.bench.serve.fleet import Fleet, Say, System
from vllm_mc2.bench.serve.footprint import idle_cores, memory_bytes
from vllm_mc2.bench.serve.load import TooQuickError, holding, throughput
from vllm_mc2.bench.serve.results import (
    LABELS,
    HandoffRow,
    IdleRow,
    LeftOut,
    MemoryRow,
    Results,
    SystemInfo,
    ThroughputRow,
)
from vllm_mc2.bench.serve.rounds import Rounds, random_prompt
from vllm_mc2.bench.serve.settings import ANSWER_TOKENS, BASE_SYSTEMS, PEERS, STEADY_TOKENS, Settings

BLOCK_SIZE = 128
"""vLLM's default on CPUs, given explicitly."""
LOAD_LENGTH = 512
"""Prompt length of the throughput runs, or the shortest length if that is less."""
HOLD_LENGTH = 1024
"""The same for what decode holds while memory is looked at."""
NUM_HELD = 4
HELD_ANSWER_TOKENS = 768
"""Their answers are this long at least, so that the first is not over when the last begins."""
REQUESTS_PER_LOAD = {1: 4}
"""By concurrency; otherwise as many as run at once, and at least 8."""
IDLE_SETTLE_SECONDS = 4.0
"""vLLM's readers go on looking for about a second after the last message."""
IDLE_SECONDS = 10.0
KV_STEP_BYTES = 64 << 20
MAX_LENT_FRACTION = 0.75
"""Our prefill lends no more of its cache than this, by default; peers need no more than that either."""


class Model(msgspec.Struct, frozen=True):
    """A model folder, as far as the benchmark needs to know it."""

    path: Path
    name: str
    vocabulary: int
    kv_bytes_per_token: int
    max_positions: int
    is_fat: bool

    @classmethod
    def read(cls, path: Path, *, is_fat: bool) -> Model:
        """From its ``config.json``.

        Raises:
            OSError: there is none.
            KeyError: it says too little; only models with ordinary attention do.
        """
        config: dict[str, Any] = json.loads((path / "config.json").read_text())
        heads = config["num_attention_heads"]
        head_size = config.get("head_dim") or config["hidden_size"] // heads
        values = 2 * config["num_hidden_layers"] * config.get("num_key_value_heads", heads) * head_size
        return cls(path, path.name, config["vocab_size"], 4 * values, config["max_position_embeddings"], is_fat)


class Sizes(msgspec.Struct, frozen=True):
    """What the lengths of a run mean for its servers; tokens are whole blocks."""

    lengths: tuple[int, ...]
    load_length: int
    hold_length: int
    max_model_len: int
    kv_bytes: int

    @classmethod
    def of(cls, settings: Settings, model: Model) -> Sizes:
        """Enough KV for the longest prompt twice, and for what prefill lends beside one of full length.

        Raises:
            ValueError: the model does not take prompts of that length.
        """
        lengths = tuple(sorted({_blocks(length) for length in settings.lengths_of(fat=model.is_fat)}))
        load_length, hold_length = min(_blocks(LOAD_LENGTH), lengths[0]), min(_blocks(HOLD_LENGTH), lengths[0])
        max_model_len = _blocks(
            max(lengths[-1] + 1 + max(ANSWER_TOKENS, STEADY_TOKENS), hold_length + 1 + HELD_ANSWER_TOKENS)
        )
        # A held answer grows by some blocks until it is broken off.
        lent = max(
            max(settings.concurrency, default=0) * _blocks(load_length + 1 + ANSWER_TOKENS),
            NUM_HELD * _blocks(hold_length + 1 + BLOCK_SIZE),
        )
        tokens = max(2 * max_model_len, int(lent / MAX_LENT_FRACTION), lent + max_model_len) + 2 * BLOCK_SIZE
        kv_bytes = -(-tokens * model.kv_bytes_per_token // KV_STEP_BYTES) * KV_STEP_BYTES
        if settings.kv_gib is not None:
            kv_bytes = int(settings.kv_gib * (1 << 30))
        if max_model_len > model.max_positions:
            raise ValueError(f"{model.name} takes {model.max_positions} tokens at most, but {max_model_len} are needed")
        return cls(lengths, load_length, hold_length, max_model_len, kv_bytes)


def _blocks(num_tokens: int) -> int:
    """The smallest number of tokens in whole blocks that is not less."""
    return -(-num_tokens // BLOCK_SIZE) * BLOCK_SIZE


def run_model(settings: Settings, model: Model, sizes: Sizes, results: Results, log_dir: Path, say: Say) -> None:
    """Measure one model; what came out is in ``results``, also if this is interrupted.

    Idle CPU is measured with the first model of a run only: what servers do while idle does not depend on it.
    """
    say(f"{model.name}: {sizes.kv_bytes / 2**20:.0f} MiB of KV cache for each server, lengths {sizes.lengths}")
    arguments = ["--skip-tokenizer-init", "--block-size", str(BLOCK_SIZE)]
    # One step for the longest prompt: ExampleConnector cannot hand over what was computed in several.
    arguments += ["--max-num-batched-tokens", str(sizes.max_model_len)]
    fleet = Fleet(
        model.path,
        arguments=arguments,
        max_model_len=sizes.max_model_len,
        kv_bytes=sizes.kv_bytes,
        ready_seconds=settings.ready_seconds,
        log_dir=log_dir,
        say=say,
    )
    with Client(model.name) as client, fleet:
        try:
            fleet.start([name for name in BASE_SYSTEMS if name in settings.systems], client)
            peers = [name for name in PEERS if name in settings.systems]
            num_groups = 0
            while peers or not num_groups:
                now = fleet.those_that_fit(peers) if fleet.systems else peers[:1]
                fleet.start(now, client)
                _remember(results, fleet)
                if fleet.systems and (not num_groups or set(now) & set(fleet.systems)):
                    Group(settings, model, sizes, num_groups, fleet, client, results, say).run()
                    num_groups += 1
                fleet.stop(now)
                peers = [name for name in peers if name not in now]
                if not now:
                    break
            for name in peers:
                fleet.leave_out(name, "there is not enough memory for its servers beside the others")
            if num_groups > 1:
                results.notes.append(f"{model.name}: peers were measured in {num_groups} groups, as memory allows")
        finally:
            results.left_out += [LeftOut(model.name, name, reason) for name, reason in fleet.left_out.items()]


def _remember(results: Results, fleet: Fleet) -> None:
    known = {system.name for system in results.systems}
    for system in fleet.systems.values():
        if system.name not in known:
            results.systems.append(SystemInfo(system.name, LABELS[system.name], system.how))


class Group:
    """All measurements of one model with the systems that are up together."""

    def __init__(
        self,
        settings: Settings,
        model: Model,
        sizes: Sizes,
        number: int,
        fleet: Fleet,
        client: Client,
        results: Results,
        say: Say,
    ) -> None:
        self._settings = settings
        self._model = model
        self._sizes = sizes
        self._number = number
        self._fleet = fleet
        self._client = client
        self._results = results
        self._say = say

    @property
    def _where(self) -> dict[str, Any]:
        return {"model": self._model.name, "group": self._number}

    def run(self) -> None:
        """Memory first: our decode's own cache takes memory only as its blocks are used for the first time."""
        rounds = Rounds(
            self._fleet,
            self._client,
            model=self._model.name,
            group=self._number,
            vocabulary=self._model.vocabulary,
            seed=self._settings.seed,
        )
        self._say("warming up")
        rounds.warm_up(self._sizes.lengths[0])
        self._memory()
        self._ttft(rounds)
        self._throughput()
        if {row.model for row in self._results.idle_cpu} <= {self._model.name}:
            self._idle()

    def _ttft(self, rounds: Rounds) -> None:
        counted = self._fleet.attempt("mc2", lambda system: self._client.metrics(system.decode.url))
        try:
            for repeat in range(self._settings.repeats):
                for length in self._sizes.lengths:
                    started = time.monotonic()
                    rounds.run(length, repeat)
                    seconds = time.monotonic() - started
                    self._say(f"repeat {repeat + 1} of {self._settings.repeats}, {length} tokens: {seconds:.0f} s")
            for length in self._sizes.lengths:
                self._say(f"time between tokens beside that without hand-off, {length} tokens")
                rounds.compare_itl(length, self._settings.steady_turns)
        finally:
            self._results.ttft += rounds.rows()
        if counted is not None:
            self._fleet.attempt("mc2", lambda system: self._handoffs(system, counted))

    def _handoffs(self, system: System, before: dict[str, float]) -> None:
        # A small request, since counters are as old as the engine's last step.
        self._client.prefill(system.decode.url, [7, 7], None)
        after = self._client.metrics(system.decode.url)

        def change(name: str) -> float:
            return after.get(name, 0.0) - before.get(name, 0.0)

        handoffs = [name for name in after if name.startswith("vllm:mc2_handoffs_total{")]
        total = sum(change(name) for name in handoffs)
        attached = sum(change(name) for name in handoffs if 'way="attach"' in name)
        self._results.handoffs.append(
            HandoffRow(
                **self._where,
                attached=round(attached),
                not_attached=round(total - attached),
                kv_bytes_not_copied=round(change("vllm:mc2_kv_bytes_not_copied_total")),
                seconds_per_handoff=change("vllm:mc2_handoff_seconds_sum") / total if total else 0.0,
            )
        )

    def _pairs(self) -> list[str]:
        return [name for name in self._fleet.systems if name != "single"]

    def _prompts(self, which: str, count: int, length: int) -> list[list[int]]:
        """New prompts, the same for every system."""
        seed = (self._settings.seed, which)
        return [random_prompt(length + 1, self._model.vocabulary, *seed, index) for index in range(count)]

    def _throughput(self) -> None:
        for concurrency in self._settings.concurrency:
            count = REQUESTS_PER_LOAD.get(concurrency, max(8, concurrency))
            prompts = self._prompts(f"load {concurrency}", count, self._sizes.load_length)
            for name in self._pairs():
                self._fleet.attempt(name, self._loader(prompts, concurrency))
            self._say(f"throughput with {concurrency} at once: done")

    def _loader(self, prompts: Sequence[Sequence[int]], concurrency: int) -> Callable[[System], None]:
        def load(system: System) -> None:
            found = throughput(self._client, system, prompts, concurrency)
            self._results.throughput.append(
                ThroughputRow(
                    **self._where,
                    system=system.name,
                    concurrency=concurrency,
                    prompt_tokens=len(prompts[0]),
                    num_requests=len(prompts),
                    output_tokens_per_second=found.output_tokens_per_second,
                    requests_per_second=found.requests_per_second,
                    mean_ttft=found.mean_ttft,
                    mean_decode_ttft=found.mean_decode_ttft,
                )
            )

        return load

    def _memory(self) -> None:
        before = {name: memory_bytes(system.servers) for name, system in self._fleet.systems.items()}
        prompts = self._prompts("hold", NUM_HELD, self._sizes.hold_length)
        plenty = self._sizes.max_model_len - len(prompts[0])

        def look(system: System) -> None:
            try:
                seen = holding(self._client, system, prompts, plenty)
            except TooQuickError as error:
                self._results.notes.append(f"{self._model.name}, {system.name}: no memory figures: {error}")
                return
            self._results.memory.append(
                MemoryRow(
                    **self._where,
                    system=system.name,
                    prompt_tokens=len(prompts[0]),
                    num_requests=len(prompts),
                    kv_bytes=sum(map(len, prompts)) * self._model.kv_bytes_per_token,
                    before_bytes=before[system.name],
                    holding_bytes=seen.memory_bytes,
                    prefill_kv_bytes=round(seen.prefill_kv_share * self._sizes.kv_bytes),
                    decode_kv_bytes=round(seen.decode_kv_share * self._sizes.kv_bytes),
                )
            )

        for name in self._pairs():
            self._fleet.attempt(name, look)
        self._say("memory: done")

    def _idle(self) -> None:
        seen: dict[str, list[float]] = defaultdict(list)

        def watch(system: System) -> None:
            time.sleep(IDLE_SETTLE_SECONDS)
            seen[system.name].append(idle_cores(system.servers, IDLE_SECONDS))

        # Those that are compared by fractions of a percent twice, in both orders.
        for name in [*self._pairs(), "mc2", "none"]:
            self._fleet.attempt(name, watch)
        for name, cores in seen.items():
            self._results.idle_cpu.append(
                IdleRow(**self._where, system=name, cores=mean(cores), seconds=IDLE_SECONDS * len(cores))
            )
        self._say("idle CPU: done")
