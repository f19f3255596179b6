"""The wire: messages between peers. How a ticket travels with a request is in ``ticket.py``.

Frames are a 4-byte little-endian length and that many bytes of MessagePack, one tagged struct each; file descriptors
ride on the frame that names them (``SCM_RIGHTS``). A session is one question and one answer, after which the
connection stays open in silence: its end tells either side that the other is gone.

::

    decode scheduler -> prefill scheduler   SchedulerHello
                     <-                     SchedulerWelcome + [index table fd, ledger fd]   or   Refusal
    decode worker r  -> prefill worker r    WorkerHello(fingerprint)
                     <-                     PoolGrant(layout) + [pool fd]                    or   Refusal
                     <-                     DeviceGrant(strips, segments), of a device       or   Refusal
    decode scheduler -> its own worker      RetirePool(key)
                     <-                     Done                                             or   Refusal
    MC2Communicator, by TCP, prefill -> decode   Introduction
                     <-                     Done                                             or   Refusal
    MC2Communicator, decode -> prefill      TensorHello
                     <-                     TensorWelcome + [index table fd, ledger fd, mail fd]  or   Refusal
    vllm-mc2 inspect -> any of the four     InspectHello
                     <-                     EngineReport (schedulers) or WorkerReport        or   Refusal
    vLLM's front end -> its own scheduler   CountsHello
                     <-                     EngineCounts                                     or   Refusal

Between hosts (``network/``) there are no descriptors, and each frame is followed by a tag of 16 bytes once both sides have
proven that they know the secret::

    prefill scheduler -> whoever connects   TcpChallenge
                     <-                     TcpProof
                      ->                    TcpAccept                                        or   Refusal
    decode scheduler -> prefill scheduler   SchedulerHello
                     <-                     SchedulerWelcome                                 or   Refusal
                      ->  LookUp, Claim     <- Offered, Verdict;  Release has no answer
    decode worker    -> prefill scheduler   WorkerHello(fingerprint)
                     <-                     RemoteGrant(layout, where to read it)            or   Refusal
                      ->  LookUp            <- Offered
    either way, when there is nothing else to say   Heartbeat

``PROTOCOL_VERSION`` grows with every change of a message, a shared layout or the meaning of either; peers of different
versions refuse each other. Nothing here is trusted: sizes and patterns are checked while decoding, the rest by the
receiver, on its own copy.
"""

import secrets
from collections.abc import Mapping
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from vllm_mc2.device_messages import Address, DeviceGrant, DeviceHello
from vllm_mc2.errors import PeerRefusedError, ProtocolError
from vllm_mc2.inspection import EngineCounts, EngineReport, WorkerReport
from vllm_mc2.layout import PoolLayout

PROTOCOL_VERSION = 6
MAX_FRAME_BYTES = 1 << 20
"""Larger than the layout of the deepest models (4096 regions), small enough to buffer for every connection."""

Hex32 = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
Hex8 = Annotated[str, Meta(pattern=r"^[0-9a-f]{8}\Z")]
EngineId = Annotated[str, Meta(min_length=1, max_length=256)]
Text = Annotated[str, Meta(max_length=4096)]
Nonce = Annotated[bytes, Meta(min_length=32, max_length=32)]
CallId = Annotated[int, Meta(ge=0, lt=1 << 62)]
TimeoutSeconds = Annotated[float, Meta(gt=0.0, le=3600.0)]


