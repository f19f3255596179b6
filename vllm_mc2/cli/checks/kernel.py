"""What the kernel lets a process do, found out by doing it to a few pages."""

import errno
import fcntl
import mmap
import os
import platform
import socket
import sys
from pathlib import Path

from vllm_mc2.channel import open_peer_pidfd
from vllm_mc2.findings import Finding, Value

_SEAL_FUTURE_WRITE = 0x10  # these are kernel ABI; Python's modules do not have them yet
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE, _MADV_COLLAPSE = 22, 23, 25
_SECCOMP = "or a seccomp profile of the container forbids it"


def kernel_findings() -> list[Finding]:
    """Facts about the kernel, and about the calls that pools and peers need."""
    return [_system(), _sealed_memory(), _pidfd(), _populate(), _collapse(), _namespaces()]


def _system() -> Finding:
    release, machine, python = platform.release(), platform.machine(), platform.python_version()
    text = f"{platform.system()} {release}, {machine}, Python {python}"
    values: dict[str, Value] = {
        "release": release,
        "machine": machine,
        "python": python,
        "num_cpus": len(os.sched_getaffinity(0)),
    }
    if sys.platform != "linux":
        return Finding("kernel", "fail", text, "Linux is needed", values)
    return Finding("kernel", "pass", f"{text}, {values['num_cpus']} processors", values=values)


def _sealed_memory() -> Finding:
    """What keeps a peer from writing to a pool, or from cutting it off under its readers."""
    name, advice = "sealed memory", f"Linux 5.1 or later is needed; {_SECCOMP}"
    try:
        fd = os.memfd_create("mc2-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        return Finding(name, "fail", f"memfd_create: {error}", advice)
    try:
        os.ftruncate(fd, mmap.PAGESIZE)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        mmap.mmap(fd, mmap.PAGESIZE, prot=mmap.PROT_READ).close()
        try:
            mmap.mmap(fd, mmap.PAGESIZE).close()
        except PermissionError:
            return Finding(name, "pass", "shared memory can be sealed against writing and truncation")
        return Finding(name, "fail", "sealed shared memory could be mapped writable", advice)
    except OSError as error:
        return Finding(name, "fail", f"F_SEAL_FUTURE_WRITE: {error}", advice)
    finally:
        os.close(fd)


def _pidfd() -> Finding:
    """How an engine hears of a peer's death although somebody else keeps its socket open."""
    left, right = socket.socketpair()
    with left, right:
        fd = open_peer_pidfd(left)
    has_open = True
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        has_open = False
    values: dict[str, Value] = {"has_peer_pidfd": fd is not None, "has_pidfd_open": has_open}
    if fd is None:
        text = "no pidfd of a peer can be had: that a peer has died is told by its socket alone"
        return Finding("pidfd", "warn", text, f"Linux 5.3 or later; {_SECCOMP}", values)
    os.close(fd)
    return Finding("pidfd", "pass", "the end of a peer's process can be waited for", values=values)


def _populate() -> Finding:
    try:
        with mmap.mmap(-1, mmap.PAGESIZE) as memory:
            memory.madvise(_MADV_POPULATE_WRITE)
            memory.madvise(_MADV_POPULATE_READ)
    except OSError as error:
        text = f"MADV_POPULATE_READ, MADV_POPULATE_WRITE: {error}; memory is made ready page by page"
        return Finding("MADV_POPULATE", "warn", text, "Linux 5.14 or later is faster at starting and at mapping peers")
    return Finding("MADV_POPULATE", "pass", "page tables can be filled in at once")


def _collapse() -> Finding:
    with mmap.mmap(-1, mmap.PAGESIZE) as memory:
        try:
            memory.madvise(_MADV_COLLAPSE, 0, 0)  # of nothing: only a kernel that does not know it refuses
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            text = "MADV_COLLAPSE is not known: 2 MiB pages only from reserved huge pages or shared-memory THP"
            return Finding("MADV_COLLAPSE", "info", text, "Linux 6.1 or later has it")
    return Finding("MADV_COLLAPSE", "pass", "known; whether it gives 2 MiB pages is tried below")


def _namespaces() -> Finding:
    """Peers must be the same user; in another PID namespace a peer can be talked to, but has no process id here."""
    spaces = {}
    for kind in ("pid", "user", "net"):
        try:
            spaces[f"{kind}_namespace"] = str(Path(f"/proc/self/ns/{kind}").readlink()).partition("[")[2].rstrip("]")
        except OSError:
            spaces[f"{kind}_namespace"] = "?"
    uid = os.geteuid()
    text = f"uid {uid}, PID namespace {spaces['pid_namespace']}, user namespace {spaces['user_namespace']}"
    return Finding("user", "info", text, values={"uid": uid, **spaces})
