"""Whether a kernel on this NPU can read own memory and another process's through one block table, which attach would need.

CANN documents that one reserved range of addresses must not hold own and imported memory at once, so the expected answer is no.
The probe asks the device: a process of its own shares a few blocks with known bytes, they are mapped behind own ones, and a
kernel gathers rows of both by their number.
"""

from collections.abc import Callable

import msgspec
import torch

from vllm_mc2._native import Acl, AclError, AddressProbe
from vllm_mc2.ascend.compat import first_line, tensor_at
from vllm_mc2.ascend.sharing import native_segments
from vllm_mc2.device_messages import DeviceGrant

OWN_BYTES = 2 << 20
NUM_ROWS = 4


def why_not_in_one_range(
    acl: Acl, device: int, grant: DeviceGrant, expected: Callable[[int, int, int], torch.Tensor]
) -> str:
    """Why own memory and that of ``grant`` cannot be read through one table, or nothing if they can.

    ``expected(strip, block, bytes)``: what stands in a block of the grant.
    """
    strip, start = grant.strips[0], grant.segments[0].address
    row_bytes = strip.num_bytes
    if OWN_BYTES % row_bytes or (strip.address - start) % row_bytes or strip.stride_bytes != row_bytes:
        return "the probe's blocks do not lie in rows of one length"
    try:
        with AddressProbe(acl, device, OWN_BYTES, native_segments(grant)) as probe:
            own_rows = OWN_BYTES // row_bytes
            first_peer = own_rows + (strip.address - start) // row_bytes
            num_rows = first_peer + grant.num_blocks
            rows = tensor_at(probe.address, num_rows * row_bytes, device).view(num_rows, row_bytes)
            own = (
                torch.arange(NUM_ROWS * row_bytes, dtype=torch.int64).remainder(127).to(torch.uint8).view(NUM_ROWS, -1)
            )
            rows[:NUM_ROWS].copy_(own)
            table = [row for pair in range(NUM_ROWS) for row in (pair, first_peer + pair)]
            found = torch.index_select(rows, 0, torch.tensor(table, device=f"npu:{device}")).cpu()
    except (AclError, RuntimeError, ValueError) as error:
        return first_line(error)
    wanted = torch.stack([row for pair in range(NUM_ROWS) for row in (own[pair], expected(0, pair, row_bytes))])
    return "" if torch.equal(found, wanted) else "a kernel does not read what stands there"


def probe_attach(acl: Acl, device: int) -> str:
    """The same, with a process that shares; takes as long as a Python with torch_npu takes to start."""
    from vllm_mc2.ascend.selftest import RemoteSide, SideError
    from vllm_mc2.ascend.selftest_side import block_bytes

    side = RemoteSide(device)
    try:
        side.call("allocate", 2 * NUM_ROWS, True)
        _, _, encoded = side.call("share")
        side.call("admit", acl.bare_tgid())
        return why_not_in_one_range(acl, device, decode_grant(encoded), block_bytes)
    except (SideError, AclError) as error:
        return str(error)
    finally:
        side.close()


def decode_grant(encoded: bytes) -> DeviceGrant:
    """What :meth:`~vllm_mc2.ascend.selftest_side.Side.share` gives."""
    return msgspec.msgpack.decode(encoded, type=DeviceGrant)
