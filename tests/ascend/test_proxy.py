"""vllm-ascend's example proxy, unchanged and as a process of its own, between fake servers that answer as our engines do."""

import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import Request, Response

from tests.ascend.vllm_ascend_source import source
from tests.proxy.fakes import DEADLINE_SECONDS, FakeServer, serving
from tests.support.ports import own_ports
from tests.support.waiting import wait_until
from vllm_mc2.protocol import Ticket
from vllm_mc2.ticket import TICKET_KEY, TcpAddress, parse_address, parse_ticket, ticket_params

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
PROMPT = {"model": "m", "prompt": "Hello", "max_tokens": 7}
MESSAGES = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "max_completion_tokens": 7}
RETRIES = 2
FIRST_SLOT = 5


def ticket_of(slot: int) -> dict[str, Any]:
    ticket = Ticket.issue("ab" * 16, slot, 1, bytes(range(16)))
    return ticket_params(ticket, "prefill-0", 2, TcpAddress("192.0.2.7", 7400))


class Prefill(FakeServer):
    """Gives every request another ticket."""

    async def answer(self, request: Request) -> Response:
        if self.params is not None:
            self.params = ticket_of(FIRST_SLOT + len(self.seen))
        return await super().answer(request)


@dataclass
class Decode(FakeServer):
    """Says in the first ``num_recomputed`` streams that it had to give up the request's blocks."""

    num_recomputed: int = 0
    served: list[int] = field(default_factory=list)

    async def stream(self) -> AsyncIterator[bytes]:
        self.served.append(1)
        if len(self.served) <= self.num_recomputed:
            chunk = {"choices": [{"text": " wor", "stop_reason": "recomputed"}]}
            yield b"data: " + json.dumps(chunk).encode() + b"\n\n"
            return
        async for part in super().stream():
            yield part


@dataclass
class Rig:
    """The proxy in front of one prefill and one decode."""

    prefill: FakeServer
    decode: Decode
    url: str

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=DEADLINE_SECONDS)


def host_arguments(kind: str, url: str) -> list[str]:
    host, port = url.removeprefix("http://").split(":")
    return [f"--{kind}-hosts", host, f"--{kind}-ports", port]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    script = source() / "examples" / "disaggregated_prefill_v1" / "load_balance_proxy_server_example.py"
    output = tmp_path_factory.mktemp("proxy") / "output"
    with ExitStack() as stack:
        prefill, decode = Prefill(), Decode()
        for fake in (prefill, decode):
            fake.url = stack.enter_context(serving(fake.app()))
        (port,) = stack.enter_context(own_ports(1))
        command = [
            sys.executable, str(script), "--host", "127.0.0.1", "--port", str(port), "--max-retries", str(RETRIES),
            *host_arguments("prefiller", prefill.url), *host_arguments("decoder", decode.url),
        ]  # fmt: skip
        with output.open("w") as file:
            process = subprocess.Popen(command, cwd=output.parent, stdout=file, stderr=subprocess.STDOUT)
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until_healthy(url, process, output)
            yield Rig(prefill, decode, url)
        finally:
            process.terminate()
            process.wait(DEADLINE_SECONDS)


def wait_until_healthy(url: str, process: "subprocess.Popen[bytes]", output: Path) -> None:
    deadline = time.monotonic() + 3 * DEADLINE_SECONDS
    while True:
        assert process.poll() is None and time.monotonic() < deadline, output.read_text()
        try:
            if httpx.get(url + "/healthcheck", timeout=DEADLINE_SECONDS).json()["status"] == "ok":
                return
        except httpx.TransportError:
            time.sleep(0.05)


@pytest.fixture
def rig(running: Rig) -> Rig:
    running.prefill.reset(params=ticket_of(FIRST_SLOT))
    running.decode.reset()
    running.decode.num_recomputed = 0
    running.decode.served.clear()
    running.decode.gate.set()
    return running


