"""``make demo``'s program, with the real model: what a stranger sees first."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.locking import alone

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "build" / "demo.json"
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]
COLUMNS = {
    "name",
    "prompt_tokens",
    "blocks_attached",
    "kv_bytes_not_copied",
    "kv_bytes_copied",
    "handoff_us",
    "decode_ttft_ms",
    "way",
    "equal",
    "text",
}


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    """Every demo of this checkout writes its result, and its servers' logs, to the same place."""
    with alone(RESULT):
        yield


def descendants(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def assert_gone(processes: list[psutil.Process]) -> None:
    left = [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    assert left == []


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "examples.demo", *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip


def test_the_demo_ends_well_and_says_so() -> None:
    with start() as demo:
        assert demo.stdout is not None
        seen: list[psutil.Process] = []
        lines = []
        for line in demo.stdout:
            lines.append(line)
            if "ready after" in line:
                seen += descendants(demo)
        assert demo.wait(timeout=120) == 0, "".join(lines[-60:])
    assert len({process.pid for process in seen}) >= 10  # four servers, most of several processes
    assert_gone(seen)
    result = json.loads(RESULT.read_text())
    assert result["ok"] is True
    assert {request["name"] for request in result["requests"]} >= {"short", "long", "chat", "stream"}
    for request in result["requests"]:
        assert set(request) == COLUMNS
        assert request["handoff_us"] > 0
        assert request["way"] == "attach" and request["equal"] and request["text"].strip()
    long = next(request for request in result["requests"] if request["name"] == "long")
    assert long["blocks_attached"] >= 7 and long["kv_bytes_not_copied"] > 40_000_000


@pytest.mark.slow
def test_two_workers_on_either_side_that_copy() -> None:
    """``make demo MODE=pull TP=2``."""
    with start("--mode", "pull", "--tp", "2") as demo:
        text, _ = demo.communicate(timeout=500)
    assert demo.returncode == 0, text[-6000:]
    assert "all equal, all pulled" in text
    result = json.loads(RESULT.read_text())
    for request in result["requests"]:
        assert request["way"] == "pull" and request["equal"]
        assert request["blocks_attached"] == request["kv_bytes_not_copied"] == 0 < request["kv_bytes_copied"]


@pytest.mark.slow
def test_ctrl_c_leaves_nothing_behind() -> None:
    with start() as demo:
        deadline = time.monotonic() + 300
        while len(descendants(demo)) < 6 and time.monotonic() < deadline:
            time.sleep(0.2)
        seen = descendants(demo)
        demo.send_signal(signal.SIGINT)
        assert demo.stdout is not None
        demo.stdout.read()
        assert demo.wait(timeout=120) != 0
    assert len(seen) >= 6
    assert_gone(seen)
