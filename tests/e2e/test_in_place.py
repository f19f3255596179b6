"""It is really the prefill's memory, really in place, and nobody is kept busy by it."""

import os
import re
import socket
import time
from pathlib import Path

import psutil
import pytest

from tests.e2e.conftest import Rig, processes_named, prompt_of
from tests.support.waiting import wait_until
from vllm_mc2.channel import peer_credentials

pytestmark = [pytest.mark.e2e]

MAPS_LINE = re.compile(r"^(\S+)-(\S+) (\S+) \S+ (\S+) (\d+)\s+/memfd:mc2-kv-pool")


def pool_mappings(pid: int) -> list[tuple[str, str]]:
    """``(inode, permissions)`` of each mapping of an mc2 pool."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [(match[5], match[3]) for match in map(MAPS_LINE.match, lines) if match]


def worker_of(server: object) -> psutil.Process:
    workers = [p for p in processes_named(server, "") if pool_mappings(p.pid)]  # type: ignore[arg-type]
    assert len(workers) == 1
    return workers[0]


def private_kib(pid: int) -> int:
    """Memory that only this process has."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return sum(int(value) for value in re.findall(r"Private_\w+:\s+(\d+) kB", text))


def test_decode_reads_prefills_very_pages(rig: Rig) -> None:
    rig.complete(rig.proxy.url, prompt_of(300, seed=1))
    theirs, ours = worker_of(rig.prefill), worker_of(rig.decode)
    lender, borrower = pool_mappings(theirs.pid), pool_mappings(ours.pid)
    assert {inode for inode, _ in lender} == {inode for inode, _ in borrower}
    assert len({inode for inode, _ in lender}) == 1
    assert {permissions for _, permissions in lender} == {"rw-s"}
    assert {permissions for _, permissions in borrower} == {"r--s"}


def test_decodes_private_memory_does_not_grow_with_the_prompt(rig: Rig) -> None:
    """An attached prompt of 1,500 tokens has 1.4 MiB of KV in the tiny model; a copy would show for many prompts."""
    rig.complete(rig.proxy.url, prompt_of(1500, seed=2), 2)
    worker = worker_of(rig.decode)
    before = private_kib(worker.pid)
    num_prompts = 20
    not_copied = 0
    for index in range(num_prompts):
        not_copied += rig.complete(rig.proxy.url, prompt_of(1500, seed=10 + index), 2).report["kv_bytes_not_copied"]
    grown = private_kib(worker.pid) - before
    assert not_copied > 20 << 20
    assert grown * 1024 < not_copied / 4


def test_an_attached_prompt_occupies_no_local_block_while_it_decodes(rig: Rig) -> None:
    """10 attached blocks on an engine that has 11 in all, of which one is taken: for the tail and what is generated."""
    prompt = prompt_of(1300, seed=3)
    ticket = rig.ticket(prompt)
    body = {
        "model": rig.model, "prompt": prompt, "max_tokens": 60, "temperature": 0, "ignore_eos": True, "stream": True,
        "kv_transfer_params": ticket,
    }  # fmt: skip
    usage = 0.0
    with rig.client.stream("POST", f"{rig.small_decode.url}/v1/completions", json=body) as response:
        for number, _ in enumerate(response.iter_lines()):
            if number == 20:
                # The gauge is as old as the engine's last statistics, so look until it shows this request.
                usage = rig.metric(rig.small_decode, "vllm:kv_cache_usage_perc")
    assert 0 < usage < 1.5 / 11, usage
    rig.assert_clean()


def test_an_idle_prefill_does_not_step_while_decode_runs(rig: Rig) -> None:
    """It holds a lease all the time. Its engine core sleeps: no step, so nearly no CPU and no context switches."""
    prompt = prompt_of(1000, seed=4)
    ticket = rig.ticket(prompt)
    (engine,) = processes_named(rig.prefill, "EngineCore")

    def is_asleep() -> bool:
        """vLLM's queue readers spin for a while after each message."""
        before = sum(engine.cpu_times()[:2])
        time.sleep(1)
        return sum(engine.cpu_times()[:2]) - before < 0.05

    wait_until(is_asleep, "the engine's rest")
    before, switches = sum(engine.cpu_times()[:2]), engine.num_ctx_switches().voluntary
    started = time.monotonic()
    answer = rig.complete(rig.decode.url, prompt, 1000, kv_transfer_params=ticket)
    elapsed = time.monotonic() - started
    assert answer.report["way"] == "attach"
    used = sum(engine.cpu_times()[:2]) - before
    assert used < 0.05 * elapsed + 0.1, (used, elapsed)
    steps = engine.num_ctx_switches().voluntary - switches
    assert steps < 200, steps  # decode made 1,000 steps meanwhile
    rig.assert_clean()


def test_only_sockets_of_live_processes_in_a_private_directory(rig: Rig) -> None:
    info = os.stat(rig.socket_dir)
    assert info.st_mode & 0o777 == 0o700
    ours = {process.pid for server in rig.engines for process in server.processes()}
    listeners = []
    for path in rig.socket_dir.iterdir():
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(path))
            listeners.append(peer_credentials(sock)[0])
    assert len(listeners) == len(set(listeners)) >= 4  # one of each process that owns something
    assert set(listeners) <= ours
