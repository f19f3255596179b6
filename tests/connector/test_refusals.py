"""What must not be attached, is not: bad tickets, other prompts, peers that do not fit or are gone. Engines live on."""

import copy
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
from vllm.lora.request import LoRARequest

from tests.connector.outcome import finish
from tests.connector.rig import MakeEngine, RigEngine, assert_clean, prefill
from tests.support.fake_model import expected_tokens, prompt_of
from tests.support.waiting import wait_until
from vllm_mc2.leases import PeerLeases
from vllm_mc2.protocol import Ticket

Pair = tuple[RigEngine, RigEngine]
PROMPT = prompt_of(70)
OTHER = prompt_of(70, seed=1)


def flip(text: str) -> str:
    return ("0" if text[0] != "0" else "1") + text[1:]


def change(key: str, value: Any = None) -> Callable[[dict[str, Any]], None]:
    def apply(params: dict[str, Any]) -> None:
        ticket = params["mc2_ticket"]
        ticket[key] = flip(ticket[key]) if value is None else value

    return apply


DAMAGE: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "missing": (lambda params: params.pop("mc2_ticket"), "bad_ticket"),
    "not a struct": (lambda params: params.update(mc2_ticket="x" * 1000), "bad_ticket"),
    "of another version": (change("version", 1), "bad_ticket"),
    "with block ids": (change("blocks", [1, 2, 3]), "bad_ticket"),
    "path as incarnation": (change("incarnation", "../../../../../../etc/passwd"), "bad_ticket"),
    "of another engine": (change("incarnation"), "peer_unreachable"),
    "with a guessed token": (change("token"), "ticket_dead"),
    "of another slot": (change("slot", "00000007"), "ticket_dead"),
    "beyond the table": (change("slot", "ffffffff"), "ticket_dead"),
    "of another generation": (change("generation"), "ticket_dead"),
}


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("name", DAMAGE)
def test_a_bad_ticket_gets_no_blocks_and_harms_nobody(make_engine: MakeEngine, name: str, policy: str) -> None:
    producer, consumer = make_engine("kv_producer"), make_engine("kv_consumer", policy=policy)
    damage, reason = DAMAGE[name]
    good = prefill(producer, "p", PROMPT)
    bad = copy.deepcopy(good)
    damage(bad)
    consumer.add("bad", PROMPT, bad)
    report = finish(consumer, "bad", policy, PROMPT)
    assert report["reason"] == reason
    way = report["way"]
    assert consumer.stats[f"handoffs|{way}|{reason}"] == 1
    assert consumer.connector._decode.snapshot() == {"handoffs": 0, "loans": 0, "borrowed_blocks": 0}  # type: ignore[union-attr]
    # The good ticket was not used up by the bad one.
    consumer.scheduler.reset_prefix_cache()
    consumer.add("good", PROMPT, good)
    consumer.run()
    assert consumer.finished["good"][0] == expected_tokens(PROMPT, 4)
    assert consumer.num_computed_prompt_tokens["good"] == 1
    assert_clean(producer, consumer)


def lora(name: str) -> LoRARequest:
    return LoRARequest(lora_name=name, lora_int_id=1, lora_path="/nowhere")


@pytest.mark.parametrize(
    ("made", "presented"),
    [
        ({}, {"prompt": OTHER}),
        ({}, {"prompt": PROMPT[:-1]}),
        ({}, {"prompt": [*PROMPT[:-1], PROMPT[-1] + 1]}),
        ({}, {"prompt": [PROMPT[0] + 1, *PROMPT[1:]]}),
        ({}, {"cache_salt": "salt"}),
        ({"cache_salt": "mine"}, {"cache_salt": "yours"}),
        ({"cache_salt": "mine"}, {}),
        ({}, {"lora_request": lora("adapter")}),
        ({"lora_request": lora("a")}, {"lora_request": lora("b")}),
    ],
)
def test_a_ticket_fits_only_its_own_prompt(pair: Pair, made: dict[str, Any], presented: dict[str, Any]) -> None:
    producer, consumer = pair
    ticket = prefill(producer, "p", PROMPT, **made)
    prompt = presented.pop("prompt", PROMPT)
    consumer.add("thief", prompt, ticket, **presented)
    report = finish(consumer, "thief", "recompute", prompt)
    assert report["reason"] == "prompt_mismatch"
    # Nothing of the lease is in decode's prefix cache: the owner's next prompt hits only what was computed here.
    cached = consumer.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block
    num_full = (len(prompt) + 3) // 16
    assert len(cached) <= num_full
    consumer.add("owner", PROMPT, ticket, **made)
    consumer.run()
    assert consumer.finished["owner"][0] == expected_tokens(PROMPT, 4)
    assert consumer.finished["owner"][2]["mc2"]["way"] == "attach"  # type: ignore[index]
    assert_clean(*pair)


