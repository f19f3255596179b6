"""Stand-ins for vLLM servers, and the proxy, on real loopback sockets inside this process."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

DEADLINE_SECONDS = 20.0

TICKET = {"do_remote_prefill": True, "remote_engine_id": "P", "mc2_ticket": "00" * 16}


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until `condition()` holds; fail after a generous while."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "condition not reached"
        time.sleep(0.01)


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
        wait_for(lambda: server.started)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(DEADLINE_SECONDS)
        assert not thread.is_alive(), "a server did not end"
