"""A prefill that sends nonsense is dropped; decode and its other prefills go on."""

import fcntl
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests.support.waiting import wait_until
from tests.tensors.rig import SHAPE, Pair, accepting, connect, dial, same_layer
from vllm_mc2 import KVCacheManager, protocol
from vllm_mc2.channel import prepare_socket_dir
from vllm_mc2.errors import ExpiredKVError, OrphanedKVError, PeerUnreachableError
from vllm_mc2.layout import PoolLayout, Region
from vllm_mc2.leases import LeaseBook
from vllm_mc2.protocol import MAX_FRAME_BYTES, PROTOCOL_VERSION, Introduction, TensorWelcome, frame
from vllm_mc2.session import Answer, SessionServer
from vllm_mc2.tensors import host
from vllm_mc2.tensors.messages import KvNotice, LayoutNotice, PoolNotice, TensorSpec, pack_ticket

MIB = 1 << 20
ANOTHER_POOL = 1 << 20
POOL = PoolLayout(num_blocks=1, pool_bytes=2 * MIB, regions=(Region(name="r", offset_bytes=0, block_bytes=2 * MIB),))


def spec(**more: Any) -> TensorSpec:
    """A good one, 16 bytes at the start of ``THE_POOL``, but for what is given."""
    good = TensorSpec(0, "kv", THE_POOL, 0, (4,), (1,), "float32")
    return msgspec.structs.replace(good, **more)


def layout(*specs: TensorSpec, num_blocks: int = 0) -> bytes:
    return frame(LayoutNotice(77, num_blocks, specs))


def pool(pool_id: int = ANOTHER_POOL, **more: Any) -> bytes:
    return frame(PoolNotice(pool_id, msgspec.structs.replace(POOL, **more)))


def region(**more: Any) -> Region:
    return msgspec.structs.replace(POOL.regions[0], **more)


def raw(payload: bytes) -> bytes:
    return len(payload).to_bytes(4, "little") + payload


THE_POOL = 7_777_777
"""Stands for the pool that both sides know; the test puts its number here."""

MAIL: dict[str, Callable[[], bytes]] = {
    "a layout that was not announced": lambda: frame(KvNotice("r", pack_ticket((0, 1), 99, bytes(16)))),
    "behind the pool's end": lambda: layout(spec(offset_bytes=4 * MIB)),
    "over the pool's end": lambda: layout(spec(offset_bytes=4 * MIB - 12)),
    "not aligned": lambda: layout(spec(offset_bytes=2)),
    "a shape that reaches out": lambda: layout(spec(shape=(MIB + 1,))),
    "strides that reach out": lambda: layout(spec(strides=(MIB,))),
    "sizes that overflow 64 bits": lambda: layout(spec(shape=(2**47, 2**47), strides=(2**47, 2**47))),
    "sizes that overflow with strides of 0": lambda: layout(spec(shape=(2**47, 2**47), strides=(0, 0))),
    "8 such sizes": lambda: layout(spec(shape=(2**47,) * 8, strides=(0,) * 8)),
    "strides that overflow 64 bits": lambda: layout(spec(shape=(2**40,) * 2, strides=(2**40,) * 2)),
    "more strides than dimensions": lambda: layout(spec(strides=(1, 1))),
    "a negative stride": lambda: layout(spec(strides=(-1,))),
    "an empty dimension": lambda: layout(spec(shape=(0,))),
    "a negative offset": lambda: layout(spec(offset_bytes=-4)),
    "no dtype of ours": lambda: layout(spec(dtype="complex64")),
    "no part of ours": lambda: layout(spec(part="query")),
    "a layer that is too deep": lambda: layout(spec(layer=4096)),
    "no tensors": layout,
    "a pool that was not announced": lambda: layout(spec(pool=ANOTHER_POOL)),
    "another number of blocks": lambda: layout(spec(), num_blocks=5),
    "a value without a key": lambda: layout(spec(part="value")),
    "both forms at once": lambda: layout(spec(part="kv"), spec(part="key")),
    "a layout twice": lambda: layout(spec()) + layout(spec()),
    "a pool without a descriptor": pool,
    "an id that is too long": lambda: frame(KvNotice("x" * 257, bytes(28))),
    "an id of nothing": lambda: frame(KvNotice("", bytes(28))),
    "a lease that is too short": lambda: frame(KvNotice("r", bytes(27))),
    "a frame that is too long": lambda: (MAX_FRAME_BYTES + 1).to_bytes(4, "little"),
    "a frame of 4 GiB": lambda: b"\xff\xff\xff\xff",
    "an empty frame": lambda: raw(b""),
    "not MessagePack": lambda: raw(b"\xc1" * 20),
    "deeply nested": lambda: raw(b"\x91" * 100_000),
    "another tag": lambda: raw(msgspec.msgpack.encode([9, 1, 2])),
    "another protocol": lambda: protocol.frame(protocol.InspectHello(1)),
    "a field too many": lambda: raw(msgspec.msgpack.encode([3, "r", bytes(28), 1])),
    "text that is no UTF-8": lambda: raw(b"\x93\x03\xa1\xff\xc4\x1c" + bytes(28)),
}


