"""Who may talk over TCP, and what becomes of a line that is listened to, changed, cut or silent."""

import contextlib
import select
import socket
import threading
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.network.conftest import HELLO, PATIENCE_SECONDS, SECRET, SILENCE_SECONDS, Connect, Lender
from tests.network.relay import Relay
from tests.support.waiting import wait_until
from vllm_mc2 import protocol
from vllm_mc2.errors import ConfigError, PeerRefusedError, PeerUnreachableError, ProtocolError
from vllm_mc2.network.borrower import open_remote_session
from vllm_mc2.network.loop import LoopThread
from vllm_mc2.network.secret import address_proof, is_proven, session_keys
from vllm_mc2.network.stream import MAX_GREETING_BYTES
from vllm_mc2.protocol import (
    PROTOCOL_VERSION,
    InspectHello,
    SchedulerWelcome,
    TcpAccept,
    TcpChallenge,
    TcpProof,
)
from vllm_mc2.ticket import TcpAddress


def test_both_sides_know_the_secret(lender: Lender, connect: Connect) -> None:
    session = connect()
    assert lender.hellos == [HELLO]
    assert not session.is_gone() and session.local_host == "127.0.0.1"
    session.close()
    wait_until(lambda: lender.ledgers == {})


def test_another_secret_is_refused_on_both_sides(lender: Lender, connect: Connect) -> None:
    with pytest.raises(PeerRefusedError, match="tcp_secret"):
        connect(secret=b"another secret of some length")
    wait_until(lambda: lender.server.num_rejected == 1)
    assert lender.hellos == []


def test_other_hellos_get_a_refusal(lender: Lender, connect: Connect) -> None:
    with pytest.raises(PeerRefusedError, match="message"):
        connect(hello=InspectHello(PROTOCOL_VERSION))


def impostor(answers: list[Any]) -> tuple[int, threading.Thread]:
    """A listener that says these things, each after it has heard something; the first at once."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with listener, contextlib.suppress(OSError):
            sock, _ = listener.accept()
            with sock:
                for answer in answers:
                    sock.sendall(answer if isinstance(answer, bytes) else protocol.frame(answer))
                    if not sock.recv(65536):
                        return

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return listener.getsockname()[1], thread


@pytest.mark.parametrize(
    ("answers", "error"),
    [
        ([TcpChallenge(PROTOCOL_VERSION, b"n" * 32, 1.0), TcpAccept(b"p" * 32)], ProtocolError),
        ([TcpChallenge(PROTOCOL_VERSION + 1, b"n" * 32, 1.0)], PeerRefusedError),
        ([TcpAccept(b"p" * 32)], ProtocolError),
        ([b"HTTP/1.1 400 Bad Request\r\n\r\n"], ProtocolError),
        ([b"\xff\xff\xff\xff"], ProtocolError),
        ([b"\x00"], PeerUnreachableError),
        ([], PeerUnreachableError),
    ],
    ids=["knows no secret", "another version", "out of turn", "a web server", "too long", "half a frame", "silence"],
)
def test_decode_trusts_no_listener(loop: LoopThread, answers: list[Any], error: type[Exception]) -> None:
    port, thread = impostor(answers)
    # Only half a frame is waited for until the end; and where that is waited for, nothing else must come in time.
    seconds = 1.0 if answers == [b"\x00"] else PATIENCE_SECONDS
    with pytest.raises(error):
        open_remote_session(loop, TcpAddress("127.0.0.1", port), SECRET, HELLO, SchedulerWelcome, seconds, 1.0)
    thread.join(PATIENCE_SECONDS)


def test_a_listener_that_echoes_proves_nothing(loop: LoopThread) -> None:
    """What the client has proven cannot be sent back to it as a proof."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        sock, _ = listener.accept()
        sock.sendall(protocol.frame(TcpChallenge(PROTOCOL_VERSION, b"n" * 32, 1.0)))
        answer = protocol.decode(sock.recv(4096)[4:])
        assert isinstance(answer, TcpProof)
        sock.sendall(protocol.frame(TcpAccept(answer.proof)))
        sock.recv(1)
        sock.close()

    threading.Thread(target=serve, daemon=True).start()
    address = TcpAddress("127.0.0.1", listener.getsockname()[1])
    with pytest.raises(ProtocolError, match="does not know the secret"):
        open_remote_session(loop, address, SECRET, HELLO, SchedulerWelcome, PATIENCE_SECONDS, 1.0)
    listener.close()


def test_a_proof_of_another_connection_is_worth_nothing(lender: Lender, connect: Connect) -> None:
    heard = bytearray()
    relay = Relay(lender.address, lambda data, way: (heard.extend(data) if way == "up" else None, data)[1])
    with relay:
        connect(relay.port)
        with socket.create_connection(lender.address) as sock:
            sock.recv(4096)
            sock.sendall(heard)
            # A refusal that says nothing, and the end.
            assert b"refusal" in b"".join(iter(lambda: sock.recv(4096), b""))
    assert len(lender.hellos) == 1


@pytest.mark.parametrize("way", ["up", "down"])
@pytest.mark.parametrize("nth", [0, 1, 2])
def test_a_bit_that_is_changed_on_the_way_ends_the_session(
    lender: Lender, connect: Connect, way: str, nth: int
) -> None:
    """In the greeting, in the hello or its answer: whatever it was, nobody acts on it."""
    seen = 0

    def change(data: bytes, direction: str) -> bytes:
        nonlocal seen
        if direction == way:
            seen += 1
            if seen == nth + 1:
                return data[:-1] + bytes([data[-1] ^ 1])
        return data

    with Relay(lender.address, change) as relay:
        try:
            session = connect(relay.port)
        except (ProtocolError, PeerRefusedError, PeerUnreachableError):
            return
        # Only a change behind the handshake, in a heartbeat, lets it come about.
        wait_until(session.is_gone)
        session.close()


