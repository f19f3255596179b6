"""One request through a pair: prefill leg, then decode leg, timed from outside."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from vllm_mc2.bench.serve.client import REQUEST_SECONDS, Answer, Client, RequestError
from vllm_mc2.bench.serve.fleet import System


class Timing(NamedTuple):
    """Seconds of one request, and its answer."""

    prefill: float
    """From the request to prefill's whole answer."""
    decode_ttft: float
    """From prefill's answer to decode's first token."""
    ttft: float
    """From the request to decode's first token."""
    answer: Answer


def both_legs(
    client: Client, system: System, prompt: Sequence[int], max_tokens: int, enough: threading.Event | None = None
) -> Timing:
    """Both legs, as the system's own proxy sends them, without a proxy in between; ``enough`` ends the answer early.

    Raises:
        RequestError: a leg failed.
    """
    hand_off = system.hand_off
    asked = hand_off.ask()
    started = time.perf_counter()
    if hand_off.at_once:
        ended, answer = _at_once(client, system, prompt, max_tokens, asked, enough)
    else:
        answered = client.prefill(system.prefill.url, prompt, asked)
        ended = time.perf_counter()
        params = hand_off.use(asked, answered)
        answer = client.complete(system.decode.url, prompt, max_tokens, params, enough=enough)
    return Timing(ended - started, answer.first - ended, answer.first - started, answer)


def _at_once(
    client: Client,
    system: System,
    prompt: Sequence[int],
    max_tokens: int,
    asked: Any,
    enough: threading.Event | None,
) -> tuple[float, Answer]:
    """When prefill had answered, and decode's answer."""
    outcome: list[float | RequestError] = []

    def prefill() -> None:
        try:
            client.prefill(system.prefill.url, prompt, asked)
            outcome.append(time.perf_counter())
        except RequestError as error:
            outcome.append(error)

    leg = threading.Thread(target=prefill, daemon=True)
    leg.start()
    params = system.hand_off.use(asked, None)
    answer = client.complete(system.decode.url, prompt, max_tokens, params, enough=enough)
    leg.join(REQUEST_SECONDS)
    if not outcome:
        raise RequestError("prefill gave no answer")
    if isinstance(outcome[0], RequestError):
        raise outcome[0]
    return outcome[0], answer
