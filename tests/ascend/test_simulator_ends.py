"""What the simulator counts as forbidden, crashes, shared events, faults on demand and older releases."""

import os
import time
from pathlib import Path

import pytest

from tests.ascend.simulator.bindings import (
    D2D,
    H2D,
    HUGE,
    Process,
)
from tests.ascend.simulator.rules import INVALID, SLOW, Start, mapped, refuses

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
    importer.set_copy_delay_us(3_000_000)
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
