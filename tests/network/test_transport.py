"""Mooncake's engine as the transport: what it brings, and what it must not do after it has failed."""

import subprocess
import sys
import time

import pytest
import torch

from tests.network.conftest import needs_mooncake
from tests.support.ports import refusing_port
from vllm_mc2.errors import TransportError
from vllm_mc2.network.transport import MAX_BATCH_PIECES, MooncakeTransport, Piece, Span

pytestmark = needs_mooncake
PIECE_BYTES = 128 << 10


class Memory:
    """A run of bytes, shared or to read to."""

    def __init__(self, num_bytes: int, *, is_random: bool) -> None:
        self.bytes = (
            torch.randint(1, 255, (num_bytes,), dtype=torch.uint8) if is_random else torch.zeros(num_bytes).byte()
        )
        self.span = Span(self.bytes.data_ptr(), num_bytes)


def pieces(own: Memory, theirs: Memory, size: int = PIECE_BYTES) -> list[Piece]:
    return [Piece(own.span.address + at, theirs.span.address + at, size) for at in range(0, own.span.num_bytes, size)]


@pytest.fixture
def transport() -> MooncakeTransport:
    return MooncakeTransport(timeout_seconds=30.0)


@pytest.mark.parametrize("size", [4096, PIECE_BYTES])
def test_bytes_arrive(transport: MooncakeTransport, size: int) -> None:
    num_bytes = (MAX_BATCH_PIECES + 300) * size
    theirs, own = Memory(num_bytes, is_random=True), Memory(num_bytes, is_random=False)
    segment = transport.share([theirs.span], "127.0.0.1")
    reader = transport.open_reader(segment, [own.span], "127.0.0.1")
    reader.read(pieces(own, theirs, size))
    assert torch.equal(own.bytes, theirs.bytes)
    reader.close()
    transport.close()


def test_nothing_is_written_after_a_failure(transport: MooncakeTransport) -> None:
    """Mooncake reports a failed batch while its other pieces are still on their way. Blocks would change under a later owner."""
    theirs, own = Memory(256 << 20, is_random=True), Memory(256 << 20, is_random=False)
    segment = transport.share([theirs.span], "127.0.0.1")
    reader = transport.open_reader(segment, [own.span], "127.0.0.1")
    wrong = pieces(own, theirs, 1 << 20)
    wrong[3] = wrong[3]._replace(peer_address=theirs.span.address + theirs.span.num_bytes)
    with pytest.raises(TransportError, match="could not read"):
        reader.read(wrong)
    after = own.bytes.clone()
    time.sleep(1.0)
    assert torch.equal(own.bytes, after)
    assert not torch.equal(own.bytes, theirs.bytes)
    with pytest.raises(TransportError, match="failed before"):
        reader.read(pieces(own, theirs))
    assert torch.equal(own.bytes, after)
    again = transport.open_reader(segment, [own.span], "127.0.0.1")
    again.read(pieces(own, theirs, 1 << 20))
    assert torch.equal(own.bytes, theirs.bytes)


def test_memory_that_is_not_shared_cannot_be_read(transport: MooncakeTransport) -> None:
    theirs, other, own = (Memory(1 << 20, is_random=True) for _ in range(3))
    segment = transport.share([theirs.span], "127.0.0.1")
    reader = transport.open_reader(segment, [own.span], "127.0.0.1")
    with pytest.raises(TransportError):
        reader.read(pieces(own, other))


def test_nobody_there(transport: MooncakeTransport) -> None:
    own = Memory(1 << 20, is_random=False)
    with refusing_port() as port:
        reader = transport.open_reader(f"127.0.0.1:{port}", [own.span], "127.0.0.1")
        with pytest.raises(TransportError, match=rf"127\.0\.0\.1:{port}"):
            reader.read(pieces(own, own))


def test_a_process_speaks_one_ip_version() -> None:
    """In a process of its own, since Mooncake decides once."""
    code = """
from vllm_mc2.errors import TransportError
from vllm_mc2.network.transport import MooncakeTransport, Span, Piece
import torch
theirs, own = torch.arange(1 << 20).byte(), torch.zeros(1 << 20).byte()
transport = MooncakeTransport(30.0)
segment = transport.share([Span(theirs.data_ptr(), 1 << 20)], "::1")
assert segment.startswith("[::1]:"), segment
reader = transport.open_reader(segment, [Span(own.data_ptr(), 1 << 20)], "::1")
reader.read([Piece(own.data_ptr(), theirs.data_ptr(), 1 << 20)])
assert torch.equal(own, theirs)
try:
    transport.share([], "127.0.0.1")
except TransportError as error:
    assert "IPv6 in this process already" in str(error)
    print("as it should be")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280, check=False)
    assert done.stdout.strip() == "as it should be", done.stderr
