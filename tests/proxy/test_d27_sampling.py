"""D27: whatever a client asks for, the prefill leg ends by length with a ticket, and the answer is that of a single server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from examples import proxy
from tests.support.waiting import wait_until

from .fakes import DEADLINE_SECONDS, EOS, TICKET, RuledServer, serving

PATHS = {
    "/v1/completions": {"model": "m", "prompt": "Say"},
    "/v1/chat/completions": {"model": "m", "messages": [{"role": "user", "content": "Say"}]},
}
FIELDS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "min_tokens 100": {"min_tokens": 100, "max_tokens": 120},
    "min_tokens 100 without a limit": {"min_tokens": 100},
    "max_tokens 1": {"max_tokens": 1},
    "max_tokens 0": {"max_tokens": 0},
    "max_tokens null": {"max_tokens": None},
    "max_tokens 2": {"max_tokens": 2},
    "max_completion_tokens 2": {"max_completion_tokens": 2},
    "max_completion_tokens and max_tokens": {"max_completion_tokens": 2, "max_tokens": 3},
    "max_completion_tokens null": {"max_completion_tokens": None, "max_tokens": 3},
    "a stop string in the first token": {"stop": "H"},
    "stop strings, one of them the first token": {"stop": ["zzz", "Hi"], "include_stop_str_in_output": True},
    "stop_token_ids": {"stop_token_ids": [1]},
    "ignore_eos": {"ignore_eos": True, "max_tokens": 9},
    "response_format": {"response_format": {"type": "json_object"}},
    "seed and penalties": {"seed": 5, "temperature": 0.7, "presence_penalty": 0.5, "frequency_penalty": 0.1},
    "repetition_penalty": {"repetition_penalty": 1.3, "min_p": 0.1, "top_k": 3},
    "n": {"n": 3, "temperature": 1.0},
    "n, greedy": {"n": 3, "temperature": 0},
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "logprobs of some tokens": {"logprobs": True, "logprob_token_ids": [1, 2]},
    "bad words and biases": {"bad_words": ["lo"], "logit_bias": {"1": -100}, "allowed_token_ids": [1, 2]},
    "min_tokens above max_tokens": {"min_tokens": 5, "max_tokens": 4},
}
STREAMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "stream": {"stream": True},
    "stream with usage": {"stream": True, "stream_options": {"include_usage": True}},
}
MODELS: dict[str, list[str]] = {"a model": ["Hi", " to", " you", EOS], "a model that says nothing": [EOS]}


@dataclass
class Trio:
    """A proxy with its two servers, and a single server beside them; all of the same model."""

    prefill: RuledServer
    decode: RuledServer
    single: RuledServer
    url: str
    client: httpx.Client

    def ask(self, url: str, path: str, body: dict[str, Any]) -> httpx.Response:
        return self.client.post(url + path, json=body, timeout=DEADLINE_SECONDS)


@pytest.fixture(scope="module")
def servers() -> Iterator[Trio]:
    with ExitStack() as stack:
        prefill, decode, single = RuledServer(), RuledServer(), RuledServer()
        for server in (prefill, decode, single):
            server.url = stack.enter_context(serving(server.app()))
        url = stack.enter_context(serving(proxy.build_app(proxy.Proxy([prefill.url], [decode.url]))))
        yield Trio(prefill, decode, single, url, stack.enter_context(httpx.Client()))


@pytest.fixture
def trio(servers: Trio) -> Trio:
    servers.prefill.reset(params=dict(TICKET))
    servers.decode.reset()
    servers.single.reset()
    return servers


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("fields", FIELDS)
def test_as_a_single_server(trio: Trio, path: str, stream: str, fields: str, model: str) -> None:
    for server in (trio.prefill, trio.decode, trio.single):
        server.tokens = MODELS[model]
    request = {**PATHS[path], **FIELDS[fields], **STREAMS[stream]}
    one, two = (trio.ask(url, path, request) for url in (trio.single.url, trio.url))
    # The client cannot tell: status, text, limits, reasons, usage, the marker at the end.
    assert (two.status_code, two.content) == (one.status_code, one.content)
    assert two.headers["content-type"] == one.headers["content-type"]
    assert two.content.endswith(b"data: [DONE]\n\n") == (one.status_code == 200 and "stream" in request)
    # Prefill has computed the prompt and one token that nobody reads, whatever was asked.
    assert trio.prefill.endings == ["length"]
    if one.status_code == 200:
        assert [seen.body["kv_transfer_params"] for seen in trio.decode.seen] == [TICKET]
        assert trio.decode.endings == trio.single.endings
    else:
        # What decode refuses cannot end the lease; the same prompt without the fault does.
        wait_until(lambda: len(trio.decode.seen) == 2)
        assert [seen.body["kv_transfer_params"] for seen in trio.decode.seen] == [TICKET, TICKET]
        wait_until(lambda: trio.decode.endings == ["length"])


def test_the_servers_follow_their_rules(trio: Trio) -> None:
    """Or the test above could not fail: each field that is taken out of the prefill leg would end it otherwise."""
    path = "/v1/completions"
    leg = proxy.prefill_body({**PATHS[path], "stream": False}, chat=False)
    spoilers: list[dict[str, Any]] = [
        {"stop": "H"}, {"stop_token_ids": [1]}, {"min_tokens": 100}, {"stream_options": {"include_usage": True}},
        {"max_tokens": 2}, {"n": 2},
    ]  # fmt: skip
    assert trio.ask(trio.prefill.url, path, leg).json()["kv_transfer_params"] == TICKET
    for spoiler in spoilers:
        answer = trio.ask(trio.prefill.url, path, {**leg, **spoiler})
        assert answer.status_code == 400 or answer.json()["kv_transfer_params"] is None, spoiler
    trio.prefill.tokens = [EOS]
    answer = trio.ask(trio.prefill.url, path, {**leg, "ignore_eos": False})
    assert json.loads(answer.content)["choices"][0]["finish_reason"] == "stop"
    assert answer.json()["kv_transfer_params"] is None
