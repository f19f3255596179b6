"""D22: too little memory of any kind ends the start, with what was wanted, what there is and what to do. Never a SIGBUS later.

Prefill's pool is a memfd, which lies in the kernel's own shared memory and not in /dev/shm: no tmpfs has a say in it. What does
is a control group, the host's memory, reserved huge pages, and a process's limits.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.isolation.conftest import ROOT, StartEngine

MIB = 1 << 20
CHILD = f"""
import ctypes, os, resource, sys
from pathlib import Path
group, num_mib, huge_pages, limits = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4:]
if group:
    Path(group, "cgroup.procs").write_text(str(os.getpid()))
if "small /dev/shm" in limits:
    from tests.isolation import namespaces
    namespaces.unshare(namespaces.NEWNS)
    namespaces.mount("none", Path("/"), "", namespaces.PRIVATE)
    namespaces.mount("tmpfs", Path("/dev/shm"), "tmpfs", data="size=64k")
    assert os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize == 65536
if "no THP" in limits:
    assert ctypes.CDLL(None).prctl(41, 1, 0, 0, 0) == 0
from vllm_mc2.layout import make_plan
from vllm_mc2.memory import WorkerMemory

if "file size" in limits:
    resource.setrlimit(resource.RLIMIT_FSIZE, ({MIB}, {MIB}))
if "address space" in limits:
    resource.setrlimit(resource.RLIMIT_AS, ({MIB} << 11, {MIB} << 11))
plan = make_plan([("layer", 65536)], num_mib * 16, 200.0 if "address space" in limits else 0.0)
try:
    memory = WorkerMemory(plan, shared=True, huge_pages=huge_pages)
except OSError as error:
    sys.exit(f"refused: {{error}}")
view = memory.buffer()
for offset in range(0, num_mib * {MIB}, 4096):
    view[offset] = 1
print("all touched,", memory.page_summary)
"""


def make_pool(
    num_mib: int, *limits: str, group: Path | None = None, huge_pages: str = "off"
) -> subprocess.CompletedProcess[str]:
    """A pool of ``num_mib`` in a process of its own, every page of which is written."""
    command = [sys.executable, "-c", CHILD, str(group or ""), str(num_mib), huge_pages, *limits]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode != -signal.SIGBUS
    return done


def refusal(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 1 and done.stderr.startswith("refused: "), (done.returncode, done.stderr)
    return done.stderr


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group with 256 MiB."""
    root = Path("/sys/fs/cgroup")
    v1 = root / "memory"
    path = (v1 if v1.is_dir() else root) / f"mc2-test-{os.getpid()}"
    try:
        path.mkdir()
        limit = path / ("memory.limit_in_bytes" if v1.is_dir() else "memory.max")
        limit.write_text(str(256 * MIB))
    except OSError as error:
        with contextlib.suppress(OSError):
            path.rmdir()
        pytest.skip(f"no memory control group can be made here: {error}")
    yield path
    path.rmdir()


def test_a_control_group_that_is_too_small(group: Path) -> None:
    text = refusal(make_pool(512, group=group))
    wanted, available = (int(word) for word in text.split() if word.isdigit() and int(word) > MIB)
    assert wanted == 512 * MIB and 0 < available < 256 * MIB
    assert "bytes wanted" in text and "bytes available" in text
    assert "more memory, or the KV cache less" in text
    # What fits is had in full, to the last page.
    assert make_pool(96, group=group).stdout == "all touched, 0% in 2 MiB pages (none)\n"


def test_dev_shm_has_no_say(why_no_containers: str | None) -> None:
    if why_no_containers is not None:
        pytest.skip(f"no namespaces can be made here: {why_no_containers}")
    done = make_pool(64, "small /dev/shm")
    assert done.stdout.startswith("all touched"), done.stderr


def test_huge_pages_that_are_required_and_not_there() -> None:
    # How many are free is others' doing, how many there are is not.
    lines = Path("/proc/meminfo").read_text().splitlines()
    if next(line.split()[1] for line in lines if line.startswith("HugePages_Total")) != "0":
        pytest.skip("this host has reserved huge pages")
    text = refusal(make_pool(32, "no THP", huge_pages="require"))
    assert f"pool of {32 * MIB} bytes required in huge pages, got 0 bytes" in text
    assert "vm.nr_hugepages" in text and "huge_pages to 'auto'" in text
    # `auto` takes what there is, and says so.
    assert make_pool(32, "no THP", huge_pages="auto").stdout == "all touched, 0% in 2 MiB pages (none)\n"


def test_a_limit_on_file_sizes() -> None:
    text = refusal(make_pool(32, "file size"))
    assert f"{32 * MIB} bytes" in text and "ulimit -f" in text


def test_a_limit_on_address_space() -> None:
    text = refusal(make_pool(32, "address space"))
    assert "bytes of address space" in text and "ulimit -v" in text and "window_pool_factor" in text


def test_an_engine_says_so_at_start(start: StartEngine) -> None:
    """1 TiB: more than any machine has that runs this."""
    cell = start("kv_producer", container=False, num_blocks=1 << 26, wait=False)
    cell.wait_until(lambda: cell.crash)
    assert "bytes wanted" in cell.crash and "bytes available" in cell.crash
    assert "VLLM_CPU_KVCACHE_SPACE" in cell.crash
