"""Routers that people have, unchanged, in front of real servers: tokens are right, blocks are attached, nothing is left.

vllm-router and vLLM's toy proxy are started by the commands of docs/routers.md. llm-d's sidecar is not run: it is a Go program
that no package index has. What its source says that it sends is sent here in its place.
"""

import json
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from tests.e2e.conftest import LOG_DIR, MAX_TOKENS, Rig, prompt_of, wait_until
from tests.proxy.recipes import TESTED_HERE, running

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

MESSAGES = [{"role": "user", "content": "Why is the sky blue? " * 30}]
LENGTHS = (1, 3, 128, 200, 1000, 1500)
WAIT_SECONDS = 120.0


@pytest.fixture(scope="module", params=TESTED_HERE)
def router(request: pytest.FixtureRequest, rig: Rig) -> Iterator[str]:
    with running(request.param, rig.prefill.port, rig.decode.port, LOG_DIR) as server:
        yield server.url


@dataclass
class Attached:
    """Counts hand-offs of decode from where it was made."""

    rig: Rig

    def __post_init__(self) -> None:
        self.before = {way: self.count(way) for way in (None, "attach")}

    def count(self, way: str | None = None) -> float:
        labels = {} if way is None else {"way": way}
        return self.rig.metric(self.rig.decode, "vllm:mc2_handoffs_total", **labels)

    def assert_all(self, number: int) -> None:
        """So many since then, each of them attached."""
        self.rig.assert_clean()
        assert self.count("attach") == self.before["attach"] + number
        assert self.count() == self.before[None] + number


