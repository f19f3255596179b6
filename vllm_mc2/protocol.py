"""The wire: messages between peers on one host, and the ticket that travels with a request.

Frames are a 4-byte little-endian length and that many bytes of MessagePack, one tagged struct each; file descriptors
ride on the frame that names them (``SCM_RIGHTS``). A session is one question and one answer, after which the
connection stays open in silence: its end tells either side that the other is gone.

::

    decode scheduler -> prefill scheduler   SchedulerHello
                     <-                     SchedulerWelcome + [index table fd, ledger fd]   or   Refusal
    decode worker r  -> prefill worker r    WorkerHello(fingerprint)
                     <-                     PoolGrant(layout) + [pool fd]                    or   Refusal
    decode scheduler -> its own worker      RetirePool(key)
                     <-                     Done                                             or   Refusal
    MC2Communicator, by TCP, prefill -> decode   Introduction
                     <-                     Done                                             or   Refusal
    MC2Communicator, decode -> prefill      TensorHello
                     <-                     TensorWelcome + [index table fd, ledger fd, mail fd]  or   Refusal
    vllm-mc2 inspect -> any of the four     InspectHello
                     <-                     EngineReport (schedulers) or WorkerReport        or   Refusal

``PROTOCOL_VERSION`` grows with every change of a message, a shared layout or the meaning of either; peers of different
versions refuse each other. Nothing here is trusted: sizes and patterns are checked while decoding, the rest by the
receiver, on its own copy.
"""

import secrets
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from vllm_mc2.errors import ProtocolError, TicketError
from vllm_mc2.inspection import EngineReport, WorkerReport
from vllm_mc2.layout import PoolLayout

PROTOCOL_VERSION = 3
MAX_FRAME_BYTES = 1 << 20
"""Larger than the layout of the deepest models (4096 regions), small enough to buffer for every connection."""

Hex32 = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
Hex8 = Annotated[str, Meta(pattern=r"^[0-9a-f]{8}\Z")]
EngineId = Annotated[str, Meta(min_length=1, max_length=256)]
Text = Annotated[str, Meta(max_length=4096)]


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
    | RetirePool
    | Introduction
    | TensorHello
    | TensorWelcome
    | Done
    | InspectHello
    | EngineReport
    | WorkerReport
    | Refusal
)
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


def first_difference(mine: Mapping[str, str], theirs: Mapping[str, str]) -> tuple[str, str, str] | None:
    """``(field, mine, theirs)`` of the first field in which two fingerprints differ, or None."""
    for field in sorted({*mine, *theirs}):
        left, right = mine.get(field, "(absent)"), theirs.get(field, "(absent)")
        if left != right:
            return field, left, right
    return None


class Ticket(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The constant-size capability that names one lease. Whoever holds it may use the lease's blocks, for its own prompt."""

    version: int
    incarnation: Hex32
    slot: Hex8
    generation: Hex8
    token: Hex32

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


TICKET_KEY = "mc2_ticket"


def new_token() -> bytes:
    """16 random bytes for a lease."""
    return secrets.token_bytes(16)


def new_incarnation() -> str:
    """32 hex digits that name one start of one engine."""
    return secrets.token_hex(16)


def ticket_params(ticket: Ticket, engine_id: str, tp_size: int) -> dict[str, Any]:
    """``kv_transfer_params`` of prefill's response: the field names that proxies and routers know, plus the ticket.

    Its size does not depend on the prompt, and it names no blocks: a client of decode's HTTP API must not be able to
    ask for other people's.
    """
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": engine_id,
        "remote_request_id": f"{ticket.slot}-{ticket.generation}",
        # There is no network listener: peers meet in the socket directory of their host.
        "remote_host": "localhost",
        "remote_port": 0,
        "tp_size": tp_size,
        TICKET_KEY: msgspec.to_builtins(ticket),
    }


def parse_ticket(params: Mapping[str, Any]) -> Ticket:
    """The ticket in a decode request's ``kv_transfer_params``, which came through an HTTP API and may hold anything.

    Raises:
        TicketError: no ticket, or one that is not well-formed or of another protocol version.
    """
    raw = params.get(TICKET_KEY)
    if raw is None:
        raise TicketError(f"kv_transfer_params hold no {TICKET_KEY}")
    try:
        ticket = msgspec.convert(raw, Ticket, strict=True)
    except (msgspec.ValidationError, RecursionError) as error:
        raise TicketError(f"malformed {TICKET_KEY}: {error}") from error
    if ticket.version != PROTOCOL_VERSION:
        raise TicketError(f"{TICKET_KEY} is of protocol {ticket.version}, this side speaks {PROTOCOL_VERSION}")
    return ticket
