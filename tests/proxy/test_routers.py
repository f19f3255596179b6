"""Routers that people have, unchanged and as processes of their own, between fake servers: what each leg is really sent.

What a router does otherwise than ours is written down here as it is, so that a newer version that behaves differently shows
up; docs/routers.md says what it means for who uses it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from fastapi import FastAPI, Response

from examples.pair import Role, Server, kv_transfer_config
from tests.proxy.fakes import DEADLINE_SECONDS, FakeServer, serving
from tests.proxy.recipes import DECODE_PORT, PREFILL_PORT, ROUTERS, TESTED_HERE, commands, running
from tests.proxy.test_proxy import CHAT, CLIENT_FIELDS, COMPLETIONS
from tests.support.waiting import wait_until
from vllm_mc2.protocol import Ticket
from vllm_mc2.ticket import TcpAddress, parse_address, parse_ticket, ticket_params

PROMPT: dict[str, Any] = {"model": "m", "prompt": [1, 2, 3]}
MESSAGES: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}
TICKET = ticket_params(Ticket.issue("ab" * 16, 5, 1, bytes(range(16))), "prefill-0", 2, TcpAddress("192.0.2.7", 7400))
ASKS_FOR_A_TICKET = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}

# vllm-router reads each request into a type of its own and writes that: what was left out has its default then.
DEFAULTS = {"stream": False, "ignore_eos": False, "skip_special_tokens": True}
ADDED: dict[tuple[str, str], dict[str, Any]] = {
    ("vllm-router", COMPLETIONS): {**DEFAULTS, "echo": False, "no_stop_trim": False, "return_hidden_states": False},
    ("vllm-router", CHAT): {
        **DEFAULTS,
        "continue_final_message": False,
        "include_reasoning": True,
        "logprobs": False,
        "no_stop_trim": False,
        "return_hidden_states": False,
        "separate_reasoning": True,
        "stream_reasoning": True,
    },
}
ROLES: list[Role] = ["kv_producer", "kv_consumer"]
MIN_TOKENS_OF_PREFILL = {"vllm-router": 1, "vLLM's toy proxy": None}
"""None: taken out, so that a first token that ends the answer ends the prefill leg with `stop`; our ticket comes anyway."""


class Engine(FakeServer):
    """Says that it is well, which routers ask before they send anything."""

    def app(self) -> FastAPI:
        app = super().app()
        app.add_api_route("/health", self.health, methods=["GET"], response_model=None)
        return app

    async def health(self) -> Response:
        return Response()


@dataclass
class Rig:
    """A router in front of one prefill and one decode."""

    router: str
    prefill: FakeServer
    decode: FakeServer
    server: Server

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return httpx.post(self.server.url + path, json=body, timeout=DEADLINE_SECONDS, trust_env=False)

    def sent(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The one body that each leg was sent."""
        (prefill,), (decode,) = self.prefill.seen, self.decode.seen
        return prefill.body, decode.body


