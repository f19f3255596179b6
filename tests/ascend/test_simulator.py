"""The simulator itself: each documented rule of Ascend's runtime that the rest of the tests rely on."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ascend.environment import NpuEnvironment
from tests.ascend.simulator.bindings import (
    D2D,
    D2H,
    DEFAULT,
    DEVICE,
    H2D,
    H2H,
    HOST,
    HUGE,
    NORMAL_ONLY,
    AclError,
    Process,
)

Start = Callable[..., Process]

INVALID = 107000
SLOW = {"MC2_ACL_SIM_COPY_DELAY_US": "150000"}
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


# Devices, contexts, machine


def test_second_init_says_so(start: Start) -> None:
    refuses(100002, start().init)


def test_devices_are_counted_and_checked(start: Start) -> None:
    process = start(MC2_ACL_SIM_DEVICES=3)
    assert process.device_count() == 3
    assert process.get_device() == 0
    refuses(107001, process.set_device, 3)
    refuses(107001, process.set_device, -1)


def test_visible_devices_select_and_order(start: Start) -> None:
    process = start(MC2_ACL_SIM_DEVICES=4, ASCEND_RT_VISIBLE_DEVICES="3,1")
    assert process.device_count() == 2
    assert [process.logic_device(i) for i in range(2)] == [3, 1]
    assert process.physical_device(process.logic_device(0)) == 3
    assert process.device_info(0, 402) == 3


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("malloc", [HUGE]),
        ("get_device", []),
        ("create_stream", []),
        ("memory_info", []),
        ("import_key", ["00" * 65]),
        ("synchronize_stream", [0]),
    ],
)
def test_thread_without_device_is_told(start: Start, method: str, arguments: list[object]) -> None:
    process = start()
    text = refuses(107002, process.in_thread, method, *arguments)
    assert "aclrtSetDevice" in text


def test_contexts(start: Start) -> None:
    process = start()
    first = process.get_context()
    own = process.create_context(1)
    assert (process.get_device(), process.live("contexts")) == (1, 1)
    process.set_context(first)
    assert process.get_device() == 0
    process.destroy_context(own)
    refuses(107002, process.set_context, own)
    assert process.live("contexts") == 0


def test_machine_says_what_it_is(start: Start) -> None:
    process = start()
    assert process.soc() == "Ascend910B3"
    assert process.version() == "9.1.0"
    assert process.runtime_version() == [9, 1, 0]
    assert process.version("driver") == "26.0.RC1"
    assert process.tgid() == process.pid
    assert process.topology(0, 1) == 1
    assert start(MC2_ACL_SIM_SOC="Ascend910_9392").soc() == "Ascend910_9392"


def test_peer_access(start: Start) -> None:
    process = start()
    assert process.can_access_peer(0, 1) == 1
    near, far = process.malloc(HUGE), 0
    process.set_device(1)
    far = process.malloc(HUGE)
    process.set_device(0)
    assert "peer access" in refuses(INVALID, process.copy_async, near, far, 64, D2D)
    process.enable_peer(1)
    process.copy_async(near, far, 64, D2D)
    process.synchronize_stream(0)
    process.disable_peer(1)
    refuses(INVALID, process.copy, near, far, 64, D2D)
    lonely = start(MC2_ACL_SIM_NO_PEER=1)
    assert lonely.can_access_peer(0, 1) == 0
    refuses(207021, lonely.enable_peer, 1)


# Plain memory and copies


def test_malloc_write_read_free(start: Start) -> None:
    process = start()
    pointer = process.malloc(3 * HUGE)
    assert pointer % HUGE == 0
    process.write(pointer + 100, "0102030405")
    assert process.read(pointer + 99, 7) == "00010203040500"
    assert process.attributes(pointer + 5) == [DEVICE, 0, HUGE]
    assert process.live("malloc") == 1
    process.free(pointer)
    assert process.live("malloc") == 0
    refuses(INVALID, process.free, pointer)
    refuses(INVALID, process.malloc, 0)


def test_memory_is_counted_over_processes_and_ends(start: Start) -> None:
    one = start(MC2_ACL_SIM_MEMORY_BYTES=8 * HUGE)
    other = start(MC2_ACL_SIM_MEMORY_BYTES=8 * HUGE)
    pointer = one.malloc(5 * HUGE)
    assert other.memory_info() == [3 * HUGE, 8 * HUGE]
    refuses(207001, other.malloc, 4 * HUGE)
    refuses(207001, other.malloc_physical, 4 * HUGE)
    other.set_device(1)
    other.malloc(4 * HUGE)
    one.free(pointer)
    other.set_device(0)
    other.malloc(8 * HUGE)


def test_host_cannot_touch_device_memory(start: Start) -> None:
    process = start()
    pointer = process.malloc(HUGE)
    with pytest.raises(EOFError, match=str(SEGV)):
        process.touch(pointer)


def test_fresh_memory_can_be_dirty(start: Start) -> None:
    process = start(MC2_ACL_SIM_POISON=0xA5)
    assert process.read(process.malloc(HUGE), 4) == "a5a5a5a5"
    pointer, _, _ = mapped(process)
    assert process.read(pointer, 4) == "a5a5a5a5"


@pytest.mark.parametrize("offset", [-1, 2 * HUGE - 15, 2 * HUGE])
def test_copies_stay_in_one_allocation(start: Start, offset: int) -> None:
    process = start()
    pointer, host = process.malloc(2 * HUGE), process.malloc_host(PAGE)
    process.copy(host, pointer + 2 * HUGE - 16, 16, D2H)
    for call in (process.copy, process.copy_async):
        refuses(INVALID, call, host, pointer + offset, 16, D2H)
        refuses(INVALID, call, pointer + offset, host, 16, H2D)
        refuses(INVALID, call, pointer, pointer + offset, 16, D2D)
        refuses(INVALID, call, pointer, host + PAGE - 8, 16, H2D)
    refuses(INVALID, process.copy, host, pointer, 0, D2H)
    refuses(INVALID, process.copy, host, pointer, 16, D2H, 15)
    process.free(pointer)
    refuses(INVALID, process.copy, host, pointer, 16, D2H)


def test_kinds_must_fit(start: Start) -> None:
    process = start()
    device, host = process.malloc(HUGE), process.malloc_host(PAGE)
    right = {H2H: (host, host + 64), H2D: (device, host), D2H: (host, device), D2D: (device, device + 64)}
    for kind in right:
        for wanted, (destination, source) in right.items():
            if kind == wanted:
                process.copy(destination, source, 64, kind)
            else:
                refuses(INVALID, process.copy, destination, source, 64, kind)
    for destination, source in right.values():
        process.copy(destination, source, 64, DEFAULT)


def test_memset(start: Start) -> None:
    process = start()
    pointer = process.malloc(HUGE)
    process.memset(pointer + 1, 0x7F, 2)
    process.memset_async(pointer + 3, 0x11, 1)
    process.synchronize_stream(0)
    assert process.read(pointer, 5) == "007f7f1100"
    refuses(INVALID, process.memset, pointer + HUGE - 1, 0, 2)
    refuses(INVALID, process.memset_async, process.malloc_host(PAGE), 0, 2)


def test_batches_copy_between_host_and_device_only(start: Start) -> None:
    process = start()
    device, host = process.malloc(HUGE), process.malloc_host(PAGE)
    process.write_host(host, "0102030405060708")
    process.batch([[device, host, 4], [device + 8, host + 4, 4]], [DEVICE, HOST])
    assert process.read(device, 12) == "010203040000000005060708"
    process.batch([[host + 16, device, 4]], [HOST, DEVICE], 0)
    process.synchronize_stream(0)
    assert process.read_host(host + 16, 4) == "01020304"
    refuses(INVALID, process.batch, [[device, device + 64, 4]], [DEVICE, DEVICE])
    refuses(INVALID, process.batch, [[device, host, 4]] * 4097, [DEVICE, HOST])
    text = refuses(INVALID, process.batch, [[device, host, 4], [device + HUGE, host, 4]], [DEVICE, HOST], 0)
    assert "(index 1)" in text


def test_registered_host_memory_is_for_kernels_alone(start: Start) -> None:
    process = start()
    host, device = process.malloc_host(PAGE), process.malloc(HUGE)
    pointer = process.host_register(host, PAGE)
    refuses(INVALID, process.copy, device, pointer, 64, D2D)
    refuses(INVALID, process.host_register, host, PAGE)
    refuses(INVALID, process.host_register, host + 8, 64)
    process.host_unregister(host)
    refuses(INVALID, process.host_unregister, host)


# Streams and events


def test_streams_are_asynchronous_and_in_order(start: Start) -> None:
    process = start(**SLOW)
    stream, device, host = process.create_stream(), process.malloc(HUGE), process.malloc_host(PAGE)
    process.write_host(host, "ab" * 64)
    process.copy_async(device, host, 64, H2D, stream)
    process.copy_async(device + 64, device, 64, D2D, stream)
    process.copy_async(host + 64, device + 64, 64, D2H, stream)
    assert not process.is_stream_idle(stream)
    assert process.read_host(host + 64, 64) == "00" * 64
    assert process.live("pending") > 0
    process.synchronize_stream(stream)
    assert process.is_stream_idle(stream)
    assert process.read_host(host + 64, 64) == "ab" * 64
    assert process.live("pending") == 0


def test_pageable_host_memory_makes_the_call_wait(start: Start) -> None:
    process = start(**SLOW)
    device, buffer = process.malloc(HUGE), process.malloc_host(PAGE)
    process.free_host(buffer)
    process.copy_async(device, process.get_context(), 8, H2D)  # any memory that is not pinned will do
    assert process.is_stream_idle(0)
    assert process.calls("pageable-copy") == 1


def test_a_wait_times_out(start: Start) -> None:
    process = start(**SLOW)
    stream, event, device = process.create_stream(), process.create_event(), process.malloc(HUGE)
    process.copy_async(device, device + 64, 64, D2D, stream)
    process.record_event(event, stream)
    refuses(507046, process.synchronize_stream, stream, 1)
    refuses(507047, process.synchronize_event, event, 1)
    assert not process.is_event_reached(event)
    process.synchronize_event(event)
    assert process.is_event_reached(event)


def test_events_order_two_streams(start: Start) -> None:
    process = start(**SLOW)
    writer, reader, event = process.create_stream(), process.create_stream(), process.create_event()
    device, host = process.malloc(HUGE), process.malloc_host(PAGE)
    process.write_host(host, "cd" * 64)
    assert not process.is_event_reached(event)
    process.copy_async(device + 64, device + 128, 64, D2D, writer)
    process.copy_async(host + 64, device, 64, D2H, reader)  # nothing orders this one
    process.copy_async(device, host, 64, H2D, writer)
    process.record_event(event, writer)
    process.wait_event(reader, event)
    process.copy_async(host + 128, device, 64, D2H, reader)
    process.synchronize_stream(reader)
    assert process.read_host(host + 64, 64) != "cd" * 64
    assert process.read_host(host + 128, 64) == "cd" * 64


def test_elapsed_time(start: Start) -> None:
    process = start(**SLOW)
    first, last, device = process.create_event(), process.create_event(), process.malloc(HUGE)
    process.record_event(first)
    process.copy_async(device, device + 64, 64, D2D)
    process.record_event(last)
    refuses(INVALID, process.elapsed_ms, first, last)
    process.synchronize_event(last)
    assert process.elapsed_ms(first, last) >= 150


def test_streams_and_events_are_counted_and_checked(start: Start) -> None:
    process = start()
    stream, event = process.create_stream(), process.create_event()
    assert (process.live("streams"), process.live("events")) == (1, 1)
    process.destroy_stream(stream)
    process.destroy_event(event)
    assert (process.live("streams"), process.live("events")) == (0, 0)
    refuses(INVALID, process.synchronize_stream, stream)
    refuses(INVALID, process.synchronize_event, event)


def test_stream_of_another_device_is_refused(start: Start) -> None:
    process = start()
    stream, pointer = process.create_stream(), process.malloc(HUGE)
    process.set_device(1)
    refuses(107003, process.copy_async, pointer, pointer + 64, 64, D2D, stream)
    refuses(107003, process.record_event, process.create_event(), stream)
    assert process.violations() == 2


def test_all_streams_of_a_device(start: Start) -> None:
    process = start(**SLOW)
    streams, pointer = [process.create_stream() for _ in range(3)], process.malloc(HUGE)
    for stream in streams:
        process.copy_async(pointer, pointer + 64, 64, D2D, stream)
    process.synchronize_device()
    assert all(process.is_stream_idle(stream) for stream in streams)


# Virtual memory


def test_map_and_unmap(start: Start) -> None:
    process = start()
    assert process.granularity() == HUGE
    assert process.granularity(0, 10) == 1 << 30
    handle, pointer = process.malloc_physical(2 * HUGE), process.reserve(4 * HUGE)
    process.map(pointer + HUGE, 2 * HUGE, handle)
    process.set_access(pointer + HUGE, 2 * HUGE)
    assert [process.get_access(pointer + HUGE, device) for device in (0, 1)] == [3, 0]
    process.write(pointer + HUGE + 7, "99")
    refuses(INVALID, process.write, pointer, "99")
    assert [process.live(what) for what in ("reservations", "mappings", "physical")] == [1, 1, 1]
    refuses(INVALID, process.release, pointer)
    process.unmap(pointer + HUGE)
    refuses(INVALID, process.read, pointer + HUGE + 7, 1)
    process.map(pointer, 2 * HUGE, handle)
    assert process.read(pointer + 7, 1) == "99"
    process.unmap(pointer)
    process.release(pointer)
    process.free_physical(handle)
    assert [process.live(what) for what in ("reservations", "mappings", "physical")] == [0, 0, 0]
    refuses(107017, process.free_physical, handle)
    refuses(107017, process.map, pointer, 2 * HUGE, handle)


def test_mapping_rules(start: Start) -> None:
    process = start()
    handle, pointer = process.malloc_physical(2 * HUGE), process.reserve(8 * HUGE)
    refuses(INVALID, process.map, pointer, HUGE, handle)  # not the whole memory
    refuses(INVALID, process.map, pointer, 2 * HUGE, handle, HUGE)  # an offset
    refuses(INVALID, process.map, pointer, 2 * HUGE, handle, 0, 1)  # flags
    refuses(INVALID, process.map, pointer + PAGE, 2 * HUGE, handle)
    refuses(INVALID, process.map, pointer + 7 * HUGE, 2 * HUGE, handle)  # over the end
    process.map(pointer + 2 * HUGE, 2 * HUGE, handle)
    other = process.malloc_physical(2 * HUGE)
    refuses(INVALID, process.map, pointer + 3 * HUGE, 2 * HUGE, other)
    refuses(INVALID, process.map, pointer + HUGE, 2 * HUGE, other)
    refuses(INVALID, process.set_access, pointer, 2 * HUGE)
    refuses(INVALID, process.set_access, pointer + 2 * HUGE, 2 * HUGE, 1)
    refuses(INVALID, process.unmap, pointer + 3 * HUGE)


def test_allocation_rules(start: Start) -> None:
    process = start()
    refuses(INVALID, process.malloc_physical, HUGE + PAGE)
    refuses(INVALID, process.malloc_physical, HUGE, 0, 10)  # pages of 1 GiB
    refuses(INVALID, process.malloc_physical, HUGE, 0, 4, DEVICE, 2)  # a handle type
    refuses(100000, process.malloc_physical, HUGE, 0, 2)  # DDR of a device
    refuses(107001, process.malloc_physical, HUGE, 2)
    refuses(INVALID, process.reserve, 0)
    refuses(INVALID, process.reserve, HUGE, HUGE)


def test_neighbours_in_a_reservation_are_one_range(start: Start) -> None:
    process = start()
    pointer = process.reserve(4 * HUGE)
    for i in range(3):
        process.map(pointer + i * HUGE, HUGE, process.malloc_physical(HUGE))
    process.write(pointer + HUGE - 2, "01020304")
    process.copy_async(pointer + 2 * HUGE - 3, pointer + HUGE - 2, 4, D2D)
    process.synchronize_stream(0)
    assert process.read(pointer + 2 * HUGE - 3, 4) == "01020304"
    refuses(INVALID, process.read, pointer + 3 * HUGE - 2, 4)


def test_freed_memory_lives_while_mapped(start: Start) -> None:
    process = start()
    pointer, handle, size = mapped(process)
    free = process.memory_info()[0]
    process.free_physical(handle)
    process.write(pointer, "42")
    assert (process.read(pointer, 1), process.live("physical"), process.memory_info()[0]) == ("42", 1, free)
    process.unmap(pointer)
    assert (process.live("physical"), process.memory_info()[0]) == (0, free + size)


def test_a_reservation_does_not_mix_devices(start: Start) -> None:
    for is_mixed in (0, 1):
        process = start(MC2_ACL_SIM_MIXED=is_mixed)
        pointer = process.reserve(2 * HUGE)
        process.map(pointer, HUGE, process.malloc_physical(HUGE, 0))
        other = process.malloc_physical(HUGE, 1)
        if is_mixed:
            process.map(pointer + HUGE, HUGE, other)
        else:
            refuses(INVALID, process.map, pointer + HUGE, HUGE, other)
            process.unmap(pointer)
            process.map(pointer, HUGE, other)


def test_handles_are_found_again(start: Start) -> None:
    process = start(MC2_ACL_SIM_DEVICES=2)
    pointer = process.reserve(4 * HUGE)
    handle = process.malloc_physical(2 * HUGE, 1)
    process.map(pointer + HUGE, 2 * HUGE, handle)
    assert process.address_range(pointer + 2 * HUGE + 5) == [pointer + HUGE, 2 * HUGE]
    assert process.retain(pointer + 2 * HUGE + 5) == handle
    assert process.properties(handle) == [4, DEVICE, 1]
    process.free_physical(handle)
    process.free_physical(handle)  # one for the allocation, one for retain
    refuses(107017, process.free_physical, handle)
    refuses(INVALID, process.retain, pointer)
    plain = process.malloc(HUGE)
    refuses(INVALID, process.retain, plain)
    assert process.address_range(plain + 9) == [plain, HUGE]


# Sharing physical memory


def test_export_and_import(start: Start) -> None:
    exporter, importer = start(), start(device=1)
    pointer, handle, size = mapped(exporter)
    exporter.write(pointer, "11223344")
    imported = importer.import_(exporter.export(handle), 1)
    own = importer.reserve(size)
    importer.map(own, size, imported)
    assert importer.pull(own, 4) == "11223344"
    assert importer.attributes(own) == [DEVICE, 1, HUGE]
    assert [exporter.live("exports"), importer.live("imports")] == [1, 1]
    importer.unmap(own)
    importer.free_physical(imported)
    assert importer.live("imports") == 0


def test_import_of_several_devices_and_pages(start: Start) -> None:
    exporter, importer = start(ASCEND_RT_VISIBLE_DEVICES="1"), start(ASCEND_RT_VISIBLE_DEVICES="0")
    pointer, handle, size = mapped(exporter, 10 * HUGE)
    exporter.write(pointer + 7 * HUGE, "55")
    own = importer.reserve(size)
    importer.map(own, size, importer.import_v2(exporter.export_v2(handle)))
    assert importer.pull(own + 7 * HUGE, 1) == "55"


def test_one_export_of_a_handle(start: Start) -> None:
    exporter = start()
    _, handle, _ = mapped(exporter)
    exporter.export(handle)
    for again in (exporter.export, exporter.export_v2):
        assert "exported already" in refuses(507899, again, handle)


def test_no_import_of_own_exports_nor_export_of_imports(start: Start) -> None:
    exporter, importer = start(), start()
    _, handle, _ = mapped(exporter)
    shareable = exporter.export(handle)
    refuses(507899, exporter.import_, shareable)
    imported = importer.import_(shareable)
    refuses(507899, importer.export, imported)


def test_imports_need_permission(start: Start) -> None:
    exporter, importer, other = start(), start(), start()
    _, handle, _ = mapped(exporter)
    shareable = exporter.export(handle, 0)
    assert "not allowed" in refuses(507899, importer.import_, shareable)
    exporter.allow(shareable, [importer.pid])
    importer.import_(shareable)
    refuses(507899, other.import_, shareable)
    refuses(INVALID, exporter.allow, shareable, [1] * 32)
    refuses(INVALID, exporter.allow, shareable, [])
    exporter.allow(shareable, [1] * 30 + [other.pid])
    other.import_(shareable)
    refuses(INVALID, importer.allow, shareable, [other.pid])


def test_permission_for_second_generation(start: Start) -> None:
    exporter, importer = start(), start()
    _, handle, _ = mapped(exporter)
    shareable = exporter.export_v2(handle, 0)
    refuses(507899, importer.import_v2, shareable)
    exporter.allow_v2(shareable, [importer.pid])
    importer.import_v2(shareable)


def test_freed_memory_cannot_be_imported_but_stays_for_importers(start: Start) -> None:
    exporter, importer, late = start(), start(), start()
    pointer, handle, size = mapped(exporter)
    exporter.write(pointer, "77")
    shareable = exporter.export(handle)
    own = importer.reserve(size)
    importer.map(own, size, importer.import_(shareable))
    exporter.unmap(pointer)
    exporter.free_physical(handle)
    assert exporter.live("exports") == 0
    refuses(507899, late.import_, shareable)
    assert importer.pull(own, 1) == "77"


@pytest.mark.parametrize("bits", [1, 1 << 13, 1 << 14, 1 << 20, 1 << 36, 1 << 55, 1 << 60])
def test_other_numbers_are_no_handles(start: Start, bits: int) -> None:
    exporter, importer = start(), start()
    _, handle, _ = mapped(exporter)
    shareable = exporter.export(handle)
    if bits < 1 << 56:
        refuses(507899, importer.import_, shareable ^ bits)
    else:
        importer.import_(shareable ^ bits)  # the device in it is for people


def test_own_and_imported_memory_do_not_mix(start: Start) -> None:
    exporter = start()
    shareable = exporter.export(mapped(exporter)[1])
    for is_mixed in (0, 1):
        importer = start(MC2_ACL_SIM_MIXED=is_mixed)
        pointer = importer.reserve(2 * HUGE)
        importer.map(pointer, HUGE, importer.malloc_physical(HUGE))
        imported = importer.import_(shareable)
        if is_mixed:
            importer.map(pointer + HUGE, HUGE, imported)
        else:
            refuses(INVALID, importer.map, pointer + HUGE, HUGE, imported)


def test_imported_memory_takes_only_some_copies(start: Start) -> None:
    exporter, importer = start(), start()
    pointer, handle, size = mapped(exporter)
    exporter.write(pointer, "31" * 64)
    imported, host = importer.reserve(size), importer.malloc_host(PAGE)
    importer.map(imported, size, importer.import_(exporter.export(handle)))
    own = importer.malloc(HUGE)
    for call in (importer.copy, importer.copy_async):
        refuses(INVALID, call, host, imported, 64, D2H)
        refuses(INVALID, call, imported, host, 64, H2D)
        refuses(INVALID, call, own, imported, 64, DEFAULT)
    refuses(INVALID, importer.copy, own, imported, 64, D2D)  # the same device: only asynchronously
    refuses(INVALID, importer.batch, [[host, imported, 64]], [HOST, DEVICE], 0)
    importer.copy_async(own, imported, 64, D2D)
    importer.copy_async(imported + 64, own, 64, D2D)
    importer.synchronize_stream(0)
    assert exporter.read(pointer + 64, 64) == "31" * 64


def test_synchronous_copy_between_devices_takes_imports(start: Start) -> None:
    exporter, importer = start(device=1), start(device=0)
    pointer, handle, size = mapped(exporter, device=1)
    exporter.write(pointer, "21")
    imported, own = importer.reserve(size), importer.malloc(HUGE)
    importer.map(imported, size, importer.import_(exporter.export(handle)))
    importer.copy(own, imported, 1, D2D)
    assert importer.read(own, 1) == "21"


def test_fabric_needs_a_machine_with_it(start: Start) -> None:
    exporter = start()
    _, handle, _ = mapped(exporter)
    refuses(207000, exporter.export_v2, handle, 1, 2)
    exporter, importer = start(MC2_ACL_SIM_FABRIC=1), start(MC2_ACL_SIM_FABRIC=1, MC2_ACL_SIM_SERVER=1)
    pointer, handle, size = mapped(exporter)
    exporter.write(pointer, "61")
    shareable = exporter.export_v2(handle, 1, 2)
    assert len(shareable) == 256
    imported = importer.reserve(size)
    importer.map(imported, size, importer.import_v2(shareable, 2))
    assert importer.pull(imported, 1) == "61"
    refuses(INVALID, importer.import_v2, "00" * 128, 2)


def test_other_handles_stay_on_their_server(start: Start) -> None:
    exporter, importer = start(MC2_ACL_SIM_SERVER=0), start(MC2_ACL_SIM_SERVER=1)
    refuses(507899, importer.import_, exporter.export(mapped(exporter)[1]))


def test_no_link_no_import(start: Start) -> None:
    exporter, importer = start(device=1), start(device=0, MC2_ACL_SIM_NO_PEER=1)
    refuses(207021, importer.import_, exporter.export(mapped(exporter, device=1)[1]))
    key = exporter.export_key(exporter.malloc(HUGE), HUGE)
    refuses(207021, importer.import_key, key)


# Keys


def test_keys(start: Start) -> None:
    exporter, importer = start(), start()
    pointer = exporter.malloc(2 * HUGE)
    exporter.write(pointer + HUGE, "0a0b")
    key = exporter.export_key(pointer, 2 * HUGE)
    assert len(key) == 130
    imported = importer.import_key(key)
    assert importer.import_key(key) == imported
    assert importer.pull(imported + HUGE, 2) == "0a0b"
    assert [exporter.live("ipc_exports"), importer.live("ipc_imports")] == [1, 1]
    importer.close_key(key)
    assert importer.pull(imported + HUGE, 2) == "0a0b"
    importer.close_key(key)
    refuses(INVALID, importer.copy_async, importer.malloc(HUGE), imported, 1, D2D)
    refuses(INVALID, importer.close_key, key)
    exporter.close_key(key)
    assert [exporter.live("ipc_exports"), exporter.violations()] == [0, 0]
    refuses(507899, importer.import_key, key)


def test_key_rules(start: Start) -> None:
    exporter, importer = start(), start()
    pointer, small = exporter.malloc(2 * HUGE), exporter.malloc(2 * PAGE, NORMAL_ONLY)
    refuses(INVALID, exporter.export_key, pointer + HUGE, HUGE)  # an offset
    refuses(INVALID, exporter.export_key, pointer, 3 * HUGE)
    refuses(INVALID, exporter.export_key, pointer, PAGE)  # not whole pages
    refuses(INVALID, exporter.export_key, small, PAGE + 1)
    refuses(INVALID, exporter.export_key, pointer, HUGE, 1, 64)  # a key of another length
    refuses(INVALID, exporter.export_key, mapped(exporter)[0], HUGE)  # virtual memory
    imported = importer.import_key(exporter.export_key(small, 2 * PAGE))
    refuses(INVALID, importer.export_key, imported, 2 * PAGE)
    key = exporter.export_key(pointer, HUGE)  # a part from the start
    refuses(507899, exporter.import_key, key)
    imported = importer.import_key(key)
    refuses(INVALID, importer.copy_async, importer.malloc(HUGE), imported + HUGE - 1, 2, D2D)


def test_keys_need_permission(start: Start) -> None:
    exporter, importer = start(), start()
    key = exporter.export_key(exporter.malloc(HUGE), HUGE, 0)
    refuses(507899, importer.import_key, key)
    refuses(INVALID, exporter.allow_key, key, [1] * 32)
    exporter.allow_key(key, [importer.pid])
    importer.import_key(key)


def test_without_peer_flag_another_device_is_out_of_reach(start: Start) -> None:
    exporter, importer = start(device=1), start(device=0)
    imported = importer.import_key(exporter.export_key(exporter.malloc(HUGE), HUGE), 0)
    refuses(INVALID, importer.copy_async, importer.malloc(HUGE), imported, 1, D2D)


# What the documentation forbids and a device does not report


def test_exporter_closing_first_is_counted(start: Start) -> None:
    exporter, importer = start(), start()
    pointer = exporter.malloc(HUGE)
    key = exporter.export_key(pointer, HUGE)
    importer.import_key(key)
    exporter.free(pointer)
    exporter.close_key(key)
    assert exporter.violations() == 2
    assert "not closed" in exporter.violation_text() and "others have" in exporter.violation_text()


def test_dead_importers_do_not_count(start: Start) -> None:
    exporter, importer = start(), start()
    key = exporter.export_key(exporter.malloc(HUGE), HUGE)
    importer.import_key(key)
    importer.kill()
    exporter.close_key(key)
    assert exporter.violations() == 0


@pytest.mark.parametrize("release", ["free", "unmap", "free_host"])
def test_release_under_a_running_copy_is_counted(start: Start, release: str, machine: Path) -> None:
    log = machine.parent / "violations"
    process = start(**SLOW, MC2_ACL_SIM_VIOLATIONS=log)
    own = process.malloc(HUGE)
    source = {"free": process.malloc, "unmap": lambda _: mapped(process)[0], "free_host": process.malloc_host}[release](
        HUGE
    )
    kind = H2D if release == "free_host" else D2D
    process.copy_async(own, own + 64, 64, D2D)
    process.copy_async(own, source, 64, kind)
    getattr(process, release)(source)
    assert process.violations() == 1
    assert f"{process.pid}: " in log.read_text()
    refuses(507053, process.synchronize_stream, 0)
    assert "released" in process.violation_text()


def test_use_after_release_is_counted(start: Start) -> None:
    process = start()
    own, plain, (pointer, _, _) = process.malloc(HUGE), process.malloc(HUGE), mapped(process)
    for release, address in ((process.free, plain), (process.unmap, pointer)):
        release(address)
        before = process.violations()
        refuses(INVALID, process.copy_async, own, address + 64, 64, D2D)
        refuses(INVALID, process.write, address, "00")
        assert process.violations() == before + 2
    assert "after its release" in process.violation_text()


def test_finalize_with_memory_is_counted(start: Start) -> None:
    process = start()
    process.malloc(HUGE)
    process.finalize()
    assert "aclFinalize" in process.violation_text()


# Crashes


def test_killed_exporter_leaves_memory_to_importers_and_no_file(start: Start, machine: Path) -> None:
    exporter, importer = start(), start()
    pointer, handle, size = mapped(exporter)
    exporter.write(pointer, "88")
    shareable, key = exporter.export(handle), exporter.export_key(exporter.malloc(HUGE), HUGE)
    imported = importer.reserve(size)
    importer.map(imported, size, importer.import_(shareable))
    exporter.kill()
    refuses(507899, importer.import_, shareable)
    refuses(507899, importer.import_key, key)
    assert importer.pull(imported, 1) == "88"
    assert importer.memory_info()[0] == importer.memory_info()[1]
    assert [path.name for path in machine.iterdir()] != []
    importer.close()
    assert list(machine.iterdir()) == []


def test_all_killed_leave_nothing_for_the_next(start: Start, machine: Path) -> None:
    for process in [start() for _ in range(3)]:
        process.malloc(HUGE)
        process.kill()
    last = start()
    assert [path.name for path in machine.iterdir()] == [f"process-{last.pid}"]
    last.close()
    assert list(machine.iterdir()) == []


def test_memory_can_die_with_its_owner(start: Start) -> None:
    exporter, importer = start(), start(MC2_ACL_SIM_LOST=1)
    _, handle, size = mapped(exporter)
    imported, own = importer.reserve(size), importer.malloc(HUGE)
    importer.map(imported, size, importer.import_(exporter.export(handle)))
    importer.copy_async(own, imported, 64, D2D)
    importer.synchronize_stream(0)
    exporter.kill()
    importer.copy_async(own, imported, 64, D2D)
    refuses(507057, importer.synchronize_stream, 0)
    importer.synchronize_stream(0)


def test_owner_killed_in_the_middle_of_a_copy(start: Start) -> None:
    exporter, importer = start(), start(MC2_ACL_SIM_LOST=1)
    _, handle, size = mapped(exporter)
    imported, own = importer.reserve(size), importer.malloc(HUGE)
    importer.map(imported, size, importer.import_(exporter.export(handle)))
    importer.set_copy_delay_us(300_000)
    importer.copy_async(own, imported, 64, D2D)
    time.sleep(0.05)
    exporter.kill()
    refuses(507057, importer.synchronize_stream, 0)


def test_processes_of_other_folders_do_not_meet(start: Start, simulator: Path, tmp_path: Path) -> None:
    exporter = start()
    shareable = exporter.export(mapped(exporter)[1])
    stranger = Process(simulator / "lib" / "libascendcl.so", tmp_path / "other")
    try:
        stranger.init()
        stranger.set_device(0)
        refuses(507899, stranger.import_, shareable)
    finally:
        stranger.close()


# Shared events


def test_events_of_another_process(start: Start) -> None:
    maker, waiter = start(**SLOW), start()
    event, pointer = maker.create_event(0x40), maker.malloc(HUGE)
    handle = maker.event_handle(event)
    opened = waiter.open_event(handle)
    maker.copy_async(pointer, pointer + 64, 64, D2D)
    maker.record_event(event)
    assert not waiter.is_event_reached(opened)
    refuses(507047, waiter.synchronize_event, opened, 1)
    waiter.synchronize_event(opened)
    assert maker.is_stream_idle(0)
    refuses(INVALID, maker.event_handle, maker.create_event())


# Faults and versions


def test_faults_on_demand(start: Start) -> None:
    process = start(MC2_ACL_SIM_FAIL="aclrtMalloc:1:207001:2")
    process.malloc(HUGE)
    for _ in range(2):
        assert "a test asked" in refuses(207001, process.malloc, HUGE)
    process.malloc(HUGE)
    process.fail("aclrtMallocPhysical", 0, 507899, 5)
    refuses(507899, process.malloc_physical, HUGE)
    process.clear_faults()
    process.malloc_physical(HUGE)
    assert process.calls("aclrtMalloc") == 4


def test_copies_that_fail_when_they_run(start: Start) -> None:
    process = start()
    stream, event, pointer = process.create_stream(), process.create_event(), process.malloc(HUGE)
    process.fail("copy-task", 1, 507057, 1)
    process.copy_async(pointer, pointer + 64, 64, D2D, stream)
    process.synchronize_stream(stream)
    process.copy_async(pointer, pointer + 64, 64, D2D, stream)
    process.record_event(event, stream)
    refuses(507057, process.synchronize_event, event)
    process.synchronize_stream(stream)  # it was reported
    process.fail("copy-task", 0, 507057, 1)
    process.copy_async(pointer, pointer + 64, 64, D2D, stream)
    refuses(507057, process.synchronize_stream, stream)
    process.record_event(event, stream)
    process.synchronize_event(event)


def test_unsupported_calls(start: Start) -> None:
    process = start(MC2_ACL_SIM_UNSUPPORTED="aclrtMemRetainAllocationHandle,aclrtMemExportToShareableHandleV2")
    pointer, handle, _ = mapped(process)
    refuses(207000, process.retain, pointer)
    refuses(207000, process.export_v2, handle)
    process.export(handle)


def test_older_runtimes_lack_symbols(start: Start) -> None:
    newest, old, oldest = start(), start(variant="old"), start(variant="oldest")
    assert [p.has("aclrtMemGetAddressRange") for p in (newest, old, oldest)] == [True, False, False]
    assert [p.has("aclrtMemRetainAllocationHandle") for p in (newest, old, oldest)] == [True, True, False]
    assert [p.has("aclrtMemExportToShareableHandleV2") for p in (newest, old, oldest)] == [True, True, False]
    assert [p.version() for p in (newest, old, oldest)] == ["9.1.0", "8.5.0", "8.3.0"]
    shareable = oldest.export(mapped(oldest)[1])
    newest.import_(shareable)


def test_without_a_folder_a_process_is_alone(simulator: Path, tmp_path: Path) -> None:
    alone = Process(simulator / "lib" / "libascendcl.so", tmp_path, MC2_ACL_SIM_DIR="")
    try:
        alone.init()
        alone.set_device(0)
        alone.export(mapped(alone)[1])
        assert os.listdir(tmp_path) == []
    finally:
        alone.close()


# Real tensors of torch_npu on the simulator

TENSORS = """
import sys, torch, torch_npu
from multiprocessing.reduction import ForkingPickler
torch.npu.set_device(0)
assert torch.npu.is_available() and torch.npu.device_count() == 2
wanted = torch.arange(6000, dtype=torch.float32).view(60, 100)
for source in (wanted, wanted.pin_memory()):
    for non_blocking in (False, True):
        tensor = source.to("npu", non_blocking=non_blocking)
        torch.npu.synchronize()
        assert torch.equal(tensor.cpu(), wanted)
