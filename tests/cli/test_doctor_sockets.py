"""What doctor says of socket directories and of whoever listens there."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.cli.conftest import Named, Serve, by_name
from tests.connector.rig import MakeEngine, RigEngine, prefill
from tests.support.fake_model import prompt_of
from tests.unit.reports import PEER, engine_report, worker_report
from vllm_mc2 import cli
from vllm_mc2.channel import prepare_socket_dir, socket_path
from vllm_mc2.cli import inspect
from vllm_mc2.cli.checks.sockets import filesystem_of, socket_findings
from vllm_mc2.cli.output import print_json
from vllm_mc2.cli.tables import Findings
from vllm_mc2.config import MC2Config
from vllm_mc2.protocol import PROTOCOL_VERSION, Refusal

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to own something as somebody else")


def look(directory: Path | str | None) -> Named:
    return by_name(socket_findings(None if directory is None else str(directory), MC2Config()))


def test_a_directory_that_is_right(directory: Path) -> None:
    before = sorted(directory.iterdir())
    found = look(directory)
    values = found["socket directory"]["values"]
    info = directory.stat()
    assert found["socket directory"]["state"] == "pass"
    assert (values["path"], values["uid"], values["mode"]) == (str(directory), info.st_uid, "0700")
    assert (values["path_bytes"], values["max_path_bytes"]) == (len(os.fsencode(directory)), 108 - 1 - 22)
    device = f"{os.major(info.st_dev)}:{os.minor(info.st_dev)}"
    lines = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    assert values["filesystem"] in {line[line.index("-") + 1] for line in lines if line[2] == device}
    assert found["engines"]["state"] == "info" and found["engines"]["values"]["workers"] == 0
    assert sorted(directory.iterdir()) == before


def test_file_systems_are_told_by_the_longest_mount_point() -> None:
    assert filesystem_of(Path("/proc/self/fd")) == "proc"
    assert filesystem_of(Path("/sys/kernel/mm")) == "sysfs"
    assert filesystem_of(Path("/procedure")) == filesystem_of(Path("/"))


def test_one_that_is_not_there_yet(tmp_path: Path) -> None:
    found = look(tmp_path / "later")["socket directory"]
    assert found["state"] == "info" and "the first engine makes it" in found["detail"]
    assert not (tmp_path / "later").exists()
    (tmp_path / "file").touch()
    found = look(tmp_path / "file" / "below")["socket directory"]
    assert found["state"] == "fail" and str(tmp_path / "file") in found["advice"]


def test_one_that_is_wrong(tmp_path: Path, directory: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(directory)
    for name in ("file", "link"):
        found = look(tmp_path / name)["socket directory"]
        assert found["state"] == "fail" and "remove it" in found["advice"], name
    directory.chmod(0o750)
    found = look(directory)["socket directory"]
    assert found["state"] == "fail" and "0750" in found["detail"]
    assert found["values"]["mode"] == "0750" and found["advice"] == f"chmod 700 {directory}"
    os.system(found["advice"])
    assert look(directory)["socket directory"]["state"] == "pass"


def test_names_that_utf8_cannot_say(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / os.fsdecode(b"s\xff")
    prepare_socket_dir(directory)
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(os.fspath(directory / os.fsdecode(b"\xfe.sock")))
    found = look(directory)
    assert found["socket directory"]["state"] == "pass" and "s\ufffd" in found["socket directory"]["values"]["path"]
    assert found["stale sockets"]["values"]["sockets"] == ["\ufffd.sock"]
    print_json(list(found.values()))
    assert cli.main(["inspect", "--socket-dir", str(directory), "--json"]) == 1
    assert "\ufffd.sock" in capsys.readouterr().out
    assert cli.main(["inspect", "--socket-dir", str(directory)]) == 1


def test_a_path_that_is_too_long_for_a_socket() -> None:
    limit = look("/tmp/x")["socket directory"]["values"]["max_path_bytes"]
    fits, too_long = "/tmp/" + "x" * (limit - 5), "/tmp/" + "x" * (limit - 4)
    assert look(fits)["socket directory"]["state"] == "info"
    found = look(too_long)["socket directory"]
    assert found["state"] == "fail" and f"at most {limit} bytes" in found["detail"] and "shorter" in found["advice"]
    # The kernel agrees: with an engine's longest name the one fits, the other does not.
    for path, is_fine in ((fits, True), (too_long, False)):
        with socket.socket(socket.AF_UNIX) as sock, pytest.raises(OSError) as caught:
            sock.bind(f"{path}/{'0' * 16}.sock")
        assert (type(caught.value) is FileNotFoundError) == is_fine


@needs_root
def test_one_of_somebody_else(directory: Path) -> None:
    os.chown(directory, 1234, 1234)
    found = look(directory)["socket directory"]
    assert found["state"] == "fail" and "uid 1234" in found["detail"] and found["values"]["uid"] == 1234
    assert "run as that user" in found["advice"]


@needs_root
def test_one_where_no_socket_can_be_made() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # which others may enter, unlike pytest's
        os.chown(folder, 1234, 1234)
        Path(folder).chmod(0o500)
        os.seteuid(1234)
        try:
            found = look(folder)["socket directory"]
        finally:
            os.seteuid(0)
    assert found["state"] == "fail" and "no socket can be made there: Permission denied" in found["detail"]


def test_where_the_directory_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = look(None)["socket directory"]
    assert found["values"]["path"] == str(tmp_path / "run" / "vllm-mc2") and "$XDG_RUNTIME_DIR" in found["detail"]
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    # Whoever is there is not of this test.
    monkeypatch.setattr("vllm_mc2.cli.checks.sockets.look", lambda path: Findings([], [], [], []))
    found = look(None)["socket directory"]
    assert found["values"]["path"] == f"/tmp/vllm-mc2-{os.getuid()}" and "without" in found["detail"]
    config = MC2Config(socket_dir=str(tmp_path / "other"))
    assert "--config" in by_name(socket_findings(None, config))["socket directory"]["detail"]
    assert "--socket-dir" in by_name(socket_findings(str(tmp_path), config))["socket directory"]["detail"]


def test_engines_in_another_default_directory(serve: Serve, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve("1", engine_report())
    monkeypatch.setattr("vllm_mc2.cli.checks.sockets.other_defaults", lambda: [directory])
    found = look(None)["another directory"]
    assert found["state"] == "warn" and str(directory) in found["detail"] and "XDG_RUNTIME_DIR" in found["advice"]
    assert "another directory" not in look(directory)


def test_engines_that_answer(serve: Serve, directory: Path) -> None:
    serve("1", engine_report(engine_id="lender", num_leases=3, num_decodes=1, listens_at="10.0.0.1:4000"))
    serve("2", engine_report(role="decode", engine_id="off", off_reason="speculative decoding is not supported"))
    serve("3", engine_report(role="decode", engine_id="copies", attach_off="prefix caching is off"))
    failed = PEER.__class__(
        **{**{f: getattr(PEER, f) for f in PEER.__struct_fields__}, "state": "failed", "reason": "r"}
    )
    serve("4", engine_report(role="both", engine_id="lonely", peers=[failed, PEER], num_peers=2))
    serve("5", worker_report())
    found = look(directory)
    values = found["engines"]["values"]
    assert {"prefill": 1, "decode": 2, "both": 1, "workers": 1, "protocol": PROTOCOL_VERSION} == values
    assert found["prefill lender"]["state"] == "pass" and "10.0.0.1:4000" in found["prefill lender"]["detail"]
    assert found["decode off"]["state"] == "fail" and "speculative" in found["decode off"]["detail"]
    assert found["decode copies"]["state"] == "info" and "prefix caching is off" in found["decode copies"]["detail"]
    assert found["both lonely"]["state"] == "warn" and "1 of 2 peers failed: r" in found["both lonely"]["detail"]


def test_names_of_others_reach_no_terminal(
    serve: Serve, directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    serve("1", engine_report(engine_id="\x1b[2J\x07", off_reason="a\nb\u202e"))
    monkeypatch.setattr("vllm_mc2.cli.checks.examination.software_findings", list)
    assert cli.main(["doctor", "--socket-dir", str(directory)]) == 1
    text = capsys.readouterr().out
    assert all(character.isprintable() for character in text.replace("\n", ""))
    assert "FAIL  prefill ?[2J?" in text and text.endswith("points failed\n")


def test_stale_silent_and_strange_sockets(serve: Serve, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspect, "ANSWER_SECONDS", 5.0)  # the only one that says nothing is waited for
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(socket_path(directory, "1" * 32)))
    serve("2", Refusal("protocol", str(PROTOCOL_VERSION), "99"))
    garbage = socket.socket(socket.AF_UNIX)
    garbage.bind(str(socket_path(directory, "3" * 32)))
    garbage.listen()
    code = f"""
