"""Which pages a KV pool gets here: what the kernel has, and what a small pool really got."""

import re
from pathlib import Path
from typing import Literal

from vllm_mc2.findings import Finding, Value
from vllm_mc2.layout import ALIGNMENT_BYTES, make_plan

HugePages = Literal["auto", "off", "require"]
PROBE_BYTES = 4 * ALIGNMENT_BYTES
_THP = Path("/sys/kernel/mm/transparent_hugepage")
_RESERVED = Path("/sys/kernel/mm/hugepages")
_ADVICE = (
    "for 2 MiB pages: Linux 6.1 or later (MADV_COLLAPSE), or sysctl vm.nr_hugepages=N with room for the whole pool,"
    f" or echo advise > {_THP}/shmem_enabled"
)


def huge_page_findings(wanted: HugePages) -> list[Finding]:
    """``wanted`` is the setting ``huge_pages``."""
    return [_reserved(), _transparent(), _pool(wanted)]


def _reserved() -> Finding:
    values: dict[str, Value] = {}
    texts = []
    for directory in sorted(_RESERVED.glob("hugepages-*kB"), key=lambda path: _size_kib(path.name)):
        size = _size_kib(directory.name)
        total, free, promised = (
            _number(directory / name) for name in ("nr_hugepages", "free_hugepages", "resv_hugepages")
        )
        values |= {f"total_{size}kB": total, f"free_{size}kB": free, f"promised_{size}kB": promised}
        texts.append(f"{free} of {total} free of {size // 1024} MiB each")
        if size * 1024 == ALIGNMENT_BYTES and free > promised:
            texts[-1] += f", enough for a pool of {(free - promised) * 2} MiB"
    return Finding("reserved huge pages", "info", "; ".join(texts) or "not in this kernel", values=values)


def _size_kib(name: str) -> int:
    return int(re.sub(r"\D", "", name))


def _number(path: Path) -> int:
    return int(path.read_text())


def _transparent() -> Finding:
    """The choice in each file stands in brackets."""
    values: dict[str, Value] = {}
    for key, path in (
        ("enabled", _THP / "enabled"),
        ("shmem_enabled", _THP / "shmem_enabled"),
        ("shmem_enabled_2048kB", _THP / "hugepages-2048kB" / "shmem_enabled"),
    ):
        try:
            chosen = re.search(r"\[(\w+)\]", path.read_text())
        except OSError:
            chosen = None
        values[key] = chosen[1] if chosen else None
    text = f"{values['enabled'] or 'not in this kernel'}; of shared memory: {values['shmem_enabled'] or 'not in this kernel'}"
    if values["shmem_enabled_2048kB"] not in {None, "inherit"}:
        text += f", of 2 MiB: {values['shmem_enabled_2048kB']}"
    return Finding("transparent huge pages", "info", text, values=values)


def _pool(wanted: HugePages) -> Finding:
    """Make a pool as a prefill does."""
    if wanted == "off":
        return Finding("pages of a pool", "info", "4 KiB, as huge_pages = 'off' asks for")
    try:
        pages = _try_pool("require")
    except OSError as refusal:
        if wanted == "require":
            return Finding("pages of a pool", "fail", f"huge_pages = 'require': {refusal}", _ADVICE)
    else:
        return _pool_finding("pass", pages)
    try:
        pages = _try_pool("auto")
    except OSError as error:
        return Finding(
            "pages of a pool", "fail", f"no pool of {PROBE_BYTES >> 20} MiB can be made: {error}", "free memory"
        )
    return _pool_finding("warn", pages)


def _pool_finding(state: Literal["pass", "warn"], pages: str) -> Finding:
    values: dict[str, Value] = {"pages": pages, "probe_bytes": PROBE_BYTES}
    text = f"{pages}: what a pool of {PROBE_BYTES >> 20} MiB got"
    return Finding("pages of a pool", state, text, "" if state == "pass" else _ADVICE, values)


def _try_pool(huge_pages: Literal["auto", "require"]) -> str:
    from vllm_mc2.memory import WorkerMemory

    plan = make_plan([("doctor", ALIGNMENT_BYTES)], PROBE_BYTES // ALIGNMENT_BYTES, 0.0)
    return WorkerMemory(plan, shared=True, huge_pages=huge_pages).page_summary
