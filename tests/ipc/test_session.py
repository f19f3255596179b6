"""Sessions over real Unix sockets: handshake, refusal, death, bad clients. Nothing here needs vllm or the native module."""

import os
import pickle
import queue
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.descriptors import assert_none_new, open_descriptors
from tests.support.waiting import wait_until
from tests.unit.test_protocol import POOL
from vllm_mc2 import channel, protocol, session
from vllm_mc2.channel import Channel, prepare_socket_dir, socket_path, sweep_stale_sockets
from vllm_mc2.errors import ConfigError, PeerRefusedError, PeerUnreachableError, ProtocolError
from vllm_mc2.protocol import Message, PoolGrant, Refusal, WorkerHello
from vllm_mc2.session import Answer, SessionServer, open_session

SERVER_ID = "5" * 32
PATIENCE_SECONDS = 60.0
"""For answers that do come."""

HELLO = WorkerHello(1, 0, "attach", {"dtype": "float32"})


class Recorder:
    """A server whose answers and ends can be looked at."""

    def __init__(self, directory: Path) -> None:
        self.read_fd, self.write_fd = os.pipe()
        self.hellos: list[Message] = []
        self.closed: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.answer: Callable[[], Answer] = lambda: Answer(PoolGrant(POOL), (self.read_fd,))
        self.server = SessionServer(directory, SERVER_ID, self._on_hello, self.closed.put)
        self.path = self.server.path

    def _on_hello(self, key: int, hello: Message) -> Answer:
        self.hellos.append(hello)
        return self.answer()

    def close(self) -> None:
        self.server.close()
        os.close(self.read_fd)
        os.close(self.write_fd)


@pytest.fixture
def recorder(directory: Path) -> Iterator[Recorder]:
    before = open_descriptors()
    recorder = Recorder(directory)
    yield recorder
    recorder.close()
    assert not recorder.path.exists()
    assert not recorder.server.is_alive
    assert_none_new(before)


def _open(recorder: Recorder) -> session.Session:
    answer, fds, opened = open_session(recorder.path, HELLO, PoolGrant, 1, PATIENCE_SECONDS)
    assert answer.pool == POOL
    os.write(recorder.write_fd, b"!")
    assert os.read(fds[0], 1) == b"!"  # the descriptor is the very pipe
    os.close(fds[0])
    return opened


def test_handshake_hands_over_a_descriptor_and_tells_the_end_to_both_sides(recorder: Recorder) -> None:
    opened = _open(recorder)
    assert recorder.hellos == [HELLO]
    assert not opened.is_gone()
    opened.close()
    assert recorder.closed.get(timeout=30) == 0
    again = _open(recorder)
    recorder.server.close()
    assert again.is_gone()
    again.close()


def test_a_server_that_stops_waits_for_its_clients(recorder: Recorder) -> None:
    """They learn that it is about to, and end their sessions when they are done with what they had from it."""
    leaving, staying = _open(recorder), _open(recorder)
    stopping = threading.Thread(target=recorder.server.close, args=(60.0,))
    stopping.start()
    wait_until(lambda: leaving.is_gone() and staying.is_gone())
    with pytest.raises(PeerUnreachableError):  # nobody is let in any more
        open_session(recorder.path, HELLO, PoolGrant, 1, 0.2)
    leaving.close()
    assert recorder.closed.get(timeout=30) == 0
    assert stopping.is_alive()
    staying.close()
    stopping.join(30)
    assert not stopping.is_alive()
    assert recorder.closed.get(timeout=30) == 1


def test_a_server_that_stops_does_not_wait_for_ever(recorder: Recorder) -> None:
    deaf = _open(recorder)
    recorder.server.close(0.1)
    assert not recorder.server.is_alive
    assert recorder.closed.get(timeout=30) == 0
    deaf.close()


def test_a_refusal_names_the_field(recorder: Recorder) -> None:
    recorder.answer = lambda: Answer(Refusal("dtype", "float32", "bfloat16"), keep_open=False)
    with pytest.raises(PeerRefusedError, match="dtype differs"):
        open_session(recorder.path, HELLO, PoolGrant, 1, PATIENCE_SECONDS)


