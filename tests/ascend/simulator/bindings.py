"""The simulator's calls for tests: here through ctypes (:class:`Acl`), or in a process of its own (:class:`Process`).

All pointers and handles are plain numbers, all answers can be sent as JSON. A call that fails raises :class:`AclError`.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

H2H, H2D, D2H, D2D, DEFAULT = range(5)
HUGE_FIRST, HUGE_ONLY, NORMAL_ONLY = range(3)
KEY_BYTES = 65
HUGE = 2 << 20
HBM_HUGE = 4
DEVICE = 1
HOST = 0
ROOT = Path(__file__).resolve().parents[3]


class AclError(Exception):
    """A call's error code and what the runtime says about it."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(code, text)
        self.code = code
        self.text = text


class Location(ctypes.Structure):
    _fields_ = [("id", ctypes.c_uint32), ("type", ctypes.c_int)]


class Prop(ctypes.Structure):
    _fields_ = [
        ("handle_type", ctypes.c_int), ("allocation_type", ctypes.c_int), ("attribute", ctypes.c_int),
        ("location", Location), ("reserve", ctypes.c_uint64),
    ]  # fmt: skip


class AccessDesc(ctypes.Structure):
    _fields_ = [("flags", ctypes.c_int), ("location", Location), ("reserved", ctypes.c_uint8 * 12)]


class BatchAttribute(ctypes.Structure):
    _fields_ = [("destination", Location), ("source", Location), ("reserved", ctypes.c_uint8 * 16)]


class PointerAttributes(ctypes.Structure):
    _fields_ = [("location", Location), ("page_bytes", ctypes.c_uint32), ("reserved", ctypes.c_uint32 * 4)]


class EventHandle(ctypes.Structure):
    _fields_ = [("data", ctypes.c_char * 64)]


def prop(device: int = 0, attribute: int = HBM_HUGE, place: int = DEVICE, handle_type: int = 0) -> Prop:
    return Prop(handle_type, 0, attribute, Location(device, place), 0)


def pids(numbers: list[int]) -> Any:
    return (ctypes.c_int32 * len(numbers))(*numbers)


