"""D21: what fifty killed prefills leave behind: sockets, which are swept, and no memory at all."""

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.descriptors import open_descriptors
from tests.support.waiting import wait_until
from tests.unit.test_protocol import POOL
from vllm_mc2.channel import prepare_socket_dir, socket_path, sweep_stale_sockets
from vllm_mc2.protocol import PoolGrant, new_incarnation
from vllm_mc2.session import Answer, SessionServer

POOL_BYTES = 4 << 20
CHILD = f"""
import sys, time
from pathlib import Path
from tests.isolation import namespaces
folder, group = sys.argv[1:]
if group:
    Path(group, "cgroup.procs").write_text("0")
try:
    namespaces.unshare(namespaces.NEWNS)
    namespaces.mount("none", Path("/"), "", namespaces.PRIVATE)
    namespaces.mount("tmpfs", Path("/dev/shm"), "tmpfs")
    has_own = True
except OSError:
    has_own = False
from vllm_mc2._native import LeaseTable, Pool
from vllm_mc2.protocol import new_incarnation
from vllm_mc2.session import SessionServer
pool, table = Pool({POOL_BYTES}, huge_pages="off"), LeaseTable(64, 64)
server = SessionServer(Path(folder), new_incarnation(), lambda key, hello: None, lambda key: None)
print("ready", has_own, flush=True)
time.sleep(600)
"""
MEMFD = re.compile(r"/memfd:mc2")


@pytest.fixture
def group() -> Iterator[Path | None]:
    """A memory control group for the prefills, if one can be made: what they leave behind is counted there and nowhere else."""
    root = Path("/sys/fs/cgroup")
    path = (root / "memory" if (root / "memory").is_dir() else root) / f"mc2-d21-{os.getpid()}"
    with contextlib.suppress(OSError):
        path.mkdir()
    has_counter = (path / "memory.stat").exists() and os.access(path / "cgroup.procs", os.W_OK)
    yield path if has_counter else None
    if path.exists():
        path.rmdir()


def shared_bytes(group: Path) -> int:
    """Pages of memfds and of tmpfs that the group is charged for."""
    found = re.search(r"^shmem (\d+)$", (group / "memory.stat").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1])


def memfds_of(pid: int | str) -> set[int]:
    """Inodes of what is ours among the memfds that a process has open or mapped."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        opened = [fd for fd, target in open_descriptors(pid).items() if MEMFD.match(target)]
        mapped = re.findall(r"(\d+) +/memfd:mc2", Path(f"/proc/{pid}/maps").read_text())
        return {os.stat(f"/proc/{pid}/fd/{fd}").st_ino for fd in opened} | set(map(int, mapped))
    return set()


def memory_of_prefill(child: subprocess.Popen[str]) -> set[int]:
    """Its memfds, once it is ready. It has no other shared memory: what has a name is there now, or never."""
    assert child.stdout is not None
    ready, has_own = child.stdout.readline().split()
    assert ready == "ready"
    if has_own == "True":
        assert os.listdir(f"/proc/{child.pid}/root/dev/shm") == []
    assert "/dev/shm" not in Path(f"/proc/{child.pid}/maps").read_text()
    assert not any(target.startswith("/dev/shm") for target in open_descriptors(child.pid).values())
    return memfds_of(child.pid)


def test_d21_fifty_killed_prefills_leave_sockets_only(tmp_path: Path, group: Path | None) -> None:
    directory = tmp_path / "s"
    prepare_socket_dir(directory)
    neighbour = SessionServer(
        directory, new_incarnation(), lambda key, hello: Answer(PoolGrant(POOL)), lambda key: None
    )
    memory: set[int] = set()
    for _ in range(5):
        command = [sys.executable, "-c", CHILD, str(directory), str(group or "")]
        children = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(10)]
        try:
            for child in children:
                own = memory_of_prefill(child)
                assert len(own) >= 2 and not own & memory  # a pool and a table, which nobody else has
                memory |= own
            if group is not None:
                assert shared_bytes(group) >= len(children) * POOL_BYTES
        finally:
            for child in children:
                child.kill()
                child.communicate(timeout=60)
    assert not memfds_of("self") & memory
    if group is not None:
        # The kernel counts in batches, for each processor apart: less than a quarter of one pool is none.
        wait_until(lambda: shared_bytes(group) < POOL_BYTES // 4, "the end of all shared memory")
    assert len(list(directory.glob("*.sock"))) == 51
    stranger = directory / "not-ours.txt"
    stranger.touch()
    assert sweep_stale_sockets(directory) == 50
    assert sorted(directory.iterdir()) == sorted([neighbour.path, stranger])
    # A stale file under a new engine's very name does not become its socket, and does not stop the sweep either.
    name = new_incarnation()
    socket_path(directory, name).touch()
    assert sweep_stale_sockets(directory) == 1
    # Killed between bind and rename: a name that nobody can connect to.
    unnamed = directory / "0123456789abcdef.new"
    unnamed.touch()
    os.utime(unnamed, (1, 1))
    (directory / "fedcba9876543210.new").touch()
    assert sweep_stale_sockets(directory) == 1
    assert not unnamed.exists()
    server = SessionServer(directory, name, lambda key, hello: Answer(PoolGrant(POOL)), lambda key: None)
    assert server.path.is_socket()
    server.close()
    neighbour.close()
