"""Messages and tickets: round trips, constant size, and hostile input."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.reports import LEASE, PEER, engine_report, worker_report
from vllm_mc2 import protocol
from vllm_mc2.digest import PromptExtras, prompt_digest
from vllm_mc2.errors import ProtocolError, TicketError
from vllm_mc2.inspection import DecodeRow, EngineCounts, MappedRow, WindowRow
from vllm_mc2.layout import PoolLayout, Region
from vllm_mc2.protocol import Ticket
from vllm_mc2.ticket import parse_ticket, ticket_params

POOL = PoolLayout(num_blocks=9, pool_bytes=1 << 21, regions=(Region(name="l.0", offset_bytes=0, block_bytes=4096),))
MESSAGES: list[protocol.Message] = [
    protocol.SchedulerHello(1, "a" * 32, "decode"),
    protocol.SchedulerWelcome("prefill", 128, (protocol.WorkerEndpoint(0, "b" * 32, POOL),)),
    protocol.WorkerHello(1, 0, "attach", {"dtype": "float32"}),
    protocol.PoolGrant(POOL),
    protocol.RetirePool("d" * 32, 64),
    protocol.Done(),
    protocol.InspectHello(1),
    protocol.CountsHello(1),
    EngineCounts(incarnation="e" * 32, num_blocks=63, held_leases=1),
    engine_report(leases=[LEASE], peers=[PEER], window=WindowRow(64, 640, 576), decodes=[DecodeRow(7, "d")]),
    worker_report(mapped=[MappedRow(128, 64, 1 << 20)]),
    protocol.Refusal("dtype", "a", "b"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_round_trip(message: protocol.Message) -> None:
    assert protocol.decode(protocol.encode(message)) == message


@given(st.binary(max_size=400))
@settings(max_examples=500)
def test_any_bytes_are_a_message_or_a_protocol_error(payload: bytes) -> None:
    try:
        protocol.decode(payload)
    except ProtocolError:
        return


@given(st.sampled_from(MESSAGES), st.data())
@settings(max_examples=500)
def test_a_flipped_byte_is_a_message_or_a_protocol_error(message: protocol.Message, data: st.DataObject) -> None:
    payload = bytearray(protocol.encode(message))
    payload[data.draw(st.integers(0, len(payload) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        protocol.decode(bytes(payload))
    except ProtocolError:
        return


def test_oversize_and_deeply_nested_frames_are_refused() -> None:
    with pytest.raises(ProtocolError, match="bytes"):
        protocol.decode(b"\0" * (protocol.MAX_FRAME_BYTES + 1))
    with pytest.raises(ProtocolError):
        protocol.decode(b"\x91" * 100_000)


def _params(slot: int = 3, generation: int = 7) -> dict[str, object]:
    return ticket_params(Ticket.issue("c" * 32, slot, generation, b"t" * 16), "engine", 1)


def test_a_ticket_survives_json_and_has_constant_size_and_no_block_ids() -> None:
    sizes = {len(msgspec.json.encode(_params(slot, generation))) for slot, generation in [(0, 1), (65535, 2**32 - 1)]}
    assert len(sizes) == 1
    params = msgspec.json.decode(msgspec.json.encode(_params()))
    ticket = parse_ticket(params)
    assert ticket.lease_id == (3, 7)
    assert ticket.token_bytes == b"t" * 16
    assert not [key for key in params if "block" in key]
    assert params["do_remote_prefill"] is True and params["do_remote_decode"] is False


def _with(**changes: object) -> object:
    raw = msgspec.to_builtins(Ticket.issue("c" * 32, 3, 7, b"t" * 16))
    return {**raw, **changes}


@pytest.mark.parametrize(
    "raw",
    [
        None, 0, "x", [], {}, {"version": 1},
        _with(version=1), _with(version="1"), _with(slot="-0000001"), _with(slot=3), _with(slot="3" * 9),
        _with(slot="0000000G"), _with(token="A" * 32), _with(token="a" * 31), _with(token="a" * 32 + "\n"),
        _with(incarnation="../../../../etc/passwd"), _with(incarnation="c" * 31 + "/"), _with(blocks=[1, 2, 3]),
        _with(generation=None), _with(version=2**70),
    ],
)  # fmt: skip
def test_a_malformed_ticket_is_a_ticket_error(raw: object) -> None:
    with pytest.raises(TicketError):
        parse_ticket({"do_remote_prefill": True, "mc2_ticket": raw})


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=40),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)


@given(json_values)
@settings(max_examples=500)
def test_any_json_is_a_ticket_or_a_ticket_error(raw: object) -> None:
    try:
        parse_ticket({"mc2_ticket": raw})
    except TicketError:
        return


def test_the_digest_covers_everything_that_determines_the_kv() -> None:
    base = prompt_digest(b"k" * 16, [1, 2, 3], PromptExtras())
    assert len(base) == 32
    assert base == prompt_digest(b"k" * 16, [1, 2, 3], PromptExtras())
    others = [
        prompt_digest(b"j" * 16, [1, 2, 3], PromptExtras()),
        prompt_digest(b"k" * 16, [1, 2], PromptExtras()),
        prompt_digest(b"k" * 16, [1, 3, 2], PromptExtras()),
        prompt_digest(b"k" * 16, [1, 2, 3, 4], PromptExtras()),
        prompt_digest(b"k" * 16, [1, 2, 3], PromptExtras(lora_name="a")),
        prompt_digest(b"k" * 16, [1, 2, 3], PromptExtras(cache_salt="a")),
        prompt_digest(b"k" * 16, [1, 2, 3], PromptExtras(media=(("h", 0, 2),))),
    ]
    assert len({base, *others}) == len(others) + 1
