"""``vllm-mc2 inspect`` against listeners of all kinds. Nothing here needs vllm or the native module."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from tests.support.descriptors import assert_none_new, open_descriptors
from tests.unit.reports import LEASE, engine_report, worker_report
from vllm_mc2 import cli, protocol, session
from vllm_mc2.channel import prepare_socket_dir, socket_path
from vllm_mc2.cli import inspect
from vllm_mc2.errors import PeerUnreachableError
from vllm_mc2.protocol import InspectHello, Message, Refusal
from vllm_mc2.session import Answer, SessionServer

Serve = Callable[[str, Message], SessionServer]


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody here is too slow, unless a test wants that."""
    monkeypatch.setattr(inspect, "ANSWER_SECONDS", 60.0)
    monkeypatch.setattr(session, "HELLO_TIMEOUT_SECONDS", 3600.0)


@pytest.fixture
def serve(directory: Path) -> Iterator[Serve]:
    servers = []

    def start(digit: str, report: Message) -> SessionServer:
        def answer(key: int, hello: Message) -> Answer:
            assert hello == InspectHello(protocol.PROTOCOL_VERSION)
            return Answer(report, keep_open=False)

        servers.append(SessionServer(directory, digit * 32, answer, lambda key: None))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def command(directory: Path, *arguments: str) -> int:
    return cli.main(["inspect", "--socket-dir", str(directory), *arguments])


def test_a_table_and_json(serve: Serve, directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    serve("1", engine_report(role="decode", engine_id="d", incarnation="1" * 32))
    serve("2", engine_report(num_leases=1, leases=[LEASE]))
    serve("3", worker_report())
    assert command(directory) == 0
    captured = capsys.readouterr()
    assert captured.out.index("prefill prefill-1  pid 4100") < captured.out.index("decode d  pid 4100")
    assert "worker 0  pid 4100" in captured.out and captured.err == "" and "\x1b" not in captured.out
    assert command(directory, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"engines", "workers", "stale", "unanswered"}
    assert found["engines"][0]["leases"] == [json.loads(msgspec.json.encode(LEASE))]
    assert found["workers"][0]["pool_bytes"] == 6 << 20


@pytest.mark.parametrize("exists", [True, False])
def test_nobody_there_is_1_and_says_where(tmp_path: Path, capsys: pytest.CaptureFixture[str], exists: bool) -> None:
    path = tmp_path / "empty"
    if exists:
        prepare_socket_dir(path)
    assert command(path) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and str(path) in captured.err and "--socket-dir" in captured.err
    assert path.exists() == exists
    assert command(path, "--json") == 1
    assert json.loads(capsys.readouterr().out) == {"engines": [], "workers": [], "stale": [], "unanswered": []}


def test_the_default_directory_is_that_of_the_engines(
    serve: Serve, directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    serve("1", engine_report())
    directory.rename(directory.parent / "vllm-mc2")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(directory.parent))
    assert cli.main(["inspect"]) == 0
    (directory.parent / "vllm-mc2").rename(directory)


def test_a_directory_that_cannot_be_used_is_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path)
    for name, message in (("file", "not a directory"), ("link", "links are not followed"), ("x" * 100, "bytes")):
        assert command(tmp_path / name) == 3
        assert message in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to own something as somebody else")
