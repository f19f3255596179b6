"""Stand-ins for vLLM servers, and the proxy, on real loopback sockets inside this process."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from tests.support.waiting import wait_until

DEADLINE_SECONDS = 60.0

TICKET = {"do_remote_prefill": True, "remote_engine_id": "P", "mc2_ticket": "00" * 16}


@dataclass
class Seen:
    """One request as a fake server received it."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]


@dataclass
class FakeServer:
    """A server that records what it is sent and answers as its fields say."""

    params: Any = None
    status: int = 200
    error: Any = None
    hang: bool = False
    break_off: bool = False
    chunks: list[bytes] = field(default_factory=lambda: [b"data: one\n\n", b"data: [DONE]\n\n"])
    seen: list[Seen] = field(default_factory=list)
    url: str = ""
    # Chunks after the first wait for this.
    gate: threading.Event = field(default_factory=threading.Event)
    # Set when a client closed its connection during `hang`, or between two chunks.
    left: threading.Event = field(default_factory=threading.Event)

    def reset(self, params: Any = None) -> None:
        """Forget the last test; the server goes on."""
        vars(self).update(vars(FakeServer(params=params, url=self.url)))

    def app(self) -> FastAPI:
        app = FastAPI()
        app.add_api_route("/v1/completions", self.answer, methods=["POST"], response_model=None)
        app.add_api_route("/v1/chat/completions", self.answer, methods=["POST"], response_model=None)
        app.add_api_route("/v1/models", self.models, methods=["GET"])
        return app

    async def models(self) -> dict[str, Any]:
        return {"object": "list", "data": [{"id": "fake", "url": self.url}]}

    async def answer(self, request: Request) -> Response:
        body = json.loads(await request.body())
        self.seen.append(Seen(request.url.path, dict(request.headers), body))
        if self.hang:
            await self.until_left(request)
        if self.status != 200:
            return JSONResponse(self.error, status_code=self.status)
        if body.get("stream"):
            return StreamingResponse(self.stream(), media_type="text/event-stream")
        return JSONResponse({"choices": [{"text": "hi"}], "kv_transfer_params": self.params})

    async def until_left(self, request: Request) -> None:
        while not await request.is_disconnected():
            await asyncio.sleep(0.01)
        self.left.set()

    async def stream(self) -> AsyncIterator[bytes]:
        yield self.chunks[0]
        try:
            while not self.gate.is_set():
                await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            # Starlette cancels a stream whose client has left.
            self.left.set()
            raise
        if self.break_off:
            raise ConnectionError("the fake server breaks off, as it was told to")
        for chunk in self.chunks[1:]:
            yield chunk


@contextmanager
def serving(app: FastAPI) -> Iterator[str]:
    """Run `app` in a thread; yields its URL."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="critical"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        wait_until(lambda: server.started)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(DEADLINE_SECONDS)
        assert not thread.is_alive(), "a server did not end"


EOS = "</s>"


@dataclass
class RuledServer(FakeServer):
    """A server whose answers follow the request's fields as vLLM's do (0.32: `check_stop` and the API's validators).

    Its model says `tokens`, whatever the prompt. As strict as can be about tickets: only an answer that ends by length, with
    one token, has one; real vLLM also gives it to some others.
    """

    tokens: list[str] = field(default_factory=lambda: ["Hi", " to", " you", EOS])
    endings: list[str] = field(default_factory=list)
    """How each answer ended, in the order of the requests."""

    def reset(self, params: Any = None, tokens: list[str] | None = None) -> None:
        fresh = RuledServer(params=params, url=self.url)
        vars(self).update({**vars(fresh), "tokens": tokens or fresh.tokens})

    async def answer(self, request: Request) -> Response:
        body = json.loads(await request.body())
        self.seen.append(Seen(request.url.path, dict(request.headers), body))
        is_chat = request.url.path.endswith("/chat/completions")
        problem = self.problem_of(body, is_chat)
        if problem is not None:
            return JSONResponse({"error": {"message": problem, "code": 400}}, status_code=400)
        text, count, reason = self.generate(body, is_chat)
        self.endings.append(reason)
        count *= body.get("n") or 1
        usage = {"prompt_tokens": 3, "completion_tokens": count, "total_tokens": 3 + count}
        choices = [
            {"index": index, "finish_reason": reason, **({"message": {"content": text}} if is_chat else {"text": text})}
            for index in range(body.get("n") or 1)
        ]
        if body.get("stream"):
            return StreamingResponse(self.events(choices, usage, body), media_type="text/event-stream")
        is_asked = (body.get("kv_transfer_params") or {}).get("do_remote_decode") is True
        params = self.params if is_asked and reason == "length" and count == 1 else None
        return JSONResponse({"choices": choices, "usage": usage, "kv_transfer_params": params})

    def limit_of(self, body: dict[str, Any], is_chat: bool) -> int:
        """The most tokens that it may say."""
        limit = body.get("max_tokens", None if is_chat else 16)
        if is_chat and body.get("max_completion_tokens") is not None:
            limit = body["max_completion_tokens"]
        return 1000 if limit is None else limit

    def problem_of(self, body: dict[str, Any], is_chat: bool) -> str | None:
        """What vLLM answers with a 400."""
        limit = self.limit_of(body, is_chat)
        if limit < 1:
            return f"max_tokens must be at least 1, got {limit}."
        if (body.get("min_tokens") or 0) > limit:
            return f"min_tokens must be less than or equal to max_tokens={limit}"
        if body.get("stream_options") is not None and not body.get("stream"):
            return "Stream options can only be defined when `stream=True`."
        if is_chat and body.get("top_logprobs") and not body.get("logprobs"):
            return "when using `top_logprobs`, `logprobs` must be set to true."
        if is_chat and body.get("logprob_token_ids") and not body.get("logprobs"):
            return "when using `logprob_token_ids`, `logprobs` must be set to true."
        if (body.get("n") or 1) > 1 and body.get("temperature") == 0:
            return "n must be 1 when using greedy sampling"
        return None

    def generate(self, body: dict[str, Any], is_chat: bool) -> tuple[str, int, str]:
        """`(text, number of tokens, finish_reason)` of one choice."""
        limit, least = self.limit_of(body, is_chat), body.get("min_tokens") or 0
        stop = body.get("stop") or []
        stop = [stop] if isinstance(stop, str) else stop
        text = ""
        for count in range(1, limit + 1):
            token = self.tokens[min(count, len(self.tokens)) - 1]
            if token == EOS and count > least and not body.get("ignore_eos"):
                return text, count, "stop"
            text += "" if token == EOS else token
            if count > least and any(word in text for word in stop):
                return text[: min(text.index(word) for word in stop if word in text)], count, "stop"
            if count > least and count in (body.get("stop_token_ids") or []):  # the n-th token has the id n
                return text, count, "stop"
        return text, limit, "length"

    async def events(
        self, choices: list[dict[str, Any]], usage: dict[str, int], body: dict[str, Any]
    ) -> AsyncIterator[bytes]:
        """An answer as a stream: one event for each choice, the usage if it is wanted, and the marker of the end."""
        for choice in choices:
            yield b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"
            await asyncio.sleep(0)
        if (body.get("stream_options") or {}).get("include_usage"):
            yield b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n"
        yield b"data: [DONE]\n\n"