import socket, sys
listener = socket.socket(fileno={garbage.fileno()})
print("ready", flush=True)
while True:
    connection, _ = listener.accept()
    connection.sendall(b"SSH-2.0-OpenSSH_9.2")
"""
    speaker = subprocess.Popen(
        [sys.executable, "-c", code], pass_fds=[garbage.fileno()], stdout=subprocess.PIPE, text=True
    )
    assert speaker.stdout is not None and speaker.stdout.readline() == "ready\n"
    speaker.stdout.close()
    stopped = start_engine(directory, "4" * 32)
    os.kill(stopped.pid, signal.SIGSTOP)
    os.waitpid(stopped.pid, os.WUNTRACED)  # until then one of its threads may still answer
    try:
        found = look(directory)
    finally:
        for child in (speaker, stopped):
            child.kill()
            child.wait(timeout=30)
        garbage.close()
    assert found["stale sockets"]["state"] == "warn"
    assert found["stale sockets"]["values"]["sockets"] == [f"{'1' * 16}.sock"]
    version, strange, silent = (found[f"socket {digit * 8}"] for digit in "234")
    assert {each["state"] for each in (version, strange, silent)} == {"fail"}
    assert "protocol is 99 there" in version["detail"] and "same version" in version["advice"]
    assert "frame of" in strange["detail"] and "no engine" in strange["advice"]
    assert "in time" in silent["detail"] and "stopped" in silent["advice"]
    assert found["engines"]["state"] == "info"


def start_engine(directory: Path, name: str) -> subprocess.Popen[str]:
    """A process that answers as an engine does, until it is killed."""
    code = """
