"""Every input that has ever failed, and what no mutation arrives at: sizes and depths far beyond what anybody sends."""

import json
import math
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.catalogue import NAMES, load
from tests.fuzz.mutate import MSGPACK
from tests.fuzz.samples import sample
from vllm_mc2 import protocol
from vllm_mc2.ascend.settings import AscendSettings, parse_foreign
from vllm_mc2.config import MC2Config, parse_config
from vllm_mc2.digest import PromptExtras, prompt_digest
from vllm_mc2.errors import ConfigError, ProtocolError, TicketError
from vllm_mc2.protocol import MAX_FRAME_BYTES, Message, Ticket
from vllm_mc2.tensors import messages as mail
from vllm_mc2.ticket import TICKET_KEY, parse_address, parse_ticket, ticket_params

CORPUS = sorted((Path(__file__).parent / "corpus").glob("*/*"))
HALF = "\ud800"
"""Half of a surrogate pair: JSON can say it, UTF-8 cannot."""

KINDS = [*get_args(Message), *get_args(mail.Mail)]
DECODERS = {kind: mail.decode if kind in get_args(mail.Mail) else protocol.decode for kind in KINDS}
some = settings(deadline=None, database=None, max_examples=20)


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_what_was_found_once(path: Path) -> None:
    load(path.parent.name).run(path.read_bytes())


@pytest.mark.parametrize("name", NAMES)
def test_seeds(name: str) -> None:
    target = load(name)
    for seed in target.seeds():
        target.run(seed)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@some
@given(rng=st.randoms(use_true_random=False))
def test_a_valid_message_comes_back_equal(kind: Any, rng: random.Random) -> None:
    message = sample(kind, rng)
    assert DECODERS[kind](protocol.encode(message)) == message


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@some
@given(
    rng=st.randoms(use_true_random=False),
    wrong=st.sampled_from([None, -1, 2**64 - 1, math.nan, "\0", b"", [], {}, [[]]]),
)
def test_one_field_of_another_kind(kind: Any, rng: random.Random, wrong: Any) -> None:
    tree = MSGPACK.decode(protocol.encode(sample(kind, rng)))
    keys = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
    tree[keys[rng.randrange(len(keys))]] = wrong
    try:
        message = DECODERS[kind](MSGPACK.encode(tree))
    except ProtocolError:
        return
    assert DECODERS[kind](protocol.encode(message)) == message


def nested(depth: int, *, is_json: bool) -> bytes:
    return b"[" * depth + b"]" * depth if is_json else b"\x91" * depth + b"\xc0"


