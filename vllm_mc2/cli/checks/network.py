"""Peers on other hosts: what this host needs for them, and ``--peer``."""

import asyncio
import errno
import importlib.metadata
import os
import socket
import time

from vllm_mc2.channel import FrameSocket
from vllm_mc2.config import SECRET_VARIABLE, MC2Config
from vllm_mc2.errors import ConfigError, PeerRefusedError, PeerUnreachableError, ProtocolError
from vllm_mc2.findings import Finding, Value
from vllm_mc2.network.address import resolve_own_address
from vllm_mc2.network.stream import SecureStream
from vllm_mc2.network.transport import why_no_mooncake
from vllm_mc2.protocol import PROTOCOL_VERSION, Message, Refusal, SchedulerHello, TcpChallenge
from vllm_mc2.ticket import TcpAddress

ANSWER_SECONDS = 5.0
_ENGINE = "mooncake-transfer-engine-non-cuda"
_NOBODY = "0" * 32
"""An incarnation that no prefill has: it refuses, and so names its own, without making anything for us."""

_COMPARE = "the same secret on both hosts: compare sha256sum of the files"
_SAME_VERSION = "the same version of vllm-mc2 on both hosts"


def parse_peer(text: str) -> TcpAddress | None:
    """``HOST:PORT``, ``[IPv6]:PORT``; None if it is neither."""
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        return None
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        return None
    return TcpAddress(host, int(port))


def network_findings(config: MC2Config, peer: TcpAddress | None, secret_file: str | None) -> list[Finding]:
    """``secret_file`` is the command line's, and comes before what ``config`` and the environment say."""
    is_wanted = peer is not None or config.tcp_address is not None
    secret, findings = None, []
    try:
        chosen = config if secret_file is None else MC2Config(tcp_secret_file=os.path.expanduser(secret_file))  # noqa: PTH111
        secret = chosen.resolve_tcp_secret()
    except ConfigError as error:
        findings.append(Finding("secret", "fail", str(error), "(umask 077; openssl rand -hex 32 > FILE)"))
    else:
        findings.append(_secret(config, secret, is_wanted=config.tcp_address is not None))
    findings.append(_transfer_engine(is_wanted=is_wanted))
    if config.tcp_address is not None:
        findings.append(_own_address(config.tcp_address, config.tcp_port))
    if peer is not None:
        findings.append(_ask(peer, secret))
    return findings


def _secret(config: MC2Config, secret: bytes | None, *, is_wanted: bool) -> Finding:
    values: dict[str, Value] = {"is_set": secret is not None}
    if secret is not None:
        return Finding("secret", "pass", f"{len(secret)} bytes, for other hosts", values=values)
    text = f"none is set ({SECRET_VARIABLE}, tcp_secret_file): no other host is talked to"
    if is_wanted:
        advice = "set tcp_secret_file; without a secret prefill does not listen at tcp_address"
        return Finding("secret", "fail", f"{text}, although tcp_address is {config.tcp_address}", advice, values)
    return Finding("secret", "info", text, values=values)


def _transfer_engine(*, is_wanted: bool) -> Finding:
    reason = why_no_mooncake()
    if reason is None:
        version = importlib.metadata.version(_ENGINE)
        text = f"Mooncake {version} loads: blocks can be read from other hosts"
        return Finding("transfer engine", "pass", text, values={"version": version})
    advice = "pip install 'vllm-mc2[mooncake]'; apt-get install libibverbs1 libcurl4; docs/other-hosts.md"
    if is_wanted:
        return Finding("transfer engine", "fail", reason, advice, {"version": None})
    return Finding("transfer engine", "info", f"none, for one host none is needed: {reason}", values={"version": None})


