"""Show it working: real prompts through prefill, decode and proxy, compared with a plain server.

    make demo                    (or: .venv/bin/python -m examples.demo)
    make demo MODE=pull          decode copies the blocks instead of using them in place
    make demo TP=2               two workers on either side, with the tiny model

Starts four processes: a prefill and a decode server that hand over KV by block table, the proxy, and a
plain single server for reference. Asks the proxy and the plain server the same, greedily, and compares
token by token. The numbers of a request are the change of decode's own /metrics over it, which works for
streamed answers too; requests go one at a time for that. Decode's time to first token is vLLM's own,
measured from the arrival of the decode leg.

Writes build/demo.json. Exit status 0 only if every answer equals the plain server's and every prompt was
attached (MODE=pull: copied). All processes are gone afterwards, whatever happens.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from examples.hosts import TwoHosts
from examples.pair import CONNECTOR, ROOT, Pair, Server, ServerError, vllm_server

MODELS = ROOT / "build" / "models"
REAL, TINY = MODELS / "smollm2-135m-instruct", MODELS / "tiny-llama"
RESULT = ROOT / "build" / "demo.json"
STORY = Path(__file__).with_name("alice.txt").read_text()

MAX_MODEL_LEN = 2048
ANSWER_TOKENS = 40
REQUEST_SECONDS = 300.0
METRIC_SECONDS = 3.0
PROGRESS_SECONDS = 5.0
WAYS = {"auto": "attach", "attach": "attach", "pull": "pull"}

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"

TTFT = "vllm:time_to_first_token_seconds"
HANDOFFS = "vllm:mc2_handoffs_total"
BLOCKS = "vllm:mc2_blocks_attached_total"
BYTES = "vllm:mc2_kv_bytes_not_copied_total"
COPIED = "vllm:mc2_kv_bytes_copied_total"
HANDOFF_SECONDS = "vllm:mc2_handoff_seconds_sum"


class DemoError(RuntimeError):
    """A request failed; the message says what came back."""


@dataclass(frozen=True)
class Case:
    """One request of the demo."""

    name: str
    path: str
    body: dict[str, Any]


@dataclass
class Reply:
    """What a server answered."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    prompt_tokens: int = 0


@dataclass(frozen=True)
class Row:
    """One line of the table, and one entry of build/demo.json."""

    name: str
    prompt_tokens: int
    blocks_attached: int
    kv_bytes_not_copied: int
    kv_bytes_copied: int
    handoff_us: float
    decode_ttft_ms: float
    way: str
    equal: bool
    text: str


def cases() -> list[Case]:
    def chat(question: str) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": question}]}

    return [
        Case("short", COMPLETIONS, {"prompt": "Once upon a time, in a small village by the sea,"}),
        Case("long", COMPLETIONS, {"prompt": f"{STORY}\nSuddenly, thump! thump! down she came upon"}),
        Case("chat", CHAT, chat("Explain in two sentences why the sky is blue.")),
        Case("stream", CHAT, {**chat("Write one sentence about the moon."), "stream": True}),
        Case("shared-1", CHAT, chat(STORY + "\nQuestion: What is the name of Alice's cat?")),
        Case("shared-2", CHAT, chat(f"{STORY}\nWhat colour was the Rabbit? Answer in one sentence.")),
    ]


# What is asked, and what came back.


def ask(url: str, case: Case, model: str) -> Reply:
    """Send one request, greedy, and collect the answer, streamed or not."""
    body = {
        "model": model,
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "return_token_ids": True,
        **case.body,
    }
    if body.get("stream"):
        body["stream_options"] = {"include_usage": True}
    reply = Reply()
    with httpx.stream("POST", url + case.path, json=body, timeout=REQUEST_SECONDS, trust_env=False) as answer:
        if answer.is_error:
            raise DemoError(f"{case.name}: status {answer.status_code}: {answer.read().decode()}")
        if body.get("stream"):
            for line in answer.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    collect(reply, json.loads(line.removeprefix("data: ")))
        else:
            collect(reply, json.loads(answer.read()))
    return reply


def collect(reply: Reply, data: dict[str, Any]) -> None:
    """Add one JSON answer, or one chunk of a streamed one."""
    if "error" in data:
        raise DemoError(f"error inside the answer: {data['error']}")
    for choice in data["choices"]:
        message = choice.get("delta") or choice.get("message") or {}
        reply.text += choice.get("text") or message.get("content") or ""
        reply.token_ids += choice.get("token_ids") or []
    if data.get("usage"):
        reply.prompt_tokens = data["usage"]["prompt_tokens"]