for other in (torch.float16, torch.bfloat16, torch.int8, torch.int64, torch.bool):
    assert torch.equal(wanted.to(other).to("npu").cpu(), wanted.to(other))
    assert torch.equal(tensor.to(other).cpu(), wanted.to(other))

# Memory is full of rubbish here: nothing is zero by itself.
assert torch.empty(30 << 20, dtype=torch.uint8, device="npu")[-3000:].cpu().unique().tolist() == [0xA5]
assert not torch.zeros((5000, 1000), dtype=torch.int8, device="npu").cpu().any()
assert torch.full((3,), 7, device="npu").cpu().tolist() == [7] * 3
assert torch.ones(3, dtype=torch.float16, device="npu").fill_(2.5).cpu().tolist() == [2.5] * 3

assert torch.equal(tensor[7:9].cpu(), wanted[7:9]) and torch.equal(tensor[:, 5:9].cpu(), wanted[:, 5:9])
assert torch.equal(tensor.t().contiguous().cpu(), wanted.t()) and torch.equal(tensor.clone().cpu(), wanted)
assert torch.equal(tensor.view(torch.int8).view(torch.float32).cpu(), wanted)
changed, on_npu = wanted.clone(), tensor.clone()
for t in (changed, on_npu):
    t[:, 3].copy_(torch.full((60,), -1.0))
    t[10:12].copy_(t[20:22].clone())
    t[:, 50:60].copy_(t[:, 0:10].clone())
    t[5].zero_()