class Acl:
    """One loaded runtime. Numbers go in as 64-bit values unless they are ctypes objects already."""

    def __init__(self, library: str) -> None:
        self.library = ctypes.CDLL(library)
        self.library.aclGetRecentErrMsg.restype = ctypes.c_char_p
        self.library.aclrtGetSocName.restype = ctypes.c_char_p
        self.library.mc2_sim_violation_text.restype = ctypes.c_char_p
        for name in ("live", "calls", "violations"):
            getattr(self.library, f"mc2_sim_{name}").restype = ctypes.c_int64

    def call(self, name: str, *arguments: Any) -> None:
        code = getattr(self.library, name)(*[ctypes.c_uint64(a) if isinstance(a, int) else a for a in arguments])
        if code != 0:
            raise AclError(code, (self.library.aclGetRecentErrMsg() or b"").decode())

    def _number(self, name: str, *arguments: Any, kind: Any = ctypes.c_uint64) -> int:
        """What a call writes to its first argument."""
        value = kind(0)
        self.call(name, ctypes.byref(value), *arguments)
        return value.value or 0

    def has(self, name: str) -> bool:
        return hasattr(self.library, name)

    # Devices
    def init(self) -> None:
        self.call("aclInit", None)

    def finalize(self) -> None:
        self.call("aclFinalize")

    def set_device(self, device: int) -> None:
        self.call("aclrtSetDevice", device)

    def get_device(self) -> int:
        return self._number("aclrtGetDevice", kind=ctypes.c_int32)

    def device_count(self) -> int:
        return self._number("aclrtGetDeviceCount", kind=ctypes.c_uint32)

    def physical_device(self, logic: int) -> int:
        value = ctypes.c_int32()
        self.call("aclrtGetPhyDevIdByLogicDevId", logic, ctypes.byref(value))
        return value.value

    def logic_device(self, user: int) -> int:
        value = ctypes.c_int32()
        self.call("aclrtGetLogicDevIdByUserDevId", user, ctypes.byref(value))
        return value.value

    def device_info(self, device: int, attribute: int) -> int:
        value = ctypes.c_int64()
        self.call("aclrtGetDeviceInfo", device, attribute, ctypes.byref(value))
        return value.value

    def topology(self, device: int, other: int) -> int:
        value = ctypes.c_uint64()
        self.call("aclrtGetDevicesTopo", device, other, ctypes.byref(value))
        return value.value

    def can_access_peer(self, device: int, peer: int) -> int:
        return self._number("aclrtDeviceCanAccessPeer", device, peer, kind=ctypes.c_int32)

    def enable_peer(self, peer: int) -> None:
        self.call("aclrtDeviceEnablePeerAccess", peer, 0)

    def disable_peer(self, peer: int) -> None:
        self.call("aclrtDeviceDisablePeerAccess", peer)

    def tgid(self) -> int:
        return self._number("aclrtDeviceGetBareTgid", kind=ctypes.c_int32)

    def create_context(self, device: int) -> int:
        return self._number("aclrtCreateContext", device)

    def destroy_context(self, context: int) -> None:
        self.call("aclrtDestroyContext", context)

    def set_context(self, context: int) -> None:
        self.call("aclrtSetCurrentContext", context)

    def get_context(self) -> int:
        return self._number("aclrtGetCurrentContext")

    def version(self, package: str = "runtime") -> str:
        text = ctypes.create_string_buffer(128)
        self.call("aclsysGetVersionStr", package.encode(), text)
        return text.value.decode()

    def runtime_version(self) -> list[int]:
        parts = (ctypes.c_int32 * 3)()
        self.call("aclrtGetVersion", *[ctypes.byref(parts, 4 * i) for i in range(3)])
        return list(parts)

    def soc(self) -> str:
        return self.library.aclrtGetSocName().decode()

    def memory_info(self) -> list[int]:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.call("aclrtGetMemInfo", 1, ctypes.byref(free), ctypes.byref(total))
        return [free.value, total.value]

    # Memory
    def malloc(self, num_bytes: int, policy: int = HUGE_FIRST) -> int:
        return self._number("aclrtMalloc", num_bytes, policy)

    def free(self, pointer: int) -> None:
        self.call("aclrtFree", pointer)

    def malloc_host(self, num_bytes: int) -> int:
        return self._number("aclrtMallocHost", num_bytes)

    def free_host(self, pointer: int) -> None:
        self.call("aclrtFreeHost", pointer)

    def host_register(self, pointer: int, num_bytes: int) -> int:
        value = ctypes.c_uint64()
        self.call("aclrtHostRegister", pointer, num_bytes, 0, ctypes.byref(value))
        return value.value

    def host_unregister(self, pointer: int) -> None:
        self.call("aclrtHostUnregister", pointer)

    def write_host(self, pointer: int, data: str) -> None:
        ctypes.memmove(pointer, bytes.fromhex(data), len(data) // 2)

    def read_host(self, pointer: int, num_bytes: int) -> str:
        return ctypes.string_at(pointer, num_bytes).hex()

    def attributes(self, pointer: int) -> list[int]:
        """Type of the place, device and page size."""
        found = PointerAttributes()
        self.call("aclrtPointerGetAttributes", pointer, ctypes.byref(found))
        return [found.location.type, found.location.id, found.page_bytes]

    # Copies
    def copy(self, destination: int, source: int, num_bytes: int, kind: int, capacity: int | None = None) -> None:
        self.call("aclrtMemcpy", destination, num_bytes if capacity is None else capacity, source, num_bytes, kind)

    def copy_async(self, destination: int, source: int, num_bytes: int, kind: int, stream: int = 0) -> None:
        self.call("aclrtMemcpyAsync", destination, num_bytes, source, num_bytes, kind, stream)

    def write(self, pointer: int, data: str, kind: int = H2D) -> None:
        """Synchronously from the host; ``data`` in hexadecimal."""
        raw = ctypes.create_string_buffer(bytes.fromhex(data), len(data) // 2)
        self.copy(pointer, ctypes.addressof(raw), len(data) // 2, kind)

    def read(self, pointer: int, num_bytes: int, kind: int = D2H) -> str:
        raw = ctypes.create_string_buffer(num_bytes)
        self.copy(ctypes.addressof(raw), pointer, num_bytes, kind)
        return raw.raw.hex()

    def pull(self, pointer: int, num_bytes: int) -> str:
        """Reads memory that may be imported: copies it in a stream to own memory first."""
        own = self.malloc(num_bytes)
        try:
            self.copy_async(own, pointer, num_bytes, D2D)
            self.synchronize_stream(0)
            return self.read(own, num_bytes)
        finally:
            self.free(own)

    def memset(self, pointer: int, value: int, num_bytes: int) -> None:
        self.call("aclrtMemset", pointer, num_bytes, value, num_bytes)

    def memset_async(self, pointer: int, value: int, num_bytes: int, stream: int = 0) -> None:
        self.call("aclrtMemsetAsync", pointer, num_bytes, value, num_bytes, stream)

    def batch(self, copies: list[list[int]], places: list[int], stream: int | None = None) -> int:
        """Copies of (destination, source, bytes); ``places`` are types: destination, source. The failed index."""
        columns = [(ctypes.c_uint64 * len(copies))(*[copy[i] for copy in copies]) for i in range(3)]
        attribute = BatchAttribute(Location(0, places[0]), Location(0, places[1]))
        first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
        common = [columns[0], columns[2], columns[1], columns[2], len(copies)]
        common += [ctypes.byref(attribute), ctypes.byref(first), 1, ctypes.byref(failed)]
        try:
            if stream is None:
                self.call("aclrtMemcpyBatch", *common)
            else:
                self.call("aclrtMemcpyBatchAsync", *common, stream)
        except AclError as error:
            raise AclError(error.code, f"{error.text} (index {failed.value})") from None
        return failed.value

    # Virtual memory
    def granularity(self, device: int = 0, attribute: int = HBM_HUGE) -> int:
        value = ctypes.c_size_t()
        self.call("aclrtMemGetAllocationGranularity", ctypes.byref(prop(device, attribute)), 0, ctypes.byref(value))
        return value.value

    def reserve(self, num_bytes: int, alignment: int = 0) -> int:
        return self._number("aclrtReserveMemAddress", num_bytes, alignment, None, 1)

    def release(self, pointer: int) -> None:
        self.call("aclrtReleaseMemAddress", pointer)

    def malloc_physical(
        self, num_bytes: int, device: int = 0, attribute: int = HBM_HUGE, place: int = DEVICE, handle_type: int = 0
    ) -> int:
        wanted = prop(device, attribute, place, handle_type)
        return self._number("aclrtMallocPhysical", num_bytes, ctypes.byref(wanted), 0)

    def free_physical(self, handle: int) -> None:
        self.call("aclrtFreePhysical", handle)

    def map(self, pointer: int, num_bytes: int, handle: int, offset: int = 0, flags: int = 0) -> None:
        self.call("aclrtMapMem", pointer, num_bytes, offset, handle, flags)

    def unmap(self, pointer: int) -> None:
        self.call("aclrtUnmapMem", pointer)

    def set_access(self, pointer: int, num_bytes: int, flags: int = 3, device: int = 0) -> None:
        desc = AccessDesc(flags, Location(device, DEVICE))
        self.call("aclrtMemSetAccess", pointer, num_bytes, ctypes.byref(desc), 1)

    def get_access(self, pointer: int, device: int = 0) -> int:
        value = ctypes.c_uint64()
        self.call("aclrtMemGetAccess", pointer, ctypes.byref(Location(device, DEVICE)), ctypes.byref(value))
        return value.value

    def retain(self, pointer: int) -> int:
        value = ctypes.c_uint64()
        self.call("aclrtMemRetainAllocationHandle", pointer, ctypes.byref(value))
        return value.value

    def properties(self, handle: int) -> list[int]:
        """Attribute, type of the place and device."""
        found = Prop()
        self.call("aclrtMemGetAllocationPropertiesFromHandle", handle, ctypes.byref(found))
        return [found.attribute, found.location.type, found.location.id]

    def address_range(self, pointer: int) -> list[int]:
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        self.call("aclrtMemGetAddressRange", pointer, ctypes.byref(base), ctypes.byref(size))
        return [base.value, size.value]

    def export(self, handle: int, flags: int = 1) -> int:
        value = ctypes.c_uint64()
        self.call("aclrtMemExportToShareableHandle", handle, 0, flags, ctypes.byref(value))
        return value.value

    def export_v2(self, handle: int, flags: int = 1, share_type: int = 1) -> str:
        data = ctypes.create_string_buffer(128)
        self.call("aclrtMemExportToShareableHandleV2", handle, flags, share_type, data)
        return data.raw[: 8 if share_type == 1 else 128].hex()

    def allow(self, shareable: int, numbers: list[int]) -> None:
        self.call("aclrtMemSetPidToShareableHandle", shareable, pids(numbers), len(numbers))

    def allow_v2(self, shareable: str, numbers: list[int], share_type: int = 1) -> None:
        data = ctypes.create_string_buffer(bytes.fromhex(shareable), 128)
        self.call("aclrtMemSetPidToShareableHandleV2", data, share_type, pids(numbers), len(numbers))

    def import_(self, shareable: int, device: int = 0) -> int:
        value = ctypes.c_uint64()
        self.call("aclrtMemImportFromShareableHandle", shareable, device, ctypes.byref(value))
        return value.value

    def import_v2(self, shareable: str, share_type: int = 1) -> int:
        data, value = ctypes.create_string_buffer(bytes.fromhex(shareable), 128), ctypes.c_uint64()
        self.call("aclrtMemImportFromShareableHandleV2", data, share_type, 0, ctypes.byref(value))
        return value.value

    # Keys
    def export_key(self, pointer: int, num_bytes: int, flags: int = 1, key_bytes: int = KEY_BYTES) -> str:
        key = ctypes.create_string_buffer(KEY_BYTES)
        self.call("aclrtIpcMemGetExportKey", pointer, num_bytes, key, key_bytes, flags)
        return key.raw.hex()

    def allow_key(self, key: str, numbers: list[int]) -> None:
        self.call("aclrtIpcMemSetImportPid", bytes.fromhex(key), pids(numbers), len(numbers))

    def import_key(self, key: str, flags: int = 1) -> int:
        return self._number("aclrtIpcMemImportByKey", bytes.fromhex(key), flags)

    def close_key(self, key: str) -> None:
        self.call("aclrtIpcMemClose", bytes.fromhex(key))

    # Streams and events
    def create_stream(self) -> int:
        return self._number("aclrtCreateStream")

    def destroy_stream(self, stream: int) -> None:
        self.call("aclrtDestroyStream", stream)

    def synchronize_stream(self, stream: int, timeout_ms: int = -1) -> None:
        self.call("aclrtSynchronizeStreamWithTimeout", stream, ctypes.c_int32(timeout_ms))

    def is_stream_idle(self, stream: int) -> bool:
        status = ctypes.c_int(-1)
        self.call("aclrtStreamQuery", stream, ctypes.byref(status))
        return status.value == 0

    def synchronize_device(self) -> None:
        self.call("aclrtSynchronizeDevice")

    def create_event(self, flag: int = 0) -> int:
        return self._number("aclrtCreateEventExWithFlag", flag)

    def destroy_event(self, event: int) -> None:
        self.call("aclrtDestroyEvent", event)

    def record_event(self, event: int, stream: int = 0) -> None:
        self.call("aclrtRecordEvent", event, stream)

    def wait_event(self, stream: int, event: int) -> None:
        self.call("aclrtStreamWaitEvent", stream, event)

    def is_event_reached(self, event: int) -> bool:
        status = ctypes.c_int(-1)
        self.call("aclrtQueryEventStatus", event, ctypes.byref(status))
        return status.value == 1

    def synchronize_event(self, event: int, timeout_ms: int = -1) -> None:
        self.call("aclrtSynchronizeEventWithTimeout", event, ctypes.c_int32(timeout_ms))

    def elapsed_ms(self, start: int, end: int) -> float:
        value = ctypes.c_float()
        self.call("aclrtEventElapsedTime", ctypes.byref(value), start, end)
        return value.value

    def event_handle(self, event: int) -> str:
        handle = EventHandle()
        self.call("aclrtIpcGetEventHandle", event, ctypes.byref(handle))
        return bytes(handle).hex()

    def open_event(self, handle: str) -> int:
        value = ctypes.c_uint64()
        self.call("aclrtIpcOpenEventHandle", EventHandle.from_buffer_copy(bytes.fromhex(handle)), ctypes.byref(value))
        return value.value

    # The simulator itself
    def fail(self, name: str, skip: int, code: int, times: int) -> None:
        self.library.mc2_sim_fail(name.encode(), skip, code, times)

    def clear_faults(self) -> None:
        self.library.mc2_sim_clear_faults()

    def live(self, what: str) -> int:
        return self.library.mc2_sim_live(what.encode())

    def calls(self, name: str) -> int:
        return self.library.mc2_sim_calls(name.encode())

    def violations(self) -> int:
        return self.library.mc2_sim_violations()

    def violation_text(self) -> str:
        return self.library.mc2_sim_violation_text().decode()

    def set_copy_delay_us(self, delay: int) -> None:
        self.library.mc2_sim_set_copy_delay_us(ctypes.c_int64(delay))

    def touch(self, pointer: int) -> int:
        """Reads from the host what may be a device's."""
        return ctypes.string_at(pointer, 1)[0]

    def in_thread(self, method: str, *arguments: Any) -> Any:
        """A method in a new thread, which has no device yet."""
        import threading

        answer: list[Any] = []

        def run() -> None:
            try:
                answer.append(getattr(self, method)(*arguments))
            except AclError as error:
                answer.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        if isinstance(answer[0], AclError):
            raise answer[0]
        return answer[0]


class Process:
    """An :class:`Acl` in a process of its own: ``process.malloc(5)`` runs there. End it with ``close`` or ``kill``."""

    def __init__(self, library: Path, folder: Path, **settings: str) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-S", "-m", "tests.ascend.simulator.bindings", str(library)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, text=True,
            env={**os.environ, "MC2_ACL_SIM_DIR": str(folder), **settings},
        )  # fmt: skip
        self.pid = self.popen.pid

    def send(self, name: str, *arguments: Any) -> None:
        """A call whose answer nobody awaits yet."""
        assert self.popen.stdin is not None
        self.popen.stdin.write(json.dumps([name, arguments]) + "\n")
        self.popen.stdin.flush()

    def answer(self) -> Any:
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        if not line:
            raise EOFError(f"the process ended with {self.popen.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise AclError(*answer["error"])
        return answer["value"]

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            self.send(name, *arguments)
            return self.answer()

        return call

    def kill(self) -> None:
        self.popen.kill()
        self._wait()

    def close(self) -> None:
        """Lets it exit by itself."""
        if self.popen.stdin is not None and not self.popen.stdin.closed:
            self.popen.stdin.close()
        self._wait()

    def _wait(self) -> None:
        try:
            self.popen.wait(20)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()
            raise
        finally:
            for pipe in (self.popen.stdin, self.popen.stdout):
                if pipe is not None and not pipe.closed:
                    pipe.close()


def serve(library: str) -> None:
    acl = Acl(library)
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            answer: dict[str, Any] = {"value": getattr(acl, name)(*arguments)}
        except AclError as error:
            answer = {"error": [error.code, error.text]}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve(sys.argv[1])
