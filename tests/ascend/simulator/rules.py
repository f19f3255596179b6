"""What the tests of the simulator share."""

from collections.abc import Callable

import pytest

from tests.ascend.simulator.bindings import (
    HUGE,
    AclError,
    Process,
)

Start = Callable[..., Process]

INVALID = 107000
SLOW = {"MC2_ACL_SIM_COPY_DELAY_US": "1000000"}
"""A copy takes longer than it takes a busy machine to ask whether it is over."""

PAGE = 4096
SEGV = -11


def refuses(code: int, call: Callable[..., object], *arguments: object) -> str:
    with pytest.raises(AclError) as caught:
        call(*arguments)
    assert caught.value.code == code, caught.value
    assert caught.value.text != ""
    return caught.value.text


def mapped(process: Process, num_bytes: int = HUGE, device: int = 0) -> tuple[int, int, int]:
    """Reservation, handle and reservation size of one mapped piece."""
    handle = process.malloc_physical(num_bytes, device)
    pointer = process.reserve(num_bytes)
    process.map(pointer, num_bytes, handle)
    return pointer, handle, num_bytes
