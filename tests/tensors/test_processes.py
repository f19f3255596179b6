"""Prefill and decode in processes of their own, and what happens when one of them is killed."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.ports import own_ports
from tests.support.waiting import wait_until
from tests.tensors import programs
from tests.tensors.rig import (
    SHAPE,
    WATCHDOG_SECONDS,
    Child,
    bits,
    connect,
    dial,
    fill,
    listen,
    private_bytes,
    same_layer,
)
from vllm_mc2 import KVCacheManager, KVCacheMapper, MC2Communicator
from vllm_mc2.channel import sweep_stale_sockets
from vllm_mc2.errors import OrphanedKVError, PeerUnreachableError
from vllm_mc2.tensors import LayerKV

Spawn = Callable[..., Child]
MIB = 1 << 20


def expected(seed: int) -> LayerKV:
    """What a prefill's layer holds that was made with this seed."""
    return fill(LayerKV(torch.empty(SHAPE, dtype=torch.float16), torch.empty(SHAPE, dtype=torch.float16)), seed)


def start_prefill(spawn: Spawn, decode: MC2Communicator, directory: Path, seed: int) -> Child:
    child = spawn(programs.prefill, str(directory), decode.listen_port, SHAPE, seed, talks=True)
    decode.accept(WATCHDOG_SECONDS)
    assert child.hear() == "ready"
    return child


def start_decode(spawn: Spawn, directory: Path) -> tuple[Child, MC2Communicator]:
    """The process, and a prefill of ours that it has accepted."""
    child = spawn(programs.decode, str(directory), talks=True)
    prefill = dial(child.hear(), directory)
    assert child.hear() == "accepted"
    return child, prefill


def wait_for_reap(prefill: MC2Communicator, number: int) -> list[tuple[str, str]]:
    ended: list[tuple[str, str]] = []
    wait_until(lambda: ended.extend(tuple(each) for each in prefill.reap()) or len(ended) >= number)
    return ended


def test_as_the_article_writes_it(spawn: Spawn, directory: Path) -> None:
    """All defaults: the directory of the sockets is the user's."""
    with own_ports(1) as (port,):
        prefill = spawn(programs.article_prefill, str(directory), port)
        decode = spawn(programs.article_decode, str(directory), port)
        assert decode.result() == {0: True, 1: True}
        num_copies, ended = prefill.result()
        assert num_copies == 4 and [reason for _, reason in ended] == ["released"]
        assert (prefill.exit_code(), decode.exit_code()) == (0, 0)
    made = directory / "vllm-mc2"
    assert list(made.iterdir()) == [] and made.stat().st_mode & 0o777 == 0o700
    made.rmdir()


def test_prefill_is_killed_before_its_request_is_mapped(spawn: Spawn, directory: Path) -> None:
    with listen(directory) as decode:
        mapper = KVCacheMapper(decode)
        prefill = start_prefill(spawn, decode, directory, 1)
        for request_id in ("one", "two"):
            prefill.ask("send", request_id, [1])
        early = decode.recv_kv_metadata(WATCHDOG_SECONDS)
        prefill.kill()
        late = decode.recv_kv_metadata(WATCHDOG_SECONDS)
        for metadata, request_id in ((early, "one"), (late, "two")):
            with pytest.raises(OrphanedKVError) as caught:
                mapper.map_remote_kv(metadata)
            assert caught.value.request_id == request_id
        with pytest.raises(PeerUnreachableError):
            decode.recv_kv_metadata()
        # Another one is served by the same decode; its start removes what the dead one has left.
        assert len(list(directory.iterdir())) == 1
        successor = start_prefill(spawn, decode, directory, 2)
        assert len(list(directory.iterdir())) == 1
        successor.ask("send", "three", [1])
        with mapper.map_remote_kv(decode.recv_kv_metadata(WATCHDOG_SECONDS)) as mapped:
            assert same_layer(mapped.layers[0], expected(2))
        successor.kill()
    assert sweep_stale_sockets(directory) == 1


