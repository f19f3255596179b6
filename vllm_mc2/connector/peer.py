"""What decode knows of one prefill engine, and what it takes to open a session with it."""

import enum
import logging
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from vllm_mc2.channel import close_all, socket_path
from vllm_mc2.errors import PeerRefusedError, PeerUnreachableError
from vllm_mc2.leases import PeerLeases
from vllm_mc2.network.borrower import RemoteLeases, RemoteSession, open_remote_session
from vllm_mc2.network.loop import LoopThread
from vllm_mc2.network.secret import is_proven
from vllm_mc2.protocol import PROTOCOL_VERSION, SchedulerHello, SchedulerWelcome, Ticket
from vllm_mc2.session import Session, open_session
from vllm_mc2.ticket import TcpAddress

logger = logging.getLogger("vllm.mc2.peers")


class PeerState(enum.Enum):
    """See the module's docstring."""

    CONNECTING = "connecting"
    MAPPING = "mapping"
    READY = "ready"
    FAILED = "failed"


@dataclass(eq=False)
class Peer:
    """One incarnation of a prefill engine."""

    incarnation: str
    key: int
    """What orders to the workers call it."""
    deadline: float
    state: PeerState = PeerState.CONNECTING
    engine_id: str = ""
    reason: str = ""
    way: Literal["attach", "pull"] = "attach"
    way_reason: str = ""
    """Why it is not attached, when it is not: ``mode``, ``attach_off``, ``other_host``, ``tensor_parallel`` or
    ``window_full``.
    """
    session: Session | RemoteSession | None = None
    leases: PeerLeases | RemoteLeases | None = None
    address: TcpAddress | None = None
    """Of a peer on another host."""
    base: int = -1
    """First block id in the window; -1 when it is not there."""
    num_blocks: int = 0
    pool_bytes: int = 0
    """Of all its workers on this host: what stays in memory for as long as it is mapped here. 0 when it is elsewhere."""
    started: float = field(default_factory=time.monotonic)
    ranks_left: set[int] = field(default_factory=set)
    num_loans: int = 0

    @property
    def first_id(self) -> int:
        """What its block 0 is called in loans: the place in the window, or 0 where its blocks keep their own ids."""
        return max(self.base, 0)

    def is_gone(self) -> bool:
        """Whether the process behind the session has ended. Loans stay valid: the pages live as long as we map them."""
        return self.session is not None and self.session.is_gone()

    def close(self) -> None:
        """End the session and unmap the lease segments; not the pool, which is the workers'."""
        if self.session is not None:
            self.session.close()
        if self.leases is not None:
            self.leases.close()


class OwnWorker(NamedTuple):
    """One of this engine's own workers: where it listens, and what proves that its scheduler speaks."""

    socket_id: str
    control_token: str


class Network(NamedTuple):
    """What it takes to talk to other hosts."""

    secret: bytes
    silence_seconds: float
    """A peer that is not heard of for so long is gone."""


class Connected(NamedTuple):
    """A new session and what came with it."""

    welcome: SchedulerWelcome
    leases: PeerLeases | RemoteLeases
    session: Session | RemoteSession

    def close(self) -> None:
        """End the session, for those who do not want it any more."""
        self.session.close()
        self.leases.close()


class Dialer:
    """Finds prefills and opens sessions with them, on this host or another. Any thread."""

    def __init__(self, engine_id: str, directory: Path, timeout_seconds: float, network: Network | None) -> None:
        """``network``: None where no other host is talked to."""
        self._engine_id = engine_id
        self._directory = directory
        self._timeout_seconds = timeout_seconds
        self._network = network
        self._loop: LoopThread | None = None
        self._lock = threading.Lock()

    def find(self, ticket: Ticket, address: TcpAddress | None) -> TcpAddress | None:
        """Where the ticket's prefill is: None for this host, else ``address`` if the ticket proves it.

        Raises:
            PeerUnreachableError: it is nowhere.
        """
        if socket_path(self._directory, ticket.incarnation).is_socket():
            return None
        nobody = f"no engine {ticket.incarnation} in {self._directory}"
        if address is None:
            raise PeerUnreachableError(f"{nobody}, and it does not listen for other hosts (tcp_address there)")
        if self._network is None:
            raise PeerUnreachableError(f"{nobody}, and no other host is talked to without a secret (tcp_secret_file)")
        if not is_proven(self._network.secret, ticket.incarnation, address, ticket.address_proof):
            raise PeerUnreachableError(f"{nobody}, and its ticket does not prove {address}: another secret, or forged")
        return address

    def dial(self, incarnation: str, address: TcpAddress | None) -> Connected:
        """Open a session; blocks until the handshake's timeout.

        Raises:
            PeerUnreachableError, PeerRefusedError, ProtocolError, OSError: as :func:`open_session` and
                :func:`open_remote_session`; PeerRefusedError also for lease segments that are not valid.
        """
        hello = SchedulerHello(PROTOCOL_VERSION, incarnation, self._engine_id)
        if address is not None:
            assert self._network is not None
            welcome, remote = open_remote_session(
                self._loop_thread(),
                address,
                self._network.secret,
                hello,
                SchedulerWelcome,
                self._timeout_seconds,
                self._network.silence_seconds,
            )
            return Connected(welcome, RemoteLeases(remote), remote)
        path = socket_path(self._directory, incarnation)
        welcome, fds, session = open_session(path, hello, SchedulerWelcome, 2, self._timeout_seconds)
        try:
            return Connected(welcome, PeerLeases(*fds), session)
        except (ValueError, OSError) as error:
            session.close()
            raise PeerRefusedError("lease segments", "valid ones", str(error)) from error
        finally:
            close_all(fds)

    def _loop_thread(self) -> LoopThread:
        with self._lock:
            if self._loop is None:
                self._loop = LoopThread()
            return self._loop

    def close(self) -> None:
        """End every session with other hosts."""
        with self._lock:
            if self._loop is not None:
                self._loop.close()
