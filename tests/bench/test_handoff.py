"""The whole command, small: real processes, every byte checked, clean ends."""

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

OURS = ("mc2", "mc2_sleep")
WAYS = (*OURS, "memcpy", "two_copy", "tcp")
COMMAND = [
    sys.executable,
    "-c",
    "import sys; from vllm_mc2.cli import main; sys.exit(main())",
    "bench",
    "handoff",
]
KEYS = {
    "way", "kv_bytes", "batch", "median_us", "p10_us", "p90_us", "metadata_bytes", "receiver_kv_bytes", "verified",
}  # fmt: skip
TIMEOUT_SECONDS = 280

pytestmark = pytest.mark.timeout(TIMEOUT_SECONDS + 20)


def leftovers(tmp_path: Path) -> list[str]:
    """What the command could have left in its temporary directory. Its shared memory has no names."""
    return [str(path) for path in (tmp_path / "tmp").iterdir()]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "tmp").mkdir()
    return {**os.environ, "TMPDIR": str(tmp_path / "tmp")}


def start(arguments: list[str], environment: dict[str, str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [*COMMAND, *arguments], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def workers_of(process: "subprocess.Popen[str]", role: str) -> list[psutil.Process]:
    """The command's worker processes of one role."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        found = [
            child
            for child in psutil.Process(process.pid).children()
            if {"vllm_mc2.bench.handoff.worker", role} <= set(child.cmdline())
        ]
        if found:
            return found
        time.sleep(0.02)
    raise AssertionError(f"no {role}: {process.communicate()}")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str, Path]:
    """One run, looked at by several tests: its JSON, its output, its directory."""
    directory = tmp_path_factory.mktemp("handoff")
    (directory / "tmp").mkdir()
    arguments = ["--ways", ",".join(WAYS), "--max-bytes", "64MiB", "--repeats", "3"]
    arguments += ["--json", str(directory / "handoff.json"), "--output-dir", str(directory)]
    # Without vLLM: importing it for the registration of blocks would be most of the time.
    blocked = "import sys; sys.modules['vllm'] = None\n"
    command = [COMMAND[0], COMMAND[1], blocked + COMMAND[2], *COMMAND[3:]]
    done = subprocess.run(
        [*command, *arguments],
        env={**os.environ, "TMPDIR": str(directory / "tmp")},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert leftovers(directory) == []
    return msgspec.json.decode((directory / "handoff.json").read_bytes()), done.stdout, directory


def test_rows_have_the_agreed_keys_and_every_byte_was_right(measured: tuple[dict[str, Any], str, Path]) -> None:
    report, _, _ = measured
    assert {(row["way"], row["kv_bytes"], row["batch"]) for row in report["results"]} == {
        (way, kv_bytes, 1) for way in WAYS if way != "mc2_sleep" for kv_bytes in (16 << 20, 64 << 20)
    }
    assert {(row["way"], row["kv_bytes"]) for row in report["sleeping"]} == {
        ("mc2_sleep", kv_bytes) for kv_bytes in (16 << 20, 64 << 20)
    }
    rows = report["results"] + report["sleeping"]
    for row in rows:
        assert row.keys() == KEYS
        assert row["verified"] is True
        assert 0 < row["p10_us"] <= row["median_us"] <= row["p90_us"]
        assert row["receiver_kv_bytes"] == (0 if row["way"] in OURS else row["kv_bytes"])
        assert (row["metadata_bytes"] > 0) == (row["way"] in OURS)
    assert len({row["metadata_bytes"] for row in rows if row["way"] in OURS}) == 1


def test_the_rest_of_the_report(measured: tuple[dict[str, Any], str, Path]) -> None:
    report, output, _ = measured
    assert report["machine"]["num_cores"] >= 1
    assert [each["huge_pages"] for each in report["first_touch"]] == ["auto", "off"]
    small, large = report["block_size_case"]["block_bytes"]
    assert large == 32 * small
    assert report["block_size_case"]["verified"] is True
    assert all(check.keys() == {"check", "limit", "measured", "ok"} for check in report["checks"])
    assert {"what": "registration in vLLM's scheduler", "reason": "vLLM is not installed"} in report["left_out"]
    # All of the KV was held and read, and none of it became the receiver's own.
    assert max(report["receiver_growth_bytes"].values()) < 4 << 20
    assert "Goals" in output
    assert "mc2 (in place)" in output


def test_charts_are_drawn(measured: tuple[dict[str, Any], str, Path]) -> None:
    _, output, directory = measured
    if importlib.util.find_spec("matplotlib") is None:
        assert 'pip install "vllm-mc2[bench]"' in output
    else:
        assert (directory / "handoff.svg").read_text().count("<path") > 10
        assert (directory / "handoff.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("role", ["sender", "receiver"])
def test_a_killed_worker_ends_the_run_and_leaves_nothing(
    role: str, tmp_path: Path, environment: dict[str, str]
) -> None:
    # So many repeats that it cannot have ended by itself.
    arguments = ["--ways", "mc2,memcpy,tcp", "--max-bytes", "16MiB", "--repeats", "10000", "--no-charts"]
    process = start(arguments, environment)
    try:
        (worker,) = workers_of(process, role)
        others = workers_of(process, "receiver" if role == "sender" else "sender")
        time.sleep(0.3)
        worker.send_signal(signal.SIGKILL)
        output, errors = process.communicate(timeout=TIMEOUT_SECONDS)
    finally:
        process.kill()
    assert process.returncode == 1, errors
    assert f"the {role} (process {worker.pid}) was killed by SIGKILL" in errors
    assert "Traceback" not in errors
    assert output == ""
    assert not any(other.is_running() for other in others)
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_workers_end_with_the_command(number: signal.Signals, environment: dict[str, str]) -> None:
    process = start(["--ways", "memcpy", "--max-bytes", "16MiB", "--repeats", "10000", "--no-charts"], environment)
    try:
        workers = [*workers_of(process, "sender"), *workers_of(process, "receiver")]
        while workers[1].memory_info().rss < 50 << 20:
            time.sleep(0.05)  # it has hardly begun
        workers[1].send_signal(signal.SIGSTOP)  # as the peers' are between their turns
        process.send_signal(number)
        process.communicate(timeout=TIMEOUT_SECONDS)
    finally:
        process.kill()
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert alive == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ways", "mc2,pigeon"], "expected some of"),
        (["--max-bytes", "1MiB"], "at least 16 MiB"),
        (["--max-bytes", "lots"], "a number of bytes"),
        (["--repeats", "0"], "1 to 10000"),
        (["--output-dir", "/nonexistent"], "not a directory that can be written to"),
        (["--json", "/nonexistent/x.json"], "not a directory that can be written to"),
    ],
)
def test_wrong_usage_is_said(arguments: list[str], message: str, environment: dict[str, str]) -> None:
    done = subprocess.run(
        [*COMMAND, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    assert done.returncode == 2
    assert message in done.stderr