class Ticket(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The constant-size capability that names one lease. Whoever holds it may use the lease's blocks, for its own prompt."""

    version: int
    incarnation: Hex32
    slot: Hex8
    generation: Hex8
    token: Hex32
    address_proof: Hex32 | None = None
    """Made with the hosts' shared secret: prefill can be reached where ``remote_host`` and ``remote_port`` say."""

    @classmethod
    def issue(cls, incarnation: str, slot: int, generation: int, token: bytes) -> "Ticket":
        """A ticket for a lease in ``slot`` with ``generation``; ``token`` is the lease's 16 secret bytes."""
        return cls(PROTOCOL_VERSION, incarnation, f"{slot:08x}", f"{generation:08x}", token.hex())

    @property
    def lease_id(self) -> tuple[int, int]:
        """``(slot, generation)`` as numbers."""
        return int(self.slot, 16), int(self.generation, 16)

    @property
    def token_bytes(self) -> bytes:
        """The 16 bytes that prove that the ticket was issued, not guessed."""
        return bytes.fromhex(self.token)


class SchedulerHello(msgspec.Struct, frozen=True, tag="scheduler_hello", forbid_unknown_fields=True):
    """Decode's scheduler asks for a session with the incarnation that issued a ticket."""

    protocol: int
    incarnation: Hex32
    """Of the prefill that is addressed, so that a successor under the same name refuses."""
    engine_id: EngineId
    """Of the decode that asks; for logs and ``inspect`` only."""


class WorkerEndpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One prefill worker: the name of its socket in the shared directory, and its pool."""

    rank: Annotated[int, Meta(ge=0, lt=65536)]
    socket_id: Hex32
    pool: PoolLayout


class SchedulerWelcome(msgspec.Struct, frozen=True, tag="scheduler_welcome", forbid_unknown_fields=True):
    """Comes with two descriptors: the index table, and the ledger made for this decode."""

    engine_id: EngineId
    block_size: Annotated[int, Meta(gt=0, le=65536)]
    workers: Annotated[tuple[WorkerEndpoint, ...], Meta(min_length=1, max_length=1024)]


class WorkerHello(msgspec.Struct, frozen=True, tag="worker_hello", forbid_unknown_fields=True):
    """Decode's worker asks for the pool of its counterpart. The fingerprint says what its own blocks are made of."""

    protocol: int
    rank: Annotated[int, Meta(ge=0, lt=65536)]
    """Of the worker that is asked."""
    way: Literal["attach", "pull"]
    """Who copies may have another number of ranks."""
    fingerprint: dict[Text, Text]
    device: DeviceHello | None = None
    """Of a worker whose KV cache is a device's memory."""


class PoolGrant(msgspec.Struct, frozen=True, tag="pool_grant", forbid_unknown_fields=True):
    """Comes with one descriptor: the sealed pool."""

    pool: PoolLayout


class RetirePool(msgspec.Struct, frozen=True, tag="retire_pool", forbid_unknown_fields=True):
    """A decode's scheduler tells its own worker, between steps, to unmap a dead peer's pool. Not for other engines:
    ``control_token`` is known to the two of them only.
    """

    control_token: Hex32
    key: Annotated[int, Meta(ge=0, lt=1 << 31)]
    """What the scheduler calls the peer in its orders."""


class Done(msgspec.Struct, frozen=True, tag="done", forbid_unknown_fields=True):
    """What was asked for has been done."""


class Introduction(msgspec.Struct, frozen=True, tag="introduction", forbid_unknown_fields=True):
    """The tensor API's prefill tells a decode, over TCP, where on their common host it listens. All else is local."""

    protocol: int
    host_id: Hex32
    """Equal on both sides when they run on one host."""
    incarnation: Hex32
    local_rank: Annotated[int, Meta(ge=0, lt=65536)]


class TensorHello(msgspec.Struct, frozen=True, tag="tensor_hello", forbid_unknown_fields=True):
    """The tensor API's decode asks the prefill that has introduced itself for a session."""

    protocol: int
    incarnation: Hex32
    local_rank: Annotated[int, Meta(ge=0, lt=65536)]


class TensorWelcome(msgspec.Struct, frozen=True, tag="tensor_welcome", forbid_unknown_fields=True):
    """Comes with three descriptors: the index table, the ledger, and the socket on which prefill's mail arrives
    (``tensors/messages.py``).
    """


class InspectHello(msgspec.Struct, frozen=True, tag="inspect_hello", forbid_unknown_fields=True):
    """An onlooker asks for a report. It gets no descriptor and no session, and leaves no trace."""

    protocol: int


class CountsHello(msgspec.Struct, frozen=True, tag="counts_hello", forbid_unknown_fields=True):
    """As :class:`InspectHello`, for a few numbers instead of a report."""

    protocol: int


class TcpChallenge(msgspec.Struct, frozen=True, tag="tcp_challenge", forbid_unknown_fields=True):
    """What whoever connects must answer with a proof. Names nothing of the engine that asks."""

    protocol: int
    nonce: Nonce
    timeout_seconds: TimeoutSeconds
    """A side that says nothing for so long is taken for gone."""


class TcpProof(msgspec.Struct, frozen=True, tag="tcp_proof", forbid_unknown_fields=True):
    """The side that connects knows the secret."""

    nonce: Nonce
    timeout_seconds: TimeoutSeconds
    proof: Nonce


class TcpAccept(msgspec.Struct, frozen=True, tag="tcp_accept", forbid_unknown_fields=True):
    """The side that listens knows it too."""

    proof: Nonce


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat", forbid_unknown_fields=True):
    """Still here."""


class RemoteGrant(msgspec.Struct, frozen=True, tag="remote_grant", forbid_unknown_fields=True):
    """Where the pool of one prefill worker can be read over the network."""

    pool: PoolLayout
    transport: Text
    segment: Text
    """What the transport calls the worker's memory."""
    addresses: Annotated[tuple[Address, ...], Meta(max_length=4096)]
    """Of block 0 in each region, as the transport counts."""


class LookUp(msgspec.Struct, frozen=True, tag="look_up", forbid_unknown_fields=True):
    """What is under this ticket? Changes nothing. As long as the answer is an offer, the blocks have not been reused."""

    call: CallId
    ticket: Ticket


class Offered(msgspec.Struct, frozen=True, tag="offered", forbid_unknown_fields=True):
    """The answer; ``digest`` is None when the lease is over or was never issued."""

    call: CallId
    digest: Nonce | None = None
    num_tokens: Annotated[int, Meta(ge=0, lt=1 << 40)] = 0
    num_blocks: Annotated[int, Meta(ge=0, lt=1 << 31)] = 0
    is_copy_wanted: bool = False


class Claim(msgspec.Struct, frozen=True, tag="claim", forbid_unknown_fields=True):
    """Claim the lease for the decode at this end of the session."""

    call: CallId
    ticket: Ticket


class Verdict(msgspec.Struct, frozen=True, tag="verdict", forbid_unknown_fields=True):
    """Whether the claim holds, and then the block table as int32."""

    call: CallId
    is_held: bool
    block_ids: Annotated[bytes, Meta(max_length=(1 << 20) - 64)] = b""


class Release(msgspec.Struct, frozen=True, tag="release", forbid_unknown_fields=True):
    """Takes one claim back."""

    ticket: Ticket


class Refusal(msgspec.Struct, frozen=True, tag="refusal", forbid_unknown_fields=True):
    """The answer to a hello that does not fit; ``theirs`` is the refuser's own value."""

    field: Text
    yours: Text
    theirs: Text


Message = (
    SchedulerHello
    | SchedulerWelcome
    | WorkerHello
    | PoolGrant
    | DeviceGrant
    | RetirePool
    | Introduction
    | TensorHello
    | TensorWelcome
    | Done
    | TcpChallenge
    | TcpProof
    | TcpAccept
    | Heartbeat
    | RemoteGrant
    | LookUp
    | Offered
    | Claim
    | Verdict
    | Release
    | InspectHello
    | EngineReport
    | CountsHello
    | EngineCounts
    | WorkerReport
    | Refusal
)
M = TypeVar("M", bound=Message)
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def encode(message: msgspec.Struct) -> bytes:
    """The message as MessagePack, without the frame's length."""
    return _encoder.encode(message)


def frame(message: msgspec.Struct) -> bytes:
    """The message as it goes over the wire, its length in front."""
    payload = encode(message)
    return len(payload).to_bytes(4, "little") + payload


def decode(payload: bytes) -> Message:
    """The message in ``payload``.

    Raises:
        ProtocolError: not MessagePack, not one of our messages, or a field out of range.
    """
    if len(payload) > MAX_FRAME_BYTES:
        raise ProtocolError(f"frame of {len(payload)} bytes, at most {MAX_FRAME_BYTES} are allowed")
    try:
        return _decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"not a message of protocol {PROTOCOL_VERSION}: {error}") from error


def expect(message: Message, expected: type[M]) -> M:
    """The answer to a hello, if it is of the type that was expected.

    Raises:
        PeerRefusedError: it is a refusal.
        ProtocolError: it is anything else.
    """
    if isinstance(message, Refusal):
        raise PeerRefusedError(message.field, message.yours, message.theirs)
    if not isinstance(message, expected):
        raise ProtocolError(f"answer {type(message).__name__}, expected {expected.__name__}")
    return message


def first_difference(mine: Mapping[str, str], theirs: Mapping[str, str]) -> tuple[str, str, str] | None:
    """``(field, mine, theirs)`` of the first field in which two fingerprints differ, or None."""
    for field in sorted({*mine, *theirs}):
        left, right = mine.get(field, "(absent)"), theirs.get(field, "(absent)")
        if left != right:
            return field, left, right
    return None


def new_token() -> bytes:
    """16 random bytes for a lease."""
    return secrets.token_bytes(16)


def new_incarnation() -> str:
    """32 hex digits that name one start of one engine."""
    return secrets.token_hex(16)
