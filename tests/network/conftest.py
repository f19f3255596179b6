"""A prefill's listener with a real lease book behind it."""

from collections.abc import Callable, Iterator

import pytest

from tests.unit.test_protocol import POOL
from vllm_mc2.leases import LeaseBook
from vllm_mc2.network.borrower import RemoteSession, open_remote_session
from vllm_mc2.network.lender import Listening, RemoteServer
from vllm_mc2.network.loop import LoopThread
from vllm_mc2.network.transport import why_no_mooncake
from vllm_mc2.protocol import (
    PROTOCOL_VERSION,
    Message,
    Refusal,
    SchedulerHello,
    SchedulerWelcome,
    WorkerEndpoint,
)
from vllm_mc2.session import Answer
from vllm_mc2.ticket import TcpAddress

_no_mooncake = why_no_mooncake()
needs_mooncake = pytest.mark.skipif(_no_mooncake is not None, reason=_no_mooncake or "")
SECRET = b"a secret of some length"
INCARNATION = "5" * 32
HELLO = SchedulerHello(PROTOCOL_VERSION, INCARNATION, "decode")
SILENCE_SECONDS = 3.0
"""A heartbeat comes three times in it; on a busy machine one may be a second late."""

PATIENCE_SECONDS = 60.0
"""For answers that do come."""

ANY_PORT = TcpAddress("127.0.0.1", 0)


class Lender:
    """What a prefill is to decodes on other hosts."""

    def __init__(self, address: TcpAddress = ANY_PORT, secret: bytes = SECRET, max_blocks: int = 8) -> None:
        self.book: LeaseBook[str] = LeaseBook(INCARNATION, 16, max_blocks)
        self.hellos: list[Message] = []
        self.ledgers: dict[int, int] = {}
        self.server = RemoteServer(Listening(address, secret, SILENCE_SECONDS), self._on_hello, self._on_close)

    @property
    def address(self) -> TcpAddress:
        return self.server.address

    def _on_hello(self, key: int, hello: Message) -> Answer:
        self.hellos.append(hello)
        if not isinstance(hello, SchedulerHello):
            return Answer(Refusal("message", type(hello).__name__, "SchedulerHello"), keep_open=False)
        self.ledgers[key], ledger_fd = self.book.add_ledger()
        welcome = SchedulerWelcome("prefill", 16, (WorkerEndpoint(0, "7" * 32, POOL),))
        return Answer(welcome, (self.book.index_fd, ledger_fd))

    def _on_close(self, key: int) -> None:
        self.book.drop_ledger(self.ledgers[key])
        del self.ledgers[key]

    def close(self) -> None:
        self.server.close()
        self.book.close()


@pytest.fixture
def lender() -> Iterator[Lender]:
    lender = Lender()
    yield lender
    lender.close()
    assert lender.ledgers == {}


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    loop = LoopThread()
    yield loop
    loop.close()


Connect = Callable[..., RemoteSession]


@pytest.fixture
def connect(lender: Lender, loop: LoopThread) -> Connect:
    """A session of a decode; ``port`` of a relay perhaps."""

    def connect(
        port: int | None = None, secret: bytes = SECRET, hello: Message = HELLO, silence: float = SILENCE_SECONDS
    ) -> RemoteSession:
        address = TcpAddress(lender.address.host, port or lender.address.port)
        welcome, session = open_remote_session(
            loop, address, secret, hello, SchedulerWelcome, PATIENCE_SECONDS, silence
        )
        assert welcome.engine_id == "prefill"
        return session

    return connect
