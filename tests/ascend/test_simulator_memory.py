"""Virtual memory, sharing and keys of the simulator: each documented rule that the rest relies on."""

import pytest

from tests.ascend.simulator.bindings import (
    D2D,
    D2H,
    DEFAULT,
    DEVICE,
    H2D,
    HOST,
    HUGE,
    NORMAL_ONLY,
)
from tests.ascend.simulator.rules import INVALID, PAGE, Start, mapped, refuses

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
