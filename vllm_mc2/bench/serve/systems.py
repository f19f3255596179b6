"""What is compared: which servers each system needs, and how a request gets from its prefill to its decode.

Peers get what makes them fast, and what they need to run on a CPU at all: Mooncake its limits for many
blocks and a shim for its start, ExampleConnector a folder in memory, NIXL free threads (the fleet takes the
pinning off every server alike).
"""

from __future__ import annotations

import shutil
import tempfile
import uuid
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import msgspec

from vllm_mc2.bench.serve.client import Client, RequestError
from vllm_mc2.bench.servers import HOST, Role, free_ports, kv_transfer_config

PLAIN = ("plain-a", "plain-b")
"""Servers without a connector; the first is the single server and also prefill of the pair without hand-off."""

# What a router asks prefill for, as vLLM's toy proxy does.
ASK_FOR_TICKET: Mapping[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class HandOff(Protocol):
    """How the two legs of one system belong together; the example of this is vLLM's proxy for it."""

    at_once: bool
    """Both legs are sent together, and decode waits for prefill by itself."""

    def ask(self) -> Mapping[str, Any] | None:
        """``kv_transfer_params`` of the prefill leg."""

    def use(self, asked: Mapping[str, Any] | None, answered: Any) -> Mapping[str, Any] | None:
        """``kv_transfer_params`` of the decode leg; ``answered`` is None if the legs are sent at once."""

    def clear(self) -> None:
        """Remove what the last request has left."""


class Nothing:
    """No hand-off at all."""

    at_once = False

    def ask(self) -> None:
        """Nothing to ask for."""

    def use(self, asked: Mapping[str, Any] | None, answered: Any) -> None:
        """Nothing to use."""

    def clear(self) -> None:
        """Nothing to remove."""


class TicketHandOff(Nothing):
    """Prefill's answer goes to decode verbatim: vllm-mc2 and NIXL."""

    def ask(self) -> Mapping[str, Any]:  # type: ignore[override]
        """The six keys of every router."""
        return ASK_FOR_TICKET

    def use(self, asked: Mapping[str, Any] | None, answered: Any) -> Mapping[str, Any]:  # type: ignore[override]
        """The answer itself.

        Raises:
            RequestError: prefill gave nothing to hand over.
        """
        if not isinstance(answered, dict) or not answered.get("do_remote_prefill"):
            raise RequestError(f"prefill gave no ticket: {answered!r:.300}")
        return answered


class MooncakeHandOff(Nothing):
    """The router names the transfer and sends both legs at once, as vLLM's Mooncake proxy does."""

    at_once = True

    def __init__(self, bootstrap_port: int) -> None:
        self._address = f"http://{HOST}:{bootstrap_port}"
        self._engine_id: str | None = None

    def connect(self, client: Client) -> None:
        """Learn prefill's engine id from its bootstrap server."""
        self._engine_id = client.get_json(f"{self._address}/query")["0"]["engine_id"]

    def ask(self) -> Mapping[str, Any]:  # type: ignore[override]
        """Ask prefill to send, under a new name."""
        return {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": f"xfer-{uuid.uuid4()}"}

    def use(self, asked: Mapping[str, Any] | None, answered: Any) -> Mapping[str, Any]:  # type: ignore[override]
        """Tell decode where to fetch it."""
        assert asked is not None
        return {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_bootstrap_addr": self._address,
            "remote_engine_id": self._engine_id,
            "transfer_id": asked["transfer_id"],
        }


class FolderHandOff(Nothing):
    """Decode finds the KV by the prompt, in a folder; it is emptied after each request, as nobody else does it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def clear(self) -> None:
        """Empty the folder."""
        for entry in self._folder.iterdir():
            shutil.rmtree(entry, ignore_errors=True)

    def remove(self) -> None:
        """Remove the folder itself; its servers must have ended."""
        shutil.rmtree(self._folder, ignore_errors=True)


class Launch(msgspec.Struct, frozen=True):
    """One server to start."""

    name: str
    kv_config: str | None = None
    environment: dict[str, str | None] = {}


class Plan(msgspec.Struct, frozen=True):
    """Both servers of a system (only one for the single server), and what joins them."""

    launches: tuple[Launch, ...]
    hand_off: Any  # a HandOff; msgspec does not take protocols
    how: str


# No plugin of ours in servers that are not ours.
_WITHOUT_US: dict[str, str | None] = {"VLLM_PLUGINS": ""}


def _both(make: Callable[[Role, int], Launch], hand_off: HandOff, how: str) -> Plan:
    roles: tuple[Role, Role] = ("kv_producer", "kv_consumer")
    return Plan(tuple(make(role, index) for index, role in enumerate(roles)), hand_off, how)


def _server_name(system: str, role: Role) -> str:
    return f"{system}-{'prefill' if role == 'kv_producer' else 'decode'}"


def plan(system: str, scratch: Path) -> Plan:
    """What to start for ``system``; files go to ``scratch``, whose path must be short enough for a socket."""
    plain = tuple(Launch(name, environment=_WITHOUT_US) for name in PLAIN)
    if system == "single":
        return Plan(plain[:1], Nothing(), "one server without a connector")
    if system == "none":
        return Plan(plain, Nothing(), "two servers without a connector; decode computes the prompt again")
    return {"mc2": _mc2, "nixl": _nixl, "mooncake": _mooncake, "example": _example}[system](scratch)


def _mc2(scratch: Path) -> Plan:
    def make(role: Role, _: int) -> Launch:
        config = kv_transfer_config(role, policy="fail", extra={"socket_dir": str(scratch / "mc2")})
        return Launch(_server_name("mc2", role), config, {"VLLM_PLUGINS": "mc2"})

    return _both(make, TicketHandOff(), "MC2Connector, default settings; a failed hand-off fails its request")


def _nixl(_: Path) -> Plan:
    ports = free_ports(2)

    def make(role: Role, index: int) -> Launch:
        config = kv_transfer_config(role, connector="NixlConnector", policy="fail")
        environment = {**_WITHOUT_US, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(ports[index])}
        return Launch(_server_name("nixl", role), config, environment)

    how = "vLLM's NixlConnector, UCX backend, default settings; prefill's kv_transfer_params go to decode verbatim"
    return _both(make, TicketHandOff(), how)


def _mooncake(_: Path) -> Plan:
    ports = free_ports(2)
    limits = ("MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER", "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER")

    def make(role: Role, index: int) -> Launch:
        config = kv_transfer_config(
            role,
            connector="MooncakeConnector",
            policy="fail",
            extra={"mooncake_protocol": "tcp"},
            module_path="vllm_mc2.bench.serve.mooncake_cpu",
        )
        environment: dict[str, str | None] = {
            **_WITHOUT_US,
            "VLLM_HOST_IP": HOST,
            "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(ports[index]),
            # Without them a batch of more than some 2048 blocks fails, and the peer stays unusable.
            **dict.fromkeys(limits, "65535"),
        }
        return Launch(_server_name("mooncake", role), config, environment)

    how = "vLLM's MooncakeConnector over TCP, through a shim for CPUs; both legs are sent at once, as its proxy in vLLM does"
    return _both(make, MooncakeHandOff(ports[0]), how)


def _example(scratch: Path) -> Plan:
    memory = Path("/dev/shm")  # noqa: S108  the fastest place; the folder has a random name
    folder = Path(tempfile.mkdtemp(prefix="mc2-bench-", dir=memory if memory.is_dir() else scratch))

    def make(role: Role, _: int) -> Launch:
        config = kv_transfer_config(
            role, connector="ExampleConnector", policy="fail", extra={"shared_storage_path": str(folder)}
        )
        return Launch(_server_name("example", role), config, _WITHOUT_US)

    how = f"vLLM's ExampleConnector, files in {folder.parent}; decode computes the blocks that it does not load"
    return _both(make, FolderHandOff(folder), how)


def why_not(system: str) -> str | None:
    """Why a system cannot be started on this host, as far as that shows without starting it; None if it can."""
    package = {"nixl": "nixl", "mooncake": "mooncake"}.get(system)
    if package is not None and find_spec(package) is None:
        return f"the package {package} is not installed (or not on PYTHONPATH)"
    return None