def stream_of(rig: Rig, url: str, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks of a streamed answer that have a choice; it must end as streams do."""
    with rig.client.stream("POST", f"{url}{path}", json={**body, "model": rig.model, "stream": True}) as response:
        assert response.status_code == 200
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [chunk for line in lines[:-1] if (chunk := json.loads(line))["choices"]]


def test_completions(rig: Rig, router: str) -> None:
    attached = Attached(rig)
    for length in LENGTHS:
        prompt = prompt_of(length, seed=170 + length)
        answer = rig.complete(router, prompt)
        assert answer.tokens == rig.expected(prompt).tokens
        assert answer.report["way"] == "attach"
    attached.assert_all(len(LENGTHS))


def test_streamed_completions(rig: Rig, router: str) -> None:
    attached = Attached(rig)
    for length in LENGTHS:
        prompt = prompt_of(length, seed=190 + length)
        body = {
            "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True
        }  # fmt: skip
        chunks = stream_of(rig, router, "/v1/completions", body)
        tokens = [token for chunk in chunks for token in chunk["choices"][0]["token_ids"] or ()]
        assert tokens == rig.expected(prompt).tokens
    attached.assert_all(len(LENGTHS))


def test_chat(rig: Rig, router: str) -> None:
    attached = Attached(rig)
    body = {"messages": MESSAGES, "max_completion_tokens": 10, "temperature": 0, "ignore_eos": True}
    path = "/v1/chat/completions"
    whole, streamed = [], []
    for url in (rig.plain.url, router):
        answer = rig.client.post(f"{url}{path}", json={**body, "model": rig.model})
        assert answer.status_code == 200, answer.text
        whole.append(answer.json()["choices"][0]["message"]["content"])
        chunks = stream_of(rig, url, path, {**body, "stream_options": {"include_usage": True}})
        streamed.append("".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks))
    assert whole[0] == whole[1] == streamed[0] == streamed[1] != ""
    attached.assert_all(2)


FIELDS: dict[str, dict[str, Any]] = {
    "min_tokens": {"min_tokens": 5, "max_tokens": 9, "ignore_eos": False},
    "no max_tokens": {"max_tokens": None},
    "one token": {"max_tokens": 1},
    "stop": {"stop": ["\n", "e"], "ignore_eos": False, "include_stop_str_in_output": True},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.7, "repetition_penalty": 1.3},
    "logprobs": {"logprobs": 3},
    "seed": {"seed": 7, "temperature": 0.8, "top_p": 0.9},
}


@pytest.mark.parametrize("name", FIELDS)
def test_sampling_fields(rig: Rig, router: str, name: str) -> None:
    """D27: what a client asks for holds on decode, and prefill hands over in any case."""
    attached = Attached(rig)
    prompt = prompt_of(300, seed=210)
    answers = [
        rig.complete(url, prompt, **{"max_tokens": MAX_TOKENS, **FIELDS[name]}) for url in (rig.plain.url, router)
    ]
    assert answers[0].tokens == answers[1].tokens != []
    attached.assert_all(1)


def test_an_answer_that_its_first_token_ends(rig: Rig, router: str) -> None:
    """The token ends the prefill leg too, unless the router has seen to it that it cannot; a ticket comes in either case."""
    attached = Attached(rig)
    prompt = prompt_of(300, seed=220)
    first = rig.expected(prompt).tokens[0]
    answers = [rig.complete(url, prompt, stop_token_ids=[first], ignore_eos=False) for url in (rig.plain.url, router)]
    assert answers[0].tokens == answers[1].tokens == [first]
    attached.assert_all(1)


def test_eight_at_once(rig: Rig, router: str) -> None:
    attached = Attached(rig)
    prompts = [prompt_of(100 + 90 * number, seed=230 + number) for number in range(8)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda prompt: rig.complete(router, prompt), prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.tokens == rig.expected(prompt).tokens
        assert answer.report["way"] == "attach"
    attached.assert_all(len(prompts))


@pytest.mark.parametrize("heading", TESTED_HERE)
def test_a_router_killed_in_the_middle_of_a_stream(rig: Rig, heading: str) -> None:
    attached = Attached(rig)
    body = {
        "model": rig.model,
        "prompt": prompt_of(500, seed=240),
        "max_tokens": 1500,
        "temperature": 0,
        "stream": True,
    }
    with running(heading, rig.prefill.port, rig.decode.port, LOG_DIR) as server:
        url = f"{server.url}/v1/completions"
        with rig.client.stream("POST", url, json={**body, "ignore_eos": True}) as response:
            lines = response.iter_lines()
            for _ in range(10):
                next(lines)
            server.kill()
    wait_until(lambda: not rig.metric(rig.decode, "vllm:num_requests_running"), timeout_seconds=WAIT_SECONDS)
    attached.assert_all(1)


def test_several_answers_to_one_prompt(rig: Rig) -> None:
    """These routers leave `n` in the prefill leg, so prefill issues a ticket for each: the unused ones end by their time."""
    attached = Attached(rig)
    prompt = prompt_of(300, seed=250)
    body = {"model": rig.model, "prompt": prompt, "max_tokens": 6, "n": 2, "temperature": 0.7, "seed": 3}
    expired = rig.metric(rig.prefill, "vllm:mc2_leases_ended_total", reason="expired")
    with running("vllm-router", rig.prefill.port, rig.decode.port, LOG_DIR) as server:
        answers = [
            rig.client.post(f"{url}/v1/completions", json={**body, "ignore_eos": True}).json()["choices"]
            for url in (rig.plain.url, server.url)
        ]
    assert [[choice["text"] for choice in choices] for choices in answers[1:]] == [[c["text"] for c in answers[0]]]

    def has_expired() -> bool:
        rig.tick()
        return rig.metric(rig.prefill, "vllm:mc2_leases_ended_total", reason="expired") > expired

    wait_until(has_expired, timeout_seconds=WAIT_SECONDS)
    assert rig.metric(rig.prefill, "vllm:mc2_leases_ended_total", reason="expired") == expired + 1
    attached.assert_all(2)


def sidecar(rig: Rig, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """What llm-d's routing sidecar sends with ``--kv-connector=nixlv2`` (``pkg/sidecar/proxy/connector_nixlv2.go``).

    To the prefill that the header ``x-prefiller-host-port`` names: one token by all three limits, also those that the client has
    not set. To its own decode: the client's request with what prefill answered.
    """
    headers = {"x-request-id": str(uuid.uuid1())}
    request = {**body, "model": rig.model}
    params: dict[str, Any] = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
    params.update(do_remote_decode=True, do_remote_prefill=False)
    first = {**request, "kv_transfer_params": params, "stream": False}
    first.pop("stream_options", None)
    first.update(max_tokens=1, max_completion_tokens=1, min_tokens=1)
    prefilled = rig.client.post(f"{rig.prefill.url}{path}", json=first, headers=headers)
    assert prefilled.status_code == 200, prefilled.text
    second = {**request, "kv_transfer_params": prefilled.json()["kv_transfer_params"]}
    answer = rig.client.post(f"{rig.decode.url}{path}", json=second, headers=headers)
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


def test_what_llm_ds_sidecar_sends(rig: Rig) -> None:
    attached = Attached(rig)
    for length in LENGTHS:
        prompt = prompt_of(length, seed=260 + length)
        body = {
            "prompt": prompt,
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        answer = sidecar(rig, "/v1/completions", body)
        assert answer["choices"][0]["token_ids"] == rig.expected(prompt).tokens
        assert answer["kv_transfer_params"]["mc2"]["way"] == "attach"
    body = {"messages": MESSAGES, "max_tokens": 10, "temperature": 0, "ignore_eos": True, "min_tokens": 4}
    plain = rig.client.post(f"{rig.plain.url}/v1/chat/completions", json={**body, "model": rig.model}).json()
    answer = sidecar(rig, "/v1/chat/completions", body)
    assert answer["choices"][0]["message"]["content"] == plain["choices"][0]["message"]["content"] != ""
    attached.assert_all(len(LENGTHS) + 1)