@pytest.fixture
def trio(pair: Pair, directory: Path) -> Iterator[tuple[Pair, socket.socket]]:
    """A pair, and the mail socket of another prefill of the same decode, from which a good request has come."""
    hostile = connect(pair.decode, directory)
    manager = KVCacheManager(hostile)
    manager.allocate(0, SHAPE, torch.float32)
    hostile.send_kv_metadata("before", [1])
    pair.map_next().release()
    assert hostile._sender is not None
    yield pair, hostile._sender._mail
    hostile.close()
    manager.close()


def assert_dropped(pair: Pair, mail: socket.socket) -> None:
    """Decode does not read from it any more, and says so by ending the session; the other prefill is served."""
    kv = pair.layer()
    for number in range(3):
        with pair.hand_over(f"good {number}", [number]) as mapped:
            assert same_layer(mapped.layers[0], kv)
    assert pair.decode._receiver is not None and len(pair.decode._receiver._prefills) == 1

    def is_refused() -> bool:
        try:
            mail.send(b"x", socket.MSG_NOSIGNAL)
        except OSError:
            return True
        return False

    wait_until(is_refused)


@pytest.mark.parametrize("name", MAIL)
def test_mail(trio: tuple[Pair, socket.socket], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pair, mail = trio
    assert pair.decode._receiver is not None
    (known,) = pair.decode._receiver._prefills[1]._pools
    monkeypatch.setattr(sys.modules[__name__], "THE_POOL", known)
    mail.sendall(MAIL[name]())
    with pytest.raises(TimeoutError):  # it is looked at, and no error of decode's
        pair.decode.recv_kv_metadata(0.01)
    assert_dropped(pair, mail)


def memfd(size: int, seals: int | None) -> int:
    fd = os.memfd_create("mc2-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    if seals is not None:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


SHRINK, GROW = fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW
POOLS: dict[str, tuple[Callable[[], int], Callable[[], bytes]]] = {
    "known already": (lambda: memfd(2 * MIB, SHRINK | GROW), lambda: pool(THE_POOL)),
    "not sealed": (lambda: memfd(2 * MIB, None), pool),
    "sealed against growing only": (lambda: memfd(2 * MIB, GROW), pool),
    "too small": (lambda: memfd(MIB, SHRINK | GROW), pool),
    "no memory": (lambda: os.open(os.devnull, os.O_RDONLY), pool),
    "a socket": (lambda: socket.socket().detach(), pool),
    "larger than it says": (lambda: memfd(2 * MIB, SHRINK | GROW), lambda: pool(pool_bytes=4 * MIB)),
    "with a hole": (
        lambda: memfd(8 * MIB, SHRINK | GROW),
        lambda: pool(pool_bytes=8 * MIB, regions=(region(), region(offset_bytes=6 * MIB))),
    ),
    "regions that overlap": (lambda: memfd(8 * MIB, SHRINK | GROW), lambda: pool(regions=(region(), region()))),
    "regions outside": (lambda: memfd(8 * MIB, SHRINK | GROW), lambda: pool(regions=(region(offset_bytes=2 * MIB),))),
    "regions of nothing": (lambda: memfd(8 * MIB, SHRINK | GROW), lambda: pool(regions=(region(block_bytes=0),))),
    "no regions": (lambda: memfd(8 * MIB, SHRINK | GROW), lambda: pool(regions=())),
    "no blocks": (lambda: memfd(8 * MIB, SHRINK | GROW), lambda: pool(num_blocks=0)),
    "more than can be addressed": (
        lambda: memfd(2 * MIB, SHRINK | GROW),
        lambda: pool(num_blocks=1 << 23, pool_bytes=1 << 63, regions=(region(block_bytes=1 << 40),)),
    ),
    "of no size": (lambda: memfd(2 * MIB, SHRINK | GROW), lambda: pool(pool_bytes=-1)),
}


@pytest.mark.parametrize("name", POOLS)
def test_pools(trio: tuple[Pair, socket.socket], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pair, mail = trio
    assert pair.decode._receiver is not None
    (known,) = pair.decode._receiver._prefills[1]._pools
    monkeypatch.setattr(sys.modules[__name__], "THE_POOL", known)
    make, message = POOLS[name]
    fd = make()
    socket.send_fds(mail, [message()], [fd])
    os.close(fd)
    with pytest.raises(TimeoutError):
        pair.decode.recv_kv_metadata(0.01)
    assert_dropped(pair, mail)


@pytest.mark.parametrize("number", [1, 9])
def test_descriptors_that_nobody_asked_for(trio: tuple[Pair, socket.socket], number: int) -> None:
    """A few are kept until the session ends, many end it; none is left in decode (see the fixture of every test)."""
    pair, mail = trio
    read_fd, write_fd = os.pipe()
    for _ in range(2):
        socket.send_fds(mail, [frame(KvNotice("r", pack_ticket((0, 1), 0, bytes(16))))], [read_fd] * number)
    for fd in (read_fd, write_fd):
        os.close(fd)
    if number == 1:
        for _ in range(2):
            assert pair.receive().request_id == "r"
    else:
        with pytest.raises(TimeoutError):
            pair.decode.recv_kv_metadata(0.01)
        assert_dropped(pair, mail)


def test_requests_before_the_nonsense_are_delivered_and_orphans(trio: tuple[Pair, socket.socket]) -> None:
    """The session has ended, so nobody keeps their blocks any more."""
    pair, mail = trio
    notice = frame(KvNotice("r", pack_ticket((0, 2), 0, bytes(16))))
    mail.sendall(notice + raw(b"\xc1"))
    metadata = pair.receive()
    assert metadata.request_id == "r"
    with pytest.raises(OrphanedKVError):
        pair.mapper.map_remote_kv(metadata)
    assert_dropped(pair, mail)


@pytest.mark.parametrize("lease", [(0, 99), (10**6, 1), (2**32 - 1, 2**32 - 1), (0, 1)])
def test_a_lease_that_is_not_there_or_of_another_token(
    trio: tuple[Pair, socket.socket], lease: tuple[int, int]
) -> None:
    pair, mail = trio
    mail.sendall(frame(KvNotice("r", pack_ticket(lease, 0, bytes(16)))))
    with pytest.raises(ExpiredKVError):
        pair.map_next()


def test_one_byte_at_a_time(pair: Pair) -> None:
    """A stream keeps no messages apart."""
    pair.layer()
    pair.hand_over("first", [1]).release()
    assert pair.prefill._sender is not None
    pair.prefill.send_kv_metadata("real", [2])
    metadata = pair.receive()
    packed = pack_ticket(metadata.lease_id, 0, metadata.token)
    for byte in frame(KvNotice("in pieces", packed)):
        with pytest.raises(TimeoutError):
            pair.decode.recv_kv_metadata(0)
        pair.prefill._sender._mail.sendall(bytes([byte]))
    with pair.map_next() as mapped:
        assert mapped.request_id == "in pieces" and mapped.block_ids.tolist() == [2]


# --- the session itself ---


@pytest.mark.parametrize("what", ["no segments", "no socket", "another's ledger"])
def test_a_welcome_that_is_none(pair: Pair, directory: Path, what: str) -> None:
    """A prefill of another make: what it hands out is looked at before it is used, and closed."""
    book: LeaseBook[None] = LeaseBook("d" * 32, 4, 4)
    _, ledger_fd = book.add_ledger()
    ours, theirs = socket.socketpair()
    null = os.open(os.devnull, os.O_RDWR)
    fds = {
        "no segments": (null, null, theirs.fileno()),
        "no socket": (book.index_fd, ledger_fd, null),
        "another's ledger": (book.index_fd, book.index_fd, theirs.fileno()),
    }[what]
    prepare_socket_dir(directory)
    server = SessionServer(directory, "d" * 32, lambda key, hello: Answer(TensorWelcome(), fds), lambda key: None)
    with accepting(pair.decode) as accepted:
        with socket.create_connection(("127.0.0.1", pair.decode.listen_port)) as sock:
            sock.sendall(protocol.frame(Introduction(PROTOCOL_VERSION, host.host_id(), "d" * 32, 0)))
            answer = protocol.decode(sock.recv(4096)[4:])
        assert isinstance(answer, protocol.Refusal) and answer.field == "session"
        connect_again = threading.Thread(target=lambda: _come_and_go(pair, directory))
        connect_again.start()
        accepted.result(60)
        connect_again.join(60)
    server.close()
    book.close()
    for closable in (ours, theirs):
        closable.close()
    os.close(null)


def _come_and_go(pair: Pair, directory: Path) -> None:
    dial(pair.decode, directory).close()


def test_a_prefill_that_ends_in_the_middle_of_a_message(trio: tuple[Pair, socket.socket]) -> None:
    pair, mail = trio
    mail.sendall(frame(KvNotice("r", bytes(28)))[:-3])
    mail.shutdown(socket.SHUT_RDWR)
    with pytest.raises(TimeoutError):
        pair.decode.recv_kv_metadata(0.05)
    assert pair.decode._receiver is not None
    assert len(pair.decode._receiver._prefills) == 1
    pair.layer()
    pair.hand_over("good", [1]).release()
    pair.prefill.close()
    with pytest.raises(PeerUnreachableError):
        pair.decode.recv_kv_metadata(0)
