"""Who dies when, and what must be left of it: the cases D01 to D25 of the field notes that concern lifetime, by name.

Two engines of a rig share this process, so "death" here is the end of sessions and listeners, which is what peers see of it;
real processes are killed in tests/chaos and tests/e2e.
"""

import os
import random
import re
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
from vllm.v1.request import RequestStatus

from tests.connector.rig import (
    MakeEngine,
    RigEngine,
    assert_clean,
    prefill,
    step_until_running,
)
from tests.support.descriptors import open_descriptors
from tests.support.fake_model import expected_tokens, prompt_of
from tests.support.waiting import wait_until
from vllm_mc2.protocol import Refusal
from vllm_mc2.session import Answer

Pair = tuple[RigEngine, RigEngine]
PROMPT = prompt_of(70)
OTHER = prompt_of(70, seed=1)


def mapped_peers(engine: RigEngine) -> int:
    return len(engine.worker._worker._backend.memory._peers)


def handoff(pair: Pair, request_id: str, prompt: list[int], max_tokens: int = 4) -> None:
    producer, consumer = pair
    consumer.add(request_id, prompt, prefill(producer, request_id, prompt), max_tokens=max_tokens)
    consumer.run()
    assert consumer.finished[request_id][0] == expected_tokens(prompt, max_tokens)


def test_a_dead_prefills_memory_is_given_back_by_an_idle_decode(pair: Pair) -> None:
    producer, consumer = pair
    handoff(pair, "r", PROMPT)
    assert mapped_peers(consumer) == 1
    assert not consumer.scheduler.has_requests()
    producer.close()
    wait_until(lambda: mapped_peers(consumer) == 0)  # without a single step
    assert list(consumer.connector._decode._peers) == []  # type: ignore[union-attr]
    peers = consumer.connector._decode._peers  # type: ignore[union-attr]
    wait_until(lambda: peers._window.num_free == peers._plan.num_window)
    assert_clean(consumer)


def test_a_worker_that_does_not_answer_gets_the_order_with_the_next_step(pair: Pair) -> None:
    producer, consumer = pair
    handoff(pair, "r", PROMPT)
    peers = consumer.connector._decode._peers  # type: ignore[union-attr]
    with mock.patch.object(peers, "_order_unmap", return_value=False):
        producer.close()
        wait_until(lambda: list(peers) == [])
    assert mapped_peers(consumer) == 1
    consumer.add("next", OTHER, None)
    consumer.run()
    assert mapped_peers(consumer) == 0


def test_only_its_own_scheduler_can_tell_a_worker_to_unmap(pair: Pair, tmp_path: Path) -> None:
    from vllm_mc2.channel import socket_path
    from vllm_mc2.errors import PeerRefusedError
    from vllm_mc2.protocol import Done, RetirePool
    from vllm_mc2.session import open_session

    _, consumer = pair
    handoff(pair, "r", PROMPT)
    base = next(iter(consumer.worker._worker._backend.memory._peers))
    path = socket_path(tmp_path / "s", consumer.worker._worker._socket_id)
    with pytest.raises(PeerRefusedError, match="control_token"):
        open_session(path, RetirePool("0" * 32, base), Done, 0, 5.0)
    assert mapped_peers(consumer) == 1


def test_the_last_loan_of_a_dead_prefill_takes_its_memory_along(pair: Pair) -> None:
    producer, consumer = pair
    consumer.add("r", PROMPT, prefill(producer, "r", PROMPT), max_tokens=30)
    step_until_running(consumer, "r")
    (peer,) = consumer.connector._decode._peers  # type: ignore[union-attr]
    producer.close()
    wait_until(peer.is_gone)  # what the watch sees, which finds a loan
    consumer.abort("r")
    # No further step: the engine may be asleep from here on.
    wait_until(lambda: mapped_peers(consumer) == 0)
    consumer.run()
    assert_clean(consumer)


