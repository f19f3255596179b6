"""An HTTP proxy that lets prefill and decode servers answer one request together.

    python examples/proxy.py --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200

It speaks the OpenAI routes /v1/completions and /v1/chat/completions. A request goes to a prefill server
first, for one token that nobody reads; what comes back in `kv_transfer_params` (the ticket) is put into
the client's own request, which then goes to a decode server, whose answer reaches the client byte by
byte. Several servers of a kind take turns.
* The prefill leg is a copy of the request, changed so that it always ends by length, with a ticket. What
  shapes the prompt (messages, tools, response_format, truncation, ...) stays.
* The decode leg is the client's request with the ticket added, nothing else.
* A client that goes away takes the leg under way with it: its connection is closed.
* The answer starts only with decode's first byte, so an error before it keeps its own status.
* A ticket that decode refuses (a 400, say), or that never reaches it, would keep prefill's blocks until its offer ends. It is
  settled instead: the prompt goes to a decode once more, for one token that nobody reads, which ends the lease.
* `kv_transfer_params` from a client are refused: they are between the servers.
* A completions request with several prompts skips the prefill leg: one ticket fits one prompt.

Answers carry `x-request-id`, `x-mc2-prefill-ms` (whole prefill leg) and `x-mc2-decode-first-byte-ms`
(decode's time to first token if the client streams).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import logging
import re
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import httpx
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.types import Receive, Scope, Send

logger = logging.getLogger("mc2.proxy")

Leg = Literal["prefill", "decode"]
Body = dict[str, Any]
T = TypeVar("T")

MAX_BODY_BYTES = 32 << 20
MAX_TICKET_ANSWER_BYTES = 4 << 20
CONNECT_SECONDS = 10.0
# Decode's word on this request's fields; other errors (401, 429, ...) would meet the settling request too.
REFUSES_THE_REQUEST = {400, 413, 422}
SETTLE_SECONDS = 60.0
MAX_SETTLING = 64
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,256}")
CLIENT_GONE_STATUS = 499

# The values that ask a prefill server for a ticket, as other routers send them.
ASK_FOR_TICKET: Mapping[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
# Fields that could end the one-token answer otherwise than by length, that vLLM refuses beside
# max_tokens 1, or that only make it larger. None of them shapes the prompt.
NOT_FOR_PREFILL = {
    *("best_of", "echo", "logprob_token_ids", "logprobs", "min_tokens", "prompt_logprobs", "top_logprobs"),
    *("include_stop_str_in_output", "repetition_detection", "stop", "stop_token_ids"),
    *("return_token_ids", "return_tokens_as_token_ids", "stream_options"),
    *("thinking_token_budget", "use_beam_search"),
}
FORWARDED_REQUEST_HEADERS = ("authorization", "traceparent", "tracestate")
FORWARDED_ANSWER_HEADERS = ("content-type", "content-length", "retry-after")


class ClientError(Exception):
    """The request is at fault; answered with `status` and the message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class UpstreamError(Exception):
    """A leg gave no usable answer; answered with `status` and a message that names the leg."""

    def __init__(self, status: int, leg: Leg, message: str) -> None:
        super().__init__(f"{leg} server: {message}")
        self.status = status


class ClientGoneError(Exception):
    """The client closed its connection."""


def prefill_body(body: Body, *, chat: bool) -> Body:
    """The client's request, turned into one that ends after one token with a ticket."""
    leg = {name: value for name, value in body.items() if name not in NOT_FOR_PREFILL}
    # The token is thrown away (decode computes it again), so what it is does not matter: without
    # ignore_eos an end-of-text token would end the request by "stop".
    leg |= {"stream": False, "max_tokens": 1, "n": 1, "ignore_eos": True}
    leg.pop("max_completion_tokens", None)
    if chat:
        leg["max_completion_tokens"] = 1
    leg["kv_transfer_params"] = dict(ASK_FOR_TICKET)
    return leg


def decode_body(body: Body, ticket: Body | None) -> Body:
    """The client's request with the ticket; without one, decode computes the prompt itself."""
    return body if ticket is None else {**body, "kv_transfer_params": ticket}


