"""vllm-ascend's real source: what its allocation gives to a connector, how it registers connectors and what it calls on them."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.ascend.source_text import hook_calls, optional_hooks, parsed, wrong_calls
from tests.ascend.vllm_ascend_source import source
from tests.packaging.test_old_vllm import old_vllm

assert old_vllm, "a fixture"
ROOT = Path(__file__).resolve().parents[2]
BLOCK = 128
pytestmark = [pytest.mark.slow]  # imports all of vLLM three times, in children


def run_child(old_vllm: Path, *arguments: str, variables: dict[str, str] | None = None) -> dict[str, Any]:
    # The source package would be found as a plugin for the platform, also by processes without the stand-ins.
    environment = {**os.environ, **(variables or {}), "VLLM_PLUGINS": "mc2"}
    # Where this is set, torch_npu looks for a whole CANN.
    environment.pop("ASCEND_HOME_PATH", None)
    # vllm-ascend's package has a folder ``tests`` too: ours must come first.
    paths = [str(ROOT), *environment.get("PYTHONPATH", "").split(os.pathsep), str(old_vllm), str(source())]
    run = subprocess.run(
        [sys.executable, "-m", "tests.ascend.real_runner", *arguments],
        env={**environment, "PYTHONPATH": os.pathsep.join(path for path in paths if path)},
        cwd=ROOT, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module", params=["cpu", "npu"])
def allocations(request: pytest.FixtureRequest, old_vllm: Path) -> dict[str, Any]:
    """With CPU tensors, and with torch_npu's own over the simulator."""
    variables = {"MC2_TEST_DEVICE": request.param}
    if request.param == "npu":
        variables |= request.getfixturevalue("npu_environment").variables()
    found = run_child(old_vllm, variables=variables)
    assert Path(found["vllm"]).is_relative_to(old_vllm) and Path(found["vllm_ascend"]).is_relative_to(source())
    return {**found, "device": request.param}