def test_a_prefill_that_dies_while_its_last_loan_ends_is_watched_once(pair: Pair) -> None:
    """Found by chaos: the loan ended after the death and before the watch had heard of it, and was watched a second time."""
    producer, consumer = pair
    consumer.add("r", PROMPT, prefill(producer, "r", PROMPT), max_tokens=30)
    step_until_running(consumer, "r")
    peers = consumer.connector._decode._peers  # type: ignore[union-attr]
    with peers._deathwatch._lock:  # the watch cannot take note now
        producer.close()
        (peer,) = peers
        wait_until(peer.is_gone)
        thread = threading.Thread(target=consumer.abort, args=("r",))
        thread.start()
        time.sleep(0.05)
    thread.join(timeout=30)
    wait_until(lambda: mapped_peers(consumer) == 0)
    consumer.run()
    assert_clean(consumer)


# --- the field cases ---


def test_d01_client_leaves_after_prefill(make_engine: MakeEngine) -> None:
    """Twenty rounds of tickets that nobody takes: all blocks are back after the offer's time, and nothing grows."""
    producer = make_engine("kv_producer", extra={"offer_timeout_seconds": 0.02, "max_lent_fraction": 1.0})
    for round_number in range(20):
        for index in range(15):
            prefill(producer, f"{round_number}-{index}", prompt_of(20, seed=index))
        assert len(producer.connector._prefill.book) > 0  # type: ignore[union-attr]
        time.sleep(0.03)
        producer.connector._prefill.reap()  # type: ignore[union-attr]
        assert_clean(producer)
    producer.add("tick", PROMPT, None, max_tokens=1)
    producer.run()
    assert producer.stats["leases_ended|expired"] == 300


def test_d02_decode_refuses_before_admission(pair: Pair) -> None:
    producer, consumer = pair
    for request_id in ("unconnected", "connected"):
        consumer.add(request_id, PROMPT, prefill(producer, request_id, PROMPT))
        consumer.abort(request_id)
        consumer.abort(request_id)  # a second end does nothing
        consumer.run()
        assert request_id not in consumer.num_computed_prompt_tokens
        assert_clean(producer, consumer)


def test_d03_a_lease_does_not_run_out_under_a_slow_decode(make_engine: MakeEngine) -> None:
    """There is no lease time: a claimed lease lasts as long as decode lives. An unclaimed one that has ended is refused."""
    producer = make_engine(
        "kv_producer", extra={"offer_timeout_seconds": 4.0}
    )  # to be claimed in, on a busy machine too
    consumer = make_engine("kv_consumer")
    handoff((producer, consumer), "connect", OTHER)
    book = producer.connector._prefill.book  # type: ignore[union-attr]
    wait_until(lambda: producer.connector._prefill.reap() or len(book) == 0)  # type: ignore[union-attr]
    consumer.add("slow", PROMPT, prefill(producer, "slow", PROMPT), max_tokens=4)
    late = prefill(producer, "late", OTHER)
    assert len(book) == 2
    wait_until(lambda: producer.connector._prefill.reap() or len(book) == 1)  # type: ignore[union-attr]
    for index in range(20):  # prefill reuses whatever it may
        producer.add(f"other-{index}", prompt_of(100, seed=50 + index), None, max_tokens=1)
        producer.run()
    consumer.run()
    assert consumer.finished["slow"][0] == expected_tokens(PROMPT, 4)
    assert consumer.num_computed_prompt_tokens["slow"] == 1
    consumer.scheduler.reset_prefix_cache()
    consumer.add("late", OTHER, late)
    consumer.run()
    assert consumer.finished["late"][0] == expected_tokens(OTHER, 4)
    assert consumer.finished["late"][2]["mc2"]["reason"] == "ticket_dead"  # type: ignore[index]
    assert_clean(producer, consumer)


