"""What a process holds, as the kernel tells it: descriptors, threads, and mappings of our memfds. No vllm, no torch."""

import contextlib
import os
import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

_LINE = re.compile(r"^\S+ (\S{4}) \S+ \S+ (\d+)\s+/memfd:mc2-([a-z-]+)", re.MULTILINE)
POOL, INDEX, LEDGER = "kv-pool", "index", "ledger"


class Mapping(NamedTuple):
    """A memfd of ours in a process's address space."""

    kind: str
    inode: int
    writable: bool


class Footprint(NamedTuple):
    """Of one process, at one moment."""

    fds: int
    threads: int
    maps: dict[Mapping, int]
    """How many address ranges show each memfd."""

    def inodes(self, kind: str, *, writable: bool | None = None) -> set[int]:
        """Memfds of a kind."""
        return {m.inode for m in self.maps if m.kind == kind and writable in (None, m.writable)}


def footprint(pid: int) -> Footprint | None:
    """None when the process is gone."""
    root = Path(f"/proc/{pid}")
    with contextlib.suppress(OSError):
        num_fds = len(os.listdir(root / "fd")) - (pid == os.getpid())  # the listing itself needs one
        threads = len(os.listdir(root / "task"))
        found = _LINE.findall((root / "maps").read_text())
        maps = Counter(Mapping(kind, int(inode), perms[1] == "w") for perms, inode, kind in found)
        return Footprint(num_fds, threads, dict(maps))
    return None


def open_files(pid: int) -> str:
    """What the descriptors of a process are, by kind, for the report of a leak."""
    kinds: Counter[str] = Counter()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            kinds[re.sub(r"\d{2,}", "*", os.readlink(link))] += 1
    return ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))


def state_of(pid: int) -> str:
    """The process's state letter (proc(5)); ``X`` when there is none."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return "X"