def test_a_ticket_of_another_request_is_refused(pair: Pair) -> None:
    producer, consumer = pair
    ticket_a, ticket_b = prefill(producer, "a", PROMPT), prefill(producer, "b", OTHER)
    consumer.add("a", PROMPT, ticket_b)
    consumer.add("b", OTHER, ticket_a)
    consumer.run()
    assert consumer.finished["a"][0] == expected_tokens(PROMPT, 4)
    assert consumer.finished["b"][0] == expected_tokens(OTHER, 4)
    assert consumer.stats["handoffs|recompute|prompt_mismatch"] == 2


def test_a_used_ticket_is_dead(pair: Pair) -> None:
    producer, consumer = pair
    ticket = prefill(producer, "p", PROMPT)
    consumer.add("first", PROMPT, ticket)
    consumer.run()
    assert_clean(*pair)
    consumer.add("again", PROMPT, ticket)
    assert finish_reason(consumer, "again") == "ticket_dead"
    assert_clean(*pair)


def finish_reason(consumer: RigEngine, request_id: str) -> str:
    consumer.run()
    tokens, _, answer = consumer.finished[request_id]
    assert tokens == expected_tokens(PROMPT, 4)
    assert answer is not None
    return str(answer["mc2"]["reason"])


def test_an_offer_that_nobody_claims_ends_and_its_ticket_is_dead(make_engine: MakeEngine) -> None:
    producer = make_engine("kv_producer", extra={"offer_timeout_seconds": 0.05})
    consumer = make_engine("kv_consumer")
    tickets = [prefill(producer, f"p{i}", PROMPT) for i in range(10)]
    time.sleep(0.1)
    producer.connector._prefill.reap()  # type: ignore[union-attr]
    assert_clean(producer)
    consumer.add("late", PROMPT, tickets[0])
    assert finish_reason(consumer, "late") == "ticket_dead"
    producer.add("tick", prompt_of(3), None, max_tokens=1)
    producer.run()
    assert producer.stats["leases_ended|expired"] == 10
    assert_clean(producer, consumer)


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_prefill_gone_before_the_claim(make_engine: MakeEngine, policy: str) -> None:
    """Its segments are still mapped here, so the lease could even be read; a request must not depend on that."""
    producer, consumer = make_engine("kv_producer"), make_engine("kv_consumer", policy=policy)
    ticket = prefill(producer, "p", PROMPT)
    producer.close()
    consumer.add("orphan", PROMPT, ticket)
    assert finish(consumer, "orphan", policy, PROMPT)["reason"] == "peer_unreachable"
    assert_clean(consumer)


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_an_orphan_of_a_prefill_that_is_attached_already(make_engine: MakeEngine, policy: str) -> None:
    producer, consumer = make_engine("kv_producer"), make_engine("kv_consumer", policy=policy)
    consumer.add("connect", OTHER, prefill(producer, "c", OTHER))
    consumer.run()
    ticket = prefill(producer, "p", PROMPT)
    consumer.add("holder", OTHER, prefill(producer, "h", OTHER), max_tokens=30)  # keeps the peer known
    producer.close()
    consumer.add("orphan", PROMPT, ticket)
    assert finish(consumer, "orphan", policy, PROMPT)["reason"] == "peer_gone"
    assert consumer.finished["holder"][0] == expected_tokens(OTHER, 30)
    assert_clean(consumer)


def test_prefill_gone_after_the_claim_leaves_decode_with_valid_memory(pair: Pair) -> None:
    producer, consumer = pair
    ticket = prefill(producer, "p", PROMPT)
    consumer.add("r", PROMPT, ticket, max_tokens=40)
    while consumer.num_computed_prompt_tokens.get("r") is None:
        consumer.step()
    producer.close()
    for _ in range(10):
        consumer.step()
    assert "r" not in consumer.finished
    assert consumer.worker._worker._backend.memory._peers  # the pages live as long as decode maps them
    consumer.run()
    assert consumer.finished["r"][0] == expected_tokens(PROMPT, 40)
    assert not consumer.worker._worker._backend.memory._peers  # and are given back once nothing needs them
    assert_clean(consumer)


def test_decode_gone_ends_what_it_held(pair: Pair) -> None:
    producer, consumer = pair
    ticket = prefill(producer, "p", PROMPT)
    consumer.add("r", PROMPT, ticket, max_tokens=40)
    while consumer.num_computed_prompt_tokens.get("r") is None:
        consumer.step()
    assert producer.num_free_blocks < 63
    consumer.connector.shutdown()
    half: Any = producer.connector._prefill
    wait_until(lambda: half.reap() or len(half.book) == 0)
    producer.add("tick", prompt_of(3), None, max_tokens=1)
    producer.run()
    assert producer.stats["leases_ended|peer_gone"] == 1
    assert_clean(producer)


