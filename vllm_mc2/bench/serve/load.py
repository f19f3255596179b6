"""Several requests at once: throughput, and memory while decode holds some long prompts."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from statistics import mean
from typing import NamedTuple

from vllm_mc2.bench.serve.client import Client, RequestError
from vllm_mc2.bench.serve.fleet import System
from vllm_mc2.bench.serve.footprint import memory_bytes
from vllm_mc2.bench.serve.legs import Timing, both_legs
from vllm_mc2.bench.serve.settings import ANSWER_TOKENS

HOLD_SECONDS = 120.0
METRIC_SECONDS = 0.2
RUNNING = "vllm:num_requests_running"
KV_USAGE = "vllm:kv_cache_usage_perc"


class Throughput(NamedTuple):
    """What came out of one load."""

    output_tokens_per_second: float
    requests_per_second: float
    mean_ttft: float
    mean_decode_ttft: float


def throughput(client: Client, system: System, prompts: Sequence[Sequence[int]], concurrency: int) -> Throughput:
    """Send all prompts, ``concurrency`` at a time, each through both legs.

    Raises:
        RequestError: one of them failed.
    """
    pool = ThreadPoolExecutor(concurrency)
    try:
        started = time.perf_counter()
        timings = list(pool.map(lambda prompt: both_legs(client, system, prompt, ANSWER_TOKENS), prompts))
        seconds = time.perf_counter() - started
    finally:
        # Whoever fails or is interrupted ends the servers next, and with them what is still under way.
        pool.shutdown(wait=False, cancel_futures=True)
    system.hand_off.clear()
    return Throughput(
        output_tokens_per_second=sum(len(timing.answer.token_ids) for timing in timings) / seconds,
        requests_per_second=len(timings) / seconds,
        mean_ttft=mean(timing.ttft for timing in timings),
        mean_decode_ttft=mean(timing.decode_ttft for timing in timings),
    )


class TooQuickError(RuntimeError):
    """An answer ended before it could be looked at: nothing wrong, but nothing measured."""


class Holding(NamedTuple):
    """Memory while decode has all prompts in work."""

    memory_bytes: int
    prefill_kv_share: float
    """Share of prefill's KV cache that it cannot give to others, 0 to 1."""
    decode_kv_share: float


def holding(client: Client, system: System, prompts: Sequence[Sequence[int]], max_tokens: int) -> Holding:
    """Let decode work on all prompts at once, look, and break them off; ``max_tokens`` only has to be plenty.

    Raises:
        RequestError: a request failed, or they were not all in work within `HOLD_SECONDS`.
        TooQuickError: ``max_tokens`` were not plenty.
    """
    enough = threading.Event()
    pool = ThreadPoolExecutor(len(prompts))
    try:
        requests = [pool.submit(both_legs, client, system, prompt, max_tokens, enough) for prompt in prompts]
        _wait_until_running(client, system, requests)
        # An engine's metrics are as old as its last step, so prefill is asked something small.
        client.prefill(system.prefill.url, prompts[0][:2], None)
        time.sleep(METRIC_SECONDS)
        seen = Holding(
            memory_bytes(system.servers),
            client.metric(system.prefill.url, KV_USAGE),
            client.metric(system.decode.url, KV_USAGE),
        )
        _none_done(requests)
        enough.set()
        wait(requests, timeout=HOLD_SECONDS)
    finally:
        enough.set()
        pool.shutdown(wait=False, cancel_futures=True)
    system.hand_off.clear()
    return seen


def _wait_until_running(client: Client, system: System, requests: Sequence[Future[Timing]]) -> None:
    deadline = time.monotonic() + HOLD_SECONDS
    while client.metric(system.decode.url, RUNNING) < len(requests):
        _none_done(requests)
        if time.monotonic() > deadline:
            raise RequestError(f"not all requests were in work after {HOLD_SECONDS:.0f} s")
        time.sleep(0.1)


def _none_done(requests: Sequence[Future[Timing]]) -> None:
    for request in requests:
        if request.done():
            request.result()
            raise TooQuickError("an answer was complete before its memory could be looked at")
