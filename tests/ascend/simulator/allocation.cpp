// Plain device memory and pinned host memory.
#include <sys/mman.h>

#include <cstring>

#include "call.h"
#include "device.h"
#include "memory.h"

namespace {

using sim::fail;
using sim::Region;
using sim::RegionKind;

aclError allocate(void** pointer, size_t size_bytes, int policy) {
    sim::Context* context = nullptr;
    SIM_TRY(sim::need_context(&context));
    if (pointer == nullptr || size_bytes == 0 || size_bytes > (size_t{1} << 44U)) {
        return fail(acl::kRtParamInvalid, "a place for the pointer and a size above 0 are needed");
    }
    const bool is_huge = policy != acl::kNormalOnly &&
                         (policy == acl::kHugeOnly || size_bytes >= sim::kHugeBytes / 2);
    const size_t page = is_huge ? sim::kHugeBytes : sim::kPageBytes;
    const size_t whole = sim::rounded_up(size_bytes, page);
    auto physical = sim::Physical::make(whole, context->device);
    if (physical == nullptr) {
        return acl::kRtMemoryAllocation;
    }
    physical->page_bytes = page;
    void* start = sim::reserve_addresses(whole, page);
    if (start == nullptr) {
        return fail(acl::kRtMemoryAllocation, "no addresses left");
    }
    sim::Memory& all = sim::memory();
    const std::scoped_lock lock(all.mutex);
    const auto address = reinterpret_cast<uintptr_t>(start);
    all.regions[address] = {.start = address,
                            .size_bytes = size_bytes,
                            .kind = RegionKind::kMalloc,
                            .physical = std::move(physical),
                            .device = context->device};
    *pointer = start;
    return acl::kSuccess;
}

aclError release(void* pointer, RegionKind kind, const char* call) {
    sim::Memory& all = sim::memory();
    const std::scoped_lock lock(all.mutex);
    const auto found = all.regions.find(reinterpret_cast<uintptr_t>(pointer));
    if (found == all.regions.end() || found->second.kind != kind) {
        return fail(acl::kRtParamInvalid, std::string(call) + ": not the start of such memory");
    }
    const Region& region = found->second;
    all.require_idle(region.start, region.size_bytes, call);
    for (const auto& [key, exported] : all.ipc_exports) {
        if (exported.region == region.start) {
            sim::violation(std::string(call) + " of memory whose key is not closed");
        }
    }
    if (kind == RegionKind::kPinnedHost) {
        ::munmap(region.host, sim::rounded_up(region.size_bytes, sim::kPageBytes));
    } else {
        sim::release_addresses(pointer, region.physical->size_bytes);
    }
    all.erase(region.start);
    return acl::kSuccess;
}

aclError allocate_host(void** pointer, size_t size_bytes) {
    sim::Context* context = nullptr;
    SIM_TRY(sim::need_context(&context));
    if (pointer == nullptr || size_bytes == 0) {
        return fail(acl::kRtParamInvalid, "a place for the pointer and a size above 0 are needed");
    }
    void* at = ::mmap(nullptr, sim::rounded_up(size_bytes, sim::kPageBytes), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) {
        return fail(acl::kRtMemoryAllocation, "no host memory");
    }
    sim::Memory& all = sim::memory();
    const std::scoped_lock lock(all.mutex);
    const auto address = reinterpret_cast<uintptr_t>(at);
    all.regions[address] = {.start = address,
                            .size_bytes = size_bytes,
                            .kind = RegionKind::kPinnedHost,
                            .host = static_cast<std::byte*>(at)};
    *pointer = at;
    return acl::kSuccess;
}

aclError register_host(void* pointer, uint64_t size_bytes, uintptr_t* device_address) {
    sim::Context* context = nullptr;
    SIM_TRY(sim::need_context(&context));
    if (pointer == nullptr || size_bytes == 0 ||
        reinterpret_cast<uintptr_t>(pointer) % sim::kPageBytes != 0) {
        return fail(acl::kRtParamInvalid, "host memory must begin at a page to be registered");
    }
    sim::Memory& all = sim::memory();
    const std::scoped_lock lock(all.mutex);
    for (const auto& [start, region] : all.regions) {
        if (region.kind == RegionKind::kRegisteredHost && region.host == pointer) {
            return fail(acl::kRtParamInvalid, "this memory is registered already");
        }
    }
    void* at = sim::reserve_addresses(size_bytes, sim::kPageBytes);
    if (at == nullptr) {
        return fail(acl::kRtMemoryAllocation, "no addresses left");
    }
    *device_address = reinterpret_cast<uintptr_t>(at);
    all.regions[*device_address] = {.start = *device_address,
                                    .size_bytes = size_bytes,
                                    .kind = RegionKind::kRegisteredHost,
                                    .host = static_cast<std::byte*>(pointer),
                                    .device = context->device};
    return acl::kSuccess;
}

}  // namespace

