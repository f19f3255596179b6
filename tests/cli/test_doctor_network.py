"""What doctor says of this host's way to others, and of a peer there."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Named, by_name
from tests.connector.rig import MakeEngine
from tests.support.ports import own_ports, refusing_port
from vllm_mc2.cli.checks import network
from vllm_mc2.cli.checks.network import network_findings, parse_peer
from vllm_mc2.config import MC2Config
from vllm_mc2.network.lender import Listening, RemoteServer
from vllm_mc2.protocol import PROTOCOL_VERSION, Message, Refusal, TcpAccept, TcpChallenge, frame
from vllm_mc2.session import Answer
from vllm_mc2.ticket import TcpAddress

SECRET = "a secret of some length"
INCARNATION = "5" * 32
Listen = Callable[[bytes], TcpAddress]


@pytest.fixture(autouse=True)
def without_mooncake(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it loads is tried in a process; once is enough, in the test of it."""
    monkeypatch.setattr(network, "why_no_mooncake", lambda: "not asked for here")
    monkeypatch.setattr(network, "ANSWER_SECONDS", 60.0)


@pytest.fixture
def secret_file(tmp_path: Path) -> str:
    path = tmp_path / "secret"
    path.touch(mode=0o600)
    path.write_text(SECRET + "\n")
    return str(path)


@pytest.fixture
def lender() -> Iterator[RemoteServer]:
    """Answers a scheduler of another incarnation as a prefill does."""

    def answer(key: int, hello: Message) -> Answer:
        return Answer(Refusal("incarnation", getattr(hello, "incarnation", "?"), INCARNATION), keep_open=False)

    listening = Listening(TcpAddress("127.0.0.1", 0), SECRET.encode(), 5.0)
    server = RemoteServer(listening, answer, lambda key: None)
    yield server
    server.close()


@pytest.fixture
def listen() -> Iterator[Listen]:
    """A listener that says the given bytes to whoever connects, and then nothing."""
    with contextlib.ExitStack() as stack:

        def start(says: bytes) -> TcpAddress:
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

            def serve() -> None:
                with contextlib.suppress(OSError):
                    while True:
                        connection, _ = listener.accept()
                        stack.callback(connection.close)
                        connection.sendall(says)

            threading.Thread(target=serve, daemon=True).start()
            # Closing alone does not wake a thread that accepts.
            stack.callback(lambda: listener.shutdown(socket.SHUT_RDWR))
            return TcpAddress(*listener.getsockname())

        yield start


def ask(address: TcpAddress, secret_file: str | None = None, config: MC2Config | None = None) -> dict[str, object]:
    found = by_name(network_findings(config or MC2Config(), address, secret_file))
    return found[f"peer {address}"]


def test_a_prefill_that_lets_us_in(lender: RemoteServer, secret_file: str) -> None:
    found = ask(lender.address, secret_file)
    assert found["state"] == "pass", found
    assert lender.num_rejected == 0  # it would log that
    assert found["values"] == {
        "is_authenticated": True, "protocol": PROTOCOL_VERSION, "incarnation": INCARNATION,
    }  # fmt: skip