def _own_address(name: str, port: int) -> Finding:
    """Where a prefill would listen: try to bind."""
    title = "tcp_address"
    try:
        host = resolve_own_address(name)
    except ConfigError as error:
        return Finding(title, "fail", str(error), "an address of this host, or a name of one: ip -brief address")
    address = TcpAddress(host, port)
    values: dict[str, Value] = {"host": host, "port": port}
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            pass
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            text = f"{address}: somebody listens there already"
            return Finding(title, "warn", text, "a running prefill, or choose another tcp_port: ss -tlnp", values)
        text = f"{address}: cannot be listened at: {error.strerror}"
        return Finding(title, "fail", text, "an address of this host: ip -brief address", values)
    return Finding(title, "pass", f"{address} can be listened at", values=values)


# --- one peer ---


def _ask(address: TcpAddress, secret: bytes | None) -> Finding:
    """As far as the secret goes: to the prefill's scheduler, or to the challenge that everybody gets."""
    name = f"peer {address}"
    values: dict[str, Value] = {"is_authenticated": False, "protocol": None}
    begin = time.monotonic()
    try:
        if secret is None:
            return _challenge(name, address, values)
        answer = asyncio.run(_handshake(address, secret))
    except PeerRefusedError as error:
        if error.field == "tcp_secret":
            return Finding(name, "fail", "it is a prefill, but has another secret", _COMPARE, values)
        values["protocol"] = int(error.theirs) if error.theirs.isdecimal() else None
        return Finding(name, "fail", f"{error.field} is {error.theirs} there, {error.mine} here", _SAME_VERSION, values)
    except ProtocolError as error:
        return Finding(
            name, "fail", f"somebody else listens there: {error}", "prefill's log says where it listens", values
        )
    except TimeoutError:
        text = f"no answer within {ANSWER_SECONDS:g} s"
        return Finding(name, "fail", text, "a firewall on the way, a stopped process, or not a prefill", values)
    except PeerUnreachableError as error:
        text = error.strerror or str(error)
        if error.errno and error.errno > 0:
            text = f"{os.strerror(error.errno)} ({text})"
        advice = "is prefill running with tcp_address and a secret, and does a firewall let this host in?"
        return Finding(name, "fail", text, advice, values)
    values |= {"is_authenticated": True, "protocol": PROTOCOL_VERSION}
    if not isinstance(answer, Refusal) or answer.field != "incarnation":
        text = f"it knows the secret, but answers {type(answer).__name__} to a scheduler's hello"
        return Finding(name, "fail", text, _SAME_VERSION, values)
    values["incarnation"] = answer.theirs
    text = f"lets this host in: secret and protocol {PROTOCOL_VERSION} are right, its scheduler answers"
    return Finding(name, "pass", f"{text} ({(time.monotonic() - begin) * 1e3:.0f} ms)", values=values)


async def _handshake(address: TcpAddress, secret: bytes) -> Message:
    """What a decode's scheduler says to a prefill, and what comes back."""
    async with asyncio.timeout(ANSWER_SECONDS):
        stream = await SecureStream.connect(address, secret, ANSWER_SECONDS)
        try:
            stream.send(SchedulerHello(PROTOCOL_VERSION, _NOBODY, "vllm-mc2 doctor"))
            return await stream.receive()
        finally:
            stream.close()


def _challenge(name: str, address: TcpAddress, values: dict[str, Value]) -> Finding:
    try:
        sock = socket.create_connection(address, ANSWER_SECONDS)
    except TimeoutError:
        raise
    except OSError as error:
        raise PeerUnreachableError(error.errno or errno.EHOSTUNREACH, f"{address}: {error}") from error
    with FrameSocket(sock) as stream:
        message, _ = stream.receive(ANSWER_SECONDS)
    if not isinstance(message, TcpChallenge):
        raise ProtocolError(f"it says {type(message).__name__} first")
    values["protocol"] = message.protocol
    if message.protocol != PROTOCOL_VERSION:
        raise PeerRefusedError("protocol", str(PROTOCOL_VERSION), str(message.protocol))
    text = f"a prefill of protocol {message.protocol} listens there; without a secret this host is not let in"
    return Finding(
        name, "warn", text, f"--secret-file FILE, or {SECRET_VARIABLE}: then the secret is tried, too", values
    )
