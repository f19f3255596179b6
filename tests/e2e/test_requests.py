"""Requests as clients send them: bad tickets, other prompts, chat, streams, disconnects. Engines live on."""

import copy
import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e.conftest import Rig, prompt_of

pytestmark = [pytest.mark.e2e]

PROMPT = prompt_of(500, seed=1)


def change(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda params: params["mc2_ticket"].update({key: value})


DAMAGE: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "missing": (lambda params: params.pop("mc2_ticket"), "bad_ticket"),
    "garbled": (lambda params: params.update(mc2_ticket={"version": [], "slot": "x" * 10_000}), "bad_ticket"),
    "another engine": (change("incarnation", "0" * 32), "peer_unreachable"),
    "another slot": (change("slot", "00000100"), "ticket_dead"),
    "a guessed token": (change("token", "0" * 32), "ticket_dead"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_bad_ticket_is_answered_without_borrowed_blocks(rig: Rig, name: str) -> None:
    damage, reason = DAMAGE[name]
    params = rig.ticket(PROMPT)
    bad = copy.deepcopy(params)
    damage(bad)
    answer = rig.complete(rig.decode.url, PROMPT, kv_transfer_params=bad)
    assert answer.report["way"] == "recompute"
    assert answer.report["reason"] == reason
    assert answer.tokens == rig.expected(PROMPT).tokens
    # The same on an engine that is told to fail such requests: an error status, and no empty answer.
    body = {"model": rig.model, "prompt": PROMPT, "max_tokens": 4, "kv_transfer_params": bad}
    refused = rig.client.post(f"{rig.small_decode.url}/v1/completions", json=body)
    assert refused.status_code >= 500, refused.text
    # The good ticket still works, so nobody has ended its lease.
    good = rig.complete(rig.decode.url, PROMPT, kv_transfer_params=params)
    assert good.report["way"] == "attach"
    assert good.tokens == rig.expected(PROMPT).tokens
    rig.assert_clean()


@pytest.mark.parametrize("difference", ["tokens", "length", "cache_salt"])
def test_a_ticket_presented_with_another_prompt(rig: Rig, difference: str) -> None:
    params = rig.ticket(PROMPT)
    prompt, more = list(PROMPT), {}
    if difference == "tokens":
        prompt[3] += 1
    elif difference == "length":
        prompt = prompt[:-1]
    else:
        more = {"cache_salt": "another"}
    answer = rig.complete(rig.decode.url, prompt, kv_transfer_params=params, **more)
    assert (answer.report["way"], answer.report["reason"]) == ("recompute", "prompt_mismatch")
    assert answer.tokens == rig.expected(prompt).tokens
    assert rig.complete(rig.decode.url, PROMPT, kv_transfer_params=params).report["way"] == "attach"
    rig.assert_clean()


def test_a_ticket_is_good_once(rig: Rig) -> None:
    params = rig.ticket(PROMPT)
    assert rig.complete(rig.decode.url, PROMPT, kv_transfer_params=params).report["way"] == "attach"
    rig.tick()  # prefill notices the release with its next step; until then the blocks are still there, and still right
    again = rig.complete(rig.decode.url, PROMPT, kv_transfer_params=params)
    assert again.report["reason"] == "ticket_dead"
    assert again.tokens == rig.expected(PROMPT).tokens
    rig.assert_clean()


def test_the_ticket_has_constant_size_and_names_no_blocks(rig: Rig) -> None:
    sizes = set()
    for length in (1, 129, 1500):
        params = rig.ticket(prompt_of(length, seed=5))
        # vLLM adds how much of the prompt it had cached itself; that number is not ours.
        params.pop("remote_prefill_cached_tokens", None)
        sizes.add(len(json.dumps(params)))
        assert not [key for key in params if "block" in key]
        rig.complete(rig.decode.url, prompt_of(length, seed=5), kv_transfer_params=params)
    assert len(sizes) == 1
    rig.assert_clean()


MESSAGES = [{"role": "user", "content": "Why is the sky blue? " * 30}]


@pytest.mark.parametrize("stream", [False, True])
def test_chat(rig: Rig, stream: bool) -> None:
    body = {
        "model": rig.model, "messages": MESSAGES, "max_completion_tokens": 10, "temperature": 0, "stream": stream,
        "ignore_eos": True,
    }  # fmt: skip
    texts = []
    before = rig.metric(rig.decode, "vllm:mc2_handoffs_total", way="attach")
    for url in (rig.plain.url, rig.proxy.url):
        if not stream:
            texts.append(
                rig.client.post(f"{url}/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
            )
            continue
        with rig.client.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
            lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
        assert lines[-1] == "[DONE]"
        deltas = [json.loads(line)["choices"][0]["delta"].get("content") or "" for line in lines[:-1]]
        texts.append("".join(deltas))
    assert texts[0] == texts[1] != ""
    rig.assert_clean()
    assert rig.metric(rig.decode, "vllm:mc2_handoffs_total", way="attach") == before + 1


def test_a_client_that_leaves_in_the_middle(rig: Rig) -> None:
    body = {
        "model": rig.model, "prompt": PROMPT, "max_tokens": 1500, "temperature": 0, "stream": True, "ignore_eos": True,
    }  # fmt: skip
    with rig.client.stream("POST", f"{rig.proxy.url}/v1/completions", json=body) as response:
        for number, _ in enumerate(response.iter_lines()):
            if number > 10:
                break
    deadline = time.monotonic() + 60
    while rig.metric(rig.decode, "vllm:num_requests_running") and time.monotonic() < deadline:
        time.sleep(0.2)
    rig.assert_clean()


def test_what_decode_refuses_after_prefill_has_run_keeps_no_blocks(rig: Rig) -> None:
    """Prefill takes n = 1 of it, decode refuses n = 3 with temperature 0. The proxy settles the ticket."""
    body = {"model": rig.model, "prompt": PROMPT, "max_tokens": 4, "n": 3, "temperature": 0}
    published = rig.metric(rig.prefill, "vllm:mc2_leases_published_total")
    released = rig.metric(rig.prefill, "vllm:mc2_leases_ended_total", reason="released")
    assert rig.client.post(f"{rig.proxy.url}/v1/completions", json=body).status_code == 400
    rig.tick()
    assert rig.metric(rig.prefill, "vllm:mc2_leases_published_total") == published + 1
    deadline = time.monotonic() + 30  # half of the offer's time
    while rig.metric(rig.prefill, "vllm:mc2_leases_ended_total", reason="released") < released + 1:
        assert time.monotonic() < deadline
        rig.tick()
    rig.assert_clean()


def test_prefill_refuses_what_a_plain_server_refuses_with_the_same_status(rig: Rig) -> None:
    body = {"model": rig.model, "prompt": prompt_of(3000), "max_tokens": 4}
    answers = [rig.client.post(f"{url}/v1/completions", json=body) for url in (rig.plain.url, rig.proxy.url)]
    assert answers[0].status_code == answers[1].status_code == 400
    rig.assert_clean()


@pytest.mark.parametrize("value", ["text", 7, [1], {"do_remote_prefill": True}])
def test_params_smuggled_in_past_the_api(rig: Rig, value: object) -> None:
    """``vllm_xargs`` takes such values. vLLM's front end stumbles over most and says 400 or 500; the engines must live on."""
    for server in (rig.prefill, rig.decode):
        body = {"model": rig.model, "prompt": PROMPT, "max_tokens": 4, "vllm_xargs": {"kv_transfer_params": value}}
        assert rig.client.post(f"{server.url}/v1/completions", json=body).status_code in {200, 400, 500}
        assert rig.complete(server.url, PROMPT).tokens == rig.expected(PROMPT).tokens
    rig.assert_clean()