def test_a_frame_that_is_sent_twice_ends_the_session(lender: Lender, connect: Connect) -> None:
    """A recorded claim cannot be played again."""
    is_doubling = False

    def change(data: bytes, way: str) -> bytes:
        return data * 2 if is_doubling and way == "up" else data

    with Relay(lender.address, change) as relay:
        session = connect(relay.port)
        is_doubling = True
        wait_until(session.is_gone)  # the first heartbeat did it
        session.close()


def test_heartbeats_keep_an_idle_session(connect: Connect) -> None:
    session = connect()
    time.sleep(3 * SILENCE_SECONDS)
    assert not session.is_gone()
    session.close()


def test_the_shorter_timeout_counts_for_heartbeats(connect: Connect) -> None:
    """A decode that waits for an hour says something in time for a prefill that waits for less than a second."""
    session = connect(silence=3600.0)
    time.sleep(3 * SILENCE_SECONDS)
    assert not session.is_gone()
    session.close()


def test_a_cut_cable_is_noticed_on_both_sides(lender: Lender, connect: Connect) -> None:
    with Relay(lender.address) as relay:
        session = connect(relay.port)
        relay.cut()
        wait_until(session.is_gone)
        assert select.select(session.descriptors(), [], [], 0)[0] == session.descriptors()
        wait_until(lambda: lender.ledgers == {})
        session.close()


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=200))
def test_strangers_get_nothing(noise: bytes) -> None:
    lender = Lender()
    try:
        with socket.create_connection(lender.address) as sock:
            sock.settimeout(PATIENCE_SECONDS)
            challenge = sock.recv(4096)
            assert isinstance(protocol.decode(challenge[4:]), TcpChallenge)
            assert b"prefill" not in challenge and lender.book is not None
            sock.sendall(noise)
            sock.shutdown(socket.SHUT_WR)
            rest = b"".join(iter(lambda: sock.recv(4096), b""))
            assert b"welcome" not in rest and b"accept" not in rest
        assert lender.hellos == []
        wait_until(lambda: lender.server.num_rejected == 1)
    finally:
        lender.close()


def test_a_long_greeting_is_not_waited_for(lender: Lender) -> None:
    with socket.create_connection(lender.address) as sock:
        sock.settimeout(PATIENCE_SECONDS)
        sock.recv(4096)
        sock.sendall((MAX_GREETING_BYTES + 1).to_bytes(4, "little"))
        assert sock.recv(4096) == b""


def test_silent_strangers_do_not_keep_others_out(lender: Lender, connect: Connect) -> None:
    strangers = [socket.create_connection(lender.address) for _ in range(20)]
    session = connect()
    session.close()
    for stranger in strangers:
        stranger.close()


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "224.0.0.1", "no.such.name.invalid"])
def test_wildcards_and_unknown_names_are_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=f"tcp_address = '{address}'"):
        Lender(TcpAddress(address, 0))


def test_an_address_of_somebody_else_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"tcp_address 192\.0\.2\.1, tcp_port 0: cannot listen"):
        Lender(TcpAddress("192.0.2.1", 0))


def test_a_port_that_is_taken_is_refused(lender: Lender) -> None:
    with pytest.raises(ConfigError, match=f"tcp_port {lender.address.port}: cannot listen"):
        Lender(lender.address)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_addresses_of_every_kind(loop: LoopThread, host: str) -> None:
    lender = Lender(TcpAddress(host, 0))
    try:
        assert lender.address.host == host and lender.address.port > 0
        _, session = open_remote_session(
            loop, lender.address, SECRET, HELLO, SchedulerWelcome, PATIENCE_SECONDS, PATIENCE_SECONDS
        )
        session.close()
    finally:
        lender.close()


def test_it_listens_on_its_address_only(lender: Lender) -> None:
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.2", lender.address.port), timeout=2)


def test_an_address_is_proven_for_one_incarnation_and_secret() -> None:
    address = TcpAddress("10.0.0.1", 4000)
    proof = address_proof(SECRET, "5" * 32, address)
    assert is_proven(SECRET, "5" * 32, address, proof)
    assert not is_proven(SECRET, "5" * 32, address, None)
    assert not is_proven(SECRET, "6" * 32, address, proof)
    assert not is_proven(SECRET, "5" * 32, TcpAddress("10.0.0.1", 4001), proof)
    assert not is_proven(SECRET, "5" * 32, TcpAddress("10.0.0.14", 0), proof)
    assert not is_proven(b"another secret of some length", "5" * 32, address, proof)


def test_keys_depend_on_all_that_was_said() -> None:
    challenge = TcpChallenge(PROTOCOL_VERSION, b"n" * 32, 1.0)
    variants = [
        session_keys(SECRET, challenge, b"c" * 32, 2.0),
        session_keys(SECRET, challenge, b"d" * 32, 2.0),
        session_keys(SECRET, challenge, b"c" * 32, 3.0),
        session_keys(SECRET, TcpChallenge(PROTOCOL_VERSION, b"n" * 32, 9.0), b"c" * 32, 2.0),
        session_keys(SECRET, TcpChallenge(PROTOCOL_VERSION, b"m" * 32, 1.0), b"c" * 32, 2.0),
        session_keys(b"x" * 32, challenge, b"c" * 32, 2.0),
    ]
    keys = [key for variant in variants for key in variant]
    assert len(set(keys)) == len(keys)
