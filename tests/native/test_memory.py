"""Pools and address ranges as Python sees them; the core has its own tests in csrc/tests."""

import errno
import gc
import os
import signal
import subprocess
import sys
import threading

import pytest

from vllm_mc2 import _native
from vllm_mc2._native import HUGE_PAGE_BYTES, AddressRange, Pool

PAGE_BYTES = 4096

# What a peer does with the descriptor; the arguments are the descriptor and the size.
PEER = """
import sys
from vllm_mc2._native import AddressRange
fd, num_bytes, mode = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
peer = AddressRange(num_bytes)
peer.map_peer(0, fd, 0, num_bytes)
peer.prefault(0, num_bytes)
view = peer.buffer()
assert view[5] == 42
if mode == "write":
    view[5] = 1
"""


def run_peer(pool: Pool, mode: str) -> int:
    command = [sys.executable, "-c", PEER, str(pool.fd), str(pool.num_bytes), mode]
    return subprocess.run(command, pass_fds=[pool.fd], timeout=60, check=False).returncode


def test_public_surface() -> None:
    public = {name for name in vars(_native) if not name.startswith("_")}
    of_ascend = {
        "Acl", "AclError", "AclNotSupportedError", "AddressProbe", "DeviceCopier", "DeviceExport", "DeviceImport",
    }  # fmt: skip
    of_host = {"HUGE_PAGE_BYTES", "AddressRange", "BlockCopier", "IdSpan", "LeaseReader", "LeaseTable", "Pool"}
    assert public == of_host | of_ascend


@pytest.mark.parametrize("huge_pages", ["auto", "off"])
def test_peer_reads_in_place_and_cannot_write(huge_pages: str) -> None:
    with Pool(HUGE_PAGE_BYTES + 1, huge_pages=huge_pages, name="test") as pool:  # type: ignore[arg-type]
        assert pool.num_bytes == 2 * HUGE_PAGE_BYTES
        owner = AddressRange(pool.num_bytes)
        owner.map_pool(0, pool, 0, pool.num_bytes)
        owner.buffer()[5] = 42
        sealed_before = pool.sealed
        pool.seal()
        assert (sealed_before, pool.sealed) == (False, True)
        assert run_peer(pool, "read") == 0
        assert run_peer(pool, "write") == -signal.SIGSEGV
        assert owner.buffer()[5] == 42


def test_pool_properties() -> None:
    pool = Pool(1, huge_pages="off")
    assert (pool.method, pool.huge_bytes, pool.page_bytes) == ("none", 0, PAGE_BYTES)
    auto = Pool(1)
    assert auto.method in {"hugetlb", "thp", "collapse", "none"}
    assert (auto.page_bytes == HUGE_PAGE_BYTES) == (auto.huge_bytes == auto.num_bytes)


def test_descriptor_is_borrowed_and_guarded() -> None:
    pool = Pool(1)
    with pytest.raises(ValueError, match="not sealed"):
        _ = pool.fd
    pool.seal()
    assert os.fstat(pool.fd).st_size == pool.num_bytes
    with pytest.raises(ValueError, match="sealed"):
        AddressRange(HUGE_PAGE_BYTES).map_pool(0, pool, 0, HUGE_PAGE_BYTES)
    pool.close()
    pool.close()
    with pytest.raises(ValueError, match="closed"):
        _ = pool.fd


def test_misuse_is_value_error() -> None:
    with pytest.raises(ValueError, match="sometimes"):
        Pool(1, huge_pages="sometimes")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_bytes"):
        Pool(0)
    with pytest.raises(ValueError, match="multiple"):
        AddressRange(PAGE_BYTES + 1)
    memory = AddressRange(HUGE_PAGE_BYTES)
    with pytest.raises(ValueError, match="not inside"):
        memory.map_anonymous(2**64 - PAGE_BYTES, 2 * PAGE_BYTES)
    with pytest.raises(TypeError):
        memory.map_anonymous(-PAGE_BYTES, PAGE_BYTES)


def test_lack_of_memory_is_os_error_with_sizes() -> None:
    wanted = 2**45
    with pytest.raises(OSError, match=rf"{wanted} bytes wanted, \d+ bytes available") as caught:
        Pool(wanted)
    assert caught.value.errno == errno.ENOMEM


def test_foreign_descriptor_must_be_sealed() -> None:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, HUGE_PAGE_BYTES)
        memory = AddressRange(HUGE_PAGE_BYTES)
        with pytest.raises(ValueError, match="not sealed"):
            memory.map_peer(0, fd, 0, HUGE_PAGE_BYTES)
        with pytest.raises(ValueError, match="not a memfd"):
            memory.map_peer(0, -1, 0, HUGE_PAGE_BYTES)
    finally:
        os.close(fd)