assert torch.equal(on_npu.cpu(), changed)
rows = torch.tensor([3, 59, 0, 3])
assert torch.equal(tensor.index_select(0, rows.to("npu")).cpu(), wanted.index_select(0, rows))
assert torch.equal(tensor.index_select(1, rows.to("npu")).cpu(), wanted.index_select(1, rows))
assert torch.equal(tensor[rows.to("npu")].cpu(), wanted[rows])

first, last = torch.npu.Event(enable_timing=True), torch.npu.Event(enable_timing=True)
first.record()
stream = torch.npu.Stream()
assert stream.npu_stream != torch.npu.current_stream().npu_stream
with torch.npu.stream(stream):
    stream.wait_event(first)
    copied = tensor.clone()
    last.record()
torch.npu.current_stream().wait_event(last)
last.synchronize()
assert last.query() and first.elapsed_time(last) >= 0 and torch.equal(copied.cpu(), wanted)

start = tensor.untyped_storage().data_ptr()
assert any(s["address"] <= start < s["address"] + s["total_size"] for s in torch.npu.memory_snapshot())
storage = torch_npu._C._construct_storage_from_data_pointer(start, tensor.device, tensor.nbytes)
again = torch.empty(0, dtype=torch.float32, device="npu").set_(storage, 0, (60, 100))
assert torch.equal(again.cpu(), wanted)

