"""What the simulated processes of ``test_native.py`` do, each in a child of its own."""

from __future__ import annotations

import ctypes
import json
import random
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from vllm_mc2._native import (
    HUGE_PAGE_BYTES,
    Acl,
    AclError,
    AclNotSupportedError,
    AddressProbe,
    DeviceCopier,
    DeviceExport,
    DeviceImport,
)

BLOCKS = [HUGE_PAGE_BYTES, 2 * HUGE_PAGE_BYTES, HUGE_PAGE_BYTES]
POOL_BYTES = sum(BLOCKS)
LIVE = ["reservations", "mappings", "malloc", "physical", "imports", "exports", "ipc_imports", "ipc_exports", "streams"]
FAULT = 507899
H2D, D2H = 1, 2


class Property(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint32) for name in ("handle", "allocation", "attribute", "id", "type", "padding")]
    _fields_ += [("reserve", ctypes.c_uint64)]


class Machine:
    """A simulated machine as this child has it, with what tests need beyond our own module."""

    def __init__(self, path: str, device: int) -> None:
        self.library = ctypes.CDLL(path)
        self.library.mc2_sim_live.restype = ctypes.c_int64
        self.library.mc2_sim_violations.restype = ctypes.c_int64
        self.library.mc2_sim_violation_text.restype = ctypes.c_char_p
        self.library.mc2_sim_calls.restype = ctypes.c_int64
        self.device = device
        self.acl = Acl(path)
        self.acl.initialize()
        self.acl.set_device(device)

    def call(self, name: str, *arguments: Any) -> None:
        code = self.library[name](*arguments)
        assert code == 0, f"{name}: {code}"

    def pool(self) -> int:
        """Blocks side by side in one reservation."""
        address = ctypes.c_void_p()
        size = ctypes.c_size_t
        self.call("aclrtReserveMemAddress", ctypes.byref(address), size(POOL_BYTES), size(0), None, ctypes.c_uint64(1))
        assert address.value
        at = address.value
        for num_bytes in BLOCKS:
            handle = ctypes.c_void_p()
            prop = Property(0, 0, 4, self.device, 1, 0, 0)
            self.call(
                "aclrtMallocPhysical", ctypes.byref(handle), size(num_bytes), ctypes.byref(prop), ctypes.c_uint64(0)
            )
            self.call("aclrtMapMem", ctypes.c_void_p(at), size(num_bytes), size(0), handle, ctypes.c_uint64(0))
            at += num_bytes
        return address.value

    def malloc(self, num_bytes: int) -> int:
        address = ctypes.c_void_p()
        self.call("aclrtMalloc", ctypes.byref(address), ctypes.c_size_t(num_bytes), 0)
        assert address.value
        return address.value

    def write(self, address: int, data: bytes) -> None:
        size = ctypes.c_size_t(len(data))
        self.call("aclrtMemcpy", ctypes.c_void_p(address), size, data, size, H2D)

    def read(self, address: int, num_bytes: int) -> bytes:
        data = ctypes.create_string_buffer(num_bytes)
        size = ctypes.c_size_t(num_bytes)
        self.call("aclrtMemcpy", data, size, ctypes.c_void_p(address), size, D2H)
        return data.raw

    def fail(self, name: str, skip: int = 0, code: int = FAULT, times: int = 1) -> None:
        self.library.mc2_sim_fail(name.encode(), skip, code, times)

    def live(self) -> dict[str, int]:
        return {name: self.library.mc2_sim_live(name.encode()) for name in LIVE}

    def check_rules(self) -> None:
        assert self.library.mc2_sim_violations() == 0, self.library.mc2_sim_violation_text()


