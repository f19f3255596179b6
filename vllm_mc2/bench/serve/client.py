"""One request to one server, timed where the client is."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from threading import Event
from types import TracebackType
from typing import Any, Self

import httpx

REQUEST_SECONDS = 300.0
CONNECT_SECONDS = 30.0
ITL_WINDOW = 4

Params = Mapping[str, Any]


class RequestError(RuntimeError):
    """A request got an error, or an answer that is none."""


@dataclass
class Answer:
    """Token ids and when they came, by `time.perf_counter`."""

    started: float
    token_ids: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    @property
    def first(self) -> float:
        """When the first token came."""
        return self.times[0]

    @property
    def itl_seconds(self) -> float:
        """Time between two tokens after the first: the median over the answer, of the mean of `ITL_WINDOW` gaps each.

        Of single gaps many would be nothing: tokens that come while this process waits for a core are read at once.
        """
        ends = zip(self.times, self.times[ITL_WINDOW:], strict=False)
        return median((later - earlier) / ITL_WINDOW for earlier, later in list(ends)[::ITL_WINDOW])


class Client:
    """Asks vLLM servers of one model, greedily, with token ids. May be used by several threads."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._http = httpx.Client(
            timeout=httpx.Timeout(REQUEST_SECONDS, connect=CONNECT_SECONDS),
            # A connection for each request: a server that was paused meanwhile may have closed an idle one.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            trust_env=False,
            verify=False,  # noqa: S501  plain HTTP on the loopback; loading certificates takes time
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._http.close()

    def complete(
        self,
        url: str,
        prompt: Sequence[int],
        max_tokens: int,
        params: Params | None = None,
        *,
        salt: str | None = None,
        enough: Event | None = None,
    ) -> Answer:
        """A streamed completion of exactly ``max_tokens``, or of those that came until ``enough`` was set.

        Raises:
            RequestError: an error status, or fewer tokens.
        """
        body = self._body(prompt, max_tokens, params, salt) | {"stream": True}
        answer = Answer(started=time.perf_counter())
        try:
            with self._http.stream("POST", f"{url}/v1/completions", json=body) as response:
                if response.is_error:
                    raise RequestError(f"status {response.status_code}: {response.read().decode()[:1000]}")
                for line in response.iter_lines():
                    if line.startswith("data: ") and line != "data: [DONE]":
                        _collect(answer, json.loads(line.removeprefix("data: ")))
                    if enough is not None and enough.is_set():
                        # Closing the connection aborts the request.
                        return answer
        except (httpx.HTTPError, ValueError) as error:
            raise RequestError(f"no answer: {error!r}") from error
        if len(answer.token_ids) != max_tokens:
            raise RequestError(f"{len(answer.token_ids)} tokens instead of {max_tokens}")
        return answer

    def prefill(self, url: str, prompt: Sequence[int], params: Params | None, salt: str | None = None) -> Any:
        """The prefill leg: one token that nobody reads; the `kv_transfer_params` of the answer.

        Raises:
            RequestError: an error status.
        """
        try:
            response = self._http.post(f"{url}/v1/completions", json=self._body(prompt, 1, params, salt))
        except httpx.HTTPError as error:
            raise RequestError(f"no answer from prefill: {error!r}") from error
        if response.is_error:
            raise RequestError(f"prefill: status {response.status_code}: {response.text[:1000]}")
        try:
            return response.json().get("kv_transfer_params")
        except (ValueError, AttributeError) as error:
            raise RequestError(f"prefill: no JSON object: {error!r}") from error

    def metrics(self, url: str) -> dict[str, float]:
        """Sums of the server's metrics by name, and by name with labels."""
        sums: dict[str, float] = {}
        for line in self._http.get(f"{url}/metrics").text.splitlines():
            name, _, value = line.rpartition(" ")
            if name and not line.startswith("#"):
                sums[name] = float(value)
                bare = name.partition("{")[0]
                if bare != name:
                    sums[bare] = sums.get(bare, 0.0) + float(value)
        return sums

    def metric(self, url: str, name: str) -> float:
        """One of them.

        Raises:
            RequestError: the server has no such metric.
        """
        sums = self.metrics(url)
        if name not in sums:
            raise RequestError(f"no metric {name}")
        return sums[name]

    def get_json(self, url: str) -> Any:
        """What a GET answers."""
        return self._http.get(url).raise_for_status().json()

    def _body(self, prompt: Sequence[int], max_tokens: int, params: Params | None, salt: str | None) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        if params is not None:
            body["kv_transfer_params"] = dict(params)
        if salt is not None:
            body["cache_salt"] = salt
        return body


def _collect(answer: Answer, data: Any) -> None:
    if "error" in data:
        raise RequestError(f"error inside the answer: {str(data['error'])[:1000]}")
    now = time.perf_counter()
    for choice in data.get("choices", ()):
        ids = choice.get("token_ids") or []
        answer.token_ids += ids
        answer.times += [now] * len(ids)
