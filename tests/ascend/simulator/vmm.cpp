// Virtual memory management: addresses and memory apart.
#include <cstring>

#include "call.h"
#include "device.h"
#include "memory.h"

namespace {

using sim::fail;
using sim::Handle;
using sim::Memory;
using sim::Region;
using sim::RegionKind;
using sim::Reservation;

uintptr_t address_of(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); }

size_t granularity_of(const acl::PhysicalProp& prop) {
    constexpr int kHuge1g[] = {10, 14, 17};
    for (const int attribute : kHuge1g) {
        if (prop.memory_attribute == attribute) {
            return size_t{1} << 30U;
        }
    }
    return sim::kHugeBytes;
}

aclError check_prop(const acl::PhysicalProp* prop) {
    if (prop == nullptr || prop->handle_type != acl::kHandleTypeNone ||
        prop->allocation_type != acl::kAllocationPinned) {
        return fail(acl::kRtParamInvalid, "only pinned memory without a handle type can be made");
    }
    const bool is_device = prop->location.type == acl::kDevice;
    if (is_device && prop->location.id >= static_cast<uint32_t>(sim::num_devices())) {
        return fail(acl::kRtInvalidDevice,
                    "there is no device " + std::to_string(prop->location.id));
    }
    if (!is_device && prop->location.type != acl::kHost && prop->location.type != acl::kHostNuma) {
        return fail(acl::kRtParamInvalid, "unknown place for the memory");
    }
    const int attribute = prop->memory_attribute;
    if (is_device && (attribute == 0 || attribute == 2 || attribute == 3)) {
        return fail(acl::kInvalidParam, "a device has no DDR memory");
    }
    if (attribute < 0 || attribute > 17) {
        return fail(acl::kInvalidParam, "unknown memory attribute " + std::to_string(attribute));
    }
    return acl::kSuccess;
}

// The reservation that holds all of these addresses.
std::pair<const uintptr_t, Reservation>* reservation_of(Memory& all, uintptr_t start,
                                                        size_t size_bytes) {
    auto next = all.reservations.upper_bound(start);
    if (next == all.reservations.begin()) {
        return nullptr;
    }
    auto& found = *std::prev(next);
    const size_t offset = start - found.first;
    return offset < found.second.size_bytes && size_bytes <= found.second.size_bytes - offset
               ? &found
               : nullptr;
}

bool overlaps_mapping(const Memory& all, uintptr_t start, size_t size_bytes) {
    const auto next = all.regions.lower_bound(start);
    if (next != all.regions.end() && next->first < start + size_bytes) {
        return true;
    }
    if (next == all.regions.begin()) {
        return false;
    }
    const Region& before = std::prev(next)->second;
    return before.start + before.size_bytes > start;
}

aclError map(Memory& all, void* pointer, size_t size_bytes, uintptr_t key, const Handle& handle) {
    const uintptr_t start = address_of(pointer);
    const sim::Physical& physical = *handle.physical;
    if (size_bytes != physical.size_bytes) {
        return fail(acl::kRtParamInvalid, "a mapping must be as large as its memory");
    }
    if (start % sim::kHugeBytes != 0) {
        return fail(acl::kRtParamInvalid, "a mapping must begin at a multiple of 2 MiB");
    }
    auto* reserved = reservation_of(all, start, size_bytes);
    if (reserved == nullptr) {
        return fail(acl::kRtParamInvalid, "these addresses are not reserved");
    }
    if (overlaps_mapping(all, start, size_bytes)) {
        return fail(acl::kRtParamInvalid, "there is memory at these addresses already");
    }
    Reservation& into = reserved->second;
    const bool is_mixed =
        into.mapped_bytes != 0 && (into.physical_device != physical.physical_device ||
                                   into.is_imported != physical.is_imported());
    if (is_mixed && sim::number_setting("MC2_ACL_SIM_MIXED", 0) == 0) {
        return fail(
            acl::kRtParamInvalid,
            "one reservation cannot hold memory of two devices, nor own and imported memory");
    }
    sim::Context* context = sim::current_context();
    into.mapped_bytes += size_bytes;
    into.physical_device = physical.physical_device;
    into.is_imported = physical.is_imported();
    const int device = physical.properties.location.type == acl::kDevice
                           ? static_cast<int>(physical.properties.location.id)
                           : context->device;
    all.regions[start] = {.start = start,
                          .size_bytes = size_bytes,
                          .kind = RegionKind::kMapping,
                          .physical = handle.physical,
                          .device = device,
                          .handle = key,
                          .reservation = reserved->first};
    return acl::kSuccess;
}

}  // namespace