def content(num_bytes: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(num_bytes)


# ---- the exporter's side, a child of its own


def exporter(path: str) -> None:
    machine = Machine(path, 0)
    address = machine.pool()
    plain = machine.malloc(HUGE_PAGE_BYTES)
    machine.write(address, content(POOL_BYTES, 1))
    machine.write(plain, content(HUGE_PAGE_BYTES, 2))
    before = machine.live()
    exported = DeviceExport(machine.acl, 0)
    segments = exported.add_allocation(address + 1, POOL_BYTES - 2)
    assert exported.add_allocation(address, 1) == segments[:1]
    segments.append(exported.add_key(plain, HUGE_PAGE_BYTES))
    assert (exported.num_segments, exported.num_bytes) == (4, POOL_BYTES + HUGE_PAGE_BYTES)
    rows = [(kind, base, size, handle.hex()) for kind, base, size, handle in segments]
    print(json.dumps(rows), flush=True)
    for line in sys.stdin:
        exported.admit(int(line))
        print("admitted", flush=True)
    exported.close()
    exported.close()
    for refused in (lambda: exported.admit(1), lambda: exported.add_key(plain, 1)):
        with pytest.raises(ValueError, match="closed"):
            refused()
    machine.check_rules()
    assert {**machine.live(), "exports": 0} == before


# ---- what an importer does with them; each is a test


class Importer:
    """What a child that imports has: its machine, its own pool, and what it was given."""

    def __init__(self, path: str) -> None:
        self.machine = Machine(path, 1)
        self.acl = self.machine.acl
        self.pool = self.machine.pool()
        self.segments = [(kind, base, size, bytes.fromhex(key)) for kind, base, size, key in json.loads(input())]
        self.peer = self.segments[0][1]
        self.before = self.machine.live()

    def admit(self) -> None:
        print(self.acl.bare_tgid(), flush=True)
        assert input() == "admitted"

    def open(self) -> DeviceImport:
        return DeviceImport(self.acl, 1, self.segments)

    def check(self) -> None:
        self.machine.check_rules()
        assert self.machine.live() == self.before


def do_errors(child: Importer) -> None:
    with pytest.raises(
        AclError, match=r"aclrtMemImportFromShareableHandleV2: error 507899 \(DRV_INTERNAL_ERROR\): .*allowed"
    ) as info:
        DeviceImport(child.acl, 1, child.segments[:1])
    assert (info.value.call, info.value.code) == ("aclrtMemImportFromShareableHandleV2", 507899)
    assert isinstance(info.value, RuntimeError)
    assert not isinstance(info.value, AclNotSupportedError)
    child.machine.fail("aclrtReserveMemAddress", code=207000)
    with pytest.raises(AclNotSupportedError, match="FEATURE_NOT_SUPPORT") as other:
        DeviceImport(child.acl, 1, child.segments[:1])
    assert other.value.code == 207000
    child.machine.fail("aclrtSetDevice", code=123456)
    with pytest.raises(AclError, match=r"^aclrtSetDevice: error 123456: "):
        child.acl.set_device(0)


def do_segments(child: Importer) -> None:
    child.admit()
    kind, base, size, handle = child.segments[0]
    for bad in (
        [],
        [("handle_v3", base, size, handle)],
        [(kind, 0, size, handle)],
        [(kind, base, 0, handle)],
        [(kind, base, size - 1, handle)],
        [(kind, base, 2**64 - HUGE_PAGE_BYTES, handle)],
        [(kind, base, size, handle[:-1])],
        [("fabric", base, size, handle)],
        [("ipc_key", base, size, handle)],
        [child.segments[0], child.segments[0]],
    ):
        with pytest.raises(ValueError, match=r"segment|handle|ipc_key|fabric"):
            DeviceImport(child.acl, 1, bad)
    with pytest.raises(TypeError):
        DeviceImport(child.acl, 1, [(kind, base, -1, handle)])
    # The order is the peer's business.
    imported = DeviceImport(child.acl, 1, child.segments[::-1])
    assert (imported.num_mappings, imported.num_bytes) == (2, POOL_BYTES + HUGE_PAGE_BYTES)
    ours = imported.translate(child.peer, POOL_BYTES)
    assert imported.translate(child.peer + BLOCKS[0] - 1, 2) == ours + BLOCKS[0] - 1
    with pytest.raises(ValueError, match="not mapped in one piece"):
        imported.translate(child.peer, POOL_BYTES + 1)
    imported.close()
    imported.close()
    with pytest.raises(ValueError, match="closed"):
        imported.translate(child.peer, 1)


def do_copies(child: Importer) -> None:
    child.admit()
    theirs = content(POOL_BYTES, 1)
    expected = bytearray(content(POOL_BYTES, 3))
    child.machine.write(child.pool, bytes(expected))
    rng = random.Random(7)
    with child.open() as imported:
        for _ in range(20):
            num_bytes = 64 * rng.randint(1, 40)
            dense = rng.random() < 0.5
            own, peer = (num_bytes + (0 if dense else 64 * rng.randrange(9)) for _ in range(2))
            start = BLOCKS[0] - 64 * rng.randrange(100)
            num_dst, num_src = rng.randint(1, 200), rng.randint(1, 200)
            strip = (child.pool, own, child.peer + start, peer, num_bytes)
            dst = rng.sample(range(num_dst), rng.randint(0, num_dst))
            src = [rng.randrange(num_src) for _ in dst]
            with DeviceCopier(child.acl, 1, imported, [strip], num_dst, num_src, rng.randint(1, 6)) as copier:
                assert copier.bytes_per_block == num_bytes
                assert copier.copy(dst, src, rng.randint(1, 4)) == len(dst) * num_bytes
            for to, of in zip(dst, src, strict=True):
                at = start + of * peer
                expected[to * own : to * own + num_bytes] = theirs[at : at + num_bytes]
            assert child.machine.read(child.pool, POOL_BYTES) == expected


def do_copy_arguments(child: Importer) -> None:
    child.admit()
    with child.open() as imported:
        good = (child.pool, 64, child.peer, 64, 64)
        for num_dst, num_src, strip in (
            (4, POOL_BYTES // 64 + 1, good),
            (2**60, 4, good),
            (0, 4, good),
            (4, 4, (child.pool, 63, child.peer, 64, 64)),
            (4, 4, (child.pool, 64, child.peer - 64, 64, 64)),
            (4, 4, (child.pool, 64, child.peer, 2**64 - 1, 64)),
            (4, 4, (0, 64, child.peer, 64, 64)),
        ):
            with pytest.raises(ValueError, match=r"strip|mapped|nothing"):
                DeviceCopier(child.acl, 1, imported, [strip], num_dst, num_src)
        copier = DeviceCopier(child.acl, 1, imported, [good], 4, 4)
    # The import is closed, the copier has the mapping.
    for dst, src in (([4], [0]), ([0], [4]), ([-1], [0]), ([0, 0], [1, 2]), ([0], [0, 1])):
        with pytest.raises(ValueError, match="block"):
            copier.copy(dst, src)
    with pytest.raises(ValueError, match="timeout"):
        copier.copy([0], [0], timeout_seconds=0)
    assert child.machine.library.mc2_sim_calls(b"aclrtMemcpyAsync") == 0
    assert copier.copy([3], [2]) == 64
    assert child.machine.read(child.pool + 3 * 64, 64) == content(POOL_BYTES, 1)[128:192]
    copier.close()
    copier.close()
    with pytest.raises(ValueError, match="closed"):
        copier.copy([0], [0])


def do_late_copy(child: Importer) -> None:
    child.admit()
    with (
        child.open() as imported,
        DeviceCopier(child.acl, 1, imported, [(child.pool, 128, child.peer, 64, 64)], 8, 8) as copier,
    ):
        child.machine.library.mc2_sim_set_copy_delay_us(ctypes.c_int64(30000))
        with pytest.raises(AclError, match="STREAM_SYNC_TIMEOUT"):
            copier.copy([0, 1, 2], [0, 1, 2], timeout_seconds=0.001)
        after = child.machine.read(child.pool, 1024)
        # Another thread runs while a copy waits.
        copying = threading.Thread(target=copier.copy, args=([4, 5], [0, 1]))
        copying.start()
        num_turns = 0
        while copying.is_alive():
            num_turns += 1
        copying.join()
        assert num_turns > 1
        assert child.machine.read(child.pool, 512) == after[:512]


def do_probe(child: Importer) -> None:
    child.admit()
    with pytest.raises(AclError, match="aclrtMapMem"):
        AddressProbe(child.acl, 1, HUGE_PAGE_BYTES, child.segments[:-1])
    with pytest.raises(ValueError, match="own_bytes"):
        AddressProbe(child.acl, 1, 4096, child.segments[:-1])


def do_mixed_probe(child: Importer) -> None:
    child.admit()
    with AddressProbe(child.acl, 1, HUGE_PAGE_BYTES, child.segments[:-1]) as probe:
        assert (probe.own_bytes, probe.peer_bytes) == (HUGE_PAGE_BYTES, POOL_BYTES)
        seen = child.machine.read(probe.address, HUGE_PAGE_BYTES)
        assert len(seen) == HUGE_PAGE_BYTES


def do_faults(child: Importer) -> None:
    """Fails every call in turn; close() is tried again, as its documentation says."""
    child.admit()

    def closes(thing: DeviceImport | DeviceCopier) -> bool:
        try:
            thing.close()
        except AclError:
            thing.close()
            return True
        return False

    def run() -> bool:
        try:
            imported = child.open()
            copier = DeviceCopier(child.acl, 1, imported, [(child.pool, 64, child.peer, 64, 64)], 8, 8, 2)
            try:
                copier.copy([0, 2, 5], [1, 3, 4], 2)
                has_thrown = False
            except AclError:
                has_thrown = True
                copier.copy([0, 2, 5], [1, 3, 4], 2)
            has_thrown |= closes(copier)
            return closes(imported) or has_thrown
        except AclError:
            return True

    calls = ["aclrtSetDevice", "aclrtReserveMemAddress", "aclrtMemImportFromShareableHandleV2", "aclrtMapMem"]
    calls += ["aclrtIpcMemImportByKey", "aclrtCreateStream", "aclrtMemcpyAsync", "copy-task", "aclrtDestroyStream"]
    calls += ["aclrtSynchronizeStreamWithTimeout", "aclrtUnmapMem", "aclrtFreePhysical", "aclrtReleaseMemAddress"]
    for name in [*calls, "aclrtIpcMemClose"]:
        for skip in range(100):
            child.machine.fail(name, skip)
            has_thrown = run()
            child.machine.library.mc2_sim_clear_faults()
            assert child.machine.live() == child.before, (name, skip)
            if not has_thrown:
                break
        assert 0 < skip < 99, (name, skip)


IMPORTERS: dict[str, Callable[[Importer], None]] = {
    name: value for name, value in list(globals().items()) if name.startswith("do_")
}


def importer(path: str, name: str) -> None:
    child = Importer(path)
    IMPORTERS[name](child)
    child.check()


# ---- one process alone


def questions(path: str) -> None:
    acl = Acl(path)
    acl.initialize()
    acl.initialize()
    assert acl.has("aclrtMapMem")
    assert not acl.has("aclrtNoSuchCall")
    assert acl.num_devices() == 2
    assert acl.device_info(1, 402) == 1
    assert acl.device_info(1, 424242) is None
    assert acl.topology(0, 1) == 1
    assert acl.physical_device(1) == 1
    assert acl.can_access_peer(0, 1) is True
    assert acl.soc_name() == "Ascend910B3"
    assert acl.version("driver") == "26.0.RC1"
    with pytest.raises(AclError, match="INVALID_DEVICEID"):
        acl.device_info(7, 402)


def old_release(path: str) -> None:
    machine = Machine(path, 0)
    address = machine.pool()
    exported = DeviceExport(machine.acl, 0)
    with pytest.raises(AclNotSupportedError, match=r"aclrtMemGetAddressRange: .*does not have it") as info:
        exported.add_allocation(address, POOL_BYTES)
    assert info.value.code == 207000
    assert not machine.acl.has("aclrtMemGetAddressRange")
    assert exported.add_key(machine.malloc(HUGE_PAGE_BYTES), HUGE_PAGE_BYTES)[0] == "ipc_key"
    exported.close()


def fabric(path: str) -> None:
    machine = Machine(path, 0)
    address = machine.pool()
    exported = DeviceExport(machine.acl, 0)
    segments = exported.add_allocation(address, POOL_BYTES, fabric=True)
    assert [(kind, len(handle)) for kind, _, _, handle in segments] == [("fabric", 128)] * 3
    with pytest.raises(ValueError, match="exported already, as fabric"):
        exported.add_allocation(address, POOL_BYTES)
    exported.close()
    machine.check_rules()