def test_an_unexpected_answer_or_number_of_descriptors_is_a_protocol_error(recorder: Recorder) -> None:
    recorder.answer = lambda: Answer(HELLO)
    with pytest.raises(ProtocolError, match="WorkerHello"):
        open_session(recorder.path, HELLO, PoolGrant, 1, PATIENCE_SECONDS)
    recorder.answer = lambda: Answer(PoolGrant(POOL), (recorder.read_fd,) * 3)
    with pytest.raises(ProtocolError, match="3 descriptors"):
        open_session(recorder.path, HELLO, PoolGrant, 1, PATIENCE_SECONDS)


def test_nobody_there_and_nobody_answering(directory: Path) -> None:
    with pytest.raises(PeerUnreachableError):
        open_session(socket_path(directory, "0" * 32), HELLO, PoolGrant, 1, 1.0)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(socket_path(directory, "1" * 32)))
        silent.listen()
        with pytest.raises(PeerUnreachableError, match="in time"):
            open_session(socket_path(directory, "1" * 32), HELLO, PoolGrant, 1, 0.2)


def _raw(recorder: Recorder) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(30)
    sock.connect(str(recorder.path))
    return sock


class _Bomb:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.target,))


@pytest.mark.parametrize("kind", ["huge", "garbage", "pickle", "half", "chatty"])
def test_a_bad_client_is_dropped_and_others_are_served(recorder: Recorder, tmp_path: Path, kind: str) -> None:
    target = tmp_path / "pwned"
    good = protocol.encode(HELLO)
    payload = {
        "huge": struct.pack("<I", 1 << 31),
        "garbage": struct.pack("<I", 64) + os.urandom(64),
        "pickle": struct.pack("<I", len(pickle.dumps(_Bomb(target)))) + pickle.dumps(_Bomb(target)),
        "half": struct.pack("<I", 64) + b"half",
        "chatty": struct.pack("<I", len(good)) + good + b"and more",
    }[kind]
    sock = _raw(recorder)
    sock.sendall(payload)
    if kind == "half":
        sock.shutdown(socket.SHUT_WR)
    assert sock.recv(1) == b""
    sock.close()
    assert not target.exists()
    _open(recorder).close()


def test_silent_clients_do_not_keep_others_out_and_are_dropped(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "HELLO_TIMEOUT_SECONDS", 3600.0)
    silent = [_raw(recorder) for _ in range(20)]
    _open(recorder).close()
    monkeypatch.setattr(session, "HELLO_TIMEOUT_SECONDS", 0.3)
    hasty = [_raw(recorder) for _ in range(20)]
    for sock in hasty:
        assert sock.recv(1) == b""
        sock.close()
    # Whoever is let in is no longer watched; nor are those whose time has not come.
    monkeypatch.setattr(session, "HELLO_TIMEOUT_SECONDS", 3600.0)
    _open(recorder).close()
    assert recorder.server.num_rejected == len(hasty)
    for sock in silent:
        sock.close()
    assert [recorder.closed.get(timeout=30) >= 0 for _ in range(2)]
    assert recorder.closed.empty()  # who never said hello has no end either


def test_a_hello_that_cannot_be_answered_does_not_end_the_thread(recorder: Recorder) -> None:
    def fail() -> Answer:
        raise RuntimeError("a bug of ours")

    good, recorder.answer = recorder.answer, fail
    with pytest.raises(PeerUnreachableError):
        open_session(recorder.path, HELLO, PoolGrant, 1, PATIENCE_SECONDS)
    recorder.answer = good
    _open(recorder).close()


CHILD = """
import os, sys, time
from pathlib import Path
from vllm_mc2.protocol import PoolGrant, WorkerHello
from vllm_mc2.session import open_session
_, fds, s = open_session(Path(sys.argv[1]), WorkerHello(1, 0, "attach", {}), PoolGrant, 1, 60.0)
if os.fork() == 0:
    os.write(1, b"%d\\n" % os.getpid())
time.sleep(600)
os._exit(0)
"""