EXTREMES: dict[str, bytes] = {
    "lists a million deep": nested(MAX_FRAME_BYTES - 1, is_json=False),
    "maps half a million deep": b"\x81\xa1a" * (MAX_FRAME_BYTES // 3 - 1) + b"\xc0",
    "a list that says 4 billion": b"\xdd\xff\xff\xff\xff",
    "a map that says 4 billion": b"\xdf\xff\xff\xff\xff",
    "a binary that says 4 billion": b"\xc6\xff\xff\xff\xff",
    "a text that says 4 billion": b"\xdb\xff\xff\xff\xff",
    "a frame that is too long": bytes(MAX_FRAME_BYTES + 1),
    "a million ids": MSGPACK.encode({"type": "verdict", "call": 1, "is_held": True, "block_ids": [0] * 1_000_000}),
    "10 million ids": MSGPACK.encode({"type": "verdict", "call": 1, "is_held": True, "block_ids": bytes(40_000_000)}),
    "a fingerprint of 100,000 fields": MSGPACK.encode(
        {
            "type": "worker_hello",
            "protocol": 5,
            "rank": 0,
            "way": "pull",
            "fingerprint": {str(i): "" for i in range(100_000)},
        }
    ),
    "200,000 regions": MSGPACK.encode(
        {"type": "pool_grant", "pool": {"num_blocks": 1, "pool_bytes": 1, "regions": [{} for _ in range(200_000)]}}
    ),
    "the unknown field is long": MSGPACK.encode({"type": "done", "x" * 1_000_000: 1}),
    "an unknown type is long": MSGPACK.encode({"type": "x" * 1_000_000}),
}


@pytest.mark.parametrize("name", EXTREMES)
@pytest.mark.parametrize("decode", [protocol.decode, mail.decode])
def test_extremes_take_little_memory(name: str, decode: Callable[[bytes], Any]) -> None:
    payload = EXTREMES[name]
    tracemalloc.start()
    try:
        try:
            decode(payload)
        except ProtocolError:
            pass
        else:
            assert name == "a fingerprint of 100,000 fields", "it must not be believed"
        assert tracemalloc.get_traced_memory()[1] < 64 * MAX_FRAME_BYTES
    finally:
        tracemalloc.stop()


TICKET = ticket_params(Ticket.issue("ab" * 16, 1, 2, bytes(16)), "p", 1)
WRONG: list[Any] = [
    HALF, "x" + HALF, "", 7, -1, 2**31, 2**63, 10**400, 1.5, math.nan, math.inf, True, [], {}, [[]], "/dev/shm/x", "0" * 31,
    "A" * 32, "0" * 31 + HALF, "\uff10" * 32, ["0" * 32],
]  # fmt: skip


@pytest.mark.parametrize("field", [*TICKET[TICKET_KEY], None])
@pytest.mark.parametrize("value", WRONG, ids=repr)
def test_ticket_fields_are_untrusted(field: str | None, value: Any) -> None:
    raw = value if field is None else {**TICKET[TICKET_KEY], field: value}
    with pytest.raises(TicketError):
        parse_ticket({**TICKET, TICKET_KEY: raw})


def test_a_ticket_names_no_blocks_and_lets_nothing_else_in() -> None:
    for extra in ("block_ids", "remote_block_ids", "address", "path"):
        with pytest.raises(TicketError):
            parse_ticket({TICKET_KEY: {**TICKET[TICKET_KEY], extra: [0] * 10_000_000}})
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(TicketError):
        parse_ticket({TICKET_KEY: deep})
    while deep:  # or its end would recurse as deeply
        deep = deep.pop()


@pytest.mark.parametrize("host", [HALF, "a" + HALF, "\0", "a\nb", "é", "", "x" * 256, None, 7, ["h"]])
def test_an_address_that_is_none(host: Any) -> None:
    assert parse_address({"remote_host": host, "remote_port": 1}) is None


def test_an_address_that_is_one() -> None:
    assert str(parse_address({"remote_host": "fe80::1%eth0", "remote_port": 65535})) == "[fe80::1%eth0]:65535"


def told(parse: Callable[[], Any]) -> tuple[str, Any]:
    """What a :class:`ConfigError` says, or what was parsed."""
    try:
        return "", parse()
    except ConfigError as error:
        return str(error), None


@pytest.mark.parametrize("key", MC2Config.__struct_fields__)
@pytest.mark.parametrize("value", [HALF, "/" + HALF, "/a\0b", math.nan, 10**400, -(2**63), [[]], {}], ids=repr)
def test_a_setting_that_is_anything(key: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MC2_TCP_SECRET", raising=False)
    said, config = told(lambda: parse_config({key: value}))
    if config is None:
        assert key in said
    else:
        assert key in {"tcp_address", "model_identity"} and getattr(config, key) == value


def test_a_mistyped_key_does_not_show_the_secret() -> None:
    secret = "correct horse battery staple"
    for key in ("tcp_secrett", "my_tcp_secret", "tcp_secret"):
        value: object = secret if key != "tcp_secret" else [secret]
        with pytest.raises(ConfigError) as caught:
            parse_config({key: value})
        assert secret not in str(caught.value) and key in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        parse_config({"tcp_secret": secret + HALF})
    assert secret not in str(caught.value)


def test_a_prompt_that_utf8_cannot_say_has_no_digest() -> None:
    with pytest.raises(OverflowError):
        prompt_digest(bytes(16), [1], PromptExtras(cache_salt=HALF))


@pytest.mark.parametrize("key", AscendSettings.__struct_fields__)
@pytest.mark.parametrize("value", [7.5, math.nan, 10**400, -1, [[]], {"tp_size": 2**63}, {"x": 1}, "/a\0b"], ids=repr)
def test_foreign_settings_that_are_anything(key: str, value: Any) -> None:
    said, parsed = told(lambda: parse_foreign({key: value}))
    if parsed is None:
        assert key in said
    else:
        ours, theirs = parsed
        assert ours == {} and getattr(theirs, key) == value


def test_python_json_says_what_the_mutator_needs() -> None:
    # The targets of requests rely on it: a stricter parser would hide what a looser front end lets through.
    assert json.loads('"\\ud800"') == HALF and math.isnan(json.loads("NaN"))
    with pytest.raises(UnicodeEncodeError):
        msgspec.msgpack.encode(HALF)
