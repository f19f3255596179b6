"""Ways ``nixl`` and ``mooncake``: one-sided reads by the transfer libraries that vLLM's own connectors use.

Set up as well as we know how, so that they lose nothing by our doing:

* memory registered and descriptors prepared in advance, 256 KiB each, and one transfer before anything is timed;
* NIXL without its progress thread. The receiver drives its transfers itself, which is faster here, and an agent with that
  thread burns a core for as long as it lives: on few cores it would slow down everything else that is measured;
* Mooncake over TCP, which is what it has for host memory, with its queues long enough for all descriptors.

They live in a pair of processes of their own, which the command stops (SIGSTOP) while another way has its turn, so that
their threads, and UCX's hooks into memory mapping, cannot disturb the others.
"""

import contextlib
import importlib
import os
import time
from typing import Any

from vllm_mc2.bench.handoff.cases import BLOCK_BYTES, Case
from vllm_mc2.bench.handoff.copies import CopyReceiver, Destination
from vllm_mc2.bench.handoff.messages import Link, Note, Turn
from vllm_mc2.bench.handoff.source import ContiguousSource
from vllm_mc2.bench.handoff.ways import TRANSFER_SECONDS

DESCRIPTOR_BYTES = BLOCK_BYTES
WARM_UP_BYTES = 64 << 20
UNUSABLE = (ImportError, OSError, RuntimeError, AttributeError)
"""What these libraries raise when they are not there, or cannot work on this host."""

_CONNECTED, _FAILED = b"connected", b"failed"
_MOONCAKE_SETTINGS = {
    # Without these, more than about 2,000 descriptors at once fail and the peer stays unusable.
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
    "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "65535",
}


class PeerSender:
    """Tells the receiver that a request is there, and is read from."""

    def __init__(self, peer: Link) -> None:
        self._peer = peer
        self._control_bytes = 0

    def prepare(self, turn: Turn) -> None:
        """Nothing to prepare."""

    def run(self, turn: Turn) -> list[int]:
        """One short message for each request."""
        started = [0] * turn.case.batch
        for request in range(turn.case.batch):
            note = Note(request.to_bytes(8, "little"))
            started[request] = time.monotonic_ns()
            self._peer.send(note)
        self._control_bytes = 8 * turn.case.batch
        return started

    def settle(self, turn: Turn) -> None:
        """Nothing was lent."""

    def costs(self) -> tuple[list[int], int]:
        """The messages."""
        return [], self._control_bytes

    def progress(self) -> None:
        """Called again and again while the receiver connects or reads."""

    def await_receiver(self) -> None:
        """Until the receiver says that it is done.

        Raises:
            TimeoutError: it does not.
        """
        deadline = time.monotonic() + TRANSFER_SECONDS
        while time.monotonic() < deadline:
            self.progress()
            with contextlib.suppress(TimeoutError):
                self._peer.expect(Note, 0.001)
                return
        raise TimeoutError(f"the receiver has not read in {TRANSFER_SECONDS:.0f} s")

    def close(self) -> None:
        """Disconnect."""


class PeerReceiver(CopyReceiver):
    """Waits for the message, then reads."""

    def __init__(self, destination: Destination, peer: Link) -> None:
        super().__init__(destination)
        self._peer = peer

    def transfer(self, case: Case, request: int) -> None:
        """Read what was announced."""
        announced = int.from_bytes(self._peer.expect(Note, TRANSFER_SECONDS).data, "little")
        self.read(case, announced)

    def read(self, case: Case, request: int) -> None:
        """One request's bytes."""
        raise NotImplementedError


def _nixl_agent(name: str) -> Any:
    api: Any = importlib.import_module("nixl._api")
    return api.nixl_agent(f"{name}-{os.getpid()}", api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))


class NixlSender(PeerSender):
    """NIXL's target."""

    def __init__(self, source: ContiguousSource, peer: Link) -> None:
        super().__init__(peer)
        self._agent = _nixl_agent("mc2-bench-sender")
        self._registered = self._agent.register_memory([(source.address, source.num_bytes, 0, "")], "DRAM")
        self.introduction: bytes = source.address.to_bytes(8, "little") + self._agent.get_agent_metadata()

    def progress(self) -> None:
        """In place of the progress thread. Without it now and then a read stalls, though it needs nothing of this process."""
        self._agent.get_new_notifs()

    def close(self) -> None:
        """Deregister."""
        self._agent.deregister_memory(self._registered)