def test_a_directory_of_somebody_else_is_3(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.chown(directory, 1234, 1234)
    assert command(directory) == 3
    assert "belongs to uid 1234" in capsys.readouterr().err


def bind(directory: Path, digit: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(str(socket_path(directory, digit * 32)))
    return sock


def test_stale_silent_and_strange_listeners_hold_nobody_up(
    serve: Serve, directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(inspect, "ANSWER_SECONDS", 5.0)
    serve("0", engine_report())
    serve("1", Refusal("protocol", "1", "2"))
    serve("2", InspectHello(protocol.PROTOCOL_VERSION))
    bind(directory, "3").close()  # stale
    (directory / "notes.txt").touch()
    (directory / f"{'4' * 16}.sock").touch()  # not a socket
    silent = []
    for digit in "56789":
        silent.append(bind(directory, digit))
        silent[-1].listen(0)
    full = socket.socket(socket.AF_UNIX)  # takes the only place in the queue
    full.connect(str(socket_path(directory, "9" * 32)))
    findings = inspect.look(directory)
    assert len(findings.engines) == 1
    assert findings.stale == [f"{'3' * 16}.sock"]
    reasons = {each.socket[0]: each.reason for each in findings.unanswered}
    assert set(reasons) == set("1256789")
    assert reasons["1"] == "refused: protocol is 2 there, 1 here"
    assert reasons["2"] == "answered InspectHello"
    assert "in time" in reasons["5"]
    assert command(directory) == 0
    assert "stale" in capsys.readouterr().out
    # They are asked at the same time: now each of them hangs up only when all of them have been asked.
    monkeypatch.setattr(inspect, "ANSWER_SECONDS", 3600.0)
    socket_path(directory, "9" * 32).unlink()
    for sock in silent[:-1]:
        while select.select([sock], [], [], 0)[0]:
            sock.accept()[0].close()
    hanging_up = threading.Thread(
        target=lambda: [each.close() for each in [sock.accept()[0] for sock in silent[:-1]]], daemon=True
    )
    hanging_up.start()
    assert {each.socket[0] for each in inspect.look(directory).unanswered} == set("125678")
    hanging_up.join()
    for sock in (*silent, full):
        sock.close()


def test_one_byte_at_a_time_ends_at_the_deadline(directory: Path) -> None:
    with bind(directory, "1") as listener:
        listener.listen()
        code = """
import socket, sys, time
s = socket.socket(fileno=int(sys.argv[1]))
c, _ = s.accept()
c.send((60000).to_bytes(4, "little"))
while True:
    c.send(b"\\0")
    time.sleep(0.05)
"""
        child = subprocess.Popen([sys.executable, "-c", code, str(listener.fileno())], pass_fds=[listener.fileno()])
        # All of the frame would take most of an hour.
        with pytest.raises(PeerUnreachableError, match="in time"):
            inspect.ask(socket_path(directory, "1" * 32), 0.5)
        child.kill()
        child.wait(timeout=30)


def test_descriptors_that_come_along_are_closed(directory: Path) -> None:
    before = open_descriptors()
    read_fd, write_fd = os.pipe()
    server = SessionServer(
        directory, "1" * 32, lambda key, hello: Answer(engine_report(), (read_fd,), keep_open=False), lambda key: None
    )
    assert len(inspect.look(directory).engines) == 1
    server.close()
    os.close(read_fd)
    os.close(write_fd)
    assert_none_new(before)


def test_a_stopped_onlooker_does_not_hold_up_the_session_thread(serve: Serve, directory: Path) -> None:
    """The largest answers are longer than what the kernel buffers."""
    leases = [msgspec.structs.replace(LEASE, holders=LEASE.holders * 12)] * 1000
    report = engine_report(num_leases=1000, leases=leases)
    hello = protocol.frame(InspectHello(protocol.PROTOCOL_VERSION))
    assert 400_000 < len(protocol.frame(report)) < protocol.MAX_FRAME_BYTES
    server = serve("1", report)
    stopped = []
    for _ in range(5):
        stopped.append(socket.socket(socket.AF_UNIX))
        stopped[-1].connect(str(server.path))
        stopped[-1].sendall(hello)
    # The server would wait for an hour for each of them.
    assert inspect.ask(server.path, 60.0) == report
    # Whoever goes on reading in time gets the rest.
    stopped[0].settimeout(60)
    received = bytearray()
    while chunk := stopped[0].recv(65536):
        received += chunk
    assert received == protocol.frame(report)
    for sock in stopped:
        sock.close()
    assert inspect.ask(server.path, 60.0) == report


def start_watching(directory: Path, *arguments: str) -> subprocess.Popen[str]:
    code = "import sys; from vllm_mc2.cli import main; sys.exit(main())"
    arguments = ("inspect", "--socket-dir", str(directory), "--watch", *arguments)
    return subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True)


def test_watch_goes_on_until_ctrl_c(serve: Serve, directory: Path) -> None:
    child = start_watching(directory, "0.1")
    assert child.stdout is not None
    lines = iter(child.stdout.readline, "")
    assert "no engine answers" in next(line for line in lines if "engine" in line)
    serve("1", engine_report())
    assert [next(line for line in lines if "prefill-1" in line) for _ in range(2)]
    child.send_signal(signal.SIGINT)
    rest, _ = child.communicate(timeout=30)
    assert child.returncode == 0 and "\x1b" not in rest


def test_a_reader_that_has_had_enough_is_no_error(serve: Serve, directory: Path) -> None:
    serve("1", engine_report())
    child = start_watching(directory, "0.1")
    assert child.stdout is not None
    child.stdout.readline()
    child.stdout.close()
    assert child.wait(timeout=30) == 0