def test_d04_abort_while_the_pool_is_being_mapped(pair: Pair) -> None:
    producer, consumer = pair
    started, go_on = threading.Event(), threading.Event()
    memory = consumer.worker._worker._backend.memory
    real = memory.map_peer

    def slow(*args: object) -> None:
        started.set()
        assert go_on.wait(30)
        real(*args)

    with mock.patch.object(memory, "map_peer", slow):
        consumer.add("a", PROMPT, prefill(producer, "a", PROMPT))
        wait_until(lambda: consumer.step() or started.is_set())
        consumer.abort("a")
        consumer.add("b", OTHER, None)
        wait_until(lambda: consumer.step() or "b" in consumer.finished)
        go_on.set()
        consumer.run()
    assert consumer.finished["b"][0] == expected_tokens(OTHER, 4)
    assert_clean(producer, consumer)


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_d05_a_peer_that_never_answers(make_engine: MakeEngine, policy: str) -> None:
    producer = make_engine("kv_producer")
    consumer = make_engine("kv_consumer", policy=policy, extra={"handshake_timeout_seconds": 0.2})
    ticket = prefill(producer, "p", PROMPT)
    go_on = threading.Event()

    def silent(key: int, hello: object) -> Answer:
        go_on.wait(30)
        return Answer(Refusal("patience", "", ""), keep_open=False)

    with mock.patch.object(producer.connector._prefill._server, "_on_hello", silent):  # type: ignore[union-attr]
        for index in range(3):
            consumer.add(f"r{index}", PROMPT, ticket)
        consumer.run()
        go_on.set()
    way = "failed" if policy == "fail" else "recompute"
    counted = sum(value for key, value in consumer.stats.items() if key.startswith(f"handoffs|{way}|"))
    assert counted == 3
    assert consumer.num_free_blocks == 63


def test_d06_nothing_to_transfer(pair: Pair) -> None:
    """Decode has the whole prompt, or most of it, cached itself; prefill's blocks go back all the same."""
    producer, consumer = pair
    for length in (64, 65, 80):
        prompt = prompt_of(length)
        consumer.add(f"warm-{length}", prompt, None, max_tokens=40)
        consumer.run()
        handoff(pair, f"r-{length}", prompt)
        assert_clean(producer, consumer)


@pytest.mark.parametrize("seed", range(int(os.environ.get("MC2_SEEDS", "24"))))
def test_d07_any_order_of_events(make_engine: MakeEngine, seed: int) -> None:
    """250 random events a seed: no exception, no request without an end, nothing left."""
    dice = random.Random(seed)
    producer = make_engine("kv_producer", extra={"offer_timeout_seconds": 0.05, "max_lent_fraction": 1.0})
    consumer = make_engine("kv_consumer", num_blocks=dice.choice([12, 20, 64]), policy="recompute")
    tickets: list[tuple[list[int], dict[str, object]]] = []
    added: dict[str, list[int]] = {}
    aborted: set[str] = set()
    for number in range(250):
        match dice.choice(["ticket", "add", "add", "step", "step", "step", "abort", "reset", "sleep", "prefill tick"]):
            case "ticket":
                prompt = prompt_of(dice.choice([1, 16, 17, 40, 90]), seed=dice.randrange(4))
                producer.add(f"p{number}", prompt, {"do_remote_decode": True}, max_tokens=1)
                producer.run()
                answer = producer.finished.pop(f"p{number}")[2]
                if answer is not None:
                    tickets.append((prompt, answer))
            case "add" if tickets:
                prompt, ticket = dice.choice(tickets[-4:])
                added[f"d{number}"] = prompt
                consumer.add(f"d{number}", prompt, ticket, max_tokens=dice.choice([1, 5, 30]))
            case "step" if consumer.scheduler.has_requests():
                consumer.step()
            case "abort" if added:
                victim = dice.choice(list(added))
                if victim not in consumer.finished:
                    aborted.add(victim)
                consumer.abort(victim)
            case "reset":
                consumer.scheduler.reset_prefix_cache(reset_running_requests=dice.random() < 0.5)
            case "sleep":
                time.sleep(0.005)
            case "prefill tick":
                producer.connector._prefill.reap()  # type: ignore[union-attr]
    consumer.run()
    for request_id, prompt in added.items():
        if request_id not in aborted:
            tokens = consumer.finished[request_id][0]
            assert tokens == expected_tokens(prompt, len(tokens))
    time.sleep(0.1)
    assert_clean(producer, consumer)


