"""Reads of another host's memory by a transfer engine.

A :class:`Transport` makes a worker's memory readable (prefill) and opens a :class:`Reader` for each peer (decode). Control
messages do not go this way, and nothing here knows of blocks or leases.

Mooncake's engine is the one there is. What its version 0.3.13 does, as far as it matters here:

* A batch that fails has not ended: pieces that are under way are still written afterwards. So a reader has an engine of its own,
  and gives it up before a failure is reported; after that nothing writes to our memory.
* Over TCP nobody is authenticated: whoever reaches its ports can read and write what is registered. They listen on every
  address of the host.
* It speaks IPv6 or IPv4 in one process, as ``MC_USE_IPV6`` says when it starts.
"""

import importlib
import ipaddress
import logging
import math
import os
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from vllm_mc2.errors import TransportError
from vllm_mc2.ticket import TcpAddress

logger = logging.getLogger("vllm.mc2.transport")

MAX_BATCH_PIECES = 1024
"""Mooncake's default limits refuse batches of more than about 2,000."""


class Span(NamedTuple):
    """A run of memory."""

    address: int
    num_bytes: int


class Piece(NamedTuple):
    """A run of bytes to read."""

    own_address: int
    peer_address: int
    num_bytes: int


class Reader(Protocol):
    """Reads one peer's memory. One thread at a time."""

    def read(self, pieces: Sequence[Piece]) -> None:
        """Fill our memory from the peer's. When this has returned or raised, nothing more is written.

        Raises:
            TransportError: not everything was read. The reader is of no use any more.
        """

    def close(self) -> None:
        """Give everything up; idempotent."""


class Transport(Protocol):
    """One worker's way to other hosts' memory. Any thread."""

    name: str
    """Both sides must use the same."""

    def share(self, spans: Iterable[Span], host: str) -> str:
        """Make memory readable for peers, from this process's ``host`` address, until it ends.

        Returns:
            What a peer calls this memory; its addresses are ours.

        Raises:
            TransportError: the engine does not start, or does not take the memory.
        """

    def open_reader(self, segment: str, spans: Iterable[Span], host: str) -> Reader:
        """A reader of a peer's memory, which will write to ``spans`` only.

        Raises:
            TransportError: as for :meth:`share`.
        """

    def close(self) -> None:
        """Share nothing any more."""


def why_no_mooncake() -> str | None:
    """Why Mooncake's engine cannot be used here, or None. Tried in a process of its own: it chooses its IP version when it is
    loaded, and a decode does not know its peers before the first request.
    """
    command = [sys.executable, "-c", "import mooncake.engine"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60.0, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"Mooncake's engine could not be tried: {error}"
    if done.returncode == 0:
        return None
    return (
        "the package mooncake-transfer-engine-non-cuda (pip install 'vllm-mc2[mooncake]') or a library that it needs"
        f" (libibverbs1, libcurl4) is not installed: {(done.stderr.strip().splitlines() or ['no reason given'])[-1]}"
    )


class MooncakeTransport:
    """Mooncake's transfer engine, protocol ``tcp``."""

    name = "mooncake-tcp"

    def __init__(self, timeout_seconds: float) -> None:
        """``timeout_seconds``: after so long without progress a read has failed."""
        seconds = str(max(1, math.ceil(timeout_seconds)))
        # What the user has set stays.
        for variable in ("MC_TCP_PROGRESS_TIMEOUT_SEC", "MC_TCP_STATUS_TIMEOUT_SEC"):
            os.environ.setdefault(variable, seconds)
        self._shared: Any = None

    def share(self, spans: Iterable[Span], host: str) -> str:
        """See :meth:`Transport.share`."""
        self._shared = _new_engine(host, spans)
        return str(TcpAddress(host, self._shared.get_rpc_port()))

    def open_reader(self, segment: str, spans: Iterable[Span], host: str) -> "MooncakeReader":
        """See :meth:`Transport.open_reader`."""
        return MooncakeReader(_new_engine(host, spans), segment)

    def close(self) -> None:
        """See :meth:`Transport.close`."""
        self._shared = None


class MooncakeReader:
    """An engine for one peer, so that giving it up ends all that is under way from there and nothing else."""

    def __init__(self, engine: Any, segment: str) -> None:
        """``engine`` must have no other owner."""
        self._engine = engine
        self._segment = segment

    def read(self, pieces: Sequence[Piece]) -> None:
        """See :meth:`Reader.read`."""
        for begin in range(0, len(pieces), MAX_BATCH_PIECES):
            batch = pieces[begin : begin + MAX_BATCH_PIECES]
            own, theirs, sizes = (list(column) for column in zip(*batch, strict=True))
            if self._engine is None:
                raise TransportError(f"reads from {self._segment} have failed before")
            if self._engine.batch_transfer_sync_read(self._segment, own, theirs, sizes) != 0:
                self.close()
                raise TransportError(f"Mooncake could not read {sum(sizes)} bytes from {self._segment}")

    def close(self) -> None:
        """See :meth:`Reader.close`. Takes about a second: the engine's threads end."""
        self._engine = None


_family_lock = threading.Lock()
_family: list[int] = []
"""The one IP version that Mooncake speaks in this process, once it has started."""


def _choose_family(host: str) -> None:
    version = ipaddress.ip_address(host.partition("%")[0]).version
    with _family_lock:
        if not _family:
            _family.append(version)
            if version == 6:
                os.environ.setdefault("MC_USE_IPV6", "1")
        if _family != [version]:
            raise TransportError(f"Mooncake speaks IPv{_family[0]} in this process already, so it cannot use {host}")


def _new_engine(host: str, spans: Iterable[Span]) -> Any:
    _choose_family(host)
    try:
        engine: Any = importlib.import_module("mooncake.engine").TransferEngine()
    except ImportError as error:
        raise TransportError(str(error)) from error
    if engine.initialize(host, "P2PHANDSHAKE", "tcp", "") != 0:
        raise TransportError(f"Mooncake's engine does not start on {host}")
    for span in spans:
        if engine.register_memory(*span) != 0:
            raise TransportError(f"Mooncake does not take {span.num_bytes} bytes of memory")
    return engine
