"""Prefill and decode in two containers with one socket directory: what the same host promises, this promises too.

Neither sees the other's process id: to the kernel's credentials of a socket it is 0, and its own may be the same number.
"""

import os
import signal
from pathlib import Path

import pytest

from tests.isolation.conftest import Cell, StartEngine
from tests.support.fake_model import expected_tokens, prompt_of_family
from vllm_mc2.cli.inspect import look

PROMPT, OTHER = prompt_of_family(1, 70), prompt_of_family(2, 70)
LONG = 400
"""Tokens to generate by a request that is to be caught in the middle."""


@pytest.fixture
def pair(start: StartEngine) -> tuple[Cell, Cell]:
    """Prefill and decode, each in its container."""
    prefill, decode = start("kv_producer", wait=False), start("kv_consumer", wait=False)
    for cell in (prefill, decode):
        cell.wait_until(lambda cell=cell: cell.ready)
    return prefill, decode


def hand_over(prefill: Cell, decode: Cell, name: str, prompt: list[int]) -> None:
    """One request, in place."""
    result = decode.run(name, prompt, prefill.prefill(name, prompt))
    assert result["params"]["mc2"]["way"] == "attach", result
    assert result["computed"] == 1


def catch(prefill: Cell, decode: Cell, name: str, prompt: list[int]) -> None:
    """A long request that is attached and runs."""
    decode.add(name, prompt, prefill.prefill(name, prompt), LONG)
    decode.wait_until(lambda: decode.ask("report")["snapshot"]["borrowed_blocks"])


def test_in_place_from_container_to_container(pair: tuple[Cell, Cell]) -> None:
    prefill, decode = pair
    # They really are apart: each has the other's id, its own view of the directory, and sees none of the other's processes.
    assert prefill.born["pid"] == decode.born["pid"] != prefill.host_pid
    assert prefill.directory != decode.directory
    namespaces = [{os.readlink(f"/proc/{cell.host_pid}/ns/{kind}") for kind in ("pid", "mnt", "net")} for cell in pair]
    assert not namespaces[0] & namespaces[1]
    hand_over(prefill, decode, "r", PROMPT)
    assert decode.pools_mapped() == 1
    prefill.settle()
    decode.settle()


@pytest.mark.parametrize("leaves_child", [False, True], ids=["", "whose child keeps its sockets"])
def test_a_killed_decode_is_noticed(pair: tuple[Cell, Cell], leaves_child: bool) -> None:
    """By its pidfd, which the socket gives us although its number means nothing here; else the child would hide it."""
    prefill, decode = pair
    catch(prefill, decode, "r", PROMPT)
    if leaves_child:
        decode.tell("sleeper")
        decode.ask("report")
    decode.kill()
    assert prefill.settle()["stats"]["leases_ended|peer_gone"] == 1


@pytest.mark.parametrize("leaves_child", [False, True], ids=["", "whose child keeps its sockets"])
def test_a_killed_prefill_is_noticed(
    pair: tuple[Cell, Cell], start: StartEngine, shared: Path, leaves_child: bool
) -> None:
    """What was claimed is finished from the mapped memory; what was not is computed; an idle decode gives the memory back."""
    prefill, decode = pair
    orphan = prefill.prefill("orphan", OTHER)
    catch(prefill, decode, "r", PROMPT)
    if leaves_child:
        prefill.tell("sleeper")
        prefill.ask("report")
    prefill.kill()
    result = decode.run("orphan", OTHER, orphan)
    assert (result["params"]["mc2"]["way"], result["computed"]) == ("recompute", len(OTHER))
    assert decode.result("r")["tokens"] == expected_tokens(PROMPT, LONG)
    decode.wait_until(lambda: decode.pools_mapped() == 0)  # asleep: nobody tells it anything
    decode.settle()
    # The one who takes its place removes what it left, serves the same decode, and is another engine to old tickets.
    again = start("kv_producer")
    hand_over(again, decode, "again", PROMPT)
    if not leaves_child:  # which still listens where the dead one did, so that one would wait for an answer
        assert len(os.listdir(shared)) == 4
        assert decode.run("old", OTHER, orphan)["params"]["mc2"]["way"] == "recompute"
    again.settle()
    decode.settle()


def test_a_stopped_engine_is_not_taken_for_dead(pair: tuple[Cell, Cell]) -> None:
    prefill, decode = pair
    hand_over(prefill, decode, "r", PROMPT)
    os.kill(prefill.host_pid, signal.SIGSTOP)
    try:
        assert decode.run("meanwhile", OTHER, None)["computed"] == len(OTHER)
        assert decode.pools_mapped() == 1
    finally:
        os.kill(prefill.host_pid, signal.SIGCONT)
    hand_over(prefill, decode, "after", prompt_of_family(3, 70))


def test_the_sweep_takes_no_neighbour_for_dead(pair: tuple[Cell, Cell], shared: Path) -> None:
    """Its process id cannot be had, which says nothing: neither is its socket removed, nor does the sweep wait for its end."""
    prefill, decode = pair
    before = sorted(os.listdir(shared))
    assert len(before) == 4
    for cell in pair:
        assert cell.ask("sweep", directory=cell.directory)["removed"] == 0
    assert sorted(os.listdir(shared)) == before
    prefill.kill()
    assert decode.ask("sweep", directory=decode.directory)["removed"] == 2
    assert len(os.listdir(shared)) == 2


def test_inspect_from_within_and_without(pair: tuple[Cell, Cell], shared: Path) -> None:
    """In a container it shows a neighbour without its process id; on the host, all of them."""
    prefill, decode = pair
    catch(prefill, decode, "r", PROMPT)
    report = prefill.ask("look", directory=prefill.directory)
    assert report["roles"] == ["prefill", "decode"]
    assert (report["num_workers"], report["unanswered"], report["stale"]) == (2, 0, [])
    assert report["holders"] == report["peers"] == [0]
    found = look(shared)
    assert [engine.pid for engine in found.engines] == [prefill.born["pid"], decode.born["pid"]]


def test_one_container_and_the_host(start: StartEngine) -> None:
    """A process on the host sees the ids of those in containers, which do not see its."""
    prefill, decode = start("kv_producer", container=False), start("kv_consumer")
    hand_over(prefill, decode, "r", PROMPT)
    assert decode.ask("sweep", directory=decode.directory)["removed"] == 0
    assert prefill.ask("sweep", directory=prefill.directory)["removed"] == 0
    catch(prefill, decode, "long", OTHER)
    decode.kill()
    assert prefill.settle()["stats"]["leases_ended|peer_gone"] == 1