def test_where_the_secret_comes_from(lender: RemoteServer, secret_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask(lender.address, None, MC2Config(tcp_secret_file=secret_file))["state"] == "pass"
    monkeypatch.setenv("MC2_TCP_SECRET", SECRET)
    assert ask(lender.address)["state"] == "pass"
    found = by_name(network_findings(MC2Config(), None, None))["secret"]
    assert found["state"] == "pass" and SECRET not in str(found) and str(len(SECRET)) in found["detail"]


def test_a_wrong_secret(lender: RemoteServer, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.touch(mode=0o600)
    other.write_text("b secret of some length")
    found = ask(lender.address, str(other))
    assert found["state"] == "fail" and "another secret" in str(found["detail"]) and "sha256sum" in str(found["advice"])
    assert found["values"]["is_authenticated"] is False  # type: ignore[index]


def test_without_a_secret_only_the_challenge_is_seen(listen: Listen) -> None:
    address = listen(frame(TcpChallenge(PROTOCOL_VERSION, bytes(32), 5.0)))
    found = ask(address)
    assert found["state"] == "warn" and f"protocol {PROTOCOL_VERSION}" in str(found["detail"])
    assert "--secret-file" in str(found["advice"])


@pytest.mark.parametrize("with_secret", [True, False])
def test_another_protocol_version(listen: Listen, secret_file: str, with_secret: bool) -> None:
    address = listen(frame(TcpChallenge(PROTOCOL_VERSION + 1, bytes(32), 5.0)))
    found = ask(address, secret_file if with_secret else None)
    assert found["state"] == "fail" and f"protocol is {PROTOCOL_VERSION + 1} there" in str(found["detail"])
    assert found["values"]["protocol"] == PROTOCOL_VERSION + 1  # type: ignore[index]


@pytest.mark.parametrize("with_secret", [True, False])
@pytest.mark.parametrize("says", [b"SSH-2.0-OpenSSH_9.2\r\n", b"\4\0\0\0oops", b"\1\0\0\0\x80"])
def test_somebody_else_listens_there(listen: Listen, secret_file: str, with_secret: bool, says: bytes) -> None:
    found = ask(listen(says), secret_file if with_secret else None)
    assert found["state"] == "fail" and "somebody else" in str(found["detail"])


def test_one_that_claims_to_know_the_secret(listen: Listen, secret_file: str) -> None:
    says = frame(TcpChallenge(PROTOCOL_VERSION, bytes(32), 5.0)) + frame(TcpAccept(bytes(32)))
    found = ask(listen(says), secret_file)
    assert found["state"] == "fail" and "does not know the secret" in str(found["detail"])


@pytest.mark.parametrize("with_secret", [True, False])
def test_nobody_and_silence(
    listen: Listen, secret_file: str, with_secret: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = secret_file if with_secret else None
    with refusing_port() as port:
        found = ask(TcpAddress("127.0.0.1", port), secret)
    assert found["state"] == "fail" and "Connection refused" in str(found["detail"])
    assert "firewall" in str(found["advice"])
    monkeypatch.setattr(network, "ANSWER_SECONDS", 0.4)
    found = ask(listen(b""), secret)
    assert found["state"] == "fail" and "no answer" in str(found["detail"])
    monkeypatch.setattr(network, "ANSWER_SECONDS", 60.0)
    found = ask(TcpAddress("no-such-host.invalid", 4000), secret)
    assert found["state"] == "fail" and "no-such-host.invalid" in str(found["detail"])


def test_a_real_prefill(make_engine: MakeEngine, secret_file: str) -> None:
    extra = {"tcp_address": "127.0.0.1", "tcp_secret_file": secret_file}
    engine = make_engine("kv_producer", extra=extra)
    half = engine.connector._prefill  # type: ignore[union-attr]
    assert half is not None and half.address is not None
    found = ask(half.address, secret_file)
    assert found["state"] == "pass", found
    assert found["values"]["incarnation"] == half.incarnation  # type: ignore[index]
    assert half._ledgers == {}  # it made nothing for us


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("host:4000", TcpAddress("host", 4000)),
        ("[fd00::1]:4000", TcpAddress("fd00::1", 4000)),
        ("host", None), ("host:", None), (":4000", None), ("host:0", None), ("host:65536", None), ("fd00::1:4000", None),
    ],
)  # fmt: skip
def test_how_a_peer_is_written(text: str, address: TcpAddress | None) -> None:
    assert parse_peer(text) == address


# --- this host ---


def own(config: MC2Config) -> Named:
    return by_name(network_findings(config, None, None))


def test_the_address_of_a_prefill(secret_file: str) -> None:
    with own_ports(1) as (port,):
        config = MC2Config(tcp_address="127.0.0.1", tcp_port=port, tcp_secret_file=secret_file)
        assert own(config)["tcp_address"]["state"] == "pass"
        with socket.create_server(("127.0.0.1", port)):
            found = own(config)["tcp_address"]
            assert found["state"] == "warn" and f"127.0.0.1:{port}" in found["detail"]
    for elsewhere, words in (
        ("192.0.2.1", "cannot be listened at"),
        ("0.0.0.0", "wildcard"),
        ("no.invalid", "no.invalid"),
    ):
        found = own(MC2Config(tcp_address=elsewhere, tcp_secret_file=secret_file))["tcp_address"]
        assert found["state"] == "fail" and words in found["detail"] and "ip -brief address" in found["advice"]


def test_a_secret_that_is_missing_or_open_to_others(tmp_path: Path, secret_file: str) -> None:
    found = own(MC2Config(tcp_address="127.0.0.1"))["secret"]
    assert found["state"] == "fail" and "does not listen" in found["advice"]
    assert own(MC2Config())["secret"]["state"] == "info"
    Path(secret_file).chmod(0o644)
    found = own(MC2Config(tcp_secret_file=secret_file))["secret"]
    assert found["state"] == "fail" and "0600" in found["detail"] and "umask 077" in found["advice"]


def test_the_transfer_engine_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_mc2.network.transport import why_no_mooncake

    monkeypatch.setattr(network, "why_no_mooncake", why_no_mooncake)
    found = own(MC2Config())["transfer engine"]
    assert found["state"] == ("pass" if why_no_mooncake() is None else "info")
    monkeypatch.setattr(network, "why_no_mooncake", lambda: "libibverbs is missing")
    assert own(MC2Config())["transfer engine"]["state"] == "info"
    found = own(MC2Config(tcp_address="127.0.0.1"))["transfer engine"]
    assert found["state"] == "fail" and "libibverbs" in found["detail"] and "vllm-mc2[mooncake]" in found["advice"]
