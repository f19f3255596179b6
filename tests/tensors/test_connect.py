"""Arguments, the first contact, and who is turned away."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.ports import own_ports, refusing_port
from tests.support.waiting import wait_until
from tests.tensors.rig import WATCHDOG_SECONDS, Pair, accepting, connect, dial, listen
from vllm_mc2 import MC2Communicator, cli, protocol
from vllm_mc2.errors import ConfigError, MC2Error, PeerRefusedError, PeerUnreachableError
from vllm_mc2.protocol import PROTOCOL_VERSION, Introduction, Refusal
from vllm_mc2.tensors import host, sender

DECODE = {"listen_port": 0}
PREFILL = {"peer_addr": "127.0.0.1", "peer_port": 1}
WHOLE = "expected a whole number from"


@pytest.fixture
def decode(directory: Path) -> Iterator[MC2Communicator]:
    with listen(directory) as made:
        yield made


# --- arguments ---


@pytest.mark.parametrize(
    ("side", "key", "value", "allowed"),
    [
        *[(DECODE, "local_rank", value, f"{WHOLE} 0 to 65535") for value in (-1, 65536, "0", 1.0, None, True)],
        *[(DECODE, "listen_port", value, f"{WHOLE} 0 to 65535") for value in (-1, 65536, "80", 1.5, False)],
        *[(PREFILL, "peer_port", value, f"{WHOLE} 1 to 65535") for value in (0, -1, 65536, "80", 1.5, True)],
        *[(PREFILL, "peer_addr", value, "expected a") for value in ("", 7)],
        (PREFILL, "peer_addr", None, "expected the host name or address of decode"),
        *[(DECODE, "listen_addr", value, "expected a text") for value in ("", 7, b"::1")],
        (DECODE, "listen_addr", "no.such.host.invalid", "cannot listen there"),
        (DECODE, "listen_addr", "192.0.2.1", "cannot listen there"),
        *[(PREFILL, "num_lease_slots", value, f"{WHOLE} 1 to 65536") for value in (0, -1, 65537, "9", 1.5, None, True)],
        *[
            (PREFILL, key, value, "expected a number above 0 and up to 86400")
            for key in ("timeout_seconds", "offer_timeout_seconds")
            for value in (0, -1, 86401, float("inf"), float("nan"), "1", None, True)
        ],
        *[
            (DECODE, "busy_poll_seconds", value, "expected a number from 0 to 60")
            for value in (-1, 61, float("nan"), "1", None, True)
        ],
        *[(DECODE, "socket_dir", value, "expected a") for value in ("", 7, "relative/path", "/" + "x" * 100)],
        *[
            (DECODE, key, value, "expected 'cpu'")
            for key in ("device", "npu_device")
            for value in ("gpu", "npu", "", 7)
        ],
        *[(DECODE, key, value, "expected 'cpu'") for key in ("device", "npu_device") for value in ("npu:0", "npu:12")],
    ],
)
def test_a_bad_argument_is_named_with_its_value_and_what_is_allowed(
    directory: Path, side: dict[str, Any], key: str, value: Any, allowed: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        MC2Communicator(**{"socket_dir": str(directory), "timeout_seconds": 0.1, **side, key: value})
    assert f"{key} = {value!r}" in str(caught.value) and allowed in str(caught.value)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"peer_addr": "127.0.0.1"},
        {"listen_addr": "127.0.0.1"},
        {"peer_addr": "127.0.0.1", "peer_port": 1, "listen_port": 1},
        {"peer_addr": "127.0.0.1", "listen_port": 0},
        {"listen_addr": "127.0.0.1", "peer_port": 1},
    ],
    ids=lambda arguments: "+".join(arguments) or "nothing",
)
def test_it_is_one_side_or_the_other(directory: Path, arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"peer_port|listen_port"):
        MC2Communicator(socket_dir=str(directory), **arguments)


def test_both_spellings_of_the_device(directory: Path) -> None:
    for spelling in ({}, {"device": "cpu"}, {"npu_device": "cpu"}, {"device": "cpu", "npu_device": "cpu"}):
        with listen(directory, **spelling) as decode:
            assert decode.device == "cpu"
    for device, npu_device in (("cpu", "npu:0"), ("npu:0", "cpu")):
        with pytest.raises(ConfigError, match=f"device = '{device}' and npu_device = '{npu_device}'"):
            listen(directory, device=device, npu_device=npu_device)


def test_the_ascend_backend_is_said_to_be_missing(directory: Path) -> None:
    with pytest.raises(ConfigError, match="Ascend backend is not there yet"):
        listen(directory, npu_device="npu:0")


@pytest.mark.parametrize(
    ("listen_addr", "peer_addr"), [("localhost", "127.0.0.1"), ("0.0.0.0", "localhost"), ("::1", "::1")]
)
def test_addresses(directory: Path, listen_addr: str, peer_addr: str) -> None:
    if listen_addr == "::1" and not Path("/proc/net/if_inet6").exists():
        pytest.skip("no IPv6 on this machine")
    with listen(directory, listen_addr=listen_addr) as decode:
        connect(decode, directory, peer_addr=peer_addr).close()


def test_a_port_that_is_taken(decode: MC2Communicator, directory: Path) -> None:
    with pytest.raises(ConfigError, match=f"listen_port = {decode.listen_port}: cannot listen there"):
        MC2Communicator(listen_port=decode.listen_port, socket_dir=str(directory))


def test_a_socket_directory_that_others_may_enter(directory: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    for arguments in (DECODE, PREFILL):
        with pytest.raises(ConfigError, match="0755 lets others in"):
            MC2Communicator(socket_dir=str(tmp_path), **arguments)


# --- who is not reached ---


def test_nobody_listens(directory: Path) -> None:
    with (
        refusing_port() as port,
        pytest.raises(PeerUnreachableError, match=f"decode at 127.0.0.1:{port} cannot be reached"),
    ):
        dial(port, directory, timeout_seconds=0.1)


def test_a_name_that_does_not_resolve(directory: Path) -> None:
    """Does not get better by trying again, so the time-out is not waited for."""
    with pytest.raises(PeerUnreachableError, match="cannot be reached"):
        dial(1, directory, peer_addr="no.such.host.invalid", timeout_seconds=86400)


def test_decode_that_comes_later(directory: Path) -> None:
    """The two are started in any order."""
    made: list[MC2Communicator] = []
    with own_ports(1) as (port,):
        thread = threading.Thread(target=lambda: made.append(dial(port, directory, timeout_seconds=WATCHDOG_SECONDS)))
        thread.start()
        wait_until(lambda: list(directory.glob("*.sock")))  # prefill is there, and finds nobody
        with MC2Communicator(listen_port=port, socket_dir=str(directory)) as decode:
            decode.accept(WATCHDOG_SECONDS)
            thread.join(WATCHDOG_SECONDS)
            made[0].close()


def test_nobody_accepts(decode: MC2Communicator, directory: Path) -> None:
    with pytest.raises(PeerUnreachableError, match=r"no answer in time; does it call accept\(\)\?"):
        dial(decode, directory, timeout_seconds=1.0)
    # It has left its introduction there. Decode finds that it is gone, and goes on.
    connect(decode, directory).close()


def test_nobody_comes(decode: MC2Communicator) -> None:
    for timeout in (0, 0.02):
        with pytest.raises(TimeoutError, match=f"no prefill came to port {decode.listen_port}"):
            decode.accept(timeout)


@pytest.mark.parametrize(
    "answer",
    [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"", protocol.frame(Introduction(1, "0" * 32, "0" * 32, 0)), b"\x00" * 64],
    ids=["http", "nothing", "another message", "zeros"],
)
def test_whoever_answers_is_no_decode(directory: Path, answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            sock, _ = server.accept()
            with sock:
                sock.recv(1024)
                sock.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(MC2Error):
            dial(server.getsockname()[1], directory, timeout_seconds=WATCHDOG_SECONDS)
        thread.join(WATCHDOG_SECONDS)


# --- who is turned away; decode goes on accepting ---


@contextlib.contextmanager
def and_another_is_accepted(decode: MC2Communicator, directory: Path, undo: Callable[[], object]) -> Iterator[None]:
    with accepting(decode) as accepted:
        yield
        assert not accepted.done()
        undo()
        dial(decode, directory).close()
        accepted.result(WATCHDOG_SECONDS)


def test_another_host(decode: MC2Communicator, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "host_id", lambda: "a" * 32)
    with and_another_is_accepted(decode, directory, monkeypatch.undo):
        with pytest.raises(PeerUnreachableError, match="runs on another host; its memory cannot be mapped from here"):
            dial(decode, directory)


def test_another_rank(decode: MC2Communicator, directory: Path) -> None:
    with and_another_is_accepted(decode, directory, lambda: None):
        with pytest.raises(PeerRefusedError, match="local_rank differs") as caught:
            dial(decode, directory, local_rank=3)
        assert (caught.value.field, caught.value.mine, caught.value.theirs) == ("local_rank", "3", "0")


def test_equal_ranks_meet(directory: Path) -> None:
    with listen(directory, local_rank=3) as decode, connect(decode, directory, local_rank=3) as prefill:
        assert prefill.local_rank == 3


def test_another_version(decode: MC2Communicator, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "PROTOCOL_VERSION", 99)
    with and_another_is_accepted(decode, directory, monkeypatch.undo):
        with pytest.raises(PeerRefusedError, match="protocol differs") as caught:
            dial(decode, directory)
        assert (caught.value.mine, caught.value.theirs) == ("99", str(PROTOCOL_VERSION))


def test_another_socket_directory(decode: MC2Communicator, directory: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "s"
    with and_another_is_accepted(decode, directory, lambda: None):
        with pytest.raises(MC2Error, match="both sides need the same socket_dir"):
            dial(decode, directory, socket_dir=str(elsewhere))
    assert list(elsewhere.iterdir()) == []


def test_a_prefill_serves_one_decode(pair: Pair, directory: Path) -> None:
    """Whoever says its name at another decode gets nothing."""
    assert pair.prefill._sender is not None
    message = Introduction(PROTOCOL_VERSION, host.host_id(), pair.prefill._sender.incarnation, 0)
    with listen(directory) as other, accepting(other) as accepted:
        with socket.create_connection(("127.0.0.1", other.listen_port)) as sock:
            sock.sendall(protocol.frame(message))
            answer = protocol.decode(sock.recv(4096)[4:])
        assert isinstance(answer, Refusal) and "one decode for each communicator" in answer.theirs
        dial(other, directory).close()
        accepted.result(WATCHDOG_SECONDS)
    pair.layer()
    pair.hand_over("r", [1]).release()


# --- what onlookers see, and what is imported ---


def test_inspect_shows_the_prefill_and_its_leases(
    pair: Pair, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def look() -> dict[str, Any]:
        assert cli.main(["inspect", "--socket-dir", str(directory), "--json"]) == 0
        (engine,) = json.loads(capsys.readouterr().out)["engines"]
        found: dict[str, Any] = engine
        return found

    pair.layer()
    engine = look()
    assert (engine["role"], engine["pid"], engine["num_leases"]) == ("prefill", os.getpid(), 0)
    assert engine["engine_id"] == f"tensors-{os.getpid()}"
    assert [decode["pid"] for decode in engine["decodes"]] == [os.getpid()]
    mapped = pair.hand_over("r", [1, 2, 3], num_tokens=40)
    pair.prefill.send_kv_metadata("waits", [4], num_tokens=9)
    held, offered = look()["leases"]
    assert (held["state"], held["num_tokens"], held["num_blocks"], held["references"]) == ("held", 40, 3, 2)
    assert [holder["pid"] for holder in held["holders"]] == [os.getpid()]
    assert (offered["state"], offered["num_tokens"], offered["num_blocks"]) == ("offered", 9, 1)
    mapped.release()
    assert [lease["state"] for lease in look()["leases"]] == ["released", "offered"]
    assert cli.main(["inspect", "--socket-dir", str(directory)]) == 0
    assert "offered" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import vllm_mc2", ["torch", "vllm", "numpy", "vllm_mc2._native"]),
        # Without a numpy, which is torch's to need or not.
        ("import sys; sys.modules['numpy'] = None; from vllm_mc2 import MC2Communicator, KVCacheManager", ["vllm"]),
    ],
)
def test_what_is_imported(statement: str, absent: list[str]) -> None:
    code = f"{statement}; import sys; print([name for name in {absent} if sys.modules.get(name)])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.strip() == "[]"


def test_only_the_tensor_api_is_looked_up() -> None:
    import vllm_mc2

    assert {"MC2Communicator", "KVCacheManager", "KVCacheMapper"} <= set(vllm_mc2.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'Nonsense'"):
        vllm_mc2.Nonsense
