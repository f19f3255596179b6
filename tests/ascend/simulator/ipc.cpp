// Plain device memory of another process, by key.
#include <cstdio>
#include <cstring>

#include "call.h"
#include "device.h"
#include "memory.h"
#include "share.h"

namespace {

using sim::fail;
using sim::Memory;
using sim::Region;
using sim::RegionKind;

constexpr const char* kKeyFormat = "mc2sim%016llx";

std::string text_of(const char* key) { return {key, ::strnlen(key, acl::kIpcKeyBytes - 1)}; }

uint64_t shareable_of(const std::string& key) {
    unsigned long long value = 0;
    return std::sscanf(key.c_str(), kKeyFormat, &value) == 1 ? value : 0;
}

aclError check_exportable(const Region* region, const void* pointer, size_t size_bytes) {
    if (region == nullptr || region->kind != RegionKind::kMalloc) {
        return fail(acl::kRtParamInvalid,
                    "only memory of aclrtMalloc has a key: no mapping and nothing imported");
    }
    const size_t page = region->physical->page_bytes;
    if (region->start != reinterpret_cast<uintptr_t>(pointer)) {
        return fail(acl::kRtParamInvalid, "a key is for the start of an allocation");
    }
    if (size_bytes == 0 || size_bytes % page != 0 || size_bytes > region->size_bytes) {
        return fail(acl::kRtParamInvalid,
                    "a key is for whole pages of " + std::to_string(page) + " bytes");
    }
    return acl::kSuccess;
}

aclError import_new(Memory& all, const std::string& key, int device, bool with_peer,
                    void** pointer) {
    std::optional<sim::Origin> origin;
    SIM_TRY(sim::open_offer(sim::Ticket::unpacked(shareable_of(key)), sim::SlotKind::kIpc, false,
                            &origin));
    std::shared_ptr<sim::Physical> physical;
    SIM_TRY(sim::open_physical(*origin, &physical));
    const bool is_other = sim::physical_of(device) != physical->physical_device;
    if (with_peer && is_other && !sim::enable_reach(device, physical->physical_device)) {
        return fail(acl::kRtLinkNotSupported, "no link between these devices");
    }
    void* at = sim::reserve_addresses(physical->size_bytes, physical->page_bytes);
    if (at == nullptr) {
        return fail(acl::kRtMemoryAllocation, "no addresses left");
    }
    const auto start = reinterpret_cast<uintptr_t>(at);
    const size_t size_bytes = physical->size_bytes;
    all.regions[start] = {.start = start,
                          .size_bytes = size_bytes,
                          .kind = RegionKind::kIpcImport,
                          .physical = std::move(physical),
                          .device = device};
    all.ipc_imports[{key, device}] = {.region = start};
    *pointer = at;
    return acl::kSuccess;
}

aclError close_import(Memory& all,
                      std::map<std::pair<std::string, int>, sim::IpcImport>::iterator import) {
    if (--import->second.references > 0) {
        return acl::kSuccess;
    }
    const Region region = all.regions.at(import->second.region);
    all.require_idle(region.start, region.size_bytes, "aclrtIpcMemClose");
    all.erase(region.start);
    sim::release_addresses(reinterpret_cast<void*>(region.start), region.size_bytes);
    all.ipc_imports.erase(import);
    return acl::kSuccess;
}

}  // namespace

SIM_API aclError aclrtIpcMemGetExportKey(void* pointer, size_t size, char* key, size_t key_bytes,
                                         uint64_t flags) {
    SIM_ENTER();
    if (key == nullptr || key_bytes != acl::kIpcKeyBytes || flags > 1) {
        return fail(acl::kRtParamInvalid,
                    "a place of 65 bytes for the key and flags of 0 or 1 are needed");
    }
    Memory& all = sim::memory();
    const std::scoped_lock lock(all.mutex);
    const Region* region = all.find(pointer);
    SIM_TRY(check_exportable(region, pointer, size));
    const sim::Physical& physical = *region->physical;
    const auto ticket = sim::offer({.kind = sim::SlotKind::kIpc,
                                    .fd = physical.fd,
                                    .physical_device = physical.physical_device,
                                    .size_bytes = size,
                                    .page_bytes = physical.page_bytes,
                                    .is_open_to_all = (flags & 1U) != 0,
                                    .properties = physical.properties});
    if (!ticket) {
        return acl::kRtOverLimit;
    }
    std::memset(key, 0, key_bytes);
    std::snprintf(key, key_bytes, kKeyFormat,
                  static_cast<unsigned long long>(ticket->packed(physical.physical_device)));
    all.ipc_exports[text_of(key)] = {.ticket = *ticket, .region = region->start};
    return acl::kSuccess;
}

SIM_API aclError aclrtIpcMemSetImportPid(const char* key, int32_t* pids, size_t num_pids) {
    SIM_ENTER();
    Memory& all = sim::memory();
    const std::scoped_lock lock(all.mutex);
    const auto found = key == nullptr ? all.ipc_exports.end() : all.ipc_exports.find(text_of(key));
    if (found == all.ipc_exports.end()) {
        return fail(acl::kRtParamInvalid, "this process did not make that key");
    }
    return sim::allow(found->second.ticket, pids, num_pids);
}

// The same addresses each time that a device asks for the same key.
SIM_API aclError aclrtIpcMemImportByKey(void** pointer, const char* key, uint64_t flags) {
    SIM_ENTER();
    sim::Context* context = nullptr;
    SIM_TRY(sim::need_context(&context));
    if (pointer == nullptr || key == nullptr || flags > 1) {
        return fail(acl::kRtParamInvalid,
                    "a key, flags of 0 or 1 and a place for the pointer are needed");
    }
    Memory& all = sim::memory();
    const std::scoped_lock lock(all.mutex);
    const auto again = all.ipc_imports.find({text_of(key), context->device});
    if (again != all.ipc_imports.end()) {
        ++again->second.references;
        *pointer = reinterpret_cast<void*>(again->second.region);
        return acl::kSuccess;
    }
    return import_new(all, text_of(key), context->device, flags == 1, pointer);
}

// Of an importer: one of its imports, the current device's first. Of the exporter: the key itself.
SIM_API aclError aclrtIpcMemClose(const char* key) {
    SIM_ENTER();
    if (key == nullptr) {
        return fail(acl::kRtParamInvalid, "a key is needed");
    }
    Memory& all = sim::memory();
    const std::scoped_lock lock(all.mutex);
    const std::string text = text_of(key);
    const auto exported = all.ipc_exports.find(text);
    if (exported != all.ipc_exports.end()) {
        if (sim::retract(exported->second.ticket) > 0) {
            sim::violation("aclrtIpcMemClose by the exporter while others have the memory open");
        }
        all.ipc_exports.erase(exported);
        return acl::kSuccess;
    }
    const sim::Context* context = sim::current_context();
    auto found = all.ipc_imports.end();
    for (auto import = all.ipc_imports.begin(); import != all.ipc_imports.end(); ++import) {
        const bool is_own = context != nullptr && import->first.second == context->device;
        if (import->first.first == text && (found == all.ipc_imports.end() || is_own)) {
            found = import;
        }
    }
    if (found == all.ipc_imports.end()) {
        return fail(acl::kRtParamInvalid, "this key is not open in this process");
    }
    return close_import(all, found);
}