def has_one_prompt(body: Body) -> bool:
    """False for a completions request whose `prompt` is a list of prompts."""
    prompt = body.get("prompt")
    return not (isinstance(prompt, list) and len(prompt) > 1 and isinstance(prompt[0], str | list))


def check_body(body: Any) -> Body:
    """Refuse what a client must not send."""
    if not isinstance(body, dict):
        raise ClientError(400, "the request body must be a JSON object")
    if body.pop("kv_transfer_params", None) is not None:
        raise ClientError(400, "kv_transfer_params is set by the proxy, not by clients")
    extra = body.get("vllm_xargs")
    if isinstance(extra, dict) and "kv_transfer_params" in extra:
        raise ClientError(400, "kv_transfer_params is set by the proxy, not by clients")
    return body


async def read_body(request: Request, limit: int) -> Body:
    """The request's JSON object; never holds more than `limit` bytes."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise ClientError(413, f"the request body is larger than {limit} bytes")
        parts.append(part)
    try:
        return check_body(json.loads(b"".join(parts)))
    except (ValueError, RecursionError) as error:
        raise ClientError(400, f"the request body is not JSON: {error}") from error


def encode(body: Body) -> bytes:
    """`body` as JSON in ASCII, which can carry whatever the client's JSON carried."""
    try:
        return json.dumps(body).encode("ascii")
    except RecursionError as error:
        raise ClientError(400, "the request body is nested too deeply") from error


def leg_headers(request: Request) -> dict[str, str]:
    """Headers for both legs: the same request id, and whatever proves who asks."""
    request_id = request.headers.get("x-request-id") or uuid.uuid4().hex
    if not REQUEST_ID.fullmatch(request_id):
        raise ClientError(400, "X-Request-Id must be 1 to 256 printable ASCII characters")
    headers = {
        "x-request-id": request_id,
        "content-type": "application/json",
        "accept-encoding": "identity",
    }
    for name in FORWARDED_REQUEST_HEADERS:
        if (value := request.headers.get(name)) is not None:
            headers[name] = value
    return headers


async def client_left(receive: Receive) -> None:
    """Return when the client has closed its connection; the body must have been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_client_leaves(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Result of `work`; if the client leaves first, `work` is cancelled and `ClientGoneError` raised."""
    task = asyncio.ensure_future(work)
    left = asyncio.ensure_future(client_left(receive))
    try:
        await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        for one in (task, left):
            one.cancel()
        # Cancelled work closes its upstream connection; that must have happened when we return.
        await asyncio.gather(task, left, return_exceptions=True)


@dataclass(frozen=True)
class Answer:
    """A started answer of the decode leg: its head, its first bytes, and the rest to come."""

    upstream: httpx.Response
    first: bytes
    rest: AsyncIterator[bytes]
    headers: dict[str, str]