import ctypes
simulator = ctypes.CDLL("libascendcl.so")
simulator.mc2_sim_violation_text.restype = ctypes.c_char_p
assert simulator.mc2_sim_violations() == 0, simulator.mc2_sim_violation_text()

tensor = torch.arange(12_000_000, dtype=torch.int32).to("npu")
torch.npu.synchronize()
print("handle", bytes(ForkingPickler.dumps(tensor[5_000_000:].view(7000, 1000))).hex(), flush=True)
assert sys.stdin.readline() == "done\\n"
assert tensor[6_000_000:6_000_010].cpu().tolist() == [-5] * 10
assert simulator.mc2_sim_violations() == 0, simulator.mc2_sim_violation_text()
"""

IMPORT = """
import pickle, sys, torch, torch_npu
torch.npu.set_device(0)
tensor = pickle.loads(bytes.fromhex(sys.stdin.readline()))
assert tensor.device.type == "npu" and tensor.shape == (7000, 1000)
assert torch.equal(tensor.clone().cpu().view(-1), torch.arange(5_000_000, 12_000_000, dtype=torch.int32))
rows = tensor.index_select(0, torch.tensor([6999, 1]).to("npu")).cpu()
assert rows[:, 0].tolist() == [11_999_000, 5_001_000]
tensor[1000:1001].fill_(-5)
torch.npu.synchronize()
print("equal")
"""

ALLOCATORS = pytest.mark.parametrize("allocator", ["expandable_segments:False", "expandable_segments:True"])


@ALLOCATORS
def test_tensors_here_and_in_another_process(npu_environment: NpuEnvironment, allocator: str) -> None:
    variables = npu_environment.variables(PYTORCH_NPU_ALLOC_CONF=allocator, MC2_ACL_SIM_POISON="0xa5")
    owner, user = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env=variables,
            cwd=npu_environment.folder.parent,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for program in (TENSORS, IMPORT)
    ]
    try:
        assert owner.stdout is not None
        handle = next(line.split()[1] for line in owner.stdout if line.startswith("handle "))
        imported, _ = user.communicate(f"{handle}\n", timeout=60)
        assert imported.splitlines()[-1] == "equal"
        owner.communicate("done\n", timeout=60)
        assert (owner.returncode, user.returncode) == (0, 0)
    finally:
        for process in (owner, user):
            process.kill()
            process.communicate()


def test_unknown_operators_end_the_process(npu_environment: NpuEnvironment) -> None:
    program = "import torch, torch_npu; a = torch.zeros(3, device='npu'); print((a + a).cpu())"
    with pytest.raises(AssertionError, match="is not simulated"):
        npu_environment.run(program)
