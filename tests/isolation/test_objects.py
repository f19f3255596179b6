"""Nothing that comes from outside becomes an object, whoever it comes from; and nobody listens who need not.

A pickle that would leave a file behind goes to every socket of running engines, into every region that a peer may write, and
behind every authentication. What it is wrapped in changes how far it gets.
"""

import ast
import asyncio
import contextlib
import ctypes
import errno
import mmap
import os
import pickle
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from tests.isolation.conftest import ROOT, Cell, StartEngine
from tests.isolation.test_users import Bomb
from tests.network.conftest import HELLO, SECRET, Lender
from tests.support.fake_model import prompt_of_family
from tests.support.waiting import wait_until
from tests.tensors.rig import Pair, connect, same_layer
from vllm_mc2 import protocol
from vllm_mc2._native import AddressRange, Pool
from vllm_mc2.channel import LENGTH, close_all
from vllm_mc2.errors import MC2Error
from vllm_mc2.network.stream import SecureStream
from vllm_mc2.network.transport import why_no_mooncake
from vllm_mc2.protocol import PROTOCOL_VERSION, InspectHello, SchedulerHello, SchedulerWelcome, WorkerHello
from vllm_mc2.session import open_session

PROMPT = prompt_of_family(1, 70)


def frame(payload: bytes) -> bytes:
    return LENGTH.pack(len(payload)) + payload


WRAPPINGS: dict[str, Callable[[bytes], bytes]] = {
    "bare": lambda bomb: bomb,
    "in a frame": frame,
    "as a MessagePack extension": lambda bomb: frame(msgspec.msgpack.encode(msgspec.msgpack.Ext(4, bomb))),
    "as bytes in a hello": lambda bomb: frame(
        msgspec.msgpack.encode({"type": "inspect_hello", "protocol": PROTOCOL_VERSION, "object": bomb})
    ),
    "as text in a hello": lambda bomb: protocol.frame(
        SchedulerHello(PROTOCOL_VERSION, "5" * 32, bomb.decode("latin1"))
    ),
    "in a fingerprint": lambda bomb: protocol.frame(
        WorkerHello(PROTOCOL_VERSION, 0, "pull", {"model": bomb.decode("latin1")})
    ),
    "behind a hello": lambda bomb: protocol.frame(InspectHello(PROTOCOL_VERSION)) + frame(bomb),
}


@pytest.fixture
def bomb(tmp_path: Path) -> Iterator[bytes]:
    """A pickle; the test fails if anybody has read it as one."""
    sign = tmp_path / "unpickled"
    data = pickle.dumps(Bomb(sign), protocol=0)
    pickle.loads(data)
    assert sign.exists(), "the bomb does not work"
    sign.unlink()
    yield data
    assert not sign.exists()


@pytest.fixture
def pair(start: StartEngine) -> tuple[Cell, Cell]:
    """Prefill and decode on this host."""
    prefill, decode = (start(role, container=False, wait=False) for role in ("kv_producer", "kv_consumer"))
    for cell in (prefill, decode):
        cell.wait_until(lambda cell=cell: cell.ready)
    return prefill, decode


def assert_served(pair: tuple[Cell, Cell], name: str = "after") -> None:
    """As if nothing had been."""
    prefill, decode = pair
    result = decode.run(name, PROMPT, prefill.prefill(name, PROMPT))
    assert (result["params"]["mc2"]["way"], result["computed"]) == ("attach", 1)
    prefill.settle()
    decode.settle()