class Relay(Response):
    """Sends an `Answer` to the client as it comes, and closes the upstream connection whatever happens."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(status_code=answer.upstream.status_code)
        self.answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_client_leaves(receive, self._send(send))
        except ClientGoneError:
            logger.info("client left while decode was answering")
        except httpx.HTTPError as error:
            # The head is out; ending here without the last chunk tells the client that bytes are missing.
            logger.warning("decode server broke off its answer: %r", error)
        finally:
            await self.answer.upstream.aclose()

    async def _send(self, send: Send) -> None:
        headers = [(name.encode(), value.encode()) for name, value in self.answer.headers.items()]
        await send({"type": "http.response.start", "status": self.status_code, "headers": headers})
        await send({"type": "http.response.body", "body": self.answer.first, "more_body": True})
        async for chunk in self.answer.rest:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class Proxy:
    """The servers, whose turn it is, and the two legs of a request. Lives in one event loop."""

    def __init__(self, prefills: Sequence[str], decodes: Sequence[str], max_body_bytes: int = MAX_BODY_BYTES) -> None:
        self._turns: dict[Leg, Iterator[str]] = {
            "prefill": itertools.cycle([url.rstrip("/") for url in prefills]),
            "decode": itertools.cycle([url.rstrip("/") for url in decodes]),
        }
        self._max_body_bytes = max_body_bytes
        self._settling: set[asyncio.Task[None]] = set()
        self._client = httpx.AsyncClient(
            # Generating may take any time; only connecting may not. The environment's proxy settings
            # are not for traffic between these servers.
            timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            trust_env=False,
        )

    async def close(self) -> None:
        for task in self._settling:
            task.cancel()
        await self._client.aclose()

    async def open(
        self,
        leg: Leg,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: Body | None = None,
        sent: asyncio.Event | None = None,
    ) -> httpx.Response:
        """Send a request to the next server of `leg`; returns once its head has come. `sent` is set when the request is out."""
        url = httpx.URL(next(self._turns[leg]) + path)
        content = None if body is None else encode(body)

        async def trace(event: str, _: object) -> None:
            if sent is not None and event.endswith("send_request_body.complete"):
                sent.set()

        request = self._client.build_request(method, url, headers=headers, content=content, extensions={"trace": trace})
        try:
            return await self._client.send(request, stream=True)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise UpstreamError(503, leg, f"cannot connect to {url.host}:{url.port}") from error
        except httpx.HTTPError as error:
            raise UpstreamError(502, leg, f"no answer ({error!r})") from error

    async def start_answer(self, leg: Leg, upstream: httpx.Response) -> Answer:
        """Wait for the first bytes of an answer, so that failing before them is still an error status."""
        rest = upstream.aiter_raw()
        came = upstream.headers
        headers = {name: came[name] for name in FORWARDED_ANSWER_HEADERS if name in came}
        try:
            first = await anext(rest, b"")
        except httpx.HTTPError as error:
            await upstream.aclose()
            raise UpstreamError(502, leg, f"broke off its answer ({error!r})") from error
        except asyncio.CancelledError:
            await upstream.aclose()
            raise
        return Answer(upstream, first, rest, headers)

    async def ticket(self, upstream: httpx.Response) -> Body | None:
        """`kv_transfer_params` of prefill's answer, if it has them."""
        data = b""
        try:
            async for chunk in upstream.aiter_raw():
                data += chunk
                if len(data) > MAX_TICKET_ANSWER_BYTES:
                    raise UpstreamError(502, "prefill", "answer too large")
            params = json.loads(data).get("kv_transfer_params")
        except httpx.HTTPError as error:
            raise UpstreamError(502, "prefill", f"broke off its answer ({error!r})") from error
        except (ValueError, AttributeError, RecursionError) as error:
            raise UpstreamError(502, "prefill", "answer is not a JSON object") from error
        finally:
            await upstream.aclose()
        return params if isinstance(params, dict) and params else None

    async def both_legs(self, path: str, headers: Mapping[str, str], body: Body) -> Answer:
        """Prefill, then decode up to its first bytes; a prefill server's error is the answer."""
        started = time.perf_counter()
        ticket = None
        if has_one_prompt(body):
            leg = prefill_body(body, chat=path.endswith("/chat/completions"))
            upstream = await self.open("prefill", "POST", path, headers, leg)
            if upstream.is_error:
                return await self.start_answer("prefill", upstream)
            ticket = await self.ticket(upstream)
        prefilled = time.perf_counter()
        answer = await self.decode_leg(path, headers, body, ticket)
        answer.headers["x-mc2-prefill-ms"] = f"{(prefilled - started) * 1e3:.3f}"
        first_byte_ms = (time.perf_counter() - prefilled) * 1e3
        answer.headers["x-mc2-decode-first-byte-ms"] = f"{first_byte_ms:.3f}"
        return answer

    async def decode_leg(self, path: str, headers: Mapping[str, str], body: Body, ticket: Body | None) -> Answer:
        """The client's request with its ticket; a ticket that decode does not take is settled."""
        sent = asyncio.Event()
        refused = False
        try:
            upstream = await self.open("decode", "POST", path, headers, decode_body(body, ticket), sent)
            refused = upstream.status_code in REFUSES_THE_REQUEST
            return await self.start_answer("decode", upstream)
        finally:
            # A decode that has got the request ends the lease itself when the client leaves.
            if ticket is not None and (refused or not sent.is_set()) and len(self._settling) < MAX_SETTLING:
                task = asyncio.create_task(self.settle(path, headers, body, ticket))
                self._settling.add(task)
                task.add_done_callback(self._settling.discard)

    async def settle(self, path: str, headers: Mapping[str, str], body: Body, ticket: Body) -> None:
        """Let a decode end the lease of a ticket that it refused or never got: with the request that prefill accepted."""
        leg = {**prefill_body(body, chat=path.endswith("/chat/completions")), "kv_transfer_params": ticket}
        try:
            async with asyncio.timeout(SETTLE_SECONDS):
                upstream = await self.open("decode", "POST", path, headers, leg)
                await upstream.aclose()
        except (UpstreamError, TimeoutError) as error:
            logger.info("a ticket could not be settled, its offer will end by itself: %s", error)

    async def generate(self, request: Request) -> Response:
        """POST /v1/completions and /v1/chat/completions."""
        headers = leg_headers(request)
        body = await read_body(request, self._max_body_bytes)
        work = self.both_legs(request.url.path, headers, body)
        answer = await unless_client_leaves(request.receive, work)
        answer.headers["x-request-id"] = headers["x-request-id"]
        return Relay(answer)

    async def models(self, request: Request) -> Response:
        """GET /v1/models, from a decode server."""
        upstream = await self.open("decode", "GET", "/v1/models", leg_headers(request))
        return Relay(await self.start_answer("decode", upstream))


