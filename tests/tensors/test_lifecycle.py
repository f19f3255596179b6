"""When a request ends, for whom, and what is left of it."""

import gc
from collections.abc import Callable

import pytest

from tests.support.waiting import wait_until
from tests.tensors.rig import (
    WATCHDOG_SECONDS,
    Pair,
    same_layer,
)
from vllm_mc2 import KVCacheMapper
from vllm_mc2.errors import ExpiredKVError, OrphanedKVError, PeerUnreachableError, UsageError
from vllm_mc2.leases import PeerLeases
from vllm_mc2.tensors import EndedKV, LayerKV, mapper

MakePair = Callable[..., Pair]


def test_released(pair: Pair) -> None:
    kv = pair.layer()
    one, two = pair.hand_over("one", [1]), pair.hand_over("two", [1, 2])
    assert pair.prefill.num_leases == 2 and pair.prefill.reap() == []
    two.release()
    assert pair.prefill.reap() == [EndedKV("two", "released")]
    assert pair.prefill.num_leases == 1
    assert same_layer(one.layers[0], kv)
    one.release()
    assert pair.prefill.reap() == [EndedKV("one", "released")]
    assert pair.prefill.reap() == [] and pair.prefill.num_leases == 0


def test_release_is_idempotent_and_what_is_released_is_not_given_out(pair: Pair) -> None:
    pair.layer()
    mapped = pair.hand_over("r", [1])
    for _ in range(3):
        mapped.release()
    with pytest.raises(UsageError, match="request 'r' has been released"):
        mapped.layers
    assert pair.reap(1) == [("r", "released")]
    # The slot is used again; another release of the old request must not touch it.
    again = pair.hand_over("again", [2])
    mapped.release()
    assert pair.prefill.reap() == [] and pair.prefill.num_leases == 1
    again.release()


def test_a_context_manager_releases_also_when_it_is_left_by_an_error(pair: Pair) -> None:
    pair.layer()
    with pytest.raises(RuntimeError, match="of ours"), pair.hand_over("r", [1]):
        raise RuntimeError("of ours")
    assert pair.reap(1) == [("r", "released")]


def test_one_that_is_forgotten_is_released_with_a_warning(pair: Pair) -> None:
    pair.layer()
    mapped = pair.hand_over("r", [1])
    held = [mapped]
    del mapped
    with pytest.warns(ResourceWarning, match="request 'r' was never released"):
        held.clear()
    assert pair.reap(1) == [("r", "released")]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_one_that_is_forgotten_is_released_also_where_warnings_are_errors(pair: Pair) -> None:
    """As they are in this project's tests, and with ``python -W error``."""
    pair.layer()
    mapped = pair.hand_over("r", [1])
    del mapped
    gc.collect()
    assert pair.reap(1) == [("r", "released")]


def test_nobody_maps_it_in_time(make_pair: MakePair) -> None:
    pair = make_pair(offer_timeout_seconds=0.05)
    pair.layer()
    pair.prefill.send_kv_metadata("r", [1])
    metadata = pair.receive()
    assert pair.reap(1) == [("r", "expired")]
    for _ in range(2):
        with pytest.raises(ExpiredKVError, match="request 'r'") as caught:
            pair.mapper.map_remote_kv(metadata)
        assert caught.value.request_id == "r"
    assert pair.prefill.num_leases == 0
    pair.hand_over("next", [1]).release()


def test_what_is_mapped_does_not_expire(make_pair: MakePair) -> None:
    pair = make_pair(offer_timeout_seconds=3.0)  # to be mapped in, on a busy machine too
    kv = pair.layer()
    mapped = pair.hand_over("r", [1])
    other = pair.prefill.send_kv_metadata("other", [1])
    assert pair.reap(1) == [(other.request_id, "expired")]  # it is older than that by now
    assert pair.prefill.num_leases == 1
    assert same_layer(mapped.layers[0], kv)
    mapped.release()
    assert pair.reap(1) == [("r", "released")]


def test_a_request_can_be_mapped_twice_and_ends_with_the_last(pair: Pair) -> None:
    pair.layer()
    pair.prefill.send_kv_metadata("r", [1])
    metadata = pair.receive()
    one, two = pair.mapper.map_remote_kv(metadata), KVCacheMapper(pair.decode).map_remote_kv(metadata)
    one.release()
    assert pair.prefill.reap() == []
    two.release()
    assert pair.reap(1) == [("r", "released")]
    with pytest.raises(ExpiredKVError):
        pair.mapper.map_remote_kv(metadata)


def test_decode_ends(pair: Pair) -> None:
    kv = pair.layer()
    mapped = pair.hand_over("r", [1])
    pair.decode.close()
    assert pair.reap(1) == [("r", "peer_gone")]
    assert same_layer(mapped.layers[0], kv)  # the mapping itself stays until its tensors go
    mapped.release()
    with pytest.raises(PeerUnreachableError, match="decode has ended its session"):
        pair.prefill.send_kv_metadata("next", [1])
    assert pair.prefill.num_leases == 0


def test_decode_ends_before_it_has_mapped(pair: Pair) -> None:
    """Nobody else can ever map it: as reap()'s docstring says, it ends with decode."""
    pair.layer()
    pair.hand_over("mapped", [1]).release()
    pair.prefill.send_kv_metadata("r", [1])
    pair.decode.close()
    wait_until(lambda: pair.prefill._sender.is_peer_gone)  # type: ignore[union-attr]
    assert sorted(pair.prefill.reap()) == [("mapped", "released"), ("r", "peer_gone")]


