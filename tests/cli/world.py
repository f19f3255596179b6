"""Kernels that can less than this one: a child that forbids itself system calls (seccomp(2))."""

import errno
import platform
from typing import NamedTuple

NUMBERS = {
    "x86_64": {"madvise": 28, "getsockopt": 55, "memfd_create": 319, "pidfd_open": 434},
    "aarch64": {"madvise": 233, "getsockopt": 209, "memfd_create": 279, "pidfd_open": 434},
}.get(platform.machine())


class Forbidden(NamedTuple):
    """A system call that fails, if its argument ``index`` (from 0) is ``value``."""

    name: str
    code: int = errno.EPERM
    index: int | None = None
    value: int = 0


def forbidding(*calls: Forbidden) -> str:
    """Python source that makes these calls fail in its process from then on."""
    assert NUMBERS is not None
    load, equal, give_back = 0x20, 0x15, 0x06
    program: list[tuple[int, int, int, int]] = []
    for call in calls:
        program.append((load, 0, 0, 0))  # the number of the call
        refusal = (give_back, 0, 0, 0x00050000 | call.code)
        if call.index is None:
            program += [(equal, 0, 1, NUMBERS[call.name]), refusal]
        else:
            program += [
                (equal, 0, 3, NUMBERS[call.name]),
                (load, 0, 0, 16 + 8 * call.index),
                (equal, 0, 1, call.value),
                refusal,
            ]
    program.append((give_back, 0, 0, 0x7FFF0000))
    return f"""
import ctypes, struct
code = b"".join(struct.pack("HBBI", *each) for each in {program!r})
kept = ctypes.create_string_buffer(code)
program = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(kept))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, ctypes.create_string_buffer(program), 0, 0) == 0, ctypes.get_errno()
"""
