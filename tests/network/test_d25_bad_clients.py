"""D25 for the listener that other hosts see: whoever can reach it may be anybody."""

import logging
import math
import random
import socket
import threading
from collections.abc import Coroutine
from typing import Any

import pytest

from tests.network.conftest import Connect, Lender
from tests.support.descriptors import assert_none_new, open_descriptors
from tests.support.waiting import wait_until
from vllm_mc2.network import lender as lender_module
from vllm_mc2.network.stream import SecureStream
from vllm_mc2.session import MAX_PENDING

NUM_NOISY = 2_000
NUM_SILENT = 3 * MAX_PENDING


@pytest.fixture(autouse=True)
def _endless_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is served is served in spite of those who wait."""
    monkeypatch.setattr(lender_module, "HELLO_TIMEOUT_SECONDS", 3600.0)


def make_noise(lender: Lender, seed: int, count: int) -> None:
    randomness = random.Random(seed)
    for _ in range(count):
        with socket.create_connection(lender.address, timeout=60) as sock:
            try:
                sock.recv(4096)
                sock.sendall(randomness.randbytes(4) + randomness.randbytes(randomness.choice([0, 16, 300])))
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(4096):
                    pass
            except OSError:
                pass  # closed with something unread


def test_all_at_once(lender: Lender, connect: Connect, caplog: pytest.LogCaptureFixture) -> None:
    silent = [socket.create_connection(lender.address) for _ in range(NUM_SILENT)]
    threads, descriptors = set(threading.enumerate()), open_descriptors()
    noisy = [threading.Thread(target=make_noise, args=(lender, seed, NUM_NOISY // 2), daemon=True) for seed in range(2)]
    with caplog.at_level(logging.WARNING, logger="vllm.mc2.network"):
        for thread in noisy:
            thread.start()
        num_served, most = 0, 0
        while num_served < 10 or any(thread.is_alive() for thread in noisy):
            connect(silence=3600.0).close()
            num_served += 1
            most = max(most, len(lender.server._pending))
        for thread in noisy:
            thread.join()
        # Strangers who wait are as many as there is room for; the others have been sent away to make it.
        wait_until(lambda: lender.server.num_rejected == NUM_NOISY + NUM_SILENT - len(lender.server._pending))
    assert most <= MAX_PENDING
    assert not set(threading.enumerate()) - threads
    lines = [record for record in caplog.records if "rejected" in record.message]
    assert 1 <= len(lines) <= math.log2(lender.server.num_rejected) + 1
    assert len(lender.hellos) == num_served
    for sock in silent:
        sock.close()
    wait_until(lambda: lender.ledgers == {})
    assert_none_new(descriptors)


def test_a_bug_costs_one_connection(
    lender: Lender, connect: Connect, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And is in the log; the loop and its other connections go on."""
    staying = connect(silence=3600.0)

    def fail(*arguments: Any) -> Coroutine[Any, Any, SecureStream]:
        raise ZeroDivisionError("a bug of ours")

    with monkeypatch.context() as patch:
        patch.setattr(SecureStream, "accept", fail)
        with socket.create_connection(lender.address, timeout=60) as sock:
            assert sock.recv(1) == b""
    wait_until(lambda: "a bug of ours" in caplog.text)
    connect(silence=3600.0).close()
    assert not staying.is_gone()
    staying.close()