def test_prefill_ends_before_it_is_mapped(pair: Pair) -> None:
    pair.layer()
    for request_id in ("one", "two"):
        pair.prefill.send_kv_metadata(request_id, [1])
    early = pair.receive()
    pair.prefill.close()
    late = pair.receive()  # it was sent before, so it still comes
    for metadata in (early, late):
        with pytest.raises(OrphanedKVError, match="computed anew") as caught:
            pair.mapper.map_remote_kv(metadata)
        assert caught.value.request_id == metadata.request_id
    for _ in range(2):
        with pytest.raises(PeerUnreachableError, match="no prefill is connected"):
            pair.decode.recv_kv_metadata(WATCHDOG_SECONDS)
    with pytest.raises(OrphanedKVError):
        pair.mapper.map_remote_kv(late)


def test_prefill_ends_after_it_was_mapped(pair: Pair) -> None:
    kv = pair.layer()
    before = LayerKV(kv.key.clone(), kv.value.clone())  # type: ignore[union-attr]
    mapped = pair.hand_over("r", [1])
    pair.prefill.close()
    pair.manager.close()
    del kv
    gc.collect()
    with pytest.raises(PeerUnreachableError):
        pair.decode.recv_kv_metadata(WATCHDOG_SECONDS)
    assert same_layer(mapped.layers[0], before)
    mapped.release()


def test_a_prefill_that_has_ended_leaves_no_memory_at_decode(
    pair: Pair, own_pool_mappings: Callable[[], list[str]]
) -> None:
    """A decode outlives many prefills; what it keeps of them is what is still in use."""
    pair.layer()
    mapped = pair.hand_over("r", [1])
    pair.prefill.close()
    pair.manager.close()
    with pytest.raises(PeerUnreachableError):
        pair.decode.recv_kv_metadata(WATCHDOG_SECONDS)
    assert len(own_pool_mappings()) > 0
    mapped.release()
    del mapped
    gc.collect()
    assert own_pool_mappings() == []


def test_every_slot_taken_and_free_again(make_pair: MakePair) -> None:
    pair = make_pair(num_lease_slots=3)
    pair.layer()
    held = [pair.hand_over(f"r{index}", [index]) for index in range(3)]
    for _ in range(2):
        with pytest.raises(UsageError, match="every lease slot is taken"):
            pair.prefill.send_kv_metadata("too many", [1])
    held[1].release()
    with pair.hand_over("next", [1]) as mapped:  # found without reap()
        assert mapped.block_ids.tolist() == [1]
        assert pair.prefill.reap() == [EndedKV("r1", "released")]  # and not lost
    for each in (held[0], held[2]):
        each.release()
    assert sorted(pair.reap(3)) == [("next", "released"), ("r0", "released"), ("r2", "released")]
    for _ in range(10):
        pair.hand_over("again", [1]).release()


# --- a verdict that takes its time ---


class Undecided:
    """Prefill is just deciding: the claim is made, and the answer comes after so many questions."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.questions = 0
        take = PeerLeases.take

        def slow_take(leases: PeerLeases, *arguments: object) -> object:
            taken = take(leases, *arguments)  # type: ignore[arg-type]
            return ("pending", taken[1]) if taken is not None and self.questions else taken

        def slow_poll(leases: PeerLeases, lease_id: tuple[int, int]) -> str:
            self.questions -= 1
            if self.questions > 0:
                return "pending"
            # The claim is settled by now, so that a real poll would find none pending.
            leases.block_ids(lease_id)
            return "held"

        monkeypatch.setattr(PeerLeases, "take", slow_take)
        monkeypatch.setattr(PeerLeases, "poll", slow_poll)


def test_a_late_verdict(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    undecided = Undecided(monkeypatch)
    kv = pair.layer()
    undecided.questions = 30
    with pair.hand_over("r", [1]) as mapped:
        assert same_layer(mapped.layers[0], kv)
    assert undecided.questions == 0
    assert pair.reap(1) == [("r", "released")]


def test_a_verdict_that_does_not_come_in_time_leaves_no_lease(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapper, "VERDICT_SECONDS", 0.02)
    undecided = Undecided(monkeypatch)
    pair.layer()
    pair.prefill.send_kv_metadata("slow", [1])
    metadata = pair.receive()
    undecided.questions = 1_000_000
    with pytest.raises(ExpiredKVError, match="'slow'"):
        pair.mapper.map_remote_kv(metadata)
    assert pair.prefill.reap() == [] and pair.prefill.num_leases == 1  # the claim stands
    undecided.questions = 2
    pair.hand_over("next", [1]).release()  # not decided yet, so it is asked for again on the way
    assert pair.reap(1) == [("next", "released")]
    pair.hand_over("next", [1]).release()
    assert sorted(pair.reap(2)) == [("next", "released"), ("slow", "released")]
    assert pair.prefill.num_leases == 0


def test_a_verdict_of_a_prefill_that_has_gone(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    undecided = Undecided(monkeypatch)
    pair.layer()
    pair.prefill.send_kv_metadata("r", [1])
    metadata = pair.receive()
    undecided.questions = 1_000_000
    ask = metadata.peer.leases.poll

    def poll_and_end(leases: PeerLeases, lease_id: tuple[int, int]) -> str:
        pair.prefill.close()
        return ask(lease_id)

    monkeypatch.setattr(PeerLeases, "poll", poll_and_end)
    with pytest.raises(OrphanedKVError, match="'r'"):
        pair.mapper.map_remote_kv(metadata)
