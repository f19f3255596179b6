"""Waiting for requests, several prefills at one decode, and calls that make no sense."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.tensors.rig import (
    SHAPE,
    WATCHDOG_SECONDS,
    Pair,
    connect,
    dial,
    fill,
    footprint,
    listen,
    same_layer,
)
from vllm_mc2 import KVCacheManager, KVCacheMapper
from vllm_mc2.errors import OrphanedKVError, PeerUnreachableError, UsageError

MakePair = Callable[..., Pair]


def test_waiting_for_a_request(pair: Pair) -> None:
    for timeout in (0, 0.01):
        with pytest.raises(TimeoutError, match="no KV metadata in"):
            pair.decode.recv_kv_metadata(timeout)
    pair.layer()
    pair.prefill.send_kv_metadata("r", [1])
    # Pool, layout and request are three messages; what is there is found without waiting.
    assert pair.decode.recv_kv_metadata(0).request_id == "r"
    for number in range(3):
        pair.prefill.send_kv_metadata(f"r{number}", [1])
    assert [pair.decode.recv_kv_metadata(0).request_id for _ in range(3)] == ["r0", "r1", "r2"]
    pair.prefill.send_kv_metadata("last", [1])
    assert pair.decode.recv_kv_metadata(float("inf")).request_id == "last"


@pytest.mark.parametrize("busy_poll_seconds", [0, 0.01])
def test_looking_before_sleeping_changes_nothing(directory: Path, busy_poll_seconds: float) -> None:
    with listen(directory, busy_poll_seconds=busy_poll_seconds) as decode, connect(decode, directory) as prefill:
        manager = KVCacheManager(prefill)
        manager.allocate(0, SHAPE, torch.float32)
        with pytest.raises(TimeoutError):
            decode.recv_kv_metadata(0.02)
        for number in range(5):
            prefill.send_kv_metadata(f"r{number}", [1])
            time.sleep(0.005 * number)
            assert decode.recv_kv_metadata(WATCHDOG_SECONDS).request_id == f"r{number}"
        prefill.close()
        with pytest.raises(PeerUnreachableError):
            decode.recv_kv_metadata()
        manager.close()


@pytest.mark.parametrize("timeout", [None, float("inf"), 1e12])
def test_waiting_without_an_end(pair: Pair, timeout: float | None) -> None:
    """It is woken by what is sent, and by the end of the last prefill."""
    pair.layer()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(pair.decode.recv_kv_metadata, timeout)
        time.sleep(0.05)
        pair.prefill.send_kv_metadata("r", [1])
        assert waiting.result(WATCHDOG_SECONDS).request_id == "r"
        waiting = pool.submit(pair.decode.recv_kv_metadata, timeout)
        time.sleep(0.05)
        pair.prefill.close()
        with pytest.raises(PeerUnreachableError):
            waiting.result(WATCHDOG_SECONDS)


def test_a_decode_that_does_not_take_its_mail(make_pair: MakePair) -> None:
    pair = make_pair(timeout_seconds=2.0, num_lease_slots=2000)
    pair.layer()
    sent = 0
    with pytest.raises(PeerUnreachableError, match="does it call recv_kv_metadata"):
        while True:
            pair.prefill.send_kv_metadata(f"r{sent}", [1])
            sent += 1
    assert sent > 100
    for index in range(sent):
        with pair.map_next() as mapped:
            assert mapped.request_id == f"r{index}"
    pair.hand_over("after all", [1]).release()


# --- several prefills ---


def test_several_prefills_and_one_that_leaves(pair: Pair, directory: Path) -> None:
    prefills = [pair.prefill, *(connect(pair.decode, directory) for _ in range(2))]
    managers = [KVCacheManager(prefill) for prefill in prefills]
    layers = [fill(manager.allocate(0, SHAPE, torch.float32), seed) for seed, manager in enumerate(managers)]
    for number, prefill in enumerate(prefills):
        prefill.send_kv_metadata(f"from {number}", [number])
    mapped = {}
    for _ in prefills:
        each = pair.map_next()
        mapped[each.request_id] = each
    for number, kv in enumerate(layers):
        assert same_layer(mapped[f"from {number}"].layers[0], kv)
        assert mapped[f"from {number}"].block_ids.tolist() == [number]
    prefills[1].send_kv_metadata("orphan", [1])
    prefills[1].close()
    managers[1].close()
    with pytest.raises(OrphanedKVError, match="orphan"):
        pair.map_next()
    assert same_layer(mapped["from 1"].layers[0], layers[1])
    with pytest.raises(TimeoutError):  # the others are still there
        pair.decode.recv_kv_metadata(0.01)
    for number in (0, 2):
        prefills[number].send_kv_metadata(f"more from {number}", [number])
        with pair.map_next() as more:
            assert more.request_id == f"more from {number}" and same_layer(more.layers[0], layers[number])
    newcomer = connect(pair.decode, directory)
    managers.append(KVCacheManager(newcomer))
    managers[-1].allocate(0, SHAPE, torch.float32)
    newcomer.send_kv_metadata("new", [1])
    pair.map_next().release()
    for each in mapped.values():
        each.release()
    newcomer.close()
    prefills[2].close()
    for manager in managers:
        manager.close()


def test_prefills_that_come_at_the_same_time(pair: Pair, directory: Path) -> None:
    """Who comes while another is being heard waits for the next accept()."""
    number = 6
    with ThreadPoolExecutor(number) as pool:
        coming = [pool.submit(dial, pair.decode, directory, num_lease_slots=1) for _ in range(number)]
        time.sleep(0.1)
        accepted = {pair.decode.accept(WATCHDOG_SECONDS) for _ in range(number)}
        prefills = [each.result(WATCHDOG_SECONDS) for each in coming]
    assert len(accepted) == number
    for prefill in prefills:
        prefill.close()


# --- calls that make no sense ---


def test_the_wrong_side(pair: Pair) -> None:
    assert (pair.prefill.role, pair.decode.role) == ("prefill", "decode")
    for call in (
        lambda: pair.prefill.listen_port,
        lambda: pair.prefill.accept(0),
        lambda: pair.prefill.recv_kv_metadata(0),
        pair.prefill.wait_prefaulted,
        lambda: KVCacheMapper(pair.prefill),
    ):
        with pytest.raises(UsageError, match="is for decode; this communicator is prefill's"):
            call()
    for call in (
        lambda: pair.decode.send_kv_metadata("r", [1]),
        pair.decode.reap,
        lambda: pair.decode.num_leases,
    ):
        with pytest.raises(UsageError, match="is for prefill; this communicator is decode's"):
            call()


def test_after_close(pair: Pair) -> None:
    pair.layer()
    pair.prefill.send_kv_metadata("r", [1])
    metadata = pair.receive()
    mapped = pair.mapper.map_remote_kv(metadata)
    for _ in range(2):
        pair.decode.close()
        pair.prefill.close()
    for call in (
        lambda: pair.decode.listen_port,
        lambda: pair.decode.accept(0),
        lambda: pair.decode.recv_kv_metadata(0),
        pair.decode.wait_prefaulted,
        lambda: KVCacheMapper(pair.decode),
        lambda: pair.mapper.map_remote_kv(metadata),
        lambda: pair.prefill.send_kv_metadata("r", [1]),
        pair.prefill.reap,
        lambda: pair.prefill.num_leases,
    ):
        with pytest.raises(UsageError, match="this communicator is closed"):
            call()
    mapped.release()


def test_nobody_was_accepted_yet(directory: Path) -> None:
    with listen(directory) as decode:
        with pytest.raises(UsageError, match="call accept"):
            decode.recv_kv_metadata(0)


def test_page_tables_can_be_waited_for(pair: Pair) -> None:
    pair.layer()
    with pair.hand_over("r", [1]):
        pair.decode.wait_prefaulted(WATCHDOG_SECONDS)


def test_the_mail_carries_no_descriptor_twice(pair: Pair) -> None:
    """Ten layers are ten pools; each is announced when it is first used, and its descriptor closed here at once."""
    before = footprint()
    for layer in range(10):
        pair.layer(layer)
    with pair.hand_over("r", [1]) as mapped:
        assert len(mapped.layers) == 10
        assert len(footprint().descriptors - before.descriptors) == 10  # prefill's own
    pair.hand_over("again", [1]).release()
