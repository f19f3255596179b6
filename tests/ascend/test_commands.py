"""``vllm-mc2 doctor`` and ``vllm-mc2 selftest`` as a user runs them, on the simulated machine and on one without NPUs."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.ascend.environment import ROOT, NpuEnvironment

pytestmark = [pytest.mark.slow]


def run(environment: dict[str, str] | None, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("vllm-mc2")), *arguments]
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)


def by_name(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    text = done.stdout[done.stdout.index("[\n") :]  # torch_npu greets on standard output
    return {finding["name"]: finding for finding in json.loads(text)}


@pytest.fixture
def machine(npu_environment: NpuEnvironment, tmp_path: Path) -> NpuEnvironment:
    return dataclasses.replace(npu_environment, folder=tmp_path / "machine")


def test_doctor_on_a_machine_without_npus() -> None:
    done = run(None, "doctor", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    findings = by_name(done)
    assert findings["vLLM"]["detail"].startswith("0.32")
    assert findings["Ascend"]["state"] == "info" and "libascendcl.so" in findings["Ascend"]["detail"]


@pytest.mark.parametrize(
    ("settings", "way", "passed_over"),
    [
        ({}, "by handle_v2", ""),
        (
            {"MC2_ACL_SIM_UNSUPPORTED": "aclrtMemRetainAllocationHandle"},
            "by torch_npu",
            "aclrtMemRetainAllocationHandle",
        ),
        ({"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:False"}, "by torch_npu", "handle_v2"),
    ],
)
def test_doctor_says_how_a_cache_would_be_shared_and_why(
    machine: NpuEnvironment, settings: dict[str, str], way: str, passed_over: str
) -> None:
    done = run(machine.variables(**settings), "doctor", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    findings = by_name(done)
    assert "runtime 9.1.0" in findings["CANN and driver"]["detail"]
    assert findings["devices"]["detail"].startswith("2 NPUs")
    assert "HCCS" in findings["topology"]["detail"]
    assert way in findings["sharing"]["detail"] and passed_over in findings["sharing"]["detail"]


def test_doctor_when_nothing_can_be_shared(machine: NpuEnvironment) -> None:
    unsupported = "aclrtMemRetainAllocationHandle,aclrtMemExportToShareableHandle,aclrtIpcMemGetExportKey"
    done = run(machine.variables(MC2_ACL_SIM_UNSUPPORTED=unsupported), "doctor")
    assert done.returncode == 1
    assert "FAIL  sharing" in done.stdout and "207000" in done.stdout


POINTS = [
    "share", "map", "only who is admitted", "pull, bytes equal", "map and unmap again", "orderly stop", "decode killed",
    "prefill killed",
]  # fmt: skip


def test_selftest_passes_point_by_point(machine: NpuEnvironment) -> None:
    done = run(machine.variables(), "selftest", "--device", "npu")
    assert done.returncode == 0, done.stdout + done.stderr
    for point in POINTS:
        assert f"PASS  {point}" in done.stdout, done.stdout
    assert "INFO  attach" in done.stdout and done.stdout.rstrip().endswith("selftest: passed")


def test_selftest_on_one_npu_by_other_ways(machine: NpuEnvironment) -> None:
    settings = {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:False", "MC2_ACL_SIM_LOST": "1"}
    done = run(machine.variables(**settings), "selftest", "--device", "npu", "--npus", "0,0", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    findings = by_name(done)
    assert {findings[point]["state"] for point in POINTS} == {"pass", "skip"}
    assert findings["only who is admitted"]["state"] == "skip"  # torch_npu's key has no list
    assert "by torch_npu" in findings["share"]["detail"]
    assert "507057" in findings["prefill killed"]["detail"]


def test_selftest_fails_when_bytes_do_not_arrive(machine: NpuEnvironment) -> None:
    done = run(machine.variables(MC2_ACL_SIM_FAIL="aclrtMapMem:0:107000:100000"), "selftest", "--device", "npu")
    assert done.returncode == 1, done.stdout
    assert "selftest:" in done.stdout and "FAIL" in done.stdout


@pytest.mark.parametrize("arguments", [["--device", "gpu"], ["--device", "npu", "--npus", "1"], []])
def test_wrong_usage(arguments: list[str]) -> None:
    assert run(None, "selftest", *arguments).returncode == 2


def test_selftest_without_npus() -> None:
    done = run(None, "selftest", "--device", "npu")
    assert done.returncode == 3 and "libascendcl.so" in done.stderr