def test_d11_preempted_prefill_hands_over_nothing_it_does_not_have(make_engine: MakeEngine) -> None:
    producer = make_engine("kv_producer", num_blocks=8, max_model_len=80)
    requests = [
        producer.add(f"p{index}", prompt_of(60, seed=index), {"do_remote_decode": True}, max_tokens=1)
        for index in range(4)
    ]
    producer.run()
    consumer = make_engine("kv_consumer")
    for index, request in enumerate(requests):
        answer = producer.finished[request.request_id][2]
        prompt = prompt_of(60, seed=index)
        consumer.add(f"d{index}", prompt, answer)
        consumer.run()
        assert consumer.finished[f"d{index}"][0] == expected_tokens(prompt, 4)
    # And what vLLM would say of a request whose blocks were purged: no blocks, hence no ticket.
    purged = producer.request("purged", PROMPT, {"do_remote_decode": True})
    purged.status = RequestStatus.FINISHED_LENGTH_CAPPED
    purged.num_computed_tokens = 70
    assert producer.connector.request_finished(purged, []) == (False, None)


def test_d13_which_request_is_meant(pair: Pair) -> None:
    """The same client id on two prompts at the same time, and again while the first is still held: tickets tell them apart."""
    producer, consumer = pair
    first, second = prefill(producer, "same", PROMPT), prefill(producer, "same", OTHER)
    assert first["mc2_ticket"] != second["mc2_ticket"]
    consumer.add("same", OTHER, second)
    consumer.run()
    assert consumer.finished.pop("same")[0] == expected_tokens(OTHER, 4)
    consumer._outputs.clear()
    consumer.add("same", PROMPT, first)
    consumer.run()
    assert consumer.finished["same"][0] == expected_tokens(PROMPT, 4)
    assert_clean(*pair)


def counts() -> tuple[int, int, int]:
    """Descriptors, threads, and mappings of pools in this process."""
    maps = Path("/proc/self/maps").read_text()
    return len(os.listdir("/proc/self/fd")), threading.active_count(), len(re.findall(r"memfd:mc2", maps))


def test_d14_a_prefill_that_comes_back_twenty_times(make_engine: MakeEngine) -> None:
    consumer = make_engine("kv_consumer")
    seen = []
    old_ticket = None
    for number in range(20):
        producer = make_engine("kv_producer", num_blocks=32, max_model_len=128)
        producer.connector._prefill._engine_id = "always the same"  # type: ignore[union-attr]
        handoff((producer, consumer), f"r{number}", prompt_of(50, seed=number))
        assert consumer.finished[f"r{number}"][2]["mc2"]["way"] == "attach"  # type: ignore[index]
        if old_ticket is not None:
            consumer.add(f"old{number}", OTHER, old_ticket)
            consumer.run()
            assert consumer.finished[f"old{number}"][0] == expected_tokens(OTHER, 4)
            assert consumer.finished[f"old{number}"][2]["mc2"]["way"] == "recompute"  # type: ignore[index]
        old_ticket = prefill(producer, f"old{number}", OTHER)
        producer.close()
        del producer.kv
        producer.worker._worker._backend.memory._range = None  # the rig's process goes on, unlike a real prefill's
        wait_until(lambda: mapped_peers(consumer) == 0)
        if number > 3:
            wait_until(lambda: counts()[1] <= seen[3][1])  # threads end a moment later
        seen.append(counts())
    assert seen[-1][2] <= seen[3][2], seen
    assert seen[-1][0] <= seen[3][0] + 2 * 17, seen  # a rig's pool descriptor lives as long as its object


def test_d14_a_decode_that_comes_back(make_engine: MakeEngine) -> None:
    producer = make_engine("kv_producer")
    for number in range(5):
        consumer = make_engine("kv_consumer")
        consumer.add("r", PROMPT, prefill(producer, f"p{number}", PROMPT), max_tokens=50)
        step_until_running(consumer, "r")
        consumer.close()  # in the middle of a request
        wait_until(lambda: producer.connector._prefill.reap() or len(producer.connector._prefill.book) == 0)  # type: ignore[union-attr]
    assert_clean(producer)


