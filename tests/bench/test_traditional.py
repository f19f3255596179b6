"""TraditionalComm brings the same bytes, whatever their number, and says what went wrong."""

import os
import socket
import threading
from collections.abc import Callable
from typing import Literal

import pytest
import torch

from vllm_mc2.bench.traditional import TraditionalComm

TRANSPORTS: tuple[Literal["shm", "tcp"], ...] = ("shm", "tcp")
SIZES = [0, 1, 7, 4096, 65_537, 3 * 65_536, 1_000_003]


def sockets(transport: str) -> tuple[socket.socket, socket.socket]:
    """A connected pair of the right family."""
    if transport == "shm":
        return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(10)
        one = socket.create_connection(server.getsockname(), 10)
        return one, server.accept()[0]


def in_background(work: Callable[[], None]) -> Callable[[], None]:
    """Run it in a thread; the result waits for its end and raises what it raised."""
    errors: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()

    def join() -> None:
        thread.join(30)
        assert not thread.is_alive()
        if errors:
            raise errors[0]

    return join


def connected(transport: Literal["shm", "tcp"], **more: float) -> tuple[TraditionalComm, TraditionalComm]:
    one, other = sockets(transport)
    sender = TraditionalComm("sender", transport, sock=one, chunk_bytes=65_536, num_chunks=3, **more)
    return sender, TraditionalComm("receiver", transport, sock=other, **more)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_equal_bytes_of_every_size(transport: Literal["shm", "tcp"]) -> None:
    sender, receiver = connected(transport)
    with sender, receiver:
        for num_bytes in [*SIZES, *reversed(SIZES)]:
            sent = torch.frombuffer(bytearray(os.urandom(num_bytes + 1)), dtype=torch.uint8)[:num_bytes]
            got = torch.zeros(num_bytes, dtype=torch.uint8)
            join = in_background(lambda sent=sent: sender.send(sent))
            receiver.recv(got)
            join()
            assert torch.equal(sent, got)
        assert sender.control_bytes > 0


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_shapes_and_dtypes_do_not_matter(transport: Literal["shm", "tcp"]) -> None:
    sender, receiver = connected(transport)
    with sender, receiver:
        sent = torch.randn(3, 5, 7).to(torch.float16)
        got = torch.empty(7, 15, dtype=torch.float16)
        join = in_background(lambda: sender.send(sent))
        receiver.recv(got)
        join()
        assert torch.equal(sent.flatten(), got.flatten())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_another_size_is_refused(transport: Literal["shm", "tcp"]) -> None:
    sender, receiver = connected(transport)
    with receiver:
        join = in_background(lambda: sender.send(torch.zeros(100, dtype=torch.uint8)))
        with pytest.raises(ValueError, match="sends 100 bytes, not 99"):
            receiver.recv(torch.zeros(99, dtype=torch.uint8))
        receiver.close()
        with sender:
            try:
                join()
            except OSError:
                pass  # shm waits for chunks that will not come back


def test_what_is_not_contiguous_is_refused() -> None:
    sender, receiver = connected("shm")
    with sender, receiver, pytest.raises(ValueError, match="contiguous"):
        sender.send(torch.zeros(4, 4)[:, 1])


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_end_of_the_sender_ends_the_receiver(transport: Literal["shm", "tcp"]) -> None:
    sender, receiver = connected(transport)
    with receiver:
        sender.close()
        with pytest.raises(ConnectionError):
            receiver.recv(torch.zeros(10))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_no_wait_is_for_ever(transport: Literal["shm", "tcp"]) -> None:
    sender, receiver = connected(transport, timeout_seconds=0.2)
    with sender, receiver, pytest.raises(TimeoutError):
        receiver.recv(torch.zeros(10))


def test_wrong_arguments_are_refused() -> None:
    one, other = sockets("shm")
    with one, other:
        with pytest.raises(ValueError, match="no such role"):
            TraditionalComm("both", "shm", sock=one)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="family AF_UNIX"):
            TraditionalComm("sender", "tcp", sock=one)