import sys, time
from pathlib import Path
from tests.unit.reports import engine_report
from vllm_mc2.session import Answer, SessionServer
answer = Answer(engine_report(), keep_open=False)
server = SessionServer(Path(sys.argv[1]), sys.argv[2], lambda key, hello: answer, lambda key: None)
print("ready", flush=True)
time.sleep(600)
"""
    child = subprocess.Popen([sys.executable, "-c", code, str(directory), name], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline() == "ready\n"
    child.stdout.close()
    return child


def test_an_engine_that_is_killed_is_stale(directory: Path) -> None:
    child = start_engine(directory, "4" * 32)
    assert look(directory)["prefill prefill-"]["values"]["pid"] == 4100
    child.kill()
    child.wait(timeout=30)
    found = look(directory)
    assert found["stale sockets"]["values"]["sockets"] == [f"{'4' * 16}.sock"] and "prefill prefill-" not in found


# --- engines of vLLM, without servers ---


def test_real_engines(pair: tuple[RigEngine, RigEngine], tmp_path: Path) -> None:
    producer, consumer = pair
    prompt = prompt_of(40)
    consumer.add("r", prompt, prefill(producer, "r", prompt))
    consumer.run()
    found = look(tmp_path / "s")
    assert found["engines"]["values"] == {
        "prefill": 1, "decode": 1, "both": 0, "workers": 2, "protocol": PROTOCOL_VERSION,
    }  # fmt: skip
    engines = {f["values"]["role"]: f for name, f in found.items() if "engine_id" in f["values"]}
    for role, engine in (("prefill", producer), ("decode", consumer)):
        assert engines[role]["state"] == "pass"
        assert engines[role]["values"]["engine_id"] == engine.connector._engine_id()
        assert engines[role]["values"]["pid"] == os.getpid()
    assert "1 peer" in engines["decode"]["detail"] and "1 decode" in engines["prefill"]["detail"]


def test_real_engines_that_cannot_hand_over(make_engine: MakeEngine, tmp_path: Path) -> None:
    make_engine("kv_consumer", enable_prefix_caching=False)
    make_engine("kv_producer", enable_prefix_caching=False, extra={"mode": "attach"})
    make_engine("kv_consumer", enable_prefix_caching=False, extra={"mode": "attach"})
    states = sorted(f["state"] for f in look(tmp_path / "s").values() if "engine_id" in f["values"])
    assert states == ["fail", "info", "pass"]


def test_the_directory_of_a_real_engine(directory: Path) -> None:
    prepare_socket_dir(directory)  # what an engine does first finds nothing wrong where doctor does not
    assert look(directory)["socket directory"]["state"] == "pass"
