"""What prefill's scheduler tells decodes on other hosts."""

from collections.abc import Callable, Sequence

from vllm_mc2.connector.fingerprint import refusal
from vllm_mc2.connector.metadata import MC2Handshake
from vllm_mc2.device_messages import DeviceGrant
from vllm_mc2.network.lender import Listening, RemoteServer
from vllm_mc2.protocol import Message, Refusal, RemoteGrant, WorkerHello
from vllm_mc2.session import Answer
from vllm_mc2.ticket import TcpAddress


class RemotePrefill:
    """The listener for other hosts, and what its workers' pools are called over the network."""

    def __init__(self, listening: Listening, workers: Sequence[MC2Handshake]) -> None:
        """``workers``: what they have said at start."""
        self.listening = listening
        self._workers = {worker.rank: worker for worker in workers}
        self._server: RemoteServer | None = None

    def listen(self, on_hello: Callable[[int, Message], Answer], on_close: Callable[[int], None]) -> TcpAddress:
        """Begin to listen; returns where.

        Raises:
            ConfigError: ``tcp_address`` cannot be listened on.
        """
        self._server = RemoteServer(self.listening, on_hello, on_close)
        return self._server.address

    @property
    def num_rejected(self) -> int:
        """Connections that the listener turned away so far. Any thread."""
        return self._server.num_rejected if self._server is not None else 0

    def grant(self, hello: WorkerHello) -> RemoteGrant | DeviceGrant | Refusal:
        """Where a decode's worker can read the pool that it asks for, if its blocks are made of the same."""
        worker = self._workers.get(hello.rank)
        if worker is None:
            return Refusal("rank", str(hello.rank), f"one of {sorted(self._workers)}")
        if worker.remote is None:
            return Refusal("host", "another", "this one: the memory here cannot be mapped or read from elsewhere")
        return refusal(worker.fingerprint, hello.rank, hello) or worker.remote

    def close(self) -> None:
        """Stop listening, and end every session."""
        if self._server is not None:
            self._server.close()
