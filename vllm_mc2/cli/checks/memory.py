"""How much memory, address space and descriptors an engine may have here."""

import resource
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from vllm_mc2.cli.checks.settings import Wanted
from vllm_mc2.findings import Finding, Value
from vllm_mc2.layout import ALIGNMENT_BYTES, DEFAULT_WINDOW_BYTES, make_plan

KIB, GIB = 1 << 10, 1 << 30
OWN_GROUPS = Path("/proc/self/cgroup")
GROUPS = Path("/sys/fs/cgroup")
LITTLE_BYTES = GIB
"""Less than a model and its KV cache need, whatever the model."""

MIN_OPEN_FILES = 1024
UNLIMITED_BYTES = 1 << 60
"""What a control group of version 1 without a limit says is above."""

_SMALLER = "free memory, or give the engine a smaller KV cache (--kv-cache-memory-bytes)"


def memory_findings(wanted: Wanted) -> list[Finding]:
    """RAM, control group and limits of this process, which an engine that is started from here inherits."""
    facts = meminfo()
    group = tightest_group()
    return [
        _memory(facts, group),
        _control_group(group),
        _overcommit(facts),
        _address_space(wanted),
        _open_files(),
        _locked_memory(),
    ]


def meminfo() -> dict[str, int]:
    """``/proc/meminfo`` in bytes; counts of pages, which have no unit there, as they are."""
    facts = {}
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        key, _, rest = line.partition(":")
        number, _, unit = rest.strip().partition(" ")
        facts[key] = int(number) * (KIB if unit == "kB" else 1)
    return facts


class Group(NamedTuple):
    """A memory control group, as its files say."""

    path: Path
    limit_bytes: int | None
    used_bytes: int
    reclaimable_bytes: int
    """Of what is used: page cache that the kernel gives up before it refuses."""

    @property
    def headroom_bytes(self) -> int | None:
        """What may still be taken; None without a limit."""
        if self.limit_bytes is None:
            return None
        return max(0, self.limit_bytes - max(0, self.used_bytes - self.reclaimable_bytes))


def tightest_group() -> Group | None:
    """Of this process's memory control group and its ancestors the one with the least room, or its own if none has a limit.

    The places are those where a pool looks before it is made (``csrc/memory/memory_info.cpp``).
    """
    groups = list(_groups())
    limited = [(group.headroom_bytes, index) for index, group in enumerate(groups) if group.headroom_bytes is not None]
    if limited:
        return groups[min(limited)[1]]
    return groups[0] if groups else None


