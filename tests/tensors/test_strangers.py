"""What strangers on decode's TCP port can do: nothing."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tensors.rig import WATCHDOG_SECONDS, Pair, accepting, connect, dial, listen
from vllm_mc2 import MC2Communicator, protocol
from vllm_mc2.protocol import PROTOCOL_VERSION, Introduction, Refusal
from vllm_mc2.tensors import host


@pytest.fixture
def decode(directory: Path) -> Iterator[MC2Communicator]:
    with listen(directory) as made:
        yield made


STRANGERS = {
    "silent": b"",
    "garbage": b"\x10\x00\x00\x00" + bytes(range(200, 216)),
    "text": b"GET / HTTP/1.1\r\n\r\n",
    "oversize": b"\xff\xff\xff\x7f",
    "a length and no more": b"\x40\x00\x00\x00",
    "nothing, with a length": b"\x00\x00\x00\x00",
    "another message": protocol.frame(protocol.InspectHello(1)),
    "a prefill that is not there": protocol.frame(Introduction(PROTOCOL_VERSION, host.host_id(), "b" * 32, 0)),
}


@pytest.mark.parametrize("leaves", [False, True], ids=["stays", "hangs up"])
@pytest.mark.parametrize("what", STRANGERS)
def test_a_stranger_keeps_nobody_out(decode: MC2Communicator, directory: Path, what: str, leaves: bool) -> None:
    with socket.create_connection(("127.0.0.1", decode.listen_port)) as stranger:
        stranger.sendall(STRANGERS[what])
        if leaves:
            stranger.close()
        connect(decode, directory).close()


def test_strangers_that_came_before_and_wait(decode: MC2Communicator, directory: Path) -> None:
    """More of them than are looked at at a time: those that have been silent the longest make room."""
    with contextlib.ExitStack() as stack:
        for _ in range(3 * host.MAX_PENDING):
            stranger = stack.enter_context(socket.socket())
            stranger.setblocking(False)
            with contextlib.suppress(BlockingIOError):  # the kernel's queue may be full
                stranger.connect(("127.0.0.1", decode.listen_port))
        connect(decode, directory, timeout_seconds=WATCHDOG_SECONDS).close()


def test_strangers_without_end(decode: MC2Communicator, directory: Path) -> None:
    """A few threads connect, say something or nothing, and come again."""
    stop = threading.Event()
    port = decode.listen_port

    def bother(what: bytes) -> None:
        held: list[socket.socket] = []
        while not stop.wait(0.002):
            with contextlib.suppress(OSError):
                held.append(socket.create_connection(("127.0.0.1", port), timeout=WATCHDOG_SECONDS))
                held[-1].sendall(what)
            while len(held) > 8:
                held.pop(0).close()
        for sock in held:
            sock.close()

    threads = [threading.Thread(target=bother, args=(what,)) for what in STRANGERS.values()]
    for thread in threads:
        thread.start()
    try:
        for _ in range(3):
            connect(decode, directory, timeout_seconds=WATCHDOG_SECONDS).close()
    finally:
        stop.set()
        for thread in threads:
            thread.join(WATCHDOG_SECONDS)


def test_a_stranger_that_is_silent_is_dismissed(
    decode: MC2Communicator, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "HELLO_SECONDS", 0.1)
    with socket.create_connection(("127.0.0.1", decode.listen_port)) as stranger, accepting(decode) as accepted:
        stranger.settimeout(WATCHDOG_SECONDS)
        assert stranger.recv(1) == b""
        monkeypatch.undo()  # the next one may take its time
        dial(decode, directory).close()
        accepted.result(WATCHDOG_SECONDS)


def test_a_slow_introduction_is_understood(pair: Pair, directory: Path) -> None:
    """TCP keeps no messages apart."""
    with accepting(pair.decode) as accepted:
        with socket.create_connection(("127.0.0.1", pair.decode.listen_port)) as slow:
            frame = protocol.frame(Introduction(PROTOCOL_VERSION, host.host_id(), "c" * 32, 9))
            for byte in frame:
                slow.sendall(bytes([byte]))
            answer = protocol.decode(slow.recv(4096)[4:])
        assert answer == Refusal("local_rank", "9", "0")
        dial(pair.decode, directory).close()
        accepted.result(WATCHDOG_SECONDS)