@pytest.fixture(scope="module")
def connectors(old_vllm: Path, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("multi") / "s"
    found = run_child(old_vllm, str(tiny_model), str(folder))
    assert list(folder.iterdir()) == []
    return found


EXPECTED = {
    # Strips of all layers, and bytes of one block over all of them.
    "dense": (6, 3 * (131072 + 65536)),
    "split_blocks": (2, 2 * 65536),
    "latent": (4, 2 * (131072 + 16384)),
    "sparse": (3, 131072 + 16384 + 32768),
    "sparse_without_indexer": (2, 131072 + 16384),
    "sparse_replicated": (3, 131072 + 16384 + 2 * 32768),
    "sparse_c8": (4, 131072 + 16384 + 16384 + 256),
    "sparse_c8_replicated": (4, 131072 + 16384 + 2 * (16384 + 256)),
    "sfa_c8": (2, 83968 + 32768),
    "sfa_c8_li_c8": (3, 83968 + 16384 + 256),
    "sfa_c8_without_indexer": (1, 83968),
    "compressed": (6, 2 * (16384 + 16384 + 256)),
    "compressed_a5": (4, 2 * (16384 + 16640)),
    "hybrid": (3, 3072 + 2 * 262144),
    "mamba_only": (2, 3072 + 262144),
    "hidden_states": (1, 4096),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_strips_are_what_the_real_allocation_gives(name: str, allocations: dict[str, Any]) -> None:
    """That each block arrives whole and nothing else changes has been checked in the child, with the tensors."""
    case = allocations["cases"][name]
    assert "error" not in case, case.get("traceback")
    strips = case["strips"]
    assert (len(strips), sum(strip["block_bytes"] for strip in strips)) == EXPECTED[name]
    assert case["devices"] == [allocations["device"]]
    listed = json.dumps(strips)
    assert all(f"{layer}/0" in listed for layer in case["given"]), "every layer is named somewhere"


def test_shapes_that_the_notes_rely_on(allocations: dict[str, Any]) -> None:
    cases = allocations["cases"]
    assert set(cases) == {*EXPECTED, "old_chip"}
    assert "not supported for 310P" in cases["old_chip"]["error"]
    heads = {name: [strip["num_heads"] for strip in cases[name]["strips"]] for name in EXPECTED}
    assert heads["dense"] == [4] * 6 and heads["latent"] == [1] * 4 and heads["hybrid"] == [None, None, 1]
    strides = {strip["block_stride_bytes"] for strip in cases["compressed"]["strips"]}
    assert strides == {16640}, "pages, not what a view has of them"
    assert cases["split_blocks"]["strips"][0]["signature"] == "float16[2x128,2,64] = layers.1.attn/0"
    for name in EXPECTED:
        if name not in {"compressed", "compressed_a5", "hybrid", "mamba_only", "hidden_states"}:
            first = cases[name]["strips"][0]
            assert set(cases[name]["given"].values()) == {"tuple"} and first["address"] % (2 << 20) == 0


def test_device_and_block_size(allocations: dict[str, Any]) -> None:
    assert (allocations["device_type"], allocations["block_size"]) == ("npu", BLOCK)


def test_formats_are_those_of_torch_npu(allocations: dict[str, Any]) -> None:
    on_npu = {"ND": "float16[32,16,16]", "NZ": "float16[32,16,16] NZ"}
    assert allocations["formats"] == (on_npu if allocations["device"] == "npu" else {})


def test_fractal_decodes_differ_in_their_kernels_only() -> None:
    """No label shows ``enable_kv_nz``: the allocation does not know it, so ``environment_facts`` must."""
    users = {str(path) for path, tree in parsed().items() if "enable_kv_nz" in ast.unparse(tree)}
    assert "vllm_ascend/attention/mla_v1.py" in users and "vllm_ascend/ascend_config.py" in users
    assert not [path for path in users if "worker" in path]
    (text,) = (ast.unparse(tree) for path, tree in parsed().items() if path.name == "ascend_config.py")
    condition = text[text.index("self.enable_kv_nz = ") : text.index("self.enable_sparse_sfa_c8 = ")]
    assert "is_kv_consumer" in condition and "can only be used in D node" in condition


def test_registration_and_plugins(connectors: dict[str, Any]) -> None:
    plugins = connectors["plugins"]
    assert plugins["ascend_kv_connector"] == "vllm_ascend:register_connector", "what the child has called"
    assert plugins["mc2"] == "vllm_mc2.plugin:register"
    assert connectors["registered"] == {"MC2Connector": True, "MooncakeConnectorV1": True}
    assert connectors["class"] == "AscendMultiConnector"
    assert connectors["children"] == ["MC2Connector", "IdleConnector"] and connectors["supports_hma"]


def test_requests_are_handed_over_through_the_connector_of_connectors(connectors: dict[str, Any]) -> None:
    for request in connectors["requests"]:
        assert request["is_right"] and request["computed"] == 1, request
        assert request["report"]["way"] == "pull" and "mc2_ticket" in request["ticket"]


def test_every_hook_that_is_called_is_there(connectors: dict[str, Any]) -> None:
    called = {call.func.attr for _, call in hook_calls()}  # type: ignore[attr-defined]
    assert called >= {
        "register_kv_caches", "handle_preemptions", "get_handshake_metadata", "wait_for_layer_load", "save_kv_layer",
        "get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta", "request_finished_all_groups",
        "on_new_request", "take_events", "get_kv_connector_stats",
    }  # fmt: skip
    assert connectors["wrong_calls"] == []
    optional = {"has_preempted_request", "update_state_before_preempt", "on_kv_cache_written"}
    assert optional_hooks() == optional, "a new one: does our connector want it?"


def test_the_check_of_calls_finds_wrong_ones() -> None:
    class Poor:
        def take_events(self, extra: int) -> None: ...

    wrong = wrong_calls(Poor)
    assert any("take_events" in line and "missing a required argument" in line for line in wrong)
    assert any("register_kv_caches" in line for line in wrong)