@pytest.fixture(scope="module", params=TESTED_HERE)
def started(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with ExitStack() as stack:
        engines = Engine(), Engine()
        for engine in engines:
            engine.url = stack.enter_context(serving(engine.app()))
        ports = [urlsplit(engine.url).port or 0 for engine in engines]
        server = stack.enter_context(running(request.param, ports[0], ports[1], tmp_path_factory.mktemp("log")))
        yield Rig(request.param, *engines, server)


@pytest.fixture
def rig(started: Rig) -> Rig:
    started.prefill.reset(params=TICKET)
    started.decode.reset()
    started.decode.gate.set()
    return started


def same(sent: dict[str, Any], received: dict[str, Any]) -> bool:
    """Equal, but that vllm-router keeps fractions in 32 bits."""
    numbers = {key: value for key, value in sent.items() if isinstance(value, float)}
    others = {key: value for key, value in sent.items() if key not in numbers}
    return others == {key: value for key, value in received.items() if key not in numbers} and numbers == pytest.approx(
        {key: received.get(key, 0.0) for key in numbers}, rel=1e-6
    )


@pytest.mark.parametrize(("path", "prompt"), [(COMPLETIONS, PROMPT), (CHAT, MESSAGES)])
def test_the_ticket_arrives_as_prefill_gave_it(rig: Rig, path: str, prompt: dict[str, Any]) -> None:
    answer = rig.post(path, {**prompt, "max_tokens": 7})
    assert answer.status_code == 200 and answer.json()["choices"][0]["text"] == "hi"
    prefill, decode = rig.sent()
    assert prefill["kv_transfer_params"] == ASKS_FOR_A_TICKET
    assert decode["kv_transfer_params"] == TICKET
    assert parse_ticket(decode["kv_transfer_params"]).lease_id == (5, 1)
    assert parse_address(decode["kv_transfer_params"]) == TcpAddress("192.0.2.7", 7400)
    # Both engines are told one id; vllm-router's has the two addresses in it.
    ids = {seen.headers["x-request-id"] for seen in (*rig.prefill.seen, *rig.decode.seen)}
    assert len(ids) == 1
    if rig.router == "vllm-router":
        assert ids.pop().startswith(f"___prefill_addr_{rig.prefill.url.removeprefix('http://')}___decode_addr_")


@pytest.mark.parametrize(("path", "prompt"), [(COMPLETIONS, PROMPT), (CHAT, MESSAGES)])
@pytest.mark.parametrize("fields", CLIENT_FIELDS, ids=lambda fields: "+".join(fields) or "none")
def test_each_leg_gets_its_sampling_fields(rig: Rig, path: str, prompt: dict[str, Any], fields: dict[str, Any]) -> None:
    if rig.router == "vllm-router" and path == CHAT and ("tools" in fields or "prompt_logprobs" in fields):
        # No `parameters` of a function, a number of `logprobs`: this router's own types refuse them, before any leg.
        assert rig.post(path, {**prompt, **fields}).status_code == 422
        assert rig.prefill.seen == rig.decode.seen == []
        return
    request = {**prompt, **fields}
    assert rig.post(path, request).status_code == 200
    prefill, decode = rig.sent()
    client = {key: value for key, value in request.items() if value is not None or rig.router != "vllm-router"}
    added = ADDED.get((rig.router, path), {})
    assert same({**added, **client, "kv_transfer_params": TICKET}, decode)

    expected = {**added, **client, "stream": False, "max_tokens": 1, "kv_transfer_params": ASKS_FOR_A_TICKET}
    expected.pop("stream_options", None)
    if "max_completion_tokens" in expected:
        expected["max_completion_tokens"] = 1
    expected["min_tokens"] = MIN_TOKENS_OF_PREFILL[rig.router]
    if expected["min_tokens"] is None:
        del expected["min_tokens"]
    assert same(expected, prefill)
    # Neither makes it one: prefill then answers with n choices, and issues as many tickets of which one is used.
    assert prefill.get("n") == fields.get("n")


@pytest.mark.parametrize(("path", "prompt"), [(COMPLETIONS, PROMPT), (CHAT, MESSAGES)])
def test_a_stream_arrives_as_it_comes(rig: Rig, path: str, prompt: dict[str, Any]) -> None:
    rig.decode.gate.clear()
    body = {**prompt, "stream": True, "stream_options": {"include_usage": True}}
    url = rig.server.url + path
    with httpx.stream("POST", url, json=body, timeout=DEADLINE_SECONDS, trust_env=False) as answer:
        kind = {"vllm-router": "text/event-stream", "vLLM's toy proxy": "application/json"}[rig.router]
        assert answer.headers["content-type"].startswith(kind)
        parts = answer.iter_bytes()
        assert next(parts) == rig.decode.chunks[0]
        rig.decode.gate.set()
        assert b"".join(parts) == b"".join(rig.decode.chunks[1:])


def test_decode_hears_of_a_client_that_leaves(rig: Rig) -> None:
    rig.decode.gate.clear()
    body = {**PROMPT, "stream": True}
    url = rig.server.url + COMPLETIONS
    with httpx.stream("POST", url, json=body, timeout=DEADLINE_SECONDS, trust_env=False) as answer:
        assert next(answer.iter_bytes())
    wait_until(rig.decode.left.is_set)


def test_without_a_ticket_decode_computes(rig: Rig) -> None:
    """Our prefill gives none when it has none to give."""
    rig.prefill.params = None
    assert rig.post(COMPLETIONS, PROMPT).status_code == 200
    assert rig.sent()[1].get("kv_transfer_params") is None


@pytest.mark.parametrize("status", [400, 500])
def test_what_prefill_refuses_never_reaches_decode(rig: Rig, status: int) -> None:
    rig.prefill.status, rig.prefill.error = status, {"error": "no"}
    answer = rig.post(COMPLETIONS, PROMPT)
    assert answer.status_code == (status if rig.router == "vllm-router" else 500)
    assert len(rig.prefill.seen) == 1 and rig.decode.seen == []
    rig.prefill.status = 200
    assert rig.post(COMPLETIONS, PROMPT).status_code == 200, "the next one is served"


@pytest.mark.parametrize("status", [400, 500])
def test_what_decode_refuses(rig: Rig, status: int) -> None:
    """So do tickets that cannot be used, where `kv_load_failure_policy` is `fail`."""
    rig.decode.status, rig.decode.error = status, {"error": "no"}
    if rig.router == "vllm-router":
        answer = rig.post(COMPLETIONS, PROMPT)
        assert (answer.status_code, answer.json()) == (status, {"error": "no"})
    else:
        # It has said 200 before it asks decode: the client sees a body that breaks off, and no reason.
        with pytest.raises(httpx.RemoteProtocolError):
            rig.post(COMPLETIONS, PROMPT)
    rig.decode.status = 200
    assert rig.post(COMPLETIONS, PROMPT).status_code == 200, "the next one is served"
    assert len(rig.prefill.seen) == 2, "and nobody tried the refused one again"


@pytest.mark.parametrize("heading", sorted(set(ROUTERS) - set(TESTED_HERE)))
def test_the_other_commands_of_the_document_carry_tickets_too(heading: str, tmp_path: Path) -> None:
    """Routers with tests of their own, which start them by other means."""
    with ExitStack() as stack:
        prefill, decode = Engine(params=TICKET), Engine()
        for engine in (prefill, decode):
            engine.url = stack.enter_context(serving(engine.app()))
        ports = [urlsplit(engine.url).port or 0 for engine in (prefill, decode)]
        server = stack.enter_context(running(heading, ports[0], ports[1], tmp_path))
        rig = Rig(heading, prefill, decode, server)
        assert rig.post(COMPLETIONS, {**PROMPT, "max_tokens": 7}).status_code == 200
        assert rig.sent()[1]["kv_transfer_params"] == TICKET


def test_the_pair_of_the_document_is_that_of_the_tests() -> None:
    """But for the model, the ports, and a socket directory of the tests' own."""
    servers = commands("The pair")
    assert [words[words.index("--port") + 1] for words in servers] == [str(PREFILL_PORT), str(DECODE_PORT)]
    for words, role in zip(servers, ROLES, strict=True):
        settings = json.loads(words[words.index("--kv-transfer-config") + 1])
        # The policy is vLLM's own default.
        assert {**settings, "kv_load_failure_policy": "fail", "kv_connector_extra_config": {}} == json.loads(
            kv_transfer_config(role, policy="fail")
        )