@pytest.mark.parametrize("when", ["waiting", "attached", "running"])
def test_abort(pair: Pair, when: str) -> None:
    producer, consumer = pair
    if when != "waiting":
        consumer.add("connect", prompt_of(20, seed=5), prefill(producer, "c", prompt_of(20, seed=5)))
        consumer.run()
    ticket = prefill(producer, "p", PROMPT)
    consumer.add("r", PROMPT, ticket, max_tokens=40)
    while when == "running" and consumer.num_computed_prompt_tokens.get("r") is None:
        consumer.step()
    consumer.abort("r")
    consumer.run()
    consumer.add("next", OTHER, None)
    consumer.run()
    assert consumer.finished["next"][0] == expected_tokens(OTHER, 4)
    assert_clean(*pair)  # at once, not after the offer timeout


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize(
    ("what", "detail"),
    [
        ({"extra": {"model_identity": "another"}}, "model differs"),
        ({"block_size": 32}, "block_size"),
    ],
)
def test_a_peer_that_does_not_fit_is_refused_by_name(
    make_engine: MakeEngine, what: dict[str, Any], detail: str, policy: str
) -> None:
    producer, consumer = make_engine("kv_producer"), make_engine("kv_consumer", policy=policy, **what)
    ticket = prefill(producer, "p", PROMPT)
    consumer.add("r", PROMPT, ticket)
    with mock.patch("vllm_mc2.connector.peers.logger.warning") as warning:
        assert finish(consumer, "r", policy, PROMPT)["reason"] == "peer_refused"
    (call,) = warning.call_args_list
    assert detail in call.args[0] % call.args[1:]
    # Permanent for this incarnation: the next one is not even asked.
    consumer.add("r2", PROMPT, ticket)
    consumer.step()
    consumer.run()
    way = "failed" if policy == "fail" else "recompute"
    assert consumer.stats[f"handoffs|{way}|peer_refused"] == 2
    assert not consumer.worker._worker._backend.memory._peers


@pytest.mark.parametrize("field", ["dtype", "attention", "kv_cache_dtype", "vllm", "layers", "num_kv_heads"])
def test_each_field_of_the_fingerprint_counts(pair: Pair, field: str) -> None:
    producer, consumer = pair
    consumer.worker._worker._fingerprint[field] = "something else"
    consumer.add("r", PROMPT, prefill(producer, "p", PROMPT))
    consumer.run()
    assert consumer.finished["r"][2]["mc2"]["reason"] == "peer_refused"  # type: ignore[index]
    assert consumer.finished["r"][0] == expected_tokens(PROMPT, 4)
    reasons = [peer.reason for peer in consumer.connector._decode._peers]  # type: ignore[union-attr]
    assert reasons == ["peer_refused"]


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_prompt_logprobs_are_computed_here(make_engine: MakeEngine, policy: str) -> None:
    """They need every prompt token computed; that is what the client asked for, not a failure."""
    producer, consumer = make_engine("kv_producer"), make_engine("kv_consumer", policy=policy)
    ticket = prefill(producer, "p", PROMPT)
    request = consumer.request("r", PROMPT, ticket)
    request.skip_reading_prefix_cache = True
    consumer.scheduler.add_request(request)
    consumer.run()
    assert consumer.finished["r"][0] == expected_tokens(PROMPT, 4)
    assert consumer.finished["r"][2]["mc2"] == {  # type: ignore[index]
        "way": "recompute", "reason": "skips_prefix_cache", "blocks_attached": 0, "tail_tokens": 0,
        "kv_bytes_not_copied": 0, "kv_bytes_copied": 0, "pull_us": 0.0, "handoff_us": 0.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    "params",
    [
        {"do_remote_prefill": 1, "mc2_ticket": {"version": 1}},
        {"do_remote_prefill": True, "mc2_ticket": [[[[]]]]},
        {"do_remote_prefill": True, "remote_block_ids": [[-1, 2**31, 2**63]], "remote_host": "elsewhere"},
        {"do_remote_prefill": "yes", "do_remote_decode": "yes"},
        {"do_remote_decode": 1},
        {"mc2_ticket": {}},
        {},
        "text",  # vllm_xargs lets a client put any value there
        7,
        [1, 2],
        [{"do_remote_prefill": True}],
    ],
)
def test_hostile_params_never_end_the_engine(make_engine: MakeEngine, params: Any) -> None:
    engine = make_engine("kv_both")
    engine.add("r", PROMPT, params)
    engine.run()
    assert engine.finished["r"][0] == expected_tokens(PROMPT, 4)
    assert_clean(engine)