def punch_hole(fd: int) -> int:
    """fallocate(2) that takes the first page away; the error's number."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return ctypes.get_errno() if libc.fallocate(fd, 0x03, 0, 4096) else 0


def test_a_sealed_pool_keeps_its_pages() -> None:
    """Not even through /proc, where a descriptor becomes writable again."""
    with Pool(1 << 21, huge_pages="off") as pool:
        memory = AddressRange(pool.num_bytes)
        memory.map_pool(0, pool, 0, pool.num_bytes)
        memory.buffer()[0] = 42
        pool.seal()
        again = os.open(f"/proc/self/fd/{pool.fd}", os.O_RDWR)
        for fd in (pool.fd, again):
            assert punch_hole(fd) == errno.EPERM
            with pytest.raises(PermissionError):
                os.pwrite(fd, b"x", 0)
        os.close(again)
        assert memory.buffer()[0] == 42


OBJECT_READERS = {
    "pickle",
    "marshal",
    "shelve",
    "dill",
    "cloudpickle",
    "joblib",
    "jsonpickle",
    "yaml",
    "multiprocessing",
    "code",
}
"""Modules that make objects, or call functions, as their input says; ``multiprocessing`` pickles what it sends."""

LOADERS = {"torch.load", "np.load", "numpy.load", "yaml.load", "os.system", "os.popen"}


def test_nobody_could_read_an_object() -> None:
    """Beside tests/unit/test_structure.py, which has the shorter list."""
    files = sorted((ROOT / "vllm_mc2").rglob("*.py"))
    assert len(files) > 50
    for path in files:
        if "bench" in path.parts:
            continue  # starts its own children, and reads its own results
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [name.name for name in node.names]
                assert not OBJECT_READERS & {name.split(".")[0] for name in names}, (path, names)
            elif isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in LOADERS | {"eval", "exec", "compile", "__import__"}, (path, called)
                assert not any(word.arg == "shell" for word in node.keywords), path


def test_every_unix_socket(pair: tuple[Cell, Cell], shared: Path, bomb: bytes) -> None:
    paths = sorted(shared.iterdir())
    assert len(paths) == 4
    for path in paths:
        for wrapping in WRAPPINGS.values():
            with socket.socket(socket.AF_UNIX) as sock:
                sock.settimeout(50)
                sock.connect(os.fspath(path))
                sock.sendall(wrapping(bomb))
                sock.shutdown(socket.SHUT_WR)
                with contextlib.suppress(ConnectionResetError):
                    while sock.recv(65536):
                        pass
    assert_served(pair)


def test_every_shared_region(pair: tuple[Cell, Cell], shared: Path, bomb: bytes) -> None:
    """The ledger is the only one that a decode may write to, and whoever has one may write anything."""
    prefill, decode = pair
    params = prefill.prefill("r", PROMPT)
    incarnation = params["mc2_ticket"]["incarnation"]
    hello = SchedulerHello(PROTOCOL_VERSION, incarnation, "hostile")
    _, fds, session = open_session(shared / f"{incarnation[:16]}.sock", hello, SchedulerWelcome, 2, 50.0)
    index_fd, ledger_fd = fds
    with pytest.raises(PermissionError):
        mmap.mmap(index_fd, 0)
    with pytest.raises(PermissionError):
        os.pwrite(index_fd, bomb, 0)
    # Opened once more through /proc, a descriptor is writable again; the seal is not impressed.
    again = os.open(f"/proc/self/fd/{index_fd}", os.O_RDWR)
    with pytest.raises(PermissionError):
        mmap.mmap(again, 0)
    os.close(again)
    with mmap.mmap(ledger_fd, 0) as ledger:
        size = len(ledger)
        for offset in (0, 1, 8, 64):
            ledger[:] = (b"\0" * offset + bomb * (size // len(bomb) + 1))[:size]
            prefill.run(f"tick {offset}", [1, 2, 3], None, 1)
            prefill.ask("report")
    for fd in fds:
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)  # prefill would get SIGBUS
    assert punch_hole(index_fd) == errno.EPERM  # it would be filled with zeros, without a signal
    result = decode.run("r", PROMPT, params)
    assert (result["params"]["mc2"]["way"], result["computed"]) == ("attach", 1)
    close_all(fds)
    session.close()
    assert_served(pair)


def test_behind_the_secret_and_before_it(bomb: bytes) -> None:
    """The listener for other hosts: strangers, and a decode that knows the secret."""
    lender = Lender()

    async def speak(data: bytes) -> None:
        stream = await SecureStream.connect(lender.address, SECRET, 5.0)
        stream.send(HELLO)
        await stream.receive()
        # As a frame whose tag is right: what `send` does with a message.
        tagged = msgspec.Raw(data)
        stream.send(tagged)  # type: ignore[arg-type]
        with contextlib.suppress(MC2Error):
            while True:
                await asyncio.wait_for(stream.receive(), 50)
        stream.close()

    try:
        for number, wrapping in enumerate(WRAPPINGS.values()):
            with socket.create_connection(lender.address) as sock:
                sock.settimeout(50)
                assert b"tcp_challenge" in sock.recv(4096)
                sock.sendall(wrapping(bomb))
                sock.shutdown(socket.SHUT_WR)
                with contextlib.suppress(ConnectionResetError):
                    while sock.recv(4096):
                        pass
            wait_until(lambda number=number: lender.server.num_rejected == number + 1)
            if wrapping is not WRAPPINGS["bare"] and wrapping is not WRAPPINGS["behind a hello"]:
                asyncio.run(speak(wrapping(bomb)[LENGTH.size :]))
            wait_until(lambda: lender.ledgers == {})
    finally:
        lender.close()


def test_the_mail_and_the_port_of_the_tensor_api(bomb: bytes, tmp_path: Path) -> None:
    """A prefill's mail goes to decode without an answer; decode's port is for introductions."""
    directory = tmp_path / "t"
    directory.mkdir(mode=0o700)
    pair = Pair(directory)
    hostile = [connect(pair.decode, directory) for _ in WRAPPINGS]
    try:
        kv = pair.layer()
        for prefill, wrapping in zip(hostile, WRAPPINGS.values(), strict=True):
            with socket.create_connection(("127.0.0.1", pair.decode.listen_port)) as sock:
                sock.sendall(wrapping(bomb))
            assert prefill._sender is not None
            prefill._sender._mail.send(wrapping(bomb))
            with pair.hand_over("good", [1]) as mapped:
                assert same_layer(mapped.layers[0], kv)
    finally:
        for prefill in hostile:
            prefill.close()
        pair.close()


def test_who_listens_and_where(pair: tuple[Cell, Cell], shared: Path) -> None:
    """Nobody on any network; and on Unix sockets in one directory that only the user may enter."""
    assert_served(pair)
    found: set[str] = set()
    for cell in pair:
        process = psutil.Process(cell.host_pid)
        assert [each for each in process.net_connections("inet") if each.status == psutil.CONN_LISTEN] == []
        listening = {each.laddr for each in process.net_connections("unix") if each.laddr}
        assert listening and not any(path.startswith(("\0", "@")) for path in listening)
        found |= listening
    # The kernel knows them by the names that they were bound with, before they listened.
    assert found == {str(path.with_suffix(".new")) for path in shared.iterdir()}
    assert shared.stat().st_mode & 0o7777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in shared.iterdir()} == {0o600}


def test_with_an_address_prefill_listens_there(start: StartEngine) -> None:
    """And decode nowhere. What else prefill then listens on is Mooncake's, where that is installed: docs/threat-model.md."""
    network = {"tcp_secret": SECRET.decode(), "mode": "attach"}
    prefill = start("kv_producer", container=False, tcp_address="127.0.0.2", **network)
    decode = start("kv_consumer", container=False, **network)
    of_prefill, of_decode = (
        [each.laddr for each in psutil.Process(cell.host_pid).net_connections("inet") if each.status == "LISTEN"]
        for cell in (prefill, decode)
    )
    assert of_decode == []
    (address,) = [each for each in of_prefill if each.ip == "127.0.0.2"]
    if why_no_mooncake() is not None:
        assert of_prefill == [address]
    # Somebody who knows no secret gets nothing but a number to prove that with.
    with socket.create_connection(address) as sock:
        sock.settimeout(50)
        assert b"tcp_challenge" in sock.recv(4096)
        sock.shutdown(socket.SHUT_WR)
        assert sock.recv(4096) == b""