class NixlReceiver(PeerReceiver):
    """NIXL's initiator."""

    def __init__(self, destination: Destination, num_bytes: int, peer: Link, introduction: bytes) -> None:
        super().__init__(destination, peer)
        self._agent = _nixl_agent("mc2-bench-receiver")
        remote, metadata = int.from_bytes(introduction[:8], "little"), introduction[8:]
        local = destination.buffer.bytes.data_ptr()
        self._registered = self._agent.register_memory([(local, num_bytes, 0, "")], "DRAM")
        self._name = self._agent.add_remote_agent(metadata)
        offsets = range(0, num_bytes, DESCRIPTOR_BYTES)
        self._local, self._remote = (
            self._agent.prep_xfer_dlist(
                name, [(base + offset, DESCRIPTOR_BYTES, 0) for offset in offsets], mem_type="DRAM"
            )
            for name, base in (("NIXL_INIT_AGENT", local), (self._name, remote))
        )
        self._transfer(0, min(num_bytes, WARM_UP_BYTES))

    def read(self, case: Case, request: int) -> None:
        """One request's bytes."""
        self._transfer(request * case.request_bytes, (request + 1) * case.request_bytes)

    def _transfer(self, begin: int, end: int) -> None:
        # Descriptors are chosen by their index, as vLLM's connector does.
        indices = list(range(begin // DESCRIPTOR_BYTES, end // DESCRIPTOR_BYTES))
        handle = self._agent.make_prepped_xfer("READ", self._local, indices, self._remote, indices, b"")
        state = self._agent.transfer(handle)
        deadline = time.monotonic() + TRANSFER_SECONDS
        while state != "DONE":
            if state == "ERR" or time.monotonic() > deadline:
                raise OSError(f"NIXL's transfer ended with {state}")
            state = self._agent.check_xfer_state(handle)
        handle.release()

    def close(self) -> None:
        """Release and deregister."""
        for prepared in (self._local, self._remote):
            prepared.release()
        self._agent.remove_remote_agent(self._name)
        self._agent.deregister_memory(self._registered)


def _mooncake_engine() -> Any:
    os.environ.update(_MOONCAKE_SETTINGS)
    engine: Any = importlib.import_module("mooncake.engine").TransferEngine()
    if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") != 0:
        raise OSError("Mooncake's engine does not start")
    return engine


class MooncakeSender(PeerSender):
    """Mooncake's target."""

    def __init__(self, source: ContiguousSource, peer: Link) -> None:
        super().__init__(peer)
        self._engine = _mooncake_engine()
        self._address = source.address
        if self._engine.register_memory(source.address, source.num_bytes) != 0:
            raise OSError("Mooncake does not take the memory")
        self.introduction = b"%d %d" % (self._engine.get_rpc_port(), source.address)

    def close(self) -> None:
        """Deregister."""
        self._engine.unregister_memory(self._address)


class MooncakeReceiver(PeerReceiver):
    """Mooncake's initiator."""

    def __init__(self, destination: Destination, num_bytes: int, peer: Link, introduction: bytes) -> None:
        super().__init__(destination, peer)
        self._engine = _mooncake_engine()
        port, self._remote = map(int, introduction.split())
        self._peer_name = f"127.0.0.1:{port}"
        self._local = destination.buffer.bytes.data_ptr()
        if self._engine.register_memory(self._local, num_bytes) != 0:
            raise OSError("Mooncake does not take the memory")
        self._transfer(0, min(num_bytes, WARM_UP_BYTES))

    def read(self, case: Case, request: int) -> None:
        """One request's bytes."""
        self._transfer(request * case.request_bytes, (request + 1) * case.request_bytes)

    def _transfer(self, begin: int, end: int) -> None:
        offsets = range(begin, end, DESCRIPTOR_BYTES)
        code = self._engine.batch_transfer_sync_read(
            self._peer_name,
            [self._local + offset for offset in offsets],
            [self._remote + offset for offset in offsets],
            [DESCRIPTOR_BYTES] * len(offsets),
        )
        if code != 0:
            raise OSError(f"Mooncake's transfer failed with code {code}")

    def close(self) -> None:
        """Deregister."""
        self._engine.unregister_memory(self._local)


def connect_sender(way: str, source: ContiguousSource, peer: Link) -> PeerSender | str:
    """The sender of ``nixl`` or ``mooncake``, connected; or why it cannot be used here.

    One note goes each way, whatever happens, so that both sides know and go on in step.
    """
    sender: NixlSender | MooncakeSender
    try:
        sender = NixlSender(source, peer) if way == "nixl" else MooncakeSender(source, peer)
    except UNUSABLE as error:
        peer.send(Note(b""))
        peer.expect(Note, TRANSFER_SECONDS)
        return _reason(error)
    peer.send(Note(sender.introduction))
    deadline = time.monotonic() + TRANSFER_SECONDS
    while time.monotonic() < deadline:
        sender.progress()
        with contextlib.suppress(TimeoutError):
            note = peer.expect(Note, 0.001)
            return sender if note.data == _CONNECTED else "the receiver could not connect"
    raise TimeoutError(f"{way} has not connected in {TRANSFER_SECONDS:.0f} s")


def connect_receiver(way: str, destination: Destination, num_bytes: int, peer: Link) -> PeerReceiver | str:
    """As :func:`connect_sender`."""
    receiver: PeerReceiver
    introduction = peer.expect(Note, TRANSFER_SECONDS).data
    try:
        if not introduction:
            raise OSError("the sender could not start it")
        kind = NixlReceiver if way == "nixl" else MooncakeReceiver
        receiver = kind(destination, num_bytes, peer, introduction)
    except UNUSABLE as error:
        peer.send(Note(_FAILED))
        return _reason(error)
    peer.send(Note(_CONNECTED))
    return receiver


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:120]
