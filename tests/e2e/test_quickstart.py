"""``docs/quickstart/host.md`` as a reader follows it: every command is taken out of the page and run.

What is replaced: the ports, since others may be in use; the model, by the tiny one; and where the servers meet, by a folder of
this test (``XDG_RUNTIME_DIR``). The machine's own environment is added, as everywhere in these tests.
"""

import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from examples.pair import QUIET, VLLM_ENVIRONMENT, Server
from tests.docs.pages import ROOT, block_of, blocks
from tests.docs.test_commands import shell
from tests.e2e.conftest import LOG_DIR
from tests.support.ports import own_ports

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PAGE = "docs/quickstart/host.md"
THIS = "tests/e2e/test_quickstart.py::test_the_quickstart_for_one_host"
PORTS = ("8000", "8100", "8200")
MODEL_OF_THE_PAGE = "HuggingFaceTB/SmolLM2-135M-Instruct"


@dataclass
class Reader:
    """Types what the page says."""

    model: Path
    ports: dict[str, int]
    environment: dict[str, str]
    typed: set[str]

    def text(self, beginning: str) -> str:
        """The block that begins so, with the replacements, behind the exports that the page wants in every terminal."""
        exports, body = block_of(PAGE, "export MODEL=").body, block_of(PAGE, beginning).body
        self.typed |= {exports, body}
        assert MODEL_OF_THE_PAGE in exports
        text = f"{exports.replace(MODEL_OF_THE_PAGE, str(self.model))}\n{body}"
        return re.sub("|".join(PORTS), lambda match: str(self.ports[match[0]]), text)

    def serve(self, name: str, beginning: str, port: str) -> Server:
        """In a terminal of its own."""
        command = ["bash", "-euc", self.text(beginning)]
        return Server(name, command, self.ports[port], log_dir=LOG_DIR / "quickstart", environment=self.environment)

    def run(self, beginning: str) -> str:
        """In the terminal that is left."""
        done = shell(self.text(beginning), **self.environment)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture
def reader(tiny_model: Path, tmp_path: Path) -> Iterator[Reader]:
    environment = {
        **VLLM_ENVIRONMENT,
        "XDG_RUNTIME_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(QUIET), os.environ.get("PYTHONPATH")])),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    with own_ports(len(PORTS)) as ports:
        yield Reader(tiny_model, dict(zip(PORTS, ports, strict=True)), environment, set())


def test_the_quickstart_for_one_host(reader: Reader) -> None:
    with ExitStack() as servers:
        prefill = servers.enter_context(reader.serve("prefill", 'vllm serve "$MODEL" --port 8100', "8100"))
        decode = servers.enter_context(reader.serve("decode", 'vllm serve "$MODEL" --port 8200', "8200"))
        prefill.wait_ready()
        decode.wait_ready()
        proxy = servers.enter_context(reader.serve("proxy", "python examples/proxy.py", "8000"))
        proxy.wait_ready()
        assert re.search(r"prefill \S+ hands over; sockets in ", prefill.log_path.read_text())
        assert re.search(r"decode \S+ takes prefills from \S+, mode auto", decode.log_path.read_text())

        answer = json.loads(reader.run("curl -s http://127.0.0.1:8000/v1/completions"))
        assert answer["choices"][0]["text"]
        report = answer["kv_transfer_params"]["mc2"]
        (example,) = [block.body for block in blocks(ROOT / PAGE) if block.language == "json"]
        shown = json.loads("{" + example + "}")["kv_transfer_params"]["mc2"]
        assert shown.pop("...") == "..." and len(shown) >= 4
        assert shown == {name: report[name] for name in shown}

        seen = reader.run("vllm-mc2 inspect")
        assert re.search(r"^prefill ", seen, re.MULTILINE) and re.search(r"^decode ", seen, re.MULTILINE)
        assert re.search(r" ready +attach ", seen)
        (line,) = reader.run("curl -s http://127.0.0.1:8200/metrics").splitlines()
        assert 'way="attach"' in line and line.endswith(" 1.0")
    marked = {block.body for block in blocks(ROOT / PAGE) if block.run_by == [THIS]}
    assert reader.typed == marked