def test_map_unmap_and_mappings() -> None:
    memory = AddressRange(4 * HUGE_PAGE_BYTES)
    pool = Pool(HUGE_PAGE_BYTES)
    memory.map_pool(0, pool, 0, HUGE_PAGE_BYTES)
    pool.seal()
    memory.map_peer(HUGE_PAGE_BYTES, pool.fd, 0, HUGE_PAGE_BYTES)
    memory.map_anonymous(2 * HUGE_PAGE_BYTES, HUGE_PAGE_BYTES)
    assert memory.mappings() == [
        (0, HUGE_PAGE_BYTES, "pool"),
        (HUGE_PAGE_BYTES, HUGE_PAGE_BYTES, "peer"),
        (2 * HUGE_PAGE_BYTES, HUGE_PAGE_BYTES, "anonymous"),
    ]
    with pytest.raises(ValueError, match="overlaps"):
        memory.map_anonymous(HUGE_PAGE_BYTES, PAGE_BYTES)
    memory.unmap(HUGE_PAGE_BYTES, 2 * HUGE_PAGE_BYTES)
    assert memory.mappings() == [(0, HUGE_PAGE_BYTES, "pool")]


def test_copy_between_parts() -> None:
    memory = AddressRange(2 * HUGE_PAGE_BYTES)
    memory.map_anonymous(0, 2 * HUGE_PAGE_BYTES)
    view = memory.buffer()
    view[0] = 7
    view[1] = -8
    memory.copy([(HUGE_PAGE_BYTES, 0, 2), (HUGE_PAGE_BYTES + 2, 0, 1)])
    assert list(view[HUGE_PAGE_BYTES : HUGE_PAGE_BYTES + 4]) == [7, -8, 7, 0]
    with pytest.raises(ValueError, match="overlaps"):
        memory.copy([(8, 0, 1), (1, 0, 2)])
    assert view[8] == 0


def test_buffer_keeps_the_range() -> None:
    memory = AddressRange(HUGE_PAGE_BYTES)
    memory.map_anonymous(0, HUGE_PAGE_BYTES)
    view = memory.buffer()
    with pytest.raises(ValueError, match="1 views"):
        memory.close()
    view[3] = 5
    del memory
    gc.collect()
    assert view[3] == 5
    assert (view.format, view.nbytes, view.readonly) == ("b", HUGE_PAGE_BYTES, False)


def test_close_after_the_views() -> None:
    memory = AddressRange(HUGE_PAGE_BYTES)
    view = memory.buffer()
    view.release()
    del view
    gc.collect()
    memory.close()
    memory.close()
    with pytest.raises(ValueError, match="closed"):
        memory.buffer()


def test_huge_range_as_tensor_shares_the_pointer() -> None:
    torch = pytest.importorskip("torch")
    memory = AddressRange(512 << 30)
    memory.map_anonymous(0, HUGE_PAGE_BYTES)
    tensor = torch.frombuffer(memory.buffer(), dtype=torch.int8)
    assert tensor.data_ptr() == memory.address
    assert tensor.numel() == memory.num_bytes
    tensor[9] = 3
    assert memory.buffer()[9] == 3
    with pytest.raises(ValueError, match="views"):
        memory.close()
    del memory
    gc.collect()
    assert tensor[9] == 3


def test_gil_is_free_while_a_pool_is_made() -> None:
    pools: list[Pool] = []
    started = threading.Event()

    def make() -> None:
        started.set()
        pools.append(Pool(256 << 20, huge_pages="off"))

    maker = threading.Thread(target=make)
    maker.start()
    assert started.wait(30)
    steps = 0
    while maker.is_alive():
        steps += 1
    maker.join()
    assert pools[0].num_bytes == 256 << 20
    # With the GIL held there is one switch to us at most before and one after; free, there are thousands.
    assert steps > 100


# Main ends while another thread is in here without the GIL, as an engine's does when it is stopped while it copies.
ENDS_IN_A_CALL = """
import threading, time
from vllm_mc2._native import AddressRange
memory = AddressRange(64 << 20)
memory.map_anonymous(0, 64 << 20)
def run():
    while True:
        memory.prefault(0, 64 << 20)
        memory.copy([(0, 32 << 20, 1 << 20)])
threading.Thread(target=run, daemon=True).start()
time.sleep(0.05)
"""


def test_the_process_ends_quietly_while_a_thread_is_in_native_code() -> None:
    for _ in range(5):
        child = subprocess.run([sys.executable, "-c", ENDS_IN_A_CALL], capture_output=True, timeout=60, check=False)
        assert (child.returncode, child.stderr) == (0, b"")
