"""What all subcommands have in common: help that teaches, exit codes, results and nothing else on standard output."""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.cli.conftest import Serve, run_child
from tests.unit.reports import engine_report
from vllm_mc2 import cli
from vllm_mc2.cli import exits
from vllm_mc2.cli.output import print_json, results_only

COMMANDS = [[], ["config"], ["doctor"], ["inspect"], ["selftest"], ["bench"], ["bench", "handoff"], ["bench", "serve"]]
PREFILL = ["config", "--role", "prefill"]
NOWHERE = "/nonexistent/mc2"


def run(*arguments: str) -> int:
    """The exit code, also where argparse ends the process."""
    try:
        return cli.main(arguments)
    except SystemExit as ended:
        return int(str(ended.code))


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_has_examples_and_exit_codes(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*command, "--help") == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert f"  vllm-mc2 {' '.join(command)}".rstrip() in captured.out  # an example
    assert "exit codes" in captured.out and "2 wrong usage" in captured.out
    assert all(len(line) <= 130 for line in captured.out.splitlines())


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_imports_nothing_heavy(command: list[str]) -> None:
    code = """
import sys
from vllm_mc2.cli import main
try:
    main([*sys.argv[1:], "--help"])
except SystemExit:
    pass
heavy = ("torch", "vllm", "numpy", "vllm_mc2._native", "asyncio", "mooncake", "matplotlib")
print([name for name in heavy if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", code, *command], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out == f"vllm-mc2 {version('vllm-mc2')}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["look"],
        ["config"],
        ["config", "--role", "lender"],
        ["config", "--role", "prefill", "--keys"],
        ["doctor", "extra"],
        ["doctor", "--config", f"@{NOWHERE}"],
        ["doctor", "--peer", "nobody"],
        ["inspect", "--watch", "0"],
        ["inspect", "--watch", "often"],
        ["inspect", "--rows", "-1"],
        ["inspect", "--json", "--watch"],
        ["selftest"],
        ["bench"],
        ["bench", "handoff", "--ways", "pigeon"],
        ["bench", "serve"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_2_and_says_so_on_standard_error(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == exits.USAGE == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "vllm-mc2" in captured.err and "Traceback" not in captured.err


def test_the_other_exit_codes(
    serve: Serve, directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_mc2.cli.checks.examination.software_findings", list)  # vLLM is asked elsewhere
    (tmp_path / "file").touch()
    # 0: yes
    assert run(*PREFILL) == exits.OK == 0
    serve("1", engine_report())
    assert run("inspect", "--socket-dir", str(directory)) == 0
    assert run("doctor", "--socket-dir", str(directory)) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("doctor: nothing failed")
    # 1: the answer is no
    assert run("inspect", "--socket-dir", NOWHERE) == exits.NEGATIVE == 1
    directory.chmod(0o755)
    assert run("doctor", "--socket-dir", str(directory)) == 1
    captured = capsys.readouterr()
    assert "FAIL  socket directory" in captured.out and f"-> chmod 700 {directory}" in captured.out
    # 3: cannot be looked at
    assert run("inspect", "--socket-dir", str(tmp_path / "file")) == exits.UNUSABLE == 3
    assert run("selftest", "--device", "npu") == 3
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("vllm-mc2 ") >= 2


def test_ctrl_c_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("vllm_mc2.cli.checks.examination.examine", interrupted)
    assert run("doctor") == exits.INTERRUPTED == 130


def test_the_whole_of_doctor(directory: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """With vLLM, as a user runs it: both forms say the same."""
    code = run("doctor", "--json", "--socket-dir", str(directory))
    found = json.loads(capfd.readouterr().out)
    assert code == (1 if any(finding["state"] == "fail" for finding in found) else 0)
    assert all(finding.keys() == {"name", "state", "detail", "advice", "values"} for finding in found)
    assert all(finding["advice"] for finding in found if finding["state"] in {"fail", "warn"})
    assert len({finding["name"] for finding in found}) == len(found)
    assert run("doctor", "--socket-dir", str(directory)) == code
    lines = [line for line in capfd.readouterr().out.splitlines() if not line.startswith(" ")]
    width = max(24, *(len(finding["name"]) for finding in found))
    assert [line[:4].strip().lower() for line in lines[:-1]] == [finding["state"] for finding in found]
    assert [line[6 : 6 + width].strip() for line in lines[:-1]] == [finding["name"] for finding in found]
    assert lines[-1].startswith("doctor: ")


def test_what_libraries_say_is_not_among_the_results(capfd: pytest.CaptureFixture[str]) -> None:
    with results_only():
        print("from Python")
        os.write(1, b"from C\n")
    print_json({"result": 1})
    captured = capfd.readouterr()
    assert json.loads(captured.out) == {"result": 1}
    assert "from Python" in captured.err and "from C" in captured.err


def test_a_reader_that_has_had_enough_is_no_error() -> None:
    command = [sys.executable, "-c", "import sys; from vllm_mc2.cli import main; sys.exit(main())", "config", "--keys"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stderr is not None
        child.stdout.close()
        assert child.stderr.read() == b""
    assert child.returncode == 0


def test_figures_of_a_benchmark_on_standard_output(tmp_path: Path) -> None:
    tmp = tmp_path / "tmp"
    tmp.mkdir()
    arguments = [
        "--quick",
        "--ways",
        "mc2",
        "--max-bytes",
        "16MiB",
        "--repeats",
        "1",
        "--no-charts",
        "--output-dir",
        str(tmp),
    ]
    done = run_child("bench", "handoff", *arguments, "--json", "-", env={"TMPDIR": str(tmp)})
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert [row["kv_bytes"] for row in figures["results"]] == [16 << 20]
    assert "KV handed over as one request" in done.stderr  # the tables
    assert list(tmp.iterdir()) == []
    done = run_child("bench", "handoff", "--output-dir", NOWHERE, "--json", "-")
    assert done.returncode == 2 and done.stdout == ""


def test_a_benchmark_of_servers_takes_the_same(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    seen = []

    def measured(settings: object, *, json_path: Path, output_dir: Path | None) -> int:
        seen.append(json_path)
        print("the report")
        json_path.write_text('{"ttft": []}\n')
        return 0

    monkeypatch.setattr("vllm_mc2.bench.serve.command.run", measured)
    assert run("bench", "serve", "--fat", "--json", "-") == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"ttft": []} and captured.err == "the report\n"
    assert not seen[0].exists()
