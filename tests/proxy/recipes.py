"""The commands of docs/routers.md, and the programs of other projects that they start."""

import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx

from examples.pair import Server
from tests.ascend.vllm_ascend_source import source as ascend_source
from tests.sources import unpack_source
from tests.support.ports import own_ports

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "routers.md"

VLLM = "vllm-0.32.0"
VLLM_SHA256 = "d2c957d5eee3d0985012151315ddc62cbe0cd368fc96a5fc3510438d9dddf2ad"
TOY_PROXY = "tests/v1/kv_connector/nixl_integration/toy_proxy_server.py"

READY_SECONDS = 120.0
PREFILL_PORT, DECODE_PORT, ROUTER_PORT, METRICS_PORT = 8100, 8200, 8000, 29000
"""As they stand in the document."""
PORTS = re.compile(r"\b(?:8100|8200|8000|29000)\b")


class Router(NamedTuple):
    """How a test starts one, and where it says that it is ready."""

    program: str
    health: str


ROUTERS = {
    "Our proxy": Router("examples/proxy.py", "/health"),
    "vllm-router": Router("vllm_router.launch_router", "/health"),
    "vLLM's toy proxy": Router("toy_proxy_server.py", "/healthcheck"),
    "vllm-ascend's proxy": Router("load_balance_proxy_server_example.py", "/healthcheck"),
}
"""By their heading in the document."""
TESTED_HERE = ["vLLM's toy proxy", "vllm-router"]
"""The others have tests of their own; of them only the command is tried."""


def commands(heading: str) -> list[list[str]]:
    """Every command under a heading of the document, in words; comments left out."""
    sections = re.split(r"^## ", DOCUMENT.read_text(), flags=re.MULTILINE)
    (section,) = [text for text in sections if text.startswith(heading + "\n")]
    blocks = re.findall(r"^```bash\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def recipe(heading: str, ports: Mapping[int, int]) -> list[str]:
    """The command that starts a router, with this interpreter, these ports, and the program's real place."""
    program = ROUTERS[heading].program
    (words,) = [words for words in commands(heading) if program in words]
    words = [PORTS.sub(lambda match: str(ports[int(match[0])]), word) for word in words]
    assert words[0] == "python"
    if program in PLACES:
        words[words.index(program)] = str(PLACES[program]())
    return [sys.executable, *words[1:]]


def toy_proxy() -> Path:
    """vLLM's proxy from the source package of the version that is installed; downloaded when it is not there."""
    target = ROOT / "build" / "routers" / VLLM
    wanted = f"{VLLM}/{TOY_PROXY}"
    return unpack_source("vllm", f"{VLLM}.tar.gz", VLLM_SHA256, target, lambda name: name == wanted) / wanted


def ascend_proxy() -> Path:
    """vllm-ascend's, of the version whose caches are tested."""
    return ascend_source() / "examples" / "disaggregated_prefill_v1" / "load_balance_proxy_server_example.py"


PLACES: dict[str, Callable[[], Path]] = {
    "examples/proxy.py": lambda: ROOT / "examples" / "proxy.py",
    "toy_proxy_server.py": toy_proxy,
    "load_balance_proxy_server_example.py": ascend_proxy,
}


@contextmanager
def running(heading: str, prefill_port: int, decode_port: int, log_dir: Path) -> Iterator[Server]:
    """The router of a recipe, started as the document says, in front of these two servers; ended at once afterwards."""
    with own_ports(2) as (port, metrics_port):
        yield from _running(heading, prefill_port, decode_port, log_dir, port, metrics_port)


def _running(
    heading: str, prefill_port: int, decode_port: int, log_dir: Path, port: int, metrics_port: int
) -> Iterator[Server]:
    ports = {PREFILL_PORT: prefill_port, DECODE_PORT: decode_port, ROUTER_PORT: port, METRICS_PORT: metrics_port}
    router = ROUTERS[heading]
    # No proxy of this machine between the router and the servers.
    environment = {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1", "OPENAI_API_KEY": "none"}
    name = Path(router.program).name
    server = Server(name, recipe(heading, ports), port, log_dir=log_dir, environment=environment)
    try:
        deadline = time.monotonic() + READY_SECONDS
        while not _answers(server.url + router.health):
            assert server.running and time.monotonic() < deadline, server.log_tail()
            time.sleep(0.05)
        yield server
    finally:
        server.kill()
        server.close()


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5.0, trust_env=False).is_success
    except httpx.HTTPError:
        return False
