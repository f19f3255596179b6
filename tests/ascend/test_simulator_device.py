"""Devices, plain memory, copies, streams and events of the simulator: each documented rule that the rest relies on."""

import pytest

from tests.ascend.simulator.bindings import (
    D2D,
    D2H,
    DEFAULT,
    DEVICE,
    H2D,
    H2H,
    HOST,
    HUGE,
)
from tests.ascend.simulator.rules import INVALID, PAGE, SEGV, SLOW, Start, mapped, refuses

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
    assert process.elapsed_ms(first, last) >= 1000


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