SIM_API aclError aclrtMemGetAllocationGranularity(acl::PhysicalProp* prop, int option,
                                                  size_t* granularity) {
    SIM_ENTER();
    if (granularity == nullptr || (option != 0 && option != 1)) {
        return fail(acl::kRtParamInvalid, "unknown option or no place for the answer");
    }
    SIM_TRY(check_prop(prop));
    *granularity = granularity_of(*prop);
    return acl::kSuccess;
}

// torch_npu asks for 512 bytes before it has a device, to learn whether reservations work: neither is an error.
SIM_API aclError aclrtReserveMemAddress(void** pointer, size_t size, size_t alignment,
                                        void* expected, uint64_t flags) {
    SIM_ENTER();
    if (pointer == nullptr || size == 0 || alignment != 0 || expected != nullptr || flags > 1) {
        return fail(
            acl::kRtParamInvalid,
            "a size above 0, an alignment of 0, no wished address and flags of 0 or 1 are needed");
    }
    void* at = sim::reserve_addresses(size, sim::kHugeBytes);
    if (at == nullptr) {
        return fail(acl::kRtMemoryAllocation, "no addresses left");
    }
    Memory& all = sim::memory();
    const std::scoped_lock lock(all.mutex);
    all.reservations[address_of(at)] = {.size_bytes = size};
    *pointer = at;
    return acl::kSuccess;
}

SIM_API aclError aclrtReleaseMemAddress(void* pointer) {
    SIM_ENTER();
    Memory& all = sim::memory();
    const std::scoped_lock lock(all.mutex);
    const auto found = all.reservations.find(address_of(pointer));
    if (found == all.reservations.end()) {
        return fail(acl::kRtParamInvalid, "not the start of a reservation");
    }
    if (found->second.mapped_bytes != 0) {
        sim::violation("aclrtReleaseMemAddress while memory is mapped there");
        return fail(acl::kRtParamInvalid, "memory is still mapped there");
    }
    sim::release_addresses(pointer, found->second.size_bytes);
    all.reservations.erase(found);
    return acl::kSuccess;
}

SIM_API aclError aclrtMallocPhysical(aclrtDrvMemHandle* handle, size_t size,
                                     const acl::PhysicalProp* prop, uint64_t flags) {
    SIM_ENTER();
    sim::Context* context = nullptr;
    SIM_TRY(sim::need_context(&context));
    SIM_TRY(check_prop(prop));
    if (handle == nullptr || flags != 0 || size == 0 || size % granularity_of(*prop) != 0) {
        return fail(acl::kRtParamInvalid,
                    "flags of 0 and a multiple of the granularity are needed");
    }
    const bool is_device = prop->location.type == acl::kDevice;
    auto physical = sim::Physical::make(size, is_device ? static_cast<int>(prop->location.id) : -1);
    if (physical == nullptr) {
        return acl::kRtMemoryAllocation;
    }
    physical->properties = *prop;
    Memory& all = sim::memory();
    const std::scoped_lock lock(all.mutex);
    const uintptr_t key = all.next_handle++;
    all.handles[key] = {.physical = std::move(physical)};
    *handle = reinterpret_cast<void*>(key);
    return acl::kSuccess;
}

// The memory lives on while it is mapped and while others have it imported.
SIM_API aclError aclrtFreePhysical(aclrtDrvMemHandle handle) {
    SIM_ENTER();
    Memory& all = sim::memory();
    const std::scoped_lock lock(all.mutex);
    const auto found = all.handles.find(address_of(handle));
    if (found == all.handles.end() || found->second.references == 0) {
        return fail(acl::kRtInvalidHandle, "not a handle of physical memory, or freed already");
    }
    --found->second.references;
    sim::drop_handle(all, found->first);
    return acl::kSuccess;
}

SIM_API aclError aclrtMapMem(void* pointer, size_t size, size_t offset, aclrtDrvMemHandle handle,
                             uint64_t flags) {
    SIM_ENTER();
    sim::Context* context = nullptr;
    SIM_TRY(sim::need_context(&context));
    if (offset != 0 || flags != 0) {
        return fail(acl::kRtParamInvalid, "offset and flags must be 0");
    }
    Memory& all = sim::memory();
    const std::scoped_lock lock(all.mutex);
    const auto found = all.handles.find(address_of(handle));
    if (found == all.handles.end() || found->second.references == 0) {
        return fail(acl::kRtInvalidHandle, "not a handle of physical memory, or freed already");
    }
    SIM_TRY(map(all, pointer, size, found->first, found->second));
    ++found->second.num_mappings;
    return acl::kSuccess;
}

