"""The example proxy between fake servers: what each leg is sent, and what the client gets."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from examples import proxy
from tests.support.waiting import wait_until

from .fakes import DEADLINE_SECONDS, TICKET, FakeServer, serving

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
PROMPT = {"model": "m", "prompt": "Hello"}
MESSAGES = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}


@dataclass
class Rig:
    """A proxy in front of two prefill and two decode servers."""

    prefills: list[FakeServer]
    decodes: list[FakeServer]
    url: str

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return httpx.post(self.url + path, content=data, headers=headers, timeout=DEADLINE_SECONDS)

    def sent(self, kind: str) -> list[dict[str, Any]]:
        fakes = self.prefills if kind == "prefill" else self.decodes
        return [seen.body for fake in fakes for seen in fake.seen]


@pytest.fixture(scope="module")
def fakes() -> Iterator[list[FakeServer]]:
    """Four servers for all tests of this file: starting them takes longer than most tests."""
    with ExitStack() as stack:
        servers = [FakeServer() for _ in range(4)]
        for fake in servers:
            fake.url = stack.enter_context(serving(fake.app()))
        yield servers


@pytest.fixture
def rig(fakes: list[FakeServer]) -> Iterator[Rig]:
    prefills, decodes = fakes[:2], fakes[2:]
    for fake in prefills:
        fake.reset(params=dict(TICKET))
    for fake in decodes:
        fake.reset()
    urls = [fake.url for fake in prefills], [fake.url for fake in decodes]
    between = proxy.Proxy(*urls, max_body_bytes=100_000)
    with serving(proxy.build_app(between)) as url:
        yield Rig(prefills, decodes, url)


def test_ticket_travels_from_prefill_to_decode(rig: Rig) -> None:
    answer = rig.post(COMPLETIONS, PROMPT)
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["text"] == "hi"
    (prefill,), (decode,) = rig.sent("prefill"), rig.sent("decode")
    assert prefill["kv_transfer_params"] == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
    assert decode == {**PROMPT, "kv_transfer_params": TICKET}


# What a client may send beside its prompt (field-evidence: every one of these broke some proxy).
CLIENT_FIELDS: list[dict[str, Any]] = [
    {"min_tokens": 100, "max_tokens": 200},
    {},
    {"max_tokens": 1},
    {"max_tokens": 0},
    {"max_tokens": None},
    {"max_completion_tokens": 7},
    {"max_completion_tokens": 7, "max_tokens": 9},
    {"stop": ["H"], "stop_token_ids": [2], "include_stop_str_in_output": True},
    {"ignore_eos": False},
    {"stream_options": {"include_usage": True}, "stream": True},
    {"response_format": {"type": "json_object"}},
    {"seed": 5, "temperature": 0.7, "presence_penalty": 0.5, "frequency_penalty": 0.1},
    {"n": 3, "best_of": 3},
    {"logprobs": 2, "top_logprobs": 2, "prompt_logprobs": 1, "echo": True},
    {"use_beam_search": True, "n": 2},
    {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "auto"},
    {"truncate_prompt_tokens": 5, "add_special_tokens": False, "cache_salt": "s"},
    {"vllm_xargs": {"a": 1}, "unknown_field": [1, {"x": None}]},
]
ENDS_OTHERWISE = {
    *("best_of", "echo", "logprobs", "min_tokens", "prompt_logprobs", "stop", "stop_token_ids"),
    *("include_stop_str_in_output", "stream_options", "top_logprobs", "use_beam_search"),
}


@pytest.mark.parametrize("path, prompt", [(COMPLETIONS, PROMPT), (CHAT, MESSAGES)])
@pytest.mark.parametrize("fields", CLIENT_FIELDS, ids=lambda fields: "+".join(fields) or "none")
def test_each_leg_gets_its_sampling_fields(rig: Rig, path: str, prompt: dict[str, Any], fields: dict[str, Any]) -> None:
    rig.decodes[0].gate.set()
    request = {**prompt, **fields}
    assert rig.post(path, request).status_code == 200
    (prefill,), (decode,) = rig.sent("prefill"), rig.sent("decode")

    # Decode: the client's request, to the letter.
    assert decode == {**request, "kv_transfer_params": TICKET}
    # Prefill: always one token, always ended by length, never streamed ...
    assert (prefill["max_tokens"], prefill["n"]) == (1, 1)
    assert prefill["stream"] is False
    assert prefill["ignore_eos"] is True
    assert prefill.get("max_completion_tokens") == (1 if path == CHAT else None)
    assert not ENDS_OTHERWISE & set(prefill)
    # ... and whatever else the client said, for it may shape the prompt.
    fixed = {"max_tokens", "max_completion_tokens", "n", "stream", "ignore_eos"}
    for name in set(request) - fixed - ENDS_OTHERWISE:
        assert prefill[name] == request[name]


def test_without_a_ticket_decode_gets_the_request_alone(rig: Rig) -> None:
    cases: list[Any] = [None, {}, "garbled", ["garbled"]]
    for params in cases:
        rig.prefills[0].params = rig.prefills[1].params = params
        assert rig.post(COMPLETIONS, PROMPT).status_code == 200
    assert rig.sent("decode") == [PROMPT] * 4


@pytest.mark.parametrize("prompt, legs", [(["a", "b"], 0), ([[1], [2]], 0), (["a"], 1), ([1, 2, 3], 1), ([[1, 2]], 1)])
def test_several_prompts_go_to_decode_only(rig: Rig, prompt: list[Any], legs: int) -> None:
    assert rig.post(COMPLETIONS, {"model": "m", "prompt": prompt}).status_code == 200
    assert len(rig.sent("prefill")) == legs
    assert rig.sent("decode")[0].get("kv_transfer_params") == (TICKET if legs else None)


def test_both_legs_share_request_id_and_authorization(rig: Rig) -> None:
    headers = {"X-Request-Id": "a:b.c-1", "Authorization": "Bearer s3cret", "Cookie": "private"}
    answer = rig.post(COMPLETIONS, PROMPT, **headers)
    assert answer.headers["x-request-id"] == "a:b.c-1"
    for fake in (rig.prefills[0], rig.decodes[0]):
        assert fake.seen[0].headers["x-request-id"] == "a:b.c-1"
        assert fake.seen[0].headers["authorization"] == "Bearer s3cret"
        assert "cookie" not in fake.seen[0].headers
    assert float(answer.headers["x-mc2-prefill-ms"]) > 0
    assert float(answer.headers["x-mc2-decode-first-byte-ms"]) > 0


def test_a_request_id_is_made_when_the_client_has_none(rig: Rig) -> None:
    made = {rig.post(COMPLETIONS, PROMPT).headers["x-request-id"] for _ in range(2)}
    assert len(made) == 2
    for kind in (rig.prefills, rig.decodes):
        assert {fake.seen[0].headers["x-request-id"] for fake in kind} == made


def test_servers_take_turns(rig: Rig) -> None:
    for _ in range(4):
        rig.post(COMPLETIONS, PROMPT)
    assert [len(fake.seen) for fake in (*rig.prefills, *rig.decodes)] == [2, 2, 2, 2]


def test_models_and_health(rig: Rig) -> None:
    assert httpx.get(rig.url + "/v1/models").json()["data"][0]["url"] == rig.decodes[0].url
    assert httpx.get(rig.url + "/health").status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        {**PROMPT, "kv_transfer_params": dict(TICKET)},
        {**PROMPT, "vllm_xargs": {"kv_transfer_params": "x"}},
        [PROMPT],
        b"{not json",
        b"\xff\xfe",
        b"[" * 50_000,
        b"",
    ],
)
def test_bad_requests_reach_no_server(rig: Rig, body: Any) -> None:
    answer = rig.post(COMPLETIONS, body)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert rig.sent("prefill") == rig.sent("decode") == []


def test_null_params_are_taken_out(rig: Rig) -> None:
    rig.prefills[0].params = None
    assert rig.post(COMPLETIONS, {**PROMPT, "kv_transfer_params": None}).status_code == 200
    assert rig.sent("decode") == [PROMPT]


def test_odd_json_is_passed_on_as_it_came(rig: Rig) -> None:
    assert rig.post(COMPLETIONS, b'{"prompt": "\\ud800 \\u00e9", "x": 1e400}').status_code == 200
    assert rig.sent("decode")[0]["prompt"] == "\ud800 \u00e9"


def test_a_request_id_that_is_no_header_is_refused(rig: Rig) -> None:
    assert rig.post(COMPLETIONS, PROMPT, **{"X-Request-Id": "x" * 257}).status_code == 400


def test_a_body_beyond_the_limit_is_refused(rig: Rig) -> None:
    answer = rig.post(COMPLETIONS, {**PROMPT, "prompt": "x" * 100_000})
    assert answer.status_code == 413
    assert "100000" in answer.json()["error"]["message"]


@pytest.mark.parametrize("kind", ["prefill", "decode"])
@pytest.mark.parametrize("status", [400, 401, 404, 429, 500, 503])
@pytest.mark.parametrize("stream", [False, True])
def test_errors_keep_their_status_and_body(rig: Rig, kind: str, status: int, stream: bool) -> None:
    fake = (rig.prefills if kind == "prefill" else rig.decodes)[0]
    fake.status, fake.error = status, {"error": {"message": f"{kind} says no", "code": status}}
    answer = rig.post(COMPLETIONS, {**PROMPT, "stream": stream})
    assert answer.status_code == status
    assert answer.json() == fake.error
    assert answer.headers["content-type"] == "application/json"
    clients_own = [body for body in rig.sent("decode") if "max_tokens" not in body]  # not the one that settles a ticket
    assert len(clients_own) == (kind == "decode")


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_an_unreachable_server_is_named(rig: Rig, kind: str) -> None:
    with socket.socket() as reserved:
        # Bound but not listening: nobody else can answer there.
        reserved.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{reserved.getsockname()[1]}"
        prefill = dead if kind == "prefill" else rig.prefills[0].url
        decode = dead if kind == "decode" else rig.decodes[0].url
        with serving(proxy.build_app(proxy.Proxy([prefill], [decode]))) as url:
            answer = httpx.post(url + COMPLETIONS, json=PROMPT, timeout=DEADLINE_SECONDS)
    assert answer.status_code == 503
    assert answer.json()["error"]["message"].startswith(f"{kind} server: cannot connect")
    assert answer.json()["error"]["type"] == "upstream_error"


@pytest.mark.parametrize("path, prompt", [(COMPLETIONS, PROMPT), (CHAT, MESSAGES)])
def test_chunks_are_passed_on_as_they_come(rig: Rig, path: str, prompt: dict[str, Any]) -> None:
    decode = rig.decodes[0]
    request = {**prompt, "stream": True}
    with httpx.stream("POST", rig.url + path, json=request, timeout=DEADLINE_SECONDS) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        chunks = answer.iter_raw()
        # The fake server holds its second chunk back until the first one was seen here.
        assert next(chunks) == decode.chunks[0]
        decode.gate.set()
        assert b"".join(chunks) == decode.chunks[1]


def test_an_answer_broken_off_is_not_ended_properly(rig: Rig) -> None:
    rig.decodes[0].break_off = True
    rig.decodes[0].gate.set()
    request = {**PROMPT, "stream": True}
    with (
        pytest.raises(httpx.RemoteProtocolError),
        httpx.stream("POST", rig.url + COMPLETIONS, json=request, timeout=DEADLINE_SECONDS) as up,
    ):
        up.read()
    assert rig.post(COMPLETIONS, PROMPT).status_code == 200


@pytest.mark.parametrize("kind", ["prefill", "decode"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_takes_the_leg_with_it(rig: Rig, kind: str, stream: bool) -> None:
    fake = (rig.prefills if kind == "prefill" else rig.decodes)[0]
    fake.hang = True
    leave_after(rig, {**PROMPT, "stream": stream}, lambda: bool(fake.seen))
    assert fake.left.wait(DEADLINE_SECONDS)
    assert len(rig.sent("decode")) == (kind == "decode")
    # The proxy is none the worse for it.
    fake.hang = False
    rig.decodes[1].gate.set()
    assert rig.post(COMPLETIONS, PROMPT).status_code == 200


def test_a_client_that_leaves_between_chunks_ends_the_stream(rig: Rig) -> None:
    decode = rig.decodes[0]
    request = {**PROMPT, "stream": True}
    with httpx.stream("POST", rig.url + COMPLETIONS, json=request) as answer:
        assert next(answer.iter_raw()) == decode.chunks[0]
    assert decode.left.wait(DEADLINE_SECONDS)


def leave_after(rig: Rig, body: dict[str, Any], condition: Any) -> None:
    """Send a request, and close the connection once `condition()` holds."""
    data = json.dumps(body).encode()
    host, port = rig.url.removeprefix("http://").split(":")
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(data)}\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=DEADLINE_SECONDS) as connection:
        connection.sendall(head.encode() + data)
        wait_until(condition)


@pytest.mark.parametrize("stream", [False, True])
def test_a_ticket_that_decode_refuses_is_settled(rig: Rig, stream: bool) -> None:
    """Decode says 400 to what the client asked; it must still get the ticket in a form that it takes."""
    decode = rig.decodes[0]
    decode.status, decode.error = 400, {"error": {"message": "n must be 1 when using greedy sampling"}}
    answer = rig.post(COMPLETIONS, {**PROMPT, "n": 3, "temperature": 0, "stream": stream})
    assert answer.status_code == 400
    wait_until(lambda: sum(len(server.seen) for server in rig.decodes) == 2)
    (settled,) = [seen for server in rig.decodes for seen in server.seen if seen.body.get("n") == 1]
    assert settled.body["kv_transfer_params"] == TICKET
    assert (settled.body["max_tokens"], settled.body["stream"]) == (1, False)


def test_a_ticket_that_never_reached_its_decode_is_settled_by_another(fakes: list[FakeServer]) -> None:
    prefill, decode = fakes[0], fakes[1]
    prefill.reset(params=dict(TICKET))
    decode.reset()
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        between = proxy.Proxy([prefill.url], [dead, decode.url])
        with serving(proxy.build_app(between)) as url:
            answer = httpx.post(url + COMPLETIONS, json=PROMPT, timeout=DEADLINE_SECONDS)
            assert answer.status_code == 503
            wait_until(lambda: len(decode.seen) == 1)
    assert decode.seen[0].body["kv_transfer_params"] == TICKET
    assert decode.seen[0].body["max_tokens"] == 1


def test_what_decode_has_taken_is_not_settled(rig: Rig) -> None:
    assert rig.post(COMPLETIONS, PROMPT).status_code == 200
    rig.decodes[1].status, rig.decodes[1].error = 500, {"error": {"message": "load failed"}}
    assert rig.post(COMPLETIONS, PROMPT).status_code == 500
    time.sleep(0.3)
    assert len(rig.sent("decode")) == 2