def check_prefill(body: dict[str, Any]) -> None:
    """What makes our prefill issue a ticket."""
    params = body["kv_transfer_params"]
    assert params["do_remote_decode"] is True and params["do_remote_prefill"] is False
    assert TICKET_KEY not in params
    assert body["stream"] is False and body["max_tokens"] == 1 and "stream_options" not in body


@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, PROMPT), (CHAT, MESSAGES)])
def test_ticket_arrives_unchanged(path: str, body: dict[str, Any], rig: Rig) -> None:
    answer = rig.post(path, body)
    assert answer.status_code == 200 and answer.json()["choices"][0]["text"] == "hi"
    (prefill,), (decode,) = rig.prefill.seen, rig.decode.seen
    assert (prefill.path, decode.path) == (path, path)
    check_prefill(prefill.body)
    if path == CHAT:
        assert prefill.body["max_completion_tokens"] == 1
    assert decode.body == {**body, "kv_transfer_params": ticket_of(5)}
    assert parse_ticket(decode.body["kv_transfer_params"]).lease_id == (5, 1)
    assert parse_address(decode.body["kv_transfer_params"]) == TcpAddress("192.0.2.7", 7400)
    assert prefill.headers["x-request-id"] == decode.headers["x-request-id"]


@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, PROMPT), (CHAT, MESSAGES)])
def test_stream_arrives_as_it_comes(path: str, body: dict[str, Any], rig: Rig) -> None:
    rig.decode.gate.clear()
    wanted = {**body, "stream": True, "stream_options": {"include_usage": True}}
    with httpx.stream("POST", rig.url + path, json=wanted, timeout=DEADLINE_SECONDS) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        parts = answer.iter_bytes()
        assert next(parts) == rig.decode.chunks[0]
        rig.decode.gate.set()
        assert b"".join(parts) == rig.decode.chunks[1]
    check_prefill(rig.prefill.seen[0].body)
    assert rig.decode.seen[0].body == {**wanted, "kv_transfer_params": ticket_of(5)}


def test_decode_hears_of_a_client_that_leaves(rig: Rig) -> None:
    rig.decode.gate.clear()
    with httpx.stream(
        "POST", rig.url + COMPLETIONS, json={**PROMPT, "stream": True}, timeout=DEADLINE_SECONDS
    ) as answer:
        assert next(answer.iter_bytes())
    wait_until(rig.decode.left.is_set)


def test_without_a_ticket_decode_computes(rig: Rig) -> None:
    """Our prefill gives none when it has none to give."""
    rig.prefill.params = None
    assert rig.post(COMPLETIONS, PROMPT).status_code == 200
    assert rig.decode.seen[0].body == PROMPT


def test_a_failed_prefill_fails_the_request(rig: Rig) -> None:
    rig.prefill.status, rig.prefill.error = 500, {"error": "no memory"}
    assert rig.post(COMPLETIONS, PROMPT).status_code == 500
    assert len(rig.prefill.seen) == RETRIES and rig.decode.seen == []
    rig.prefill.status = 200
    assert rig.post(COMPLETIONS, PROMPT).status_code == 200, "the next one is served"


def test_a_request_that_decode_gave_up_is_prefilled_anew(rig: Rig) -> None:
    """Its scheduler (recompute_scheduler_enable) ends it; the proxy continues with what was generated, and a new ticket."""
    rig.decode.num_recomputed = 1
    answer = rig.post(COMPLETIONS, {**PROMPT, "stream": True})
    assert answer.status_code == 200 and answer.content == b"".join(rig.decode.chunks)
    assert [seen.body["prompt"] for seen in rig.prefill.seen] == ["Hello", "Hello wor"]
    for seen in rig.prefill.seen:
        check_prefill(seen.body)
    assert [seen.body["kv_transfer_params"] for seen in rig.decode.seen] == [ticket_of(5), ticket_of(6)]
