"""Servers of ``vllm-mc2 bench serve``: pausing and counting them; one small real run, and one that is interrupted."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import msgspec
import psutil
import pytest

from tests.support.family import family
from vllm_mc2.bench.serve.client import RequestError
from vllm_mc2.bench.serve.fleet import Fleet, System
from vllm_mc2.bench.serve.footprint import idle_cores, memory_bytes
from vllm_mc2.bench.serve.results import Results
from vllm_mc2.bench.serve.systems import Nothing
from vllm_mc2.bench.servers import Server, ServerError, free_ports, kv_transfer_config

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_SECONDS = 60.0

# A server with a child, which has a child; each writes the time to its own file all the time.
TREE = """
import subprocess, sys, time
folder, depth = sys.argv[1], int(sys.argv[2])
if depth:
    subprocess.Popen([sys.executable, "-c", open(sys.argv[3]).read(), folder, str(depth - 1), sys.argv[3]])
while True:
    with open(f"{folder}/{depth}.new", "w") as file:
        file.write(str(time.monotonic()))
    import os
    os.replace(f"{folder}/{depth}.new", f"{folder}/{depth}")
    time.sleep(0.01)
"""


# Servers that are paused.


def dummy(folder: Path, name: str = "dummy") -> Server:
    script = folder / "tree.py"
    script.write_text(TREE)
    return Server(name, [sys.executable, str(script), str(folder), "2", str(script)], 1, log_dir=folder)


def stamps(folder: Path) -> list[str]:
    return [(folder / str(depth)).read_text() for depth in range(3)]


def wait_until(true, what: str) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def test_a_paused_tree_stands_still_goes_on_and_ends(tmp_path: Path) -> None:
    with dummy(tmp_path) as server:
        wait_until(lambda: all((tmp_path / str(depth)).exists() for depth in range(3)), "the tree has grown")
        processes = server.processes()
        assert len(processes) == 3
        server.pause()
        assert {process.status() for process in processes} == {psutil.STATUS_STOPPED}
        still = stamps(tmp_path)
        time.sleep(0.1)
        assert stamps(tmp_path) == still
        assert server.running
        server.resume()
        wait_until(
            lambda: all(new != old for new, old in zip(stamps(tmp_path), still, strict=True)), "the tree goes on"
        )
        server.pause()
    assert [process for process in processes if process.is_running() and process.status() != "zombie"] == []


def test_a_paused_server_gets_its_sigterm(tmp_path: Path) -> None:
    """Its own clean-up must run; without going on first it could only be killed."""
    mark = tmp_path / "ended"
    code = (
        f"import signal, sys, time; signal.signal(15, lambda *_: (open({str(mark)!r}, 'w').close(), sys.exit(0)));"
        f"open({str(tmp_path / 'up')!r}, 'w').close(); time.sleep(600)"
    )
    with Server("dummy", [sys.executable, "-c", code], 1, log_dir=tmp_path) as server:
        wait_until((tmp_path / "up").exists, "it is up")
        server.pause()
    assert mark.exists()


def test_only_whose_turn_it_is_runs_and_a_failing_system_is_left_out(tmp_path: Path) -> None:
    said: list[str] = []
    fleet = Fleet(
        tmp_path, arguments=[], max_model_len=1, kv_bytes=1, ready_seconds=1.0, log_dir=tmp_path, say=said.append
    )
    folders = {name: tmp_path / name for name in ("one", "two")}
    with ExitStack() as ending, fleet:
        for name, folder in folders.items():
            folder.mkdir()
            server = ending.enter_context(dummy(folder, name))
            fleet.systems[name] = System(name, [server], Nothing(), "a dummy")
        servers = {name: system.prefill for name, system in fleet.systems.items()}
        for name, folder in folders.items():
            wait_until(lambda: all((folder / str(depth)).exists() for depth in range(3)), f"{name} has grown")  # noqa: B023
            servers[name].pause()

        def look(system: System) -> tuple[bool, bool]:
            return tuple(  # type: ignore[return-value]
                all(process.status() == psutil.STATUS_STOPPED for process in server.processes())
                for server in servers.values()
            )

        assert fleet.attempt("one", look) == (False, True)
        assert fleet.attempt("two", look) == (True, False)
        assert look(fleet.systems["one"]) == (True, True)

        def fail(system: System) -> None:
            raise RequestError("status 500: it broke")

        assert fleet.attempt("one", fail) is None
        assert fleet.left_out == {"one": "status 500: it broke"}
        assert servers["one"].processes() == []
        assert len(servers["two"].processes()) == 3
        assert fleet.attempt("one", look) is None
        servers["two"].pause()
        fleet.stop(["two"])
        assert servers["two"].processes() == []
    assert said == ["one is left out: status 500: it broke"]


def test_cpu_and_memory_of_a_tree(tmp_path: Path) -> None:
    """A memfd that nobody has mapped is memory too."""
    code = (
        "import mmap, os, time; f = os.memfd_create('mc2-test'); os.posix_fallocate(f, 0, 32 << 20)\n"
        # The child has it mapped and read, but not open.
        "m = mmap.mmap(f, 32 << 20)\n"
        "if os.fork() == 0: os.close(f); [m[i] for i in range(0, 32 << 20, 4096)]; up = 'child'\n"
        "else: up = 'parent'\n"
        f"open({str(tmp_path)!r} + '/' + up, 'w').close(); t = time.monotonic()\n"
        "while time.monotonic() < t + 600: pass"
    )
    with Server("dummy", [sys.executable, "-c", code], 1, log_dir=tmp_path) as server:
        wait_until(lambda: (tmp_path / "child").exists() and (tmp_path / "parent").exists(), "both are up")
        assert 32 << 20 < memory_bytes([server]) < 60 << 20
        wait_until(lambda: idle_cores([server], 0.5) > 0.05, "it is seen to use the processor")
        server.pause()
        assert idle_cores([server], 0.3) == 0.0
    assert memory_bytes([server]) == 0


def test_an_environment_variable_can_be_taken_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MC2_TEST_A", "a")
    monkeypatch.setenv("MC2_TEST_B", "b")
    code = "import os; print(os.environ.get('MC2_TEST_A'), os.environ.get('MC2_TEST_B'), flush=True)"
    environment = {"MC2_TEST_A": None, "MC2_TEST_B": "c"}
    with Server("dummy", [sys.executable, "-c", code], 1, log_dir=tmp_path, environment=environment) as server:
        wait_until(lambda: server.log_text().endswith("\n"), "it has printed")
        assert server.log_text() == "None c\n"
        with pytest.raises(ServerError, match="dummy ended with status 0"):
            server.wait_ready(DEADLINE_SECONDS)


def test_ports_and_configs() -> None:
    assert len(set(free_ports(4))) == 4
    config = json.loads(kv_transfer_config("kv_both", connector="Other", module_path="some.where"))
    assert config["kv_connector_module_path"] == "some.where"
    assert "kv_connector_module_path" not in json.loads(kv_transfer_config("kv_both"))


# Everything, with a model that computes nothing to speak of.


def servers_of(running: "subprocess.Popen[str]", scratch: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.Process(running.pid).children(recursive=True):
        try:
            if str(scratch) in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:
            pass
    return found


def bench(tiny_model: Path, folder: Path) -> subprocess.Popen[str]:
    """The real command on a copy of the model, so that its servers can be told. It fails if it leaves processes behind."""
    model = folder / "model"
    model.mkdir()
    for file in tiny_model.iterdir():
        os.link(file, model / file.name)
    code = (
        "import argparse, sys; from vllm_mc2.bench.serve.arguments import add_parser;"
        "parser = argparse.ArgumentParser(); add_parser(parser.add_subparsers());"
        "args = parser.parse_args(sys.argv[1:]); sys.exit(args.run(args))"
    )
    argv = [
        *("serve", "--model", str(model), "--lengths", "256", "--repeats", "1", "--systems", "single,none,mc2"),
        *("--concurrency", "2", "--json", str(folder / "result.json"), "--output-dir", str(folder / "out")),
    ]
    quiet = ROOT / "examples" / "setup" / "quiet"
    search = os.pathsep.join(filter(None, [str(quiet), os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(
        family([sys.executable, "-c", code, *argv]),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": search},
    )


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_small_real_run(tiny_model: Path, tmp_path: Path) -> None:
    with bench(tiny_model, tmp_path) as running:
        text, _ = running.communicate(timeout=1100)
    assert running.returncode == 0, text
    results = msgspec.json.decode((tmp_path / "result.json").read_bytes(), type=Results)
    assert results.left_out == []
    rows = {row.system: row for row in results.ttft}
    assert set(rows) == {"single", "single-hit", "single-floor", "none", "mc2", "mc2-tail"}
    assert all(rows[system].tokens_equal for system in ("single-floor", "none", "mc2", "mc2-tail"))
    assert [(handoff.attached, handoff.not_attached) for handoff in results.handoffs] == [(6, 0)]
    assert results.handoffs[0].kv_bytes_not_copied > 0
    assert {row.system for row in results.throughput} == {row.system for row in results.idle_cpu} == {"none", "mc2"}
    assert "checks" in text


@pytest.mark.e2e
@pytest.mark.slow
def test_an_interrupted_run_leaves_nothing(tiny_model: Path, tmp_path: Path) -> None:
    with bench(tiny_model, tmp_path) as running:
        try:
            wait_until(lambda: len(servers_of(running, tmp_path)) >= 5, "servers are starting")
            running.send_signal(signal.SIGINT)
            text, _ = running.communicate(timeout=200)
        finally:
            running.kill()
    assert running.returncode == 1 or running.returncode == 130, text
    assert "interrupted" in text