# The numbers.


@dataclass(frozen=True)
class Counters:
    """The metrics of the decode server that the table is made of, at one moment."""

    sums: dict[str, float]
    ways: dict[str, float]

    @classmethod
    def read(cls, server: Server) -> Counters:
        text = httpx.get(f"{server.url}/metrics", timeout=30.0, trust_env=False).text
        sums: dict[str, float] = {}
        ways: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
                if sample.name == HANDOFFS:
                    way = sample.labels["way"]
                    ways[way] = ways.get(way, 0.0) + sample.value
        return cls(sums, ways)

    def since(self, before: Counters) -> Counters:
        """Change of every number."""
        return Counters(subtract(self.sums, before.sums), subtract(self.ways, before.ways))

    @property
    def decode_ttft_ms(self) -> float:
        return mean(self.sums.get(f"{TTFT}_sum", 0.0), self.sums.get(f"{TTFT}_count", 0.0)) * 1e3

    @property
    def handoff_us(self) -> float:
        return mean(self.sums.get(HANDOFF_SECONDS, 0.0), sum(self.ways.values())) * 1e6

    @property
    def way(self) -> str:
        """How the request's KV arrived; "none" if decode took no notice of a ticket."""
        return "+".join(sorted(way for way, count in self.ways.items() if count)) or "none"

    @property
    def complete(self) -> bool:
        """Whether a whole request was counted: engines report at the end of a step, not at once."""
        return self.sums.get(f"{TTFT}_count", 0.0) >= 1 and self.way != "none"


def mean(total: float, count: float) -> float:
    return total / count if count else 0.0


