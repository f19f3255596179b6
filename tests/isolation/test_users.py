"""Who is another user, and what that means: on one host, in user namespaces, and after a mistake with the directory's mode.

Users are told apart by what the kernel says of a connected socket. In a user namespace it says it in that namespace's own
numbers: two that stand for the same user of the host fit together, whatever they are called; all strangers are 65534.
"""

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.isolation.conftest import Cell, StartEngine
from tests.support.fake_model import prompt_of_family
from vllm_mc2 import protocol
from vllm_mc2.protocol import PROTOCOL_VERSION, InspectHello, SchedulerHello, WorkerHello

PROMPT = prompt_of_family(1, 70)
OURS, THEIRS, NOBODY = 100_000, 200_000, 65_534
"""Users of the host."""


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Path]:
    """The socket directory, of a user who is not root; whoever likes can come as far as its door."""
    for parent in (tmp_path, *tmp_path.parents):
        if parent.stat().st_uid == os.geteuid() and str(parent).startswith("/tmp/"):
            parent.chmod(0o755)
    path = tmp_path / "s"
    path.mkdir(mode=0o700)
    os.chown(path, OURS, OURS)
    yield path
    assert list(path.iterdir()) == []


def test_one_host_user_under_two_names(start: StartEngine) -> None:
    """1000 in one container and root in the other, but the same user to the host: they may do to each other what they like."""
    prefill = start("kv_producer", uid_ranges=[(1000, OURS, 1)], uid=1000, wait=False)
    decode = start("kv_consumer", uid_ranges=[(0, OURS, 65536)], uid=0)
    prefill.wait_until(lambda: prefill.ready)
    assert (prefill.born["uid"], decode.born["uid"]) == (1000, 0)
    assert {os.stat(f"/proc/{cell.host_pid}").st_uid for cell in (prefill, decode)} == {OURS}
    result = decode.run("r", PROMPT, prefill.prefill("r", PROMPT))
    assert (result["params"]["mc2"]["way"], result["computed"]) == ("attach", 1)
    prefill.settle()
    decode.settle()


@pytest.mark.parametrize("uid", [None, 0], ids=["on the host", "in a container"])
def test_another_users_directory_is_refused_at_start(start: StartEngine, uid: int | None) -> None:
    """With the same name inside, but another user to the host."""
    ranges = None if uid is None else [(0, THEIRS, 65536)]
    cell = start("kv_consumer", uid_ranges=ranges, uid=THEIRS if uid is None else uid, wait=False)
    cell.wait_until(lambda: cell.crash)
    shown = OURS if uid is None else NOBODY
    assert f"belongs to uid {shown}, this process runs as {cell.born['uid']}" in cell.crash


STRANGER = """
import os, socket, sys

uid, directory, payload = int(sys.argv[1]), sys.argv[2], bytes.fromhex(sys.argv[3])
os.setgroups([]); os.setresgid(uid, uid, uid); os.setresuid(uid, uid, uid)
try:
    names = sorted(os.listdir(directory))
except PermissionError:
    sys.exit("door")
for name in names:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(50)
    try:
        sock.connect(directory + "/" + name)
    except PermissionError:
        print("socket", name)
        continue
    try:
        sock.sendall(payload)
        print("answer", name, sock.recv(1))
    except (BrokenPipeError, ConnectionResetError):
        print("answer", name, b"")
    sock.close()
"""


class Bomb:
    """What leaves a file behind when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


def come_as(uid: int, directory: Path, payload: bytes) -> list[list[str]]:
    """What another user gets from every socket; ``[["door"]]`` when there is no way in."""
    command = [sys.executable, "-c", STRANGER, str(uid), str(directory), payload.hex()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0 or done.stderr == "door\n", done.stderr
    return [line.split(maxsplit=2) for line in (done.stdout or done.stderr).splitlines()]


@pytest.mark.parametrize("is_contained", [False, True], ids=["on the host", "in containers"])
def test_another_user_gets_no_answer_even_through_open_doors(
    start: StartEngine, shared: Path, tmp_path: Path, is_contained: bool
) -> None:
    """First the directory's mode keeps it out, then the sockets', then what the kernel says about who it is."""
    bomb_file = tmp_path / "unpickled"
    how = {"uid_ranges": [(0, OURS, 65536)], "uid": 0} if is_contained else {"container": False, "uid": OURS}
    pair: tuple[Cell, Cell] = start("kv_producer", wait=False, **how), start("kv_consumer", wait=False, **how)
    prefill, decode = pair
    for cell in pair:
        cell.wait_until(lambda cell=cell: cell.ready)
    params = prefill.prefill("r", PROMPT)
    inspect = protocol.frame(InspectHello(PROTOCOL_VERSION))
    assert come_as(THEIRS, shared, inspect) == [["door"]]
    assert shared.stat().st_mode & 0o777 == 0o700
    shared.chmod(0o777)
    names = sorted(path.name for path in shared.iterdir())
    assert len(names) == 4
    assert come_as(THEIRS, shared, inspect) == [["socket", name] for name in names]
    for name in names:
        assert (shared / name).stat().st_mode & 0o777 == 0o600
        (shared / name).chmod(0o666)
    bomb = pickle.dumps(Bomb(bomb_file))
    hellos = [
        inspect,
        protocol.frame(SchedulerHello(PROTOCOL_VERSION, params["mc2_ticket"]["incarnation"], "stranger")),
        protocol.frame(WorkerHello(PROTOCOL_VERSION, 0, "attach", {})),
        len(bomb).to_bytes(4, "little") + bomb,
    ]
    for hello in hellos:
        assert come_as(THEIRS, shared, hello) == [["answer", name, "b''"] for name in names]
        # Root is served by its own engines only, although it could read all their memory anyway.
        assert come_as(0, shared, hello) == [["answer", name, "b''"] for name in names]
    assert not bomb_file.exists()
    assert prefill.ask("report")["book"] == 1  # the offer is there still
    # The clear word is in the log of whoever was asked; and the engines never noticed.
    text = f"peer runs as uid {NOBODY if is_contained else THEIRS}, only {0 if is_contained else OURS} is served"
    for cell in pair:
        assert text in cell.log.read_text()
    result = decode.run("r", PROMPT, params)
    assert (result["params"]["mc2"]["way"], result["computed"]) == ("attach", 1)
    shared.chmod(0o700)
    prefill.settle()
    decode.settle()


def test_nobody_is_no_user_in_a_user_namespace(start: StartEngine, shared: Path) -> None:
    """There, 65534 is also what every stranger looks like."""
    os.chown(shared, OURS + NOBODY, -1)
    cell = start("kv_consumer", uid_ranges=[(0, OURS, 65536)], uid=NOBODY, wait=False)
    cell.wait_until(lambda: cell.crash)
    assert "every unknown user is shown as uid 65534" in cell.crash


def test_nobody_is_a_user_like_any_other_outside_of_one(start: StartEngine, shared: Path) -> None:
    os.chown(shared, NOBODY, -1)
    prefill = start("kv_producer", container=False, uid=NOBODY, wait=False)
    decode = start("kv_consumer", container=False, uid=NOBODY)
    prefill.wait_until(lambda: prefill.ready)
    result = decode.run("r", PROMPT, prefill.prefill("r", PROMPT))
    assert (result["params"]["mc2"]["way"], result["computed"]) == ("attach", 1)