SIM_API aclError aclrtUnmapMem(void* pointer) {
    SIM_ENTER();
    Memory& all = sim::memory();
    const std::scoped_lock lock(all.mutex);
    const auto found = all.regions.find(address_of(pointer));
    if (found == all.regions.end() || found->second.kind != RegionKind::kMapping) {
        return fail(acl::kRtParamInvalid, "not the start of a mapping");
    }
    const Region region = found->second;
    all.require_idle(region.start, region.size_bytes, "aclrtUnmapMem");
    all.reservations[region.reservation].mapped_bytes -= region.size_bytes;
    all.erase(region.start);
    --all.handles[region.handle].num_mappings;
    sim::drop_handle(all, region.handle);
    return acl::kSuccess;
}

SIM_API aclError aclrtMemSetAccess(void* pointer, size_t size, acl::AccessDesc* desc,
                                   size_t count) {
    SIM_ENTER();
    constexpr int kReadWrite = 3;
    if (desc == nullptr || count == 0) {
        return fail(acl::kRtParamInvalid, "who gets access is missing");
    }
    Memory& all = sim::memory();
    const std::scoped_lock lock(all.mutex);
    const uintptr_t end = address_of(pointer) + size;
    for (uintptr_t at = address_of(pointer); at < end;) {
        const Region* region = all.find(reinterpret_cast<void*>(at));
        if (region == nullptr || region->kind != RegionKind::kMapping) {
            return fail(acl::kRtParamInvalid, "nothing is mapped there");
        }
        at = region->start + region->size_bytes;
    }
    for (size_t i = 0; i < count; ++i) {
        if (desc[i].flags != kReadWrite) {
            return fail(acl::kRtParamInvalid, "only reading and writing together can be allowed");
        }
    }
    return acl::kSuccess;
}

SIM_API aclError aclrtMemGetAccess(void* pointer, acl::Location* location, uint64_t* flag) {
    SIM_ENTER();
    Memory& all = sim::memory();
    const std::scoped_lock lock(all.mutex);
    const Region* region = all.find(pointer);
    if (region == nullptr || region->kind != RegionKind::kMapping || location == nullptr ||
        flag == nullptr) {
        return fail(acl::kRtParamInvalid, "nothing is mapped there");
    }
    const bool is_own =
        location->type == acl::kDevice && location->id == static_cast<uint32_t>(region->device);
    *flag = is_own ? 3 : 0;
    return acl::kSuccess;
}

#if MC2_SIM_LEVEL >= 85
SIM_API aclError aclrtMemRetainAllocationHandle(void* pointer, aclrtDrvMemHandle* handle) {
    SIM_ENTER();
    Memory& all = sim::memory();
    const std::scoped_lock lock(all.mutex);
    const Region* region = all.find(pointer);
    if (region == nullptr || region->kind != RegionKind::kMapping || handle == nullptr) {
        return fail(acl::kRtParamInvalid, "no physical memory is mapped there");
    }
    ++all.handles[region->handle].references;
    *handle = reinterpret_cast<void*>(region->handle);
    return acl::kSuccess;
}

SIM_API aclError aclrtMemGetAllocationPropertiesFromHandle(aclrtDrvMemHandle handle,
                                                           acl::PhysicalProp* prop) {
    SIM_ENTER();
    Memory& all = sim::memory();
    const std::scoped_lock lock(all.mutex);
    const auto found = all.handles.find(address_of(handle));
    if (found == all.handles.end() || prop == nullptr) {
        return fail(acl::kRtInvalidHandle, "not a handle of physical memory");
    }
    *prop = found->second.physical->properties;
    return acl::kSuccess;
}
#endif

#if MC2_SIM_LEVEL >= 90
// Of memory in a reservation: the one mapping around the address.
SIM_API aclError aclrtMemGetAddressRange(void* pointer, void** base, size_t* size) {
    SIM_ENTER();
    Memory& all = sim::memory();
    const std::scoped_lock lock(all.mutex);
    const Region* region = all.find(pointer);
    if (region == nullptr || region->physical == nullptr) {
        return fail(acl::kRtParamInvalid, "not device memory");
    }
    if (base != nullptr) {
        *base = reinterpret_cast<void*>(region->start);
    }
    if (size != nullptr) {
        *size = region->size_bytes;
    }
    return acl::kSuccess;
}

SIM_API aclError aclrtReserveMemAddressNoUCMemory(void** pointer, size_t size, size_t alignment,
                                                  void* expected, uint64_t flags) {
    SIM_ENTER();
    return aclrtReserveMemAddress(pointer, size, alignment, expected, flags);
}
#endif