def test_a_rejected_request_before_admission_ends_its_lease(pair: Pair) -> None:
    """What vLLM's API layer does when decode refuses a request: it adds it as one that is aborted already."""
    producer, consumer = pair
    for request_id in ("before the handshake", "after it"):
        consumer.add(request_id, PROMPT, prefill(producer, "p", PROMPT), abort_immediately=True)
        consumer.abort(request_id)
        consumer.run()
        assert_clean(*pair)


@pytest.mark.parametrize("verdict", ["held", "dead"])
@pytest.mark.parametrize("is_aborted", [False, True])
def test_a_claim_while_prefill_is_deciding_waits_for_the_verdict(pair: Pair, verdict: str, is_aborted: bool) -> None:
    """Prefill's EXPIRING lasts microseconds; here it is made to last."""
    producer, consumer = pair
    consumer.add("connect", OTHER, prefill(producer, "c", OTHER))
    consumer.run()
    consumer.add("r", PROMPT, None, max_tokens=1)
    consumer.run()
    consumer.scheduler.reset_prefix_cache()
    ticket = prefill(producer, "p", PROMPT)
    answers = ["pending"] * 5 + [verdict]
    real_claim, real_release = PeerLeases.claim, PeerLeases.release

    def claim(self: PeerLeases, lease_id: tuple[int, int]) -> str:
        assert real_claim(self, lease_id) == "held"
        return answers.pop(0)

    def poll(self: PeerLeases, lease_id: tuple[int, int]) -> str:
        answer = answers.pop(0)
        if answer == "dead":
            real_release(self, lease_id)
        return answer

    with mock.patch.multiple(PeerLeases, claim=claim, poll=poll):
        consumer.add("late", PROMPT, ticket)
        consumer.step()
        if is_aborted:
            consumer.abort("late")
        consumer.run()
    assert answers == []
    if not is_aborted:
        assert consumer.finished["late"][0] == expected_tokens(PROMPT, 4)
        way = {"held": "attach", "dead": "recompute"}[verdict]
        assert consumer.finished["late"][2]["mc2"]["way"] == way  # type: ignore[index]
    assert_clean(*pair)


def test_two_requests_with_one_ticket_while_prefill_is_deciding(pair: Pair) -> None:
    """The first one's verdict comes after the second has the loan already: its own claim is given back too."""
    producer, consumer = pair
    consumer.add("connect", OTHER, prefill(producer, "c", OTHER))
    consumer.run()
    ticket = prefill(producer, "p", PROMPT)
    verdicts = ["pending", "held"]
    real_claim = PeerLeases.claim

    def claim(self: PeerLeases, lease_id: tuple[int, int]) -> str:
        assert real_claim(self, lease_id) == "held"
        return verdicts.pop(0)

    with mock.patch.multiple(PeerLeases, claim=claim, poll=lambda self, lease_id: "held"):
        consumer.add("first", PROMPT, ticket)
        consumer.add("second", PROMPT, ticket)
        consumer.run()
    for request_id in ("first", "second"):
        assert consumer.finished[request_id][0] == expected_tokens(PROMPT, 4)
        assert consumer.finished[request_id][2]["mc2"]["way"] == "attach"  # type: ignore[index]
    assert_clean(*pair)


def test_a_pending_claim_on_a_lease_that_is_over_is_settled(pair: Pair) -> None:
    """Left pending, it would keep decode from ever claiming a lease in that slot again."""
    producer, consumer = pair
    consumer.add("connect", OTHER, prefill(producer, "c", OTHER))
    consumer.run()
    ticket = prefill(producer, "p", PROMPT)
    settled: list[tuple[int, int]] = []
    real_look_up = PeerLeases.look_up
    looks = [real_look_up, lambda self, ticket: None]

    def poll(self: PeerLeases, lease_id: tuple[int, int]) -> str:
        settled.append(lease_id)
        return "dead"

    def look_up(self: PeerLeases, ticket: Ticket) -> object:
        return looks.pop(0)(self, ticket)

    with mock.patch.multiple(PeerLeases, claim=lambda self, lease_id: "pending", poll=poll, look_up=look_up):
        consumer.add("late", PROMPT, ticket)
        consumer.run()
    assert len(settled) == 1
    assert consumer.finished["late"][0] == expected_tokens(PROMPT, 4)
    assert consumer.finished["late"][2]["mc2"]["reason"] == "ticket_dead"  # type: ignore[index]