def _groups() -> Iterator[Group]:
    """From this process's own group upwards. In a container the path may be the host's; then there is only the root's."""
    for line in OWN_GROUPS.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, names, key = GROUPS, ("memory.max", "memory.current"), "inactive_file"
        elif "memory" in controllers.split(","):
            root = GROUPS / "memory"
            names, key = ("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_inactive_file"
        else:
            continue
        own = root / path.lstrip("/")
        for directory in (own, *own.parents):
            if directory.is_relative_to(root):
                group = _group(directory, names, key)
                if group is not None:
                    yield group


def _group(directory: Path, names: tuple[str, str], key: str) -> Group | None:
    try:
        limit, used = ((directory / name).read_text().strip() for name in names)
        stat = dict(line.split(" ", 1) for line in (directory / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None  # no such group here, or the root of version 2, which has no limit
    limit_bytes = int(limit) if limit.isdecimal() and int(limit) < UNLIMITED_BYTES else None
    return Group(directory, limit_bytes, int(used), int(stat.get(key, 0)))


def _memory(facts: dict[str, int], group: Group | None) -> Finding:
    total, available = facts["MemTotal"], facts["MemAvailable"]
    headroom = group.headroom_bytes if group is not None else None
    pool = available if headroom is None else min(available, headroom)
    text = f"{gib(available)} of {gib(total)} are available; a prefill's KV cache may have {gib(pool)} now"
    values: dict[str, Value] = {"total_bytes": total, "available_bytes": available, "max_pool_bytes": pool}
    if pool < LITTLE_BYTES:
        return Finding("memory", "warn", text, _SMALLER, values)
    return Finding("memory", "pass", text, values=values)


def _control_group(group: Group | None) -> Finding:
    name = "control group"
    if group is None:
        return Finding(name, "info", "no memory control group is visible here: none limits it, or none can be seen")
    values: dict[str, Value] = {
        "path": str(group.path),
        "limit_bytes": group.limit_bytes,
        "used_bytes": group.used_bytes,
    }
    if group.limit_bytes is None or group.headroom_bytes is None:
        return Finding(name, "pass", f"no limit; {gib(group.used_bytes)} used in {group.path}", values=values)
    text = f"at most {gib(group.limit_bytes)}, {gib(group.used_bytes)} used, {gib(group.headroom_bytes)} left in {group.path}"
    if group.headroom_bytes < LITTLE_BYTES:
        return Finding(name, "warn", text, "raise the container's memory limit", values)
    return Finding(name, "pass", text, values=values)


def _overcommit(facts: dict[str, int]) -> Finding:
    name = "overcommit"
    mode = int(Path("/proc/sys/vm/overcommit_memory").read_text())
    values: dict[str, Value] = {
        "mode": mode,
        "commit_limit_bytes": facts["CommitLimit"],
        "committed_bytes": facts["Committed_AS"],
    }
    if mode != 2:
        kind = "always" if mode == 1 else "by heuristics"
        return Finding(name, "pass", f"mode {mode}, {kind}; address space alone counts as nothing", values=values)
    left = facts["CommitLimit"] - facts["Committed_AS"]
    text = (
        f"mode 2, strict: {gib(max(0, left))} of {gib(facts['CommitLimit'])} are left for all that processes allocate"
    )
    advice = "see that both engines fit (sysctl vm.overcommit_memory, vm.overcommit_ratio)"
    return Finding(name, "warn", text, advice, values)


def _address_space(wanted: Wanted) -> Finding:
    """Decode keeps address space for its peers' pools: try to."""
    from vllm_mc2.memory import WorkerMemory

    name = "address space"
    limit = _soft_limit(resource.RLIMIT_AS)
    said = "no limit" if limit is None else f"limited to {gib(limit)} (ulimit -v)"
    factor = wanted.config.window_pool_factor
    values: dict[str, Value] = {"limit_bytes": limit, "window_bytes": DEFAULT_WINDOW_BYTES if factor is None else None}
    if wanted.role == "kv_producer":
        return Finding(name, "info", f"{said}; a prefill needs none for peers", values=values)
    if factor is not None:
        text = f"{said}; a decode with this window_pool_factor needs {factor:g} times its own KV cache"
        return Finding(name, "info", text, values=values)
    try:
        memory = WorkerMemory(make_plan([("doctor", ALIGNMENT_BYTES)], 1, None), shared=False, huge_pages="off")
    except OSError as error:
        text = f"{said}: a decode's window cannot be reserved: {error}"
        advice = f"ulimit -v unlimited for decode, or a smaller window_pool_factor (without one: {gib(DEFAULT_WINDOW_BYTES)})"
        return Finding(name, "fail", text, advice, values)
    reserved = memory.plan.range_bytes
    del memory
    return Finding(name, "pass", f"{said}; {gib(reserved)} for a decode's window could be reserved", values=values)


def _open_files() -> Finding:
    soft, hard = _soft_limit(resource.RLIMIT_NOFILE), _limit(resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    text = f"{_count(soft)} now, {_count(hard)} at most"
    values: dict[str, Value] = {"soft_limit": soft, "hard_limit": hard}
    if soft is not None and soft < MIN_OPEN_FILES:
        advice = f"ulimit -n {MIN_OPEN_FILES} or more: each peer takes several descriptors, each client of vLLM one"
        return Finding("open files", "warn", text, advice, values)
    return Finding("open files", "pass", text, values=values)


def _locked_memory() -> Finding:
    limit = _soft_limit(resource.RLIMIT_MEMLOCK)
    said = "no limit" if limit is None else f"at most {limit // KIB} KiB (ulimit -l)"
    text = f"{said}; nothing on one host is locked, a transfer engine with RDMA locks all that it reads or writes"
    return Finding("locked memory", "info", text, values={"limit_bytes": limit})


def _soft_limit(kind: int) -> int | None:
    return _limit(resource.getrlimit(kind)[0])


def _limit(value: int) -> int | None:
    return None if value == resource.RLIM_INFINITY else value


def _count(limit: int | None) -> str:
    return "no limit" if limit is None else str(limit)


def gib(num_bytes: int) -> str:
    """In the unit in which memory is bought."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB // 10 else f"{num_bytes / (1 << 20):.1f} MiB"
