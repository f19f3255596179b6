"""What a container is made of: namespaces, a uid of its own, and a socket directory that is mounted somewhere else.

Everything here runs in a process that has just been forked and has one thread, since the kernel makes no user namespace for
another. Only standard modules: a process of another uid may be unable to import anything.
"""

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path

NEWNS, _NEWUTS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = (
    0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
)  # fmt: skip
_MS_BIND, PRIVATE = 0x1000, 0x4000 | 1 << 18
_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def unshare(flags: int) -> None:
    """unshare(2); Python has it since 3.12."""
    _check(_libc.unshare(flags), f"unshare(0x{flags:x})")


def mount(source: str, target: Path, kind: str, flags: int = 0, data: str = "") -> None:
    """mount(2)."""
    arguments = (source.encode(), os.fspath(target).encode(), kind.encode(), flags, data.encode())
    _check(_libc.mount(*arguments), f"mount {kind or source} at {target}")


def enter(directory: Path, inside: Path) -> None:
    """Namespaces of our own for mounts, network, IPC and host name, and for the processes that are forked from now on.

    ``directory`` is found at ``inside`` from here on, and nowhere else.
    """
    unshare(NEWNS | _NEWUTS | _NEWIPC | _NEWNET | _NEWPID)
    mount("none", Path("/"), "", PRIVATE)
    mount("tmpfs", inside.parent, "tmpfs")
    inside.mkdir()
    mount(os.fspath(directory), inside, "", _MS_BIND)
    mount("tmpfs", directory, "tmpfs")


def show_own_processes() -> None:
    """A /proc of the process namespace; to be called by its first process."""
    mount("proc", Path("/proc"), "proc")


def map_uids(pid: int, ranges: Sequence[tuple[int, int, int]]) -> None:
    """Give a process that has just made a user namespace its ids: ``(first inside, first outside, how many)``. Needs root."""
    text = "".join(f"{inside} {outside} {count}\n" for inside, outside, count in ranges)
    for name in ("uid_map", "gid_map"):
        Path(f"/proc/{pid}/{name}").write_text(text)


def become(uid: int) -> None:
    """Another user, for good."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def in_user_namespace(ranges: Sequence[tuple[int, int, int]]) -> None:
    """A user namespace of our own. A helper process, which is still outside, writes the map: only root there may map several."""
    go_read, go_write = os.pipe()
    done_read, done_write = os.pipe()
    own_pid = os.getpid()
    helper = os.fork()
    if helper == 0:
        code = 1
        try:
            os.read(go_read, 1)
            map_uids(own_pid, ranges)
            code = 0
        finally:
            os.write(done_write, bytes([code]))
            os._exit(code)
    unshare(_NEWUSER)
    os.write(go_write, b"!")
    failed = os.read(done_read, 1) != b"\0"
    os.waitpid(helper, 0)
    for fd in (go_read, go_write, done_read, done_write):
        os.close(fd)
    if failed:
        raise PermissionError("no ids can be mapped into a user namespace here")


def why_not() -> str | None:
    """Why no container can be made here, or None. Tries it, in a child."""
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            in_user_namespace([(0, 0, 1)])
            unshare(NEWNS | _NEWUTS | _NEWIPC | _NEWNET | _NEWPID)
            mount("none", Path("/"), "", PRIVATE)
            mount("tmpfs", Path("/mnt"), "tmpfs")
            if os.fork() == 0:
                try:
                    show_own_processes()
                except OSError as error:
                    os.write(write_fd, str(error).encode())
                os._exit(0)
            os.wait()
        except OSError as error:
            os.write(write_fd, str(error).encode())
        finally:
            os._exit(0)
    os.close(write_fd)
    os.waitpid(pid, 0)
    with os.fdopen(read_fd) as pipe:
        return pipe.read() or None


if __name__ == "__main__":
    print(why_not() or "")
