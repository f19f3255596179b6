"""D21: what fifty killed prefills leave behind: sockets, which are swept, and no memory at all."""

import os
import subprocess
import sys
from pathlib import Path

from tests.unit.test_protocol import POOL
from vllm_mc2.channel import prepare_socket_dir, socket_path, sweep_stale_sockets
from vllm_mc2.protocol import PoolGrant, new_incarnation
from vllm_mc2.session import Answer, SessionServer

CHILD = """
import sys, time
from pathlib import Path
from vllm_mc2._native import LeaseTable, Pool
from vllm_mc2.protocol import new_incarnation
from vllm_mc2.session import SessionServer
pool, table = Pool(4 << 20, huge_pages="off"), LeaseTable(64, 64)
server = SessionServer(Path(sys.argv[1]), new_incarnation(), lambda key, hello: None, lambda key: None)
print("ready", flush=True)
time.sleep(60)
"""


def shared_memory_kib() -> int:
    """Shmem of /proc/meminfo: every memfd and tmpfs page of this machine."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("Shmem:")).split()[1])


def test_d21_fifty_killed_prefills_leave_sockets_only(tmp_path: Path) -> None:
    directory = tmp_path / "s"
    prepare_socket_dir(directory)
    neighbour = SessionServer(
        directory, new_incarnation(), lambda key, hello: Answer(PoolGrant(POOL)), lambda key: None
    )
    shm_before = sorted(os.listdir("/dev/shm"))
    memory_before = shared_memory_kib()
    for _ in range(5):
        children = [
            subprocess.Popen([sys.executable, "-c", CHILD, str(directory)], stdout=subprocess.PIPE, text=True)
            for _ in range(10)
        ]
        for child in children:
            assert child.stdout is not None and child.stdout.readline() == "ready\n"
        for child in children:
            child.kill()
            child.wait(timeout=30)
            assert child.stdout is not None
            child.stdout.close()
    assert sorted(os.listdir("/dev/shm")) == shm_before
    # Fifty pools of 4 MiB would be 200 MiB. Others use this machine too, hence no exact figure.
    assert shared_memory_kib() - memory_before < 100 << 10
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
