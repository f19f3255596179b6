"""vllm-ascend's example proxy, unchanged, in front of real servers: the tickets go through it, and tokens are right."""

import subprocess
import sys
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx
import pytest

from tests.ascend.vllm_ascend_source import source
from tests.e2e.conftest import LOG_DIR, Rig, prompt_of
from tests.support.ports import own_ports

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture
def port() -> Iterator[int]:
    with own_ports(1) as (port,):
        yield port


@pytest.fixture
def proxy(rig: Rig, port: int) -> Iterator[str]:
    prefill, decode = urlsplit(rig.prefill.url), urlsplit(rig.decode.url)
    script = source() / "examples" / "disaggregated_prefill_v1" / "load_balance_proxy_server_example.py"
    command = [
        sys.executable, str(script), "--host", "127.0.0.1", "--port", str(port),
        "--prefiller-hosts", str(prefill.hostname), "--prefiller-ports", str(prefill.port),
        "--decoder-hosts", str(decode.hostname), "--decoder-ports", str(decode.port),
    ]  # fmt: skip
    LOG_DIR.mkdir(parents=True, exist_ok=True)
    with (LOG_DIR / "ascend-proxy.log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 60
        while True:
            try:
                if rig.client.get(f"{url}/healthcheck").status_code == 200:
                    break
            except httpx.HTTPError:
                assert process.poll() is None and time.monotonic() < deadline, "the proxy does not start"
                time.sleep(0.1)
        yield url
        process.terminate()


def test_tokens_are_right_and_blocks_are_attached(rig: Rig, proxy: str) -> None:
    for length in (3, 200, 1000):
        prompt = prompt_of(length, seed=70 + length)
        answer = rig.complete(proxy, prompt)
        assert answer.tokens == rig.expected(prompt).tokens
        assert answer.report["way"] == "attach"
    rig.assert_clean()


def test_a_stream(rig: Rig, proxy: str) -> None:
    prompt = prompt_of(300, seed=90)
    body = {"model": rig.model, "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "stream": True}
    attached = rig.metric(rig.decode, "vllm:mc2_handoffs_total", way="attach")
    with rig.client.stream("POST", f"{proxy}/v1/completions", json={**body, "return_token_ids": True}) as response:
        assert response.status_code == 200
        lines = [line for line in response.iter_lines() if line.startswith("data: {")]
    assert len(lines) == 8
    rig.assert_clean()
    assert rig.metric(rig.decode, "vllm:mc2_handoffs_total", way="attach") == attached + 1