def test_a_killed_peer_is_gone_although_its_forked_child_keeps_the_socket(recorder: Recorder) -> None:
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(recorder.path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    grandchild = int(child.stdout.readline())
    child.kill()
    try:
        # Not reaped yet: kill(pid, 0) would still find it, the pidfd tells the truth.
        assert recorder.closed.get(timeout=30) == 0
    finally:
        os.kill(grandchild, signal.SIGKILL)
        child.wait(timeout=30)
        child.stdout.close()


def test_a_session_sees_a_stopped_peer_as_alive_and_a_killed_one_as_gone(directory: Path) -> None:
    code = """
import sys, time
from pathlib import Path
from tests.unit.test_protocol import POOL
from vllm_mc2.protocol import PoolGrant
from vllm_mc2.session import Answer, SessionServer
s = SessionServer(Path(sys.argv[1]), "5" * 32, lambda key, hello: Answer(PoolGrant(POOL)), lambda key: None)
print("ready", flush=True)
time.sleep(600)
"""
    server = subprocess.Popen([sys.executable, "-c", code, str(directory)], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None and server.stdout.readline() == "ready\n"
    _, _, opened = open_session(socket_path(directory, SERVER_ID), HELLO, PoolGrant, 0, PATIENCE_SECONDS)
    os.kill(server.pid, signal.SIGSTOP)
    assert not opened.is_gone()
    server.kill()
    wait_until(opened.is_gone)
    server.wait(timeout=30)
    server.stdout.close()
    opened.close()
    # It was killed, so its socket file is still there; the sweep proves it dead and removes it.
    assert socket_path(directory, SERVER_ID).exists()
    assert sweep_stale_sockets(directory) == 1
    assert not socket_path(directory, SERVER_ID).exists()


def test_the_sweep_leaves_live_sockets_alone(recorder: Recorder) -> None:
    assert sweep_stale_sockets(recorder.path.parent) == 0
    _open(recorder).close()


def test_the_socket_directory_must_be_private(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o755)
    with pytest.raises(ConfigError, match="0755 lets others in"):
        prepare_socket_dir(shared)
    link = tmp_path / "link"
    link.symlink_to(shared)
    with pytest.raises(ConfigError, match="not a directory"):
        prepare_socket_dir(link)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to own something as somebody else")
def test_the_socket_directory_must_be_ours(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir(mode=0o700)
    os.chown(theirs, 1234, 1234)
    with pytest.raises(ConfigError, match="belongs to uid 1234"):
        prepare_socket_dir(theirs)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
def test_another_user_is_refused(recorder: Recorder) -> None:
    os.chmod(recorder.path.parent, 0o755)
    os.chmod(recorder.path, 0o666)
    for parent in recorder.path.parents:
        if parent.stat().st_uid == 0 and str(parent).startswith("/tmp/"):
            parent.chmod(parent.stat().st_mode | 0o055)
    code = f"""
import os, socket
os.setuid(1234)
s = socket.socket(socket.AF_UNIX); s.settimeout(60); s.connect({str(recorder.path)!r})
print(s.recv(1))
"""
    result = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60)
    assert result.stdout == "b''\n", result.stderr
    assert recorder.hellos == []
    _open(recorder).close()


def test_lost_descriptors_are_an_error(directory: Path) -> None:
    """The kernel drops descriptors that the receiver has no room for, without an error."""
    ours, theirs = socket.socketpair()
    with Channel(ours) as sender, Channel(theirs) as receiver:
        read_fd, write_fd = os.pipe()
        sender.send(PoolGrant(POOL), [read_fd] * (channel.MAX_FRAME_FDS + 4))
        with pytest.raises(ProtocolError, match="descriptors"):
            receiver.receive(5.0)
        os.close(read_fd)
        os.close(write_fd)


def test_many_sessions_at_once(recorder: Recorder) -> None:
    opened: list[session.Session] = []
    lock = threading.Lock()

    def connect() -> None:
        _, fds, one = open_session(recorder.path, HELLO, PoolGrant, 1, PATIENCE_SECONDS)
        os.close(fds[0])
        with lock:
            opened.append(one)

    threads = [threading.Thread(target=connect) for _ in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(opened) == 40
    for one in opened:
        one.close()
    assert {recorder.closed.get(timeout=30) for _ in range(40)} == set(range(40))
