"""The whole hand-over on simulated NPUs: real engine processes on vLLM 0.23's scheduler, real torch_npu tensors, our native code.

What the simulator enforces is what CANN's documentation says; that hardware behaves as documented was never tried.
"""

import dataclasses
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ascend.environment import ROOT, NpuEnvironment
from tests.ascend.fleet import EngineProcess, Fleet, Nursery, prefill, prompt_of
from tests.ascend.shapes import BLOCK_SIZE, SHAPES
from tests.packaging.test_old_vllm import old_vllm
from tests.support.locking import own_folder
from tests.support.waiting import wait_until
from vllm_mc2.channel import sweep_stale_sockets
from vllm_mc2.cli.inspect import look

assert old_vllm, "a fixture"


MakeFleet = Callable[..., Fleet]


@pytest.fixture(scope="module")
def nursery(npu_environment: NpuEnvironment, old_vllm: Path) -> Iterator[Nursery]:
    logs = own_folder(ROOT / "build" / "logs" / "ascend")
    logs.mkdir(exist_ok=True)
    nursery = Nursery(variables_of(npu_environment, old_vllm), logs / "engines.log")
    yield nursery
    nursery.close()


def variables_of(machine: NpuEnvironment, old_vllm: Path, **settings: str) -> dict[str, str]:
    variables = machine.variables(**{"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True", **settings})
    variables["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(old_vllm), variables["PYTHONPATH"]])
    return variables


@pytest.fixture
def make_fleet(
    nursery: Nursery, npu_environment: NpuEnvironment, old_vllm: Path, tiny_model: Path, tmp_path: Path
) -> Iterator[MakeFleet]:
    """Each fleet is a machine of its own."""
    fleets: list[Fleet] = []

    def make(**settings: str) -> Fleet:
        number = len(fleets)
        machine = dataclasses.replace(npu_environment, folder=tmp_path / f"machine{number}")
        variables = variables_of(machine, old_vllm, **settings)
        fleets.append(Fleet(nursery, variables, tiny_model, tmp_path / f"s{number}"))
        return fleets[-1]

    yield make
    for fleet in fleets:
        fleet.close()
        sweep_stale_sockets(fleet.socket_dir)  # of killed ones, as the next engine to start does
        assert list(fleet.socket_dir.glob("*")) == []


def hand_over(producer: EngineProcess, consumer: EngineProcess, name: str, prompt: list[int]) -> dict[str, Any]:
    """One request, prefill and decode; its answer."""
    answer: dict[str, Any] = consumer.call("run", name, prompt, prefill(producer, name, prompt), 6)
    assert answer["is_right"], answer
    return answer


def assert_nothing_is_left(producer: EngineProcess, consumer: EngineProcess, num_free: int) -> None:
    assert producer.call("num_leases") == 0
    assert (producer.call("num_free"), consumer.call("num_free")) == (num_free, num_free)


def assert_closes_clean(consumer: EngineProcess, producer: EngineProcess) -> None:
    """In the order in which a deployment stops: importers first, by themselves or because prefill asks for it."""
    for engine in (consumer, producer):
        before = engine.call("idle_live")
        left = engine.call("close")
        # An export lasts as long as the memory, which is torch's.
        assert (left["imports"], left["ipc_imports"], left["streams"]) == (0, 0, before["streams"]), (before, left)
        assert engine.call("violations")[0] == 0, engine.call("violations")


def test_tokens_are_right_in_every_shape(make_fleet: MakeFleet) -> None:
    """One engine after the other in the same two processes, which also shows that each leaves nothing behind."""
    fleet = make_fleet()
    engines = producer, consumer = fleet.start("kv_producer", "none"), fleet.start("kv_consumer", "none")
    for shape in SHAPES:
        for engine in engines:
            engine.begin("open", shape)
        for engine in engines:
            engine.answer()
        num_free = producer.call("num_free")
        for length in (1, 15, 16, 17, 100):
            answer = hand_over(producer, consumer, f"r{length}", prompt_of(length))
            report = answer["params"]["mc2"]
            if length > 1:
                assert (report["way"], report["reason"], answer["computed"]) == ("pull", "attach_off", 1), (
                    shape,
                    answer,
                )
        assert_nothing_is_left(producer, consumer, num_free)
        assert_closes_clean(consumer, producer)
        assert [engine.call("forget") for engine in engines] == [0, 0], shape
    assert consumer.call("calls", "aclrtMemcpyAsync") > 0


V2 = "aclrtMemRetainAllocationHandle"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "environment"),
    [
        ("handle_v2", {}),
        ("torch_npu", {"MC2_ACL_SIM_UNSUPPORTED": V2}),
        ("torch_npu", {"MC2_ACL_SIM_UNSUPPORTED": V2, "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:False"}),
        ("ipc_key", {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:False", "MC2_TEST_WITHOUT_SHARE": "1"}),
    ],
    ids=["retained handles", "torch_npu's handles", "torch_npu's key", "a key of ours"],
)
def test_every_way_of_sharing(make_fleet: MakeFleet, way: str, environment: dict[str, str]) -> None:
    fleet = make_fleet(**environment)
    producer, consumer = fleet.start("kv_producer"), fleet.start("kv_consumer")
    assert producer.call("way") == way
    num_free = producer.call("num_free")
    for number in range(3):
        assert hand_over(producer, consumer, f"r{number}", prompt_of(90, number))["params"]["mc2"]["way"] == "pull"
    assert_nothing_is_left(producer, consumer, num_free)
    assert_closes_clean(consumer, producer)


def test_both_on_one_npu(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    producer, consumer = fleet.start("kv_producer", npu=0), fleet.start("kv_consumer", npu=0)
    assert hand_over(producer, consumer, "r", prompt_of(70))["params"]["mc2"]["way"] == "pull"
    workers = {worker.pages: worker for worker in look(fleet.socket_dir).workers}
    assert set(workers) == {"NPU 0, shared by handle_v2", "NPU 0"}
    (mapped,) = workers["NPU 0"].mapped
    assert (mapped.num_blocks, mapped.num_bytes) == (64, workers["NPU 0"].bytes_per_block * 64)
    assert_closes_clean(consumer, producer)


def test_prefill_stops_first_and_decode_unmaps_before_it_ends(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    producer, consumer = fleet.start("kv_producer"), fleet.start("kv_consumer")
    hand_over(producer, consumer, "r", prompt_of(70))
    left = producer.call("close")
    assert producer.call("violations")[0] == 0, producer.call("violations")
    assert left["imports"] == 0
    assert consumer.call("wait_live", "imports", 0) == 0
    # And a successor is met as anybody else.
    successor = fleet.start("kv_producer")
    assert hand_over(successor, consumer, "next", prompt_of(70, 1))["params"]["mc2"]["way"] == "pull"
    assert_closes_clean(consumer, successor)


COPY_US = 10_000_000


def begin_slow_copy(producer: EngineProcess, consumer: EngineProcess, prompt: list[int], socket_dir: Path) -> None:
    """The peer is mapped already, so the copies, of ten seconds each, are under way a moment after the claim."""
    hand_over(producer, consumer, "warm", prompt_of(5))
    ticket = prefill(producer, "r", prompt)
    consumer.call("slow", COPY_US)
    consumer.begin("run", "r", prompt, ticket, 6)

    def is_claimed() -> bool:
        return any(lease.state == "held" for engine in look(socket_dir).engines for lease in engine.leases)

    wait_until(is_claimed, "decode's claim")
    time.sleep(0.1)  # it may as well be in the middle of the first copy; the outcome is the same before that


def test_prefill_is_killed_while_decode_copies(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    producer, consumer = fleet.start("kv_producer"), fleet.start("kv_consumer", MC2_ACL_SIM_LOST="1")
    num_free, prompt = consumer.call("num_free"), prompt_of(100)
    begin_slow_copy(producer, consumer, prompt, fleet.socket_dir)
    producer.kill()
    answer = consumer.answer()
    assert answer["is_right"] and answer["computed"] == len(prompt), answer
    assert consumer.call("wait_live", "imports", 0) == 0
    assert consumer.call("num_free") == num_free
    successor = fleet.start("kv_producer")
    assert hand_over(successor, consumer, "next", prompt_of(70, 1))["params"]["mc2"]["way"] == "pull"


def test_what_was_read_from_a_dead_prefill_is_not_believed(make_fleet: MakeFleet) -> None:
    """Although its memory outlives it here, and the bytes would even be right."""
    fleet = make_fleet()
    producer, consumer = fleet.start("kv_producer"), fleet.start("kv_consumer")
    prompt = prompt_of(100)
    begin_slow_copy(producer, consumer, prompt, fleet.socket_dir)
    producer.kill()
    answer = consumer.answer()
    assert answer["is_right"] and answer["computed"] == len(prompt), answer
    assert answer["params"]["mc2"]["reason"] in {"pull_failed", "peer_gone"}
    assert consumer.call("wait_live", "imports", 0) == 0


def test_decode_is_killed_while_it_copies(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    producer, victim = fleet.start("kv_producer"), fleet.start("kv_consumer")
    num_free = producer.call("num_free")
    begin_slow_copy(producer, victim, prompt_of(100), fleet.socket_dir)
    victim.kill()
    consumer = fleet.start("kv_consumer")
    assert hand_over(producer, consumer, "next", prompt_of(70, 1))["params"]["mc2"]["way"] == "pull"
    assert_nothing_is_left(producer, consumer, num_free)
    assert_closes_clean(consumer, producer)


IMPORT_CALLS = (
    "aclrtDeviceGetBareTgid", "aclrtReserveMemAddress", "aclrtMemImportFromShareableHandleV2", "aclrtMapMem",
)  # fmt: skip
COPY_CALLS = ("aclrtCreateStream", "aclrtMemcpyAsync", "copy-task", "aclrtSynchronizeStreamWithTimeout")


def test_each_injected_error_ends_one_hand_over_and_leaks_nothing(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    producer = fleet.start("kv_producer", MC2_TEST_EXTRA='{"offer_timeout_seconds": 10.0}')
    consumer = fleet.start("kv_consumer")
    num_free = producer.call("num_free")
    # While the peer is being mapped, and afterwards.
    for number, (call, code) in enumerate(
        [(call, 107000) for call in IMPORT_CALLS] + [(call, 507057) for call in COPY_CALLS]
    ):
        assert call in COPY_CALLS or consumer.call("wait_live", "imports", 0) == 0
        before = consumer.call("live")
        consumer.call("fail", call, 0, code, 1)
        prompt = prompt_of(60, number)
        answer = hand_over(producer, consumer, f"bad{number}", prompt)
        assert answer["computed"] == len(prompt), (call, answer)
        report = answer["params"]["mc2"]
        assert report["reason"] in {"map_failed", "pull_failed"}, (call, report)
        consumer.call("clear")
        if call in IMPORT_CALLS:
            assert consumer.call("live") == before, call
    for number in range(2):
        answer = hand_over(producer, consumer, f"good{number}", prompt_of(60, 50 + number))
        assert answer["params"]["mc2"]["way"] == "pull" and answer["computed"] == 1
    # A decode that could not map its memory has told prefill nothing: such an offer ends by itself.
    assert producer.call("wait_leases", 0) == 0
    assert_nothing_is_left(producer, consumer, num_free)
    assert_closes_clean(consumer, producer)


@pytest.mark.slow
@pytest.mark.parametrize("call", ["aclrtMemExportToShareableHandleV2", "aclrtMemGetAddressRange"])
def test_an_error_while_sharing_falls_back_or_says_why(make_fleet: MakeFleet, call: str) -> None:
    fleet = make_fleet()
    producer = fleet.start("kv_producer", MC2_ACL_SIM_FAIL=f"{call}:0:107000:1000")
    assert producer.call("way") == "torch_npu"
    consumer = fleet.start("kv_consumer")
    assert hand_over(producer, consumer, "r", prompt_of(60))["params"]["mc2"]["way"] == "pull"
    assert_closes_clean(consumer, producer)


def test_caches_of_different_kinds_are_refused_by_name(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    producer, consumer = fleet.start("kv_producer"), fleet.start("kv_consumer", "values of another size")
    answer = consumer.call("run", "r", prompt_of(60), prefill(producer, "r", prompt_of(60)), 6)
    assert answer["is_right"] and answer["computed"] == 60
    assert answer["params"]["mc2"]["reason"] == "peer_refused"


def test_a_copy_waits_for_what_is_queued_on_the_device(make_fleet: MakeFleet) -> None:
    """Kernels of requests that have ended may still write to blocks that are somebody else's by now."""
    fleet = make_fleet()
    producer, consumer = fleet.start("kv_producer"), fleet.start("kv_consumer")
    hand_over(producer, consumer, "warm", prompt_of(5))
    prompt = prompt_of(100)
    ticket = prefill(producer, "r", prompt)
    consumer.call("queue_zeros", 200_000)
    answer = consumer.call("run", "r", prompt, ticket, 6)
    assert answer["is_right"] and answer["params"]["mc2"]["way"] == "pull" and answer["computed"] == 1, answer


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_failed_copy_follows_the_policy(make_fleet: MakeFleet, policy: str) -> None:
    fleet = make_fleet()
    producer, consumer = fleet.start("kv_producer"), fleet.start("kv_consumer", MC2_TEST_POLICY=policy)
    num_free = producer.call("num_free")
    hand_over(producer, consumer, "warm", prompt_of(5))
    prompt = prompt_of(60)
    ticket = prefill(producer, "r", prompt)
    consumer.call("fail", "copy-task", 0, 507057, 1)
    answer = consumer.call("run", "r", prompt, ticket, 6)
    if policy == "fail":
        assert answer["reason"] == "error"
    else:
        assert answer["is_right"] and answer["computed"] == 60
    hand_over(producer, consumer, "next", prompt_of(70, 1))
    assert_nothing_is_left(producer, consumer, num_free)


FABRIC = {"MC2_ACL_SIM_FABRIC": "1", "MC2_TCP_SECRET": "a secret of the tests' own"}


@pytest.mark.slow
def test_another_server_of_a_superpod(make_fleet: MakeFleet) -> None:
    """Two servers share nothing here but the fabric: no common socket directory."""
    here, there = make_fleet(**FABRIC), make_fleet(**FABRIC)
    producer = here.start("kv_producer", MC2_TEST_EXTRA='{"tcp_address": "127.0.0.1"}')
    consumer = there.start("kv_consumer", MC2_ACL_SIM_DIR=here.environment["MC2_ACL_SIM_DIR"])
    assert producer.call("way") == "fabric"
    num_free = producer.call("num_free")
    for number in range(3):
        answer = hand_over(producer, consumer, f"r{number}", prompt_of(90, number))
        assert (answer["params"]["mc2"]["way"], answer["params"]["mc2"]["reason"]) == ("pull", "other_host"), answer
        assert answer["computed"] == 1
    assert_nothing_is_left(producer, consumer, num_free)
    # And on its own server, with the same handles.
    local = here.start("kv_consumer")
    assert hand_over(producer, local, "local", prompt_of(50))["params"]["mc2"]["reason"] == "attach_off"
    producer.kill()
    assert consumer.call("wait_live", "imports", 0) == 0


def test_a_server_without_fabric_tells_other_servers_so(make_fleet: MakeFleet) -> None:
    secret = {"MC2_TCP_SECRET": FABRIC["MC2_TCP_SECRET"]}
    here, there = make_fleet(**secret), make_fleet(**secret)
    producer = here.start("kv_producer", MC2_TEST_EXTRA='{"tcp_address": "127.0.0.1"}')
    consumer = there.start("kv_consumer")
    assert producer.call("way") == "handle_v2"
    answer = consumer.call("run", "r", prompt_of(60), prefill(producer, "r", prompt_of(60)), 6)
    assert answer["is_right"] and answer["computed"] == 60
    assert answer["params"]["mc2"]["reason"] == "peer_refused"


@pytest.mark.slow
def test_the_probe_for_attach_says_what_came_of_it(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    extra = {"MC2_TEST_EXTRA": '{"npu_attach": true}'}
    documented = fleet.start("kv_consumer", **extra)
    other = fleet.start("kv_consumer", MC2_ACL_SIM_MIXED="1", **extra)
    assert "aclrtMapMem: error 107000" in documented.call("attach_off")
    assert "has passed, but vllm-ascend has no hook" in other.call("attach_off")


@pytest.mark.parametrize(
    ("kind", "peer_size", "own_size"),
    [("heads", 2, 1), ("heads", 4, 2), ("heads", 1, 2), ("heads", 2, 2), ("latent", 2, 1), ("latent", 1, 2)],
)
def test_other_numbers_of_ranks(make_fleet: MakeFleet, kind: str, peer_size: int, own_size: int) -> None:
    """Each rank of decode gets its heads, out of whichever ranks of prefill have them, and nothing else changes."""
    fleet = make_fleet()
    prefills = [fleet.start_rank("prefill", rank, peer_size, kind) for rank in range(peer_size)]
    for rank in range(own_size):
        decode = fleet.start_rank("decode", rank, own_size, kind)
        pid, wanted = decode.call("pid"), decode.call("wanted_ranks", peer_size)
        grants = {str(peer): prefills[peer].call("grant", pid) for peer in wanted}
        assert decode.call("pull", grants, peer_size, [5, 6, 9, 30], [1, 2, 31, 7]) == 0


def test_blocks_are_whole(make_fleet: MakeFleet) -> None:
    """Many requests at random lengths one after the other: ids are reused, both tables are shuffled."""
    fleet = make_fleet()
    producer, consumer = fleet.start("kv_producer"), fleet.start("kv_consumer")
    num_free = producer.call("num_free")
    for number in range(12):
        length = 3 + (number * 37) % (6 * BLOCK_SIZE)
        hand_over(producer, consumer, f"r{number}", prompt_of(length, number))
    assert_nothing_is_left(producer, consumer, num_free)
    assert_closes_clean(consumer, producer)