def error_response(status: int, message: str) -> JSONResponse:
    """An error in the shape that OpenAI clients read."""
    kind = "invalid_request_error" if status < 500 else "upstream_error"
    content = {"error": {"message": message, "type": kind, "param": None, "code": status}}
    return JSONResponse(content, status_code=status)


async def on_error(request: Request, error: Exception) -> Response:
    """Answer for the errors that this file raises itself."""
    if isinstance(error, ClientError | UpstreamError):
        logger.info("%s %s: %s", request.method, request.url.path, error)
        return error_response(error.status, str(error))
    # Nobody is there to read it.
    logger.info("client left before decode answered")
    return Response(status_code=CLIENT_GONE_STATUS)


async def health() -> dict[str, str]:
    """GET /health: this process answers; the servers have their own."""
    return {"status": "ok"}


def build_app(proxy: Proxy) -> FastAPI:
    """The routes, around `proxy`."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
        yield
        await proxy.close()

    app = FastAPI(title="vllm-mc2 example proxy", lifespan=lifespan)
    for kind in (ClientError, UpstreamError, ClientGoneError):
        app.add_exception_handler(kind, on_error)
    for path in ("/v1/completions", "/v1/chat/completions"):
        app.add_api_route(path, proxy.generate, methods=["POST"], response_model=None)
    app.add_api_route("/v1/models", proxy.models, methods=["GET"], response_model=None)
    app.add_api_route("/health", health, methods=["GET"])
    return app


def server_url(text: str) -> str:
    """Parse an argument: a URL that can be asked."""
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from error
    if url.scheme not in ("http", "https") or not url.host:
        raise argparse.ArgumentTypeError(f"{text!r} is not like http://127.0.0.1:8100")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description="Proxy for prefill and decode servers.")
    parser.add_argument("--prefill", action="append", required=True, type=server_url, help="URL; may be repeated")
    parser.add_argument("--decode", action="append", required=True, type=server_url, help="URL; may be repeated")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--max-body-bytes", type=int, default=MAX_BODY_BYTES)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    proxy = Proxy(arguments.prefill, arguments.decode, arguments.max_body_bytes)
    with suppress(KeyboardInterrupt):
        uvicorn.run(build_app(proxy), host=arguments.host, port=arguments.port, access_log=False)


if __name__ == "__main__":
    main()