def test_d15_a_dead_peers_memory_is_dropped_by_itself(pair: Pair) -> None:
    test_a_dead_prefills_memory_is_given_back_by_an_idle_decode(pair)


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("step", ["map_peer", "PeerLeases", "block_ids"])
def test_d17_a_failure_at_each_step_follows_the_policy(make_engine: MakeEngine, policy: str, step: str) -> None:
    producer, consumer = make_engine("kv_producer"), make_engine("kv_consumer", policy=policy)
    ticket = prefill(producer, "p", PROMPT)
    target = {
        "map_peer": "vllm_mc2.memory.WorkerMemory.map_peer",
        "PeerLeases": "vllm_mc2.connector.peer.PeerLeases",
        "block_ids": "vllm_mc2.leases.PeerLeases.block_ids",
    }[step]
    outcome = {"return_value": [0, 1, 2, 3, 4]} if step == "block_ids" else {"side_effect": OSError(12, "injected")}
    with mock.patch(target, **outcome):
        consumer.add("r", PROMPT, ticket)
        assert consumer.scheduler.has_requests()  # a waiting request keeps the engine awake
        consumer.run()
    if policy == "recompute":
        assert consumer.finished["r"][0] == expected_tokens(PROMPT, 4)
    else:
        assert consumer.finished["r"][0] == []
    consumer.add("next", OTHER, prefill(producer, "next", OTHER))
    consumer.run()
    if step != "PeerLeases":  # a peer whose segments are wrong is not asked again
        assert consumer.finished["next"][0] == expected_tokens(OTHER, 4)
    assert consumer.num_free_blocks == 63


def test_d19_two_prefills_and_two_decodes_with_the_same_settings(make_engine: MakeEngine) -> None:
    producers = [make_engine("kv_producer") for _ in range(2)]
    consumers = [make_engine("kv_consumer") for _ in range(2)]
    for number, (producer, consumer) in enumerate((p, c) for p in producers for c in consumers):
        handoff((producer, consumer), f"r{number}", prompt_of(40, seed=number))
    assert_clean(*producers, *consumers)


def test_d20_clocks_do_not_travel(make_engine: MakeEngine) -> None:
    """Decode's clock is set a thousand seconds off, either way; prefill's offer lasts as long as prefill says."""
    producer = make_engine("kv_producer")
    consumer = make_engine("kv_consumer")
    real = time.monotonic
    for offset in (-1000.0, 1000.0):
        with mock.patch("vllm_mc2.connector.peers.time.monotonic", lambda offset=offset: real() + offset):
            handoff((producer, consumer), f"r{offset}", PROMPT)
    assert consumer.stats["handoffs|attach|"] == 2
    assert_clean(producer, consumer)


def shared_memory() -> set[str]:
    """Of this process, mapped or open: memory without a name, and files in /dev/shm."""
    maps = [line.split(maxsplit=5)[5:] for line in Path("/proc/self/maps").read_text().splitlines()]
    paths = {path for [path] in filter(None, maps)} | set(open_descriptors().values())
    return {path for path in paths if path.startswith(("/memfd:", "/dev/shm/"))}


def test_d21_nothing_is_left_that_could_be_found_by_name(pair: Pair, tmp_path: Path) -> None:
    """Pools and tables are anonymous: nothing that we map or have open has a name; sockets are swept when their owner is dead.

    That nothing is there besides is shown with processes that have a /dev/shm of their own (tests/ipc/test_d21_leftovers.py).
    """
    before = shared_memory()
    handoff(pair, "r", PROMPT)
    found = shared_memory()
    assert len([path for path in found if path.startswith("/memfd:mc2")]) >= 3  # pool, index and ledger
    assert not [path for path in found - before if not path.startswith("/memfd:mc2")]
    assert not [path for path in found if "mc2" in path and not path.startswith("/memfd:")]
    assert all(path.is_socket() for path in (tmp_path / "s").iterdir())


def test_d25_ten_thousand_bad_frames_do_not_stop_the_listener(pair: Pair, tmp_path: Path) -> None:
    import socket
    import struct

    producer, _ = pair
    path = str(producer.connector._prefill._server.path)  # type: ignore[union-attr]
    dice = random.Random(0)
    for number in range(10_000):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(path)
            body = dice.randbytes(dice.randrange(40))
            sock.send(struct.pack("<I", len(body) if number % 3 else 1 << 31) + body)
    handoff(pair, "r", PROMPT)
    assert producer.connector._prefill._server.is_alive  # type: ignore[union-attr]
