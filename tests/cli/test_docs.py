"""The commands in docs/cli.md, run as they are written, and what they print compared with what is written."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import CHILD
from tests.unit.reports import engine_report
from vllm_mc2 import cli
from vllm_mc2.channel import prepare_socket_dir
from vllm_mc2.cli import exits
from vllm_mc2.network.lender import Listening, RemoteServer
from vllm_mc2.protocol import PROTOCOL_VERSION, Refusal
from vllm_mc2.session import Answer, SessionServer
from vllm_mc2.ticket import TcpAddress

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "cli.md").read_text()
FENCE = re.compile(r"(?:<!-- run by: (\S+) -->\n)?```(console|bash)\n(.*?)```", re.DOTALL)
DOCUMENTED = "/run/user/1000"
needs_jq = pytest.mark.skipif(shutil.which("jq") is None, reason="jq is not installed")


def blocks(test: str) -> list[str]:
    """The blocks that name ``test`` as the one that runs them."""
    found = [body for name, _, body in FENCE.findall(TEXT) if name == f"tests/cli/test_docs.py::{test}"]
    assert found
    return found


def session(block: str) -> list[tuple[str, str]]:
    """``(command, what it prints)`` of a console block."""
    parts = re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]
    return [(part.partition("\n")[0], part.partition("\n")[2]) for part in parts]


@pytest.fixture
def shell(tmp_path: Path):
    """Runs a command line with ``vllm-mc2`` on the path; both outputs together. vLLM, which takes long, is not there."""
    folder = tmp_path / "bin"
    folder.mkdir()
    script = folder / "vllm-mc2"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -c {shlex.quote(CHILD.format(prelude=""))} "$@"\n')
    script.chmod(0o755)

    def run(command: str, check: bool = False) -> str:
        run_dir = os.environ["XDG_RUNTIME_DIR"]
        done = subprocess.run(
            ["bash", "-c", command.replace(DOCUMENTED, run_dir)],
            env={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "HOME": str(tmp_path)},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=100,
            check=check,
        )
        return done.stdout.replace(run_dir, DOCUMENTED)

    return run


def assert_alike(written: str, printed: str) -> None:
    """Equal, but that ``...`` stands for anything."""
    pattern = ".*".join(re.escape(part) for part in written.split("..."))
    assert re.fullmatch(pattern, printed, re.DOTALL), f"documented:\n{written}\nprinted:\n{printed}"


def test_every_block_is_run_or_says_that_it_is_not() -> None:
    for match in FENCE.finditer(TEXT):
        if match[1] is None:
            assert "not run" in TEXT[: match.start()].rstrip().rpartition("\n\n")[2] + match[3]
            continue
        path, _, name = match[1].partition("::")
        assert f"def {name}(" in (Path(__file__).resolve().parents[2] / path).read_text()


def test_console_blocks(shell) -> None:
    for block in blocks("test_console_blocks"):
        for command, written in session(block):
            assert_alike(written, shell(command))


def names(text: str) -> list[str]:
    return [line[6:30].strip() for line in text.splitlines() if re.match(r"(PASS|FAIL|WARN|INFO|SKIP)  ", line)]


def test_the_findings_are_those_of_doctor(capfd: pytest.CaptureFixture[str]) -> None:
    [block] = blocks("test_the_findings_are_those_of_doctor")
    [(command, written)] = session(block)
    assert cli.main(shlex.split(command)[1:]) in {0, 1}
    found = names(capfd.readouterr().out)
    documented = [name for name in names(written) if not name.startswith(("prefill ", "decode "))]
    # What is only found on some machines is not in the example.
    assert [name for name in found if name in documented] == documented
    assert set(found) - set(documented) <= {"another directory"}
    table = {name for row in re.findall(r"^\| (`.*?) \|", TEXT, re.MULTILINE) for name in re.findall(r"`(.*?)`", row)}
    facts = {"kernel", "user", "reserved huge pages", "transparent huge pages", "versions", "CPU backend"}
    assert set(found) - facts <= table


def test_a_configuration_is_looked_at(shell) -> None:
    [block] = blocks("test_a_configuration_is_looked_at")
    [(command, written)] = session(block)
    first, *_ = written.splitlines()
    printed = shell(command).splitlines()
    assert_alike(first, printed[0])
    assert printed[1] == written.splitlines()[1]


def test_a_peer_is_asked(shell, tmp_path: Path) -> None:
    [block] = blocks("test_a_peer_is_asked")
    [(command, written)] = session(block)
    secret = tmp_path / "mc2-secret"
    secret.touch(mode=0o600)
    secret.write_text("a secret of some length")
    listening = Listening(TcpAddress("127.0.0.1", 0), secret.read_bytes(), 5.0)
    answer = Answer(Refusal("incarnation", "0" * 32, "5" * 32), keep_open=False)
    server = RemoteServer(listening, lambda key, hello: answer, lambda key: None)
    try:
        printed = shell(command.replace("10.0.0.1:14000", str(server.address)))
    finally:
        server.close()
    written = re.sub(r"protocol \d+", f"protocol {PROTOCOL_VERSION}", written).replace("(3 ms)", "...")
    assert_alike(written.split("lets this host in")[1], printed.split("lets this host in")[1])


def test_selftest_without_npus(shell) -> None:
    for block in blocks("test_selftest_without_npus"):
        for command, written in session(block):
            assert_alike(written, shell(command))


@needs_jq
def test_the_script(shell, tmp_path: Path) -> None:
    [script] = blocks("test_the_script")
    directory = tmp_path / "run" / "vllm-mc2"
    prepare_socket_dir(directory)
    answer = Answer(engine_report(lent_blocks=113), keep_open=False)
    server = SessionServer(directory, "1" * 32, lambda key, hello: answer, lambda key: None)
    try:
        *failures, pool, lent = shell(f"set -e\n{script}", check=True).splitlines()
    finally:
        server.close()
    assert [failure.split(":")[0] for failure in failures] == ["vLLM"]  # which the shell of this test has not
    assert int(pool) > 0 and lent == "113"


def test_the_exit_codes_are_those_of_the_code() -> None:
    table = TEXT.partition("## Exit codes")[2].partition("##")[0]
    documented = [int(code) for code in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)]
    assert documented == sorted(value for name, value in vars(exits).items() if name.isupper())


@pytest.mark.parametrize("command", ["config", "doctor"])
def test_every_option_is_documented(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    options = set(re.findall(r"^  (--[a-z-]+)", capsys.readouterr().out, re.MULTILINE))
    assert len(options) > 3
    section = TEXT.partition(f"\n## {command}\n")[2].partition("\n## ")[0]
    assert [option for option in sorted(options) if option not in section] == []
