"""What a worker has to do with other hosts: its pool is made readable for them, and theirs are reached."""

import errno
import threading
from collections.abc import Callable, Sequence

from vllm_mc2.config import MC2Config
from vllm_mc2.connector.backend import Backend
from vllm_mc2.connector.metadata import MapPeer, MapResult
from vllm_mc2.connector.pulling import PullResults
from vllm_mc2.connector.remote_pulling import Part, RemotePart, RemotePuller, RemoteSource, strips_of
from vllm_mc2.device_messages import DeviceGrant
from vllm_mc2.errors import ConfigError, PeerUnreachableError, TransportError
from vllm_mc2.layout import HeadSlice
from vllm_mc2.memory import OwnRegion
from vllm_mc2.network.address import resolve_own_address
from vllm_mc2.network.borrower import RemoteSession, open_remote_session
from vllm_mc2.network.loop import LoopThread
from vllm_mc2.network.transport import MooncakeTransport, Reader, Span, Transport, why_no_mooncake
from vllm_mc2.protocol import PROTOCOL_VERSION, RemoteGrant, WorkerHello
from vllm_mc2.ticket import TcpAddress


class WorkerNetwork:
    """Of one worker. Does nothing without a secret."""

    def __init__(
        self,
        config: MC2Config,
        rank: int,
        results: PullResults,
        report: Callable[[MapResult], None],
        *,
        is_device: bool = False,
    ) -> None:
        """``report``: takes what the scheduler must know of a peer. ``is_device``: our blocks are a device's memory, which other
        hosts map rather than read over the network.

        Raises:
            ConfigError: there is a secret, but no transfer engine to use it with, or no address.
        """
        self.puller = RemotePuller(results)
        self.grant: RemoteGrant | DeviceGrant | None = None
        self._config = config
        self._rank = rank
        self._pull_results = results
        self._report = report
        self._secret = config.resolve_tcp_secret()
        self._own_host = None
        self._transport: Transport | None = None
        self._loop: LoopThread | None = None
        self._loop_lock = threading.Lock()
        self._remote_keys: set[int] = set()
        """Peers on other hosts."""
        self._is_device = is_device
        if self._secret is None or is_device:
            return
        problem = why_no_mooncake()
        if problem is not None:
            raise ConfigError(f"there is a secret for peers on other hosts, but {problem}")
        if config.tcp_address is not None:
            self._own_host = resolve_own_address(config.tcp_address)
        self._transport = MooncakeTransport(config.tcp_timeout_seconds)

    def share(self, backend: Backend, is_producer: bool) -> None:
        """Prefill: make the pool readable for those who are told where it is.

        Raises:
            ConfigError: the transfer engine does not start on ``tcp_address``.
        """
        self.grant = backend.remote_grant()
        memory = backend.memory
        if self._transport is None or self._own_host is None or memory is None or not is_producer:
            return
        plan = memory.plan
        addresses = [memory.address + plan.block_offset(region, 0) for region in plan.regions]
        spans = [
            Span(address, plan.num_local * region.block_bytes)
            for address, region in zip(addresses, plan.regions, strict=True)
        ]
        try:
            segment = self._transport.share(spans, self._own_host)
        except TransportError as error:
            raise ConfigError(f"tcp_address {self._config.tcp_address}: {error}") from error
        self.grant = RemoteGrant(memory.layout, self._transport.name, segment, tuple(addresses))

    def expect(self, key: int) -> None:
        """A peer on another host is going to be reached (or dropped) under this key."""
        self._remote_keys.add(key)

    def reach(
        self,
        order: MapPeer,
        address: TcpAddress,
        slices: Sequence[HeadSlice],
        backend: Backend,
        fingerprint: dict[str, str],
    ) -> None:
        """Decode: open a session and readers; from now on blocks can be read from there. Blocks; on a thread of its own.

        Raises:
            PeerUnreachableError, PeerRefusedError, ProtocolError: as
                :func:`~vllm_mc2.network.borrower.open_remote_session`.
            TransportError, DeviceError, LayoutError: nothing can be read from there.
        """
        sessions: list[RemoteSession] = []
        parts: list[Part] = []
        try:
            for part in slices:
                hello = WorkerHello(PROTOCOL_VERSION, part.peer_rank, "pull", fingerprint, backend.device_hello())
                grant, session = self._ask(address, hello)
                sessions.append(session)
                parts.append(self._open_part(grant, part, backend, self._own_host or session.local_host))
        except BaseException:
            for session in sessions:
                session.close()
            for opened in parts:
                opened.close()
            raise
        for session in sessions[1:]:
            session.close()  # one is enough to ask about leases

        def on_broken(detail: str) -> None:
            self._report(MapResult(order.incarnation, order.key, self._rank, "transfer_failed", detail))

        self.puller.add_source(order.key, RemoteSource(sessions[0], parts, self._pull_results, on_broken))

    def _ask(self, address: TcpAddress, hello: WorkerHello) -> tuple[RemoteGrant | DeviceGrant, RemoteSession]:
        if self._secret is None:
            raise PeerUnreachableError(errno.EPERM, "no secret here")
        expected: type[RemoteGrant | DeviceGrant] = DeviceGrant if self._is_device else RemoteGrant
        with self._loop_lock:
            self._loop = self._loop or LoopThread()
        return open_remote_session(
            self._loop,
            address,
            self._secret,
            hello,
            expected,
            self._config.handshake_timeout_seconds,
            self._config.tcp_timeout_seconds,
        )

    def _open_part(self, grant: RemoteGrant | DeviceGrant, part: HeadSlice, backend: Backend, host: str) -> Part:
        if isinstance(grant, DeviceGrant):
            return backend.open_remote(grant, part)
        strips = strips_of(backend.own, grant, part)
        return RemotePart(self._open_reader(grant, backend.own, host), strips)

    def _open_reader(self, grant: RemoteGrant, own: Sequence[OwnRegion], host: str) -> Reader:
        assert self._transport is not None
        if grant.transport != self._transport.name:
            raise TransportError(f"the peer uses {grant.transport}, this side {self._transport.name}")
        return self._transport.open_reader(
            grant.segment, [Span(region.address, region.num_bytes) for region in own], host
        )

    def drop(self, key: int, *, is_coming: bool) -> bool:
        """Forget a peer on another host. Returns at once.

        Returns:
            False when the peer is on this host.
        """
        if key not in self._remote_keys:
            return False
        self._remote_keys.discard(key)
        self.puller.remove_source(key, is_coming=is_coming)
        return True

    def close(self) -> None:
        """Share and reach nothing any more."""
        self.puller.close()
        if self._transport is not None:
            self._transport.close()
        if self._loop is not None:
            self._loop.close()
