"""D25: bad clients of every kind at once keep nobody out and cost little; and a listener that ends by a bug says so."""

import contextlib
import logging
import math
import os
import random
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ipc.test_session import HELLO, Recorder
from vllm_mc2 import protocol, session
from vllm_mc2.channel import sweep_stale_sockets
from vllm_mc2.protocol import PoolGrant
from vllm_mc2.session import MAX_PENDING, open_session

NUM_FRAMES = 10_000
NUM_SILENT = 3 * MAX_PENDING
PATIENCE_SECONDS = 60.0


@pytest.fixture
def recorder(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    """A server that never loses patience, so that whoever is served is served in spite of those who wait."""
    monkeypatch.setattr(session, "HELLO_TIMEOUT_SECONDS", 3600.0)
    recorder = Recorder(directory)
    yield recorder
    recorder.close()


def dial(recorder: Recorder) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(os.fspath(recorder.path))  # without a timeout, it waits for a place in the listener's queue
    sock.settimeout(PATIENCE_SECONDS)
    return sock


def bad_frame(randomness: random.Random) -> bytes:
    """Noise, with a length that is right, too large, or of less than follows; or a good hello that is not the last word."""
    noise = randomness.randbytes(randomness.choice([0, 1, 16, 300]))
    return randomness.choice(
        [
            struct.pack("<I", len(noise)) + noise,
            struct.pack("<I", randomness.choice([1 << 31, 0xFFFFFFFF, protocol.MAX_FRAME_BYTES + 1])) + noise,
            struct.pack("<I", len(noise)) + noise + b"more",
            protocol.frame(HELLO) + b"\0" * 40,
        ]
    )


def send_bad_frames(recorder: Recorder, seed: int, count: int) -> None:
    randomness = random.Random(seed)
    for _ in range(count):
        with dial(recorder) as sock:
            try:
                sock.sendall(bad_frame(randomness))
                assert sock.recv(1) == b""
            except (BrokenPipeError, ConnectionResetError):
                pass  # it had to make room already; or was closed with something unread


def shake_hands(recorder: Recorder) -> None:
    _, fds, opened = open_session(recorder.path, HELLO, PoolGrant, 1, PATIENCE_SECONDS)
    os.close(fds[0])
    assert not opened.is_gone()
    opened.close()
    recorder.closed.get(timeout=PATIENCE_SECONDS)


def test_all_at_once(recorder: Recorder, caplog: pytest.LogCaptureFixture) -> None:
    silent = [dial(recorder) for _ in range(NUM_SILENT)]
    for number, sock in enumerate(silent):
        with contextlib.suppress(BrokenPipeError):  # it had to make room for the next ones already
            sock.sendall([b"", b"\x40", b"\x40\0\0\0", b"\x40\0\0\0half of it"][number % 4])
    threads = set(threading.enumerate())
    noisy = [
        threading.Thread(target=send_bad_frames, args=(recorder, seed, NUM_FRAMES // 4), daemon=True)
        for seed in range(4)
    ]
    with caplog.at_level(logging.INFO, logger="vllm.mc2.session"):
        for thread in noisy:
            thread.start()
        num_served, most = 0, 0
        while num_served < 20 or any(thread.is_alive() for thread in noisy):
            shake_hands(recorder)
            num_served += 1
            most = max(most, len(recorder.server._connections))
        for thread in noisy:
            thread.join()
    assert recorder.server.is_alive and recorder.server.failure is None
    # One place for each who is not known yet, however many come: descriptors and buffers are bounded by it. No threads at all.
    assert most <= MAX_PENDING
    assert not set(threading.enumerate()) - threads
    # Each of them is counted, also those who had to make room; and what is logged grows with the logarithm only.
    num_waiting = len(recorder.server._connections)
    assert recorder.server.num_rejected == NUM_FRAMES + NUM_SILENT - num_waiting
    assert len(recorder.hellos) == num_served
    lines = [record for record in caplog.records if "rejected" in record.message]
    assert 1 <= len(lines) <= math.log2(recorder.server.num_rejected) + 1
    for sock in silent:
        sock.close()


def test_half_a_hello_is_counted_and_a_look_is_not(recorder: Recorder) -> None:
    """The sweep connects to see whether somebody listens; that is no fault of anybody's."""
    assert sweep_stale_sockets(recorder.path.parent) == 0
    shake_hands(recorder)
    assert recorder.server.num_rejected == 0
    with dial(recorder) as sock:
        sock.sendall(b"\x40\0\0\0half")
    shake_hands(recorder)
    assert recorder.server.num_rejected == 1


def test_a_bug_in_the_thread_is_told_and_ends_no_lease(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The clients are alive: they read what they were given, and what they hold must not be given to others."""
    _, fds, opened = open_session(recorder.path, HELLO, PoolGrant, 1, PATIENCE_SECONDS)
    os.close(fds[0])

    def fail(buffer: bytearray, max_bytes: int) -> bytes:
        raise ZeroDivisionError("a bug of ours")

    seen: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(session, "first_frame", fail)
    monkeypatch.setattr(threading, "excepthook", seen.append)
    with dial(recorder) as sock:
        sock.sendall(protocol.frame(HELLO))
        assert sock.recv(1) == b""
    recorder.server._thread.join(PATIENCE_SECONDS)
    assert not recorder.server.is_alive
    assert recorder.server.failure == "ZeroDivisionError: a bug of ours"
    assert [hook.exc_type for hook in seen] == [ZeroDivisionError]
    assert [record.levelname for record in caplog.records] == ["CRITICAL"]
    assert "restart this engine" in caplog.text
    assert not recorder.path.exists()
    assert opened.is_gone()  # to a client it is as if the server had died: it keeps what it has mapped
    assert recorder.closed.empty()
    opened.close()
    recorder.server.close()  # as ever