@pytest.mark.parametrize("how", ["killed", "left", "closed"])
def test_prefill_ends_after_its_request_was_mapped(
    spawn: Spawn, directory: Path, how: str, own_pool_mappings: Callable[[], list[str]]
) -> None:
    """Nobody writes to it any more, and the pages live as long as decode maps them."""
    with listen(directory) as decode:
        prefill = start_prefill(spawn, decode, directory, 3)
        prefill.ask("send", "r", [1, 2])
        mapped = KVCacheMapper(decode).map_remote_kv(decode.recv_kv_metadata(WATCHDOG_SECONDS))
        if how == "killed":
            prefill.kill()
        else:
            assert prefill.talk is not None
            prefill.talk.send(("leave",) if how == "left" else ("stop",))
            assert prefill.exit_code() == 0
        for _ in range(2):
            with pytest.raises(PeerUnreachableError):
                decode.recv_kv_metadata()
            assert same_layer(mapped.layers[0], expected(3))
        assert mapped.block_ids.tolist() == [1, 2]
        mapped.release()
        del mapped
        assert own_pool_mappings() == []
    assert sweep_stale_sockets(directory) == (0 if how == "closed" else 1)


def test_a_killed_prefill_whose_forked_child_keeps_its_sockets(spawn: Spawn, directory: Path) -> None:
    """Its end is the end of its process, whoever else holds its descriptors."""
    with listen(directory) as decode:
        prefill = start_prefill(spawn, decode, directory, 4)
        grandchild = prefill.ask("fork")
        try:
            prefill.ask("send", "r", [1])
            prefill.kill()
            metadata = decode.recv_kv_metadata(WATCHDOG_SECONDS)
            with pytest.raises(OrphanedKVError):
                KVCacheMapper(decode).map_remote_kv(metadata)
            with pytest.raises(PeerUnreachableError):  # and not a TimeoutError, while the grandchild lives
                decode.recv_kv_metadata(WATCHDOG_SECONDS)
        finally:
            os.kill(grandchild, signal.SIGKILL)
    wait_until(lambda: sweep_stale_sockets(directory) == 1)


def test_a_prefill_that_is_stopped(spawn: Spawn, directory: Path) -> None:
    """Mapping asks nothing of it, and it is not taken for dead."""
    with listen(directory) as decode:
        prefill = start_prefill(spawn, decode, directory, 5)
        prefill.ask("send", "r", [3])
        os.kill(prefill.pid, signal.SIGSTOP)
        with KVCacheMapper(decode).map_remote_kv(decode.recv_kv_metadata(WATCHDOG_SECONDS)) as mapped:
            assert same_layer(mapped.layers[0], expected(5))
            with pytest.raises(TimeoutError):
                decode.recv_kv_metadata(0.05)
        os.kill(prefill.pid, signal.SIGCONT)
        assert prefill.ask("reap", 1) == [("r", "released")]
        prefill.kill()
    assert sweep_stale_sockets(directory) == 1


def test_the_last_words_of_a_prefill(spawn: Spawn, directory: Path) -> None:
    """Decode sleeps, and when it wakes up there are a request and the end of its sender, at once."""
    decode, prefill = start_decode(spawn, directory)
    manager = KVCacheManager(prefill)
    manager.allocate(0, SHAPE, torch.float16)
    prefill.send_kv_metadata("first", [1])
    assert decode.ask("receive") == "first"
    assert decode.talk is not None
    decode.talk.send(("receive",))
    time.sleep(0.1)
    os.kill(decode.pid, signal.SIGSTOP)
    prefill.send_kv_metadata("last", [1])
    prefill.close()
    os.kill(decode.pid, signal.SIGCONT)
    assert decode.hear() == "last"
    decode.talk.send(("stop",))
    assert decode.exit_code() == 0
    manager.close()


