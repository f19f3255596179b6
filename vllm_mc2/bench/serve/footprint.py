"""What server processes use of the machine: CPU and memory, read from ``/proc``."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from vllm_mc2.bench.servers import Server

_PSS = re.compile(rb"^Pss:\s+(\d+) kB", re.MULTILINE)
# The first line of a mapping: addresses, rights, offset, device, inode, name.
_MAPPING = re.compile(rb"^[0-9a-f]+-[0-9a-f]+ \S+ [0-9a-f]+ \S+ (\d+)\s*(.*)$")
_MEMFD = "/memfd:"


def cpu_seconds(servers: Iterable[Server]) -> float:
    """CPU time that all threads of these servers have used so far."""
    # The scheduler's own nanoseconds; the usual counters have a resolution of 10 ms.
    return sum(_run_seconds(task) for pid in _pids(servers) for task in _entries(Path(f"/proc/{pid}/task")))


def idle_cores(servers: Sequence[Server], seconds: float) -> float:
    """Seconds of CPU per second over the next ``seconds``."""
    before, started = cpu_seconds(servers), time.monotonic()
    time.sleep(seconds)
    return (cpu_seconds(servers) - before) / (time.monotonic() - started)


def memory_bytes(servers: Iterable[Server]) -> int:
    """Memory of these servers: what several processes share is counted once, and so is a memfd, mapped or not."""
    pids = list(_pids(servers))
    allocated = {inode: size for pid in pids for inode, size in _memfds(pid)}
    kib = 0
    for pid in pids:
        kib += sum(int(match) for match in _PSS.findall(_read(f"/proc/{pid}/smaps_rollup")))
        if _MEMFD.encode() in _read(f"/proc/{pid}/maps"):
            # Pss shares a page among those that have touched it; what nobody has touched is memory as well.
            mapped = _memfd_pss_kib(_read(f"/proc/{pid}/smaps"))
            kib -= sum(size for inode, size in mapped if inode in allocated)
    return kib * 1024 + sum(allocated.values())


def _memfd_pss_kib(smaps: bytes) -> Iterator[tuple[int, int]]:
    """Inode and Pss of each mapping of a memfd."""
    inode: int | None = None
    for line in smaps.splitlines():
        if (mapping := _MAPPING.match(line)) is not None:
            inode = int(mapping[1]) if mapping[2].startswith(_MEMFD.encode()) else None
        elif inode is not None and (pss := _PSS.match(line)) is not None:
            yield inode, int(pss[1])


def _pids(servers: Iterable[Server]) -> Iterator[int]:
    for server in servers:
        for process in server.processes():
            yield process.pid


def _memfds(pid: int) -> Iterator[tuple[int, int]]:
    """Inode and allocated bytes of each memfd that a process has open."""
    for entry in _entries(Path(f"/proc/{pid}/fd")):
        with suppress(OSError):
            if str(entry.readlink()).startswith(_MEMFD):
                status = entry.stat()
                yield status.st_ino, status.st_blocks * 512


def _run_seconds(task: Path) -> float:
    fields = _read(str(task / "schedstat")).split()
    return int(fields[0]) * 1e-9 if fields else 0.0


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _read(path: str) -> bytes:
    """The file, or nothing if its process has ended."""
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""