def subtract(after: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    return {name: value - before.get(name, 0.0) for name, value in after.items()}


def change(server: Server, before: Counters) -> Counters:
    """Change of the counters over one request, once it has been counted."""
    deadline = time.monotonic() + METRIC_SECONDS
    while True:
        now = Counters.read(server).since(before)
        if now.complete or time.monotonic() > deadline:
            return now
        time.sleep(0.05)


def measure(case: Case, pair: Pair, single: Server, model: str) -> Row:
    """One request through the pair and to the plain server."""
    before = Counters.read(pair.decode)
    ours = ask(pair.url, case, model)
    counted = change(pair.decode, before)
    plain = ask(single.url, case, model)
    return Row(
        name=case.name,
        prompt_tokens=ours.prompt_tokens,
        blocks_attached=round(counted.sums.get(BLOCKS, 0.0)),
        kv_bytes_not_copied=round(counted.sums.get(BYTES, 0.0)),
        kv_bytes_copied=round(counted.sums.get(COPIED, 0.0)),
        handoff_us=round(counted.handoff_us, 1),
        decode_ttft_ms=round(counted.decode_ttft_ms, 1),
        way=counted.way,
        equal=(ours.token_ids, ours.text) == (plain.token_ids, plain.text) and bool(ours.token_ids),
        text=ours.text,
    )


# What the user sees.


def say(text: str) -> None:
    print(text, flush=True)


def table(rows: Sequence[Row]) -> str:
    """The rows, at most 100 columns wide."""
    titles = ["request", "prompt", "blocks attached", "KV bytes not copied", "copied"]
    titles += ["hand-off us", "decode TTFT ms", "way", "equal"]
    lines = [titles]
    lines += [
        [
            row.name,
            str(row.prompt_tokens),
            str(row.blocks_attached),
            f"{row.kv_bytes_not_copied:,}",
            f"{row.kv_bytes_copied:,}",
            f"{row.handoff_us:.1f}",
            f"{row.decode_ttft_ms:.1f}",
            row.way,
            "yes" if row.equal else "NO",
        ]
        for row in rows
    ]
    widths = [max(len(line[column]) for line in lines) for column in range(len(titles))]
    left = {0, 7, 8}
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


class Progress:
    """Says every few seconds what is still awaited."""

    def __init__(self) -> None:
        self._started = self._said = time.monotonic()

    def __call__(self, server: Server, _: float) -> None:
        now = time.monotonic()
        if now - self._said >= PROGRESS_SECONDS:
            self._said = now
            say(f"demo: waiting for {server.name} ... {now - self._started:.0f} s")


def write_result(rows: Sequence[Row], ok: bool) -> None:
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    result = {"ok": ok, "requests": [asdict(row) for row in rows]}
    draft = RESULT.with_suffix(".new")
    draft.write_text(json.dumps(result, indent=2) + "\n")
    draft.replace(RESULT)


# Running it.


@dataclass(frozen=True)
class Setting:
    """How the pair is set up."""

    connector: str | None = CONNECTOR
    mode: str = "auto"
    tensor_parallel_size: int = 1
    num_hosts: int = 1
    """With 2, prefill and decode each have a network namespace, and a virtual cable between them."""

    @property
    def way(self) -> str:
        """In which each prompt has to arrive."""
        return "pull" if self.num_hosts == 2 else WAYS[self.mode]

    @property
    def model(self) -> Path:
        """Two workers on either side are too much for the real model on two cores."""
        return REAL if self.tensor_parallel_size == 1 else TINY


def start(stack: ExitStack, setting: Setting) -> tuple[Pair, Server]:
    """Start all servers at once (two cores: quicker than one after the other) and wait."""
    started, progress, model = time.monotonic(), Progress(), setting.model
    say(f"demo: starting prefill, decode, proxy and a plain server with {model.name} ...")
    size = ["--tensor-parallel-size", str(setting.tensor_parallel_size)] if setting.tensor_parallel_size > 1 else []
    extra = {"mode": setting.mode} if setting.connector is not None else None
    hosts = None
    if setting.num_hosts == 2:
        try:
            hosts = stack.enter_context(TwoHosts())
        except (PermissionError, FileNotFoundError) as error:
            raise DemoError(f"two hosts need network namespaces, which cannot be made here: {error}") from error
    pair = stack.enter_context(
        Pair(
            model,
            connector=setting.connector,
            decode_extra=extra,
            max_model_len=MAX_MODEL_LEN,
            arguments=size,
            hosts=hosts,
        )
    )
    single = stack.enter_context(vllm_server("single", model, max_model_len=MAX_MODEL_LEN))
    for server in (*pair.servers, single):
        server.wait_ready(progress=progress)
        say(f"demo: {server.name} ready after {time.monotonic() - started:.0f} s")
    return pair, single


def converse(pair: Pair, single: Server, model: str, rows: list[Row]) -> None:
    """All requests, one after the other; `rows` keeps what was done if one fails."""
    try:
        for case in cases():
            row = measure(case, pair, single, model)
            rows.append(row)
            say(f"\n[{row.name}] {row.prompt_tokens} prompt tokens, way: {row.way}\n{row.text.strip()}")
    except (DemoError, httpx.HTTPError) as error:
        dead = [server for server in (*pair.servers, single) if not server.running]
        tails = [f"{one.name}:\n{one.log_tail()}" for one in dead or (pair.prefill, pair.decode)]
        raise DemoError("\n".join([f"{error!s:.2000}", *tails])) from error


def run(setting: Setting) -> bool:
    """The whole demo; True if all answers were equal and all prompts came in the way that was asked for."""
    RESULT.unlink(missing_ok=True)
    rows: list[Row] = []
    ok, way = False, setting.way
    with ExitStack() as stack:
        try:
            pair, single = start(stack, setting)
            converse(pair, single, setting.model.name, rows)
            ok = all(row.equal and row.way == way for row in rows)
        finally:
            # From here on only cleaning up: a second Ctrl-C must not leave servers behind.
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)
            write_result(rows, ok)
    say(f"\n{table(rows)}\n")
    done = {"attach": "attached", "pull": "pulled"}[way]
    say(f"demo: {f'all equal, all {done}' if ok else f'NOT all equal and {done}'}; see {RESULT}")
    return ok


def interrupt(_signal: int, _frame: object) -> None:
    raise KeyboardInterrupt


def main() -> int:
    parser = argparse.ArgumentParser(description="Demo of vllm-mc2 with real servers.")
    parser.add_argument("--without-connector", action="store_true", help="plain servers (fails)")
    parser.add_argument("--mode", choices=sorted(WAYS), default="auto", help="decode's mode (default: auto)")
    parser.add_argument("--tp", type=int, choices=[1, 2], default=1, help="workers on either side (default: 1)")
    parser.add_argument(
        "--hosts", type=int, choices=[1, 2], default=1, help="2: prefill and decode in network namespaces (root)"
    )
    arguments = parser.parse_args()
    connector = None if arguments.without_connector else CONNECTOR
    setting = Setting(connector, arguments.mode, arguments.tp, arguments.hosts)
    if not (setting.model / "config.json").exists():
        print(f"demo: {setting.model} is missing; run `make setup`", file=sys.stderr)
        return 1
    # Also SIGINT: a shell that starts this in the background sets it to be ignored.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
    try:
        return 0 if run(setting) else 1
    except KeyboardInterrupt:
        print("demo: interrupted, everything stopped", file=sys.stderr)
        return 130
    except (ServerError, DemoError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