SIM_API aclError aclrtMalloc(void** pointer, size_t size, int policy) {
    SIM_ENTER();
    return allocate(pointer, size, policy);
}

SIM_API aclError aclrtMallocAlign32(void** pointer, size_t size, int policy) {
    SIM_ENTER();
    return allocate(pointer, size, policy);
}

SIM_API aclError aclrtMallocCached(void** pointer, size_t size, int policy) {
    SIM_ENTER();
    return allocate(pointer, size, policy);
}

SIM_API aclError aclrtMallocWithCfg(void** pointer, size_t size, int policy, void* /*config*/) {
    SIM_ENTER();
    return allocate(pointer, size, policy);
}

SIM_API aclError aclrtFree(void* pointer) {
    SIM_ENTER();
    return release(pointer, RegionKind::kMalloc, "aclrtFree");
}

SIM_API aclError aclrtMallocHost(void** pointer, size_t size) {
    SIM_ENTER();
    return allocate_host(pointer, size);
}

SIM_API aclError aclrtMallocHostWithCfg(void** pointer, uint64_t size, void* /*config*/) {
    SIM_ENTER();
    return allocate_host(pointer, size);
}

SIM_API aclError aclrtFreeHost(void* pointer) {
    SIM_ENTER();
    return release(pointer, RegionKind::kPinnedHost, "aclrtFreeHost");
}

// The address that it gives is for kernels alone: no copy may use it.
SIM_API aclError aclrtHostRegister(void* pointer, uint64_t size, int type, void** device_pointer) {
    SIM_ENTER();
    if (type != 0 || device_pointer == nullptr) {
        return fail(acl::kRtParamInvalid, "only the mapped type is known");
    }
    uintptr_t address = 0;
    SIM_TRY(register_host(pointer, size, &address));
    *device_pointer = reinterpret_cast<void*>(address);
    return acl::kSuccess;
}

SIM_API aclError aclrtHostRegisterV2(void* pointer, uint64_t size, uint32_t flag) {
    SIM_ENTER();
    constexpr uint32_t kMapped = 0x2;
    constexpr uint32_t kPinned = 0x10000000;
    if (flag == 0 || (flag & ~(kMapped | kPinned)) != 0) {
        return fail(acl::kRtParamInvalid, "unknown flags");
    }
    uintptr_t address = 0;
    return register_host(pointer, size, &address);
}

SIM_API aclError aclrtHostGetDevicePointer(void* pointer, void** device_pointer, uint32_t flag) {
    SIM_ENTER();
    sim::Memory& all = sim::memory();
    const std::scoped_lock lock(all.mutex);
    for (const auto& [start, region] : all.regions) {
        if (flag == 0 && region.kind == RegionKind::kRegisteredHost && region.host == pointer) {
            *device_pointer = reinterpret_cast<void*>(start);
            return acl::kSuccess;
        }
    }
    return fail(acl::kRtParamInvalid, "this memory is not registered");
}

SIM_API aclError aclrtHostUnregister(void* pointer) {
    SIM_ENTER();
    sim::Memory& all = sim::memory();
    const std::scoped_lock lock(all.mutex);
    for (const auto& [start, region] : all.regions) {
        if (region.kind == RegionKind::kRegisteredHost && region.host == pointer) {
            sim::release_addresses(reinterpret_cast<void*>(start), region.size_bytes);
            all.erase(start);
            return acl::kSuccess;
        }
    }
    return fail(acl::kRtParamInvalid, "this memory is not registered");
}

SIM_API aclError aclrtPointerGetAttributes(const void* pointer,
                                           acl::PointerAttributes* attributes) {
    SIM_ENTER();
    if (attributes == nullptr) {
        return fail(acl::kRtParamInvalid, "a place for the answer is needed");
    }
    *attributes = {
        .location = {.id = 0, .type = acl::kUnregistered}, .page_size = 0, .reserved = {}};
    sim::Memory& all = sim::memory();
    const std::scoped_lock lock(all.mutex);
    if (const Region* region = all.find(pointer)) {
        const bool is_device = region->physical != nullptr;
        attributes->location.type = is_device ? acl::kDevice : acl::kHost;
        attributes->location.id = is_device ? static_cast<uint32_t>(region->device) : 0;
        attributes->page_size =
            static_cast<uint32_t>(is_device ? region->physical->page_bytes : sim::kPageBytes);
    }
    return acl::kSuccess;
}