def test_one_of_two_prefills_is_killed(spawn: Spawn, directory: Path) -> None:
    with listen(directory) as decode:
        mapper = KVCacheMapper(decode)
        victim, other = (start_prefill(spawn, decode, directory, seed) for seed in (6, 7))
        victim.ask("send", "victim's", [0])
        mapped = mapper.map_remote_kv(decode.recv_kv_metadata(WATCHDOG_SECONDS))
        victim.kill()
        for number in range(3):
            other.ask("send", f"other's {number}", [number])
            with mapper.map_remote_kv(decode.recv_kv_metadata(WATCHDOG_SECONDS)) as mine:
                assert same_layer(mine.layers[0], expected(7))
        assert same_layer(mapped.layers[0], expected(6))
        mapped.release()
        assert len(other.ask("reap", 3)) == 3
        other.kill()
    assert sweep_stale_sockets(directory) == 2


def test_a_write_of_decodes_ends_it_and_changes_nothing(spawn: Spawn, directory: Path) -> None:
    decode, prefill = start_decode(spawn, directory)
    with prefill:
        manager = KVCacheManager(prefill)
        kv = fill(manager.allocate(0, SHAPE, torch.float16), 8)
        before = bits(kv.key).clone()
        prefill.send_kv_metadata("r", [0])
        assert decode.ask("map") == "r"
        assert decode.talk is not None
        decode.talk.send(("write",))
        assert decode.exit_code() == -signal.SIGSEGV
        assert torch.equal(bits(kv.key), before)
        assert wait_for_reap(prefill, 1) == [("r", "peer_gone")]
        manager.close()


def test_decodes_memory_does_not_grow_by_the_cache(spawn: Spawn, directory: Path) -> None:
    """It reads all of 256 MiB, in pages that it shares with prefill."""
    decode, prefill = start_decode(spawn, directory)
    with prefill:
        manager = KVCacheManager(prefill)
        small = fill(manager.allocate(0, SHAPE, torch.float16), 9)
        prefill.send_kv_metadata("small", {0: small})
        assert decode.ask("map") == "small" and decode.ask("digest") == programs.digest(small)
        before = private_bytes(decode.pid)
        large = manager.allocate(0, (128 * MIB,), torch.uint8)
        for tensor, factor in zip(large, (3, 5), strict=True):
            assert tensor is not None
            words = tensor.view(torch.int64)
            torch.arange(len(words), out=words).mul_(factor)
        prefill.send_kv_metadata("large", {0: large})
        assert decode.ask("map") == "large"
        assert decode.ask("digest") == programs.digest(large)
        assert private_bytes(decode.pid) - before < 32 * MIB
        decode.talk.send(("stop",))  # type: ignore[union-attr]
        assert decode.exit_code() == 0
        assert sorted(wait_for_reap(prefill, 2)) == [("large", "released"), ("small", "released")]
        manager.close()


def test_decode_is_killed(spawn: Spawn, directory: Path) -> None:
    decode, prefill = start_decode(spawn, directory)
    with prefill:
        manager = KVCacheManager(prefill)
        fill(manager.allocate(0, SHAPE, torch.float16), 10)
        for request_id in ("one", "two"):
            prefill.send_kv_metadata(request_id, [1])
            assert decode.ask("map") == request_id
        assert prefill.reap() == []
        decode.kill()
        assert sorted(wait_for_reap(prefill, 2)) == [("one", "peer_gone"), ("two", "peer_gone")]
        for _ in range(2):
            with pytest.raises(PeerUnreachableError):
                prefill.send_kv_metadata("three", [1])
        assert prefill.num_leases == 0
        # The cache is prefill's own again, for the next decode.
        with listen(directory) as next_decode, connect(next_decode, directory) as again:
            KVCacheManager(again).register(0, *manager.layers[0])
            again.send_kv_metadata("four", [1])
            KVCacheMapper(next_decode).map_remote_kv(next_decode.recv_kv_metadata(WATCHDOG_SECONDS)).release()
        manager.close()
