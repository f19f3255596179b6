#include "share.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>

#include "call.h"
#include "device.h"

namespace sim {

std::optional<Ticket> offer(const Offer& what) {
    const auto ticket = claim_slot();
    if (!ticket) {
        (void)fail(acl::kRtOverLimit, "this process shares too much");
        return std::nullopt;
    }
    Slot& slot = own_table()->slots[ticket->slot];
    slot.kind = what.kind;
    slot.fd = what.fd;
    slot.physical_device = what.physical_device;
    slot.size_bytes = what.size_bytes;
    slot.page_bytes = static_cast<uint32_t>(what.page_bytes);
    slot.is_open_to_all = what.is_open_to_all ? 1 : 0;
    slot.is_fabric = what.is_fabric ? 1 : 0;
    std::memcpy(slot.properties, &what.properties, sizeof(slot.properties));
    publish(*ticket);
    return ticket;
}

aclError allow(const Ticket& ticket, const int32_t* pids, size_t num_pids) {
    if (pids == nullptr || num_pids == 0 || num_pids > acl::kMaxPidsPerCall) {
        return fail(acl::kRtParamInvalid, "one call takes 1 to 31 processes");
    }
    Slot& slot = own_table()->slots[ticket.slot];
    const uint32_t before = slot.num_pids;
    if (before + num_pids > kMaxPids) {
        return fail(acl::kRtOverLimit, "too many processes for one handle");
    }
    for (size_t i = 0; i < num_pids; ++i) {
        slot.pids[before + i] = pids[i];
    }
    slot.num_pids = before + static_cast<uint32_t>(num_pids);
    return acl::kSuccess;
}

namespace {

bool is_allowed(const Slot& slot) {
    if (slot.is_open_to_all != 0) {
        return true;
    }
    const uint32_t num = std::min<uint32_t>(slot.num_pids, kMaxPids);
    for (uint32_t i = 0; i < num; ++i) {
        if (slot.pids[i] == ::getpid()) {
            return true;
        }
    }
    return false;
}

}  // namespace

aclError open_offer(const Ticket& ticket, SlotKind kind, bool is_fabric,
                    std::optional<Origin>* origin) {
    if (ticket.pid == ::getpid()) {
        return fail(acl::kRtDriverInternal, "a process cannot import what it exports itself");
    }
    auto table = ticket.slot < kNumSlots ? table_of(ticket.pid) : nullptr;
    if (table == nullptr) {
        return fail(acl::kRtDriverInternal, "nobody offers this");
    }
    Slot& slot = (*table)->slots[ticket.slot];
    if (slot.generation.load(std::memory_order_acquire) != ticket.generation || slot.kind != kind) {
        return fail(acl::kRtDriverInternal, "this is not offered any more");
    }
    const int server = static_cast<int>(number_setting("MC2_ACL_SIM_SERVER", 0));
    if ((slot.is_fabric != 0) != is_fabric || (!is_fabric && (*table)->server != server)) {
        return fail(acl::kRtDriverInternal, "another kind of handle, or of another server");
    }
    if (!is_allowed(slot)) {
        return fail(acl::kRtDriverInternal,
                    "process " + std::to_string(::getpid()) + " is not allowed to import");
    }
    if (!add_importer(slot)) {
        return fail(acl::kRtOverLimit, "too many importers");
    }
    *origin = Origin{.table = std::move(table), .ticket = ticket};
    return acl::kSuccess;
}

aclError open_physical(const Origin& origin, std::shared_ptr<Physical>* physical) {
    Slot& slot = origin.slot();
    const int fd = open_memory(*origin.table, origin.ticket);
    if (fd < 0) {
        remove_importer(slot);
        return fail(acl::kRtDriverInternal, "the memory is gone");
    }
    auto opened = std::make_shared<Physical>(fd, slot.size_bytes, slot.physical_device, origin);
    if (opened->view == nullptr) {
        return fail(acl::kRtMemoryAllocation, "no addresses left");
    }
    opened->page_bytes = slot.page_bytes;
    std::memcpy(&opened->properties, slot.properties, sizeof(slot.properties));
    *physical = std::move(opened);
    return acl::kSuccess;
}

}  // namespace sim

namespace {

using sim::fail;
using sim::Handle;
using sim::Memory;

aclError export_handle(aclrtDrvMemHandle handle, uint64_t flags, bool is_fabric,
                       uint64_t* shareable) {
    if (shareable == nullptr || flags > 1) {
        return fail(acl::kRtParamInvalid, "flags of 0 or 1 and a place for the handle are needed");
    }
    if (is_fabric && sim::number_setting("MC2_ACL_SIM_FABRIC", 0) == 0) {
        return fail(acl::kRtNotSupported, "this machine has no fabric");
    }
    Memory& all = sim::memory();
    const std::scoped_lock lock(all.mutex);
    const auto found = all.handles.find(reinterpret_cast<uintptr_t>(handle));
    if (found == all.handles.end() || found->second.references == 0) {
        return fail(acl::kRtInvalidHandle, "not a handle of physical memory, or freed already");
    }
    Handle& exported = found->second;
    const sim::Physical& physical = *exported.physical;
    if (physical.is_imported()) {
        return fail(acl::kRtDriverInternal, "imported memory cannot be exported");
    }
    if (exported.has_export) {
        return fail(acl::kRtDriverInternal, "this memory is exported already");
    }
    const auto ticket = sim::offer({.kind = sim::SlotKind::kVmm,
                                    .fd = physical.fd,
                                    .physical_device = physical.physical_device,
                                    .size_bytes = physical.size_bytes,
                                    .page_bytes = physical.page_bytes,
                                    .is_open_to_all = (flags & 1U) != 0,
                                    .is_fabric = is_fabric,
                                    .properties = physical.properties});
    if (!ticket) {
        return acl::kRtOverLimit;
    }
    exported.has_export = true;
    exported.exported = *ticket;
    *shareable = ticket->packed(std::max(physical.physical_device, 0));
    all.vmm_exports[*shareable] = found->first;
    return acl::kSuccess;
}

aclError allow_shareable(uint64_t shareable, const int32_t* pids, size_t num_pids) {
    Memory& all = sim::memory();
    const std::scoped_lock lock(all.mutex);
    if (!all.vmm_exports.contains(shareable)) {
        return fail(acl::kRtParamInvalid, "this process did not export that");
    }
    return sim::allow(sim::Ticket::unpacked(shareable), pids, num_pids);
}

aclError import_handle(uint64_t shareable, int device, bool is_fabric, aclrtDrvMemHandle* handle) {
    if (handle == nullptr) {
        return fail(acl::kRtParamInvalid, "a place for the handle is needed");
    }
    std::optional<sim::Origin> origin;
    SIM_TRY(
        sim::open_offer(sim::Ticket::unpacked(shareable), sim::SlotKind::kVmm, is_fabric, &origin));
    std::shared_ptr<sim::Physical> physical;
    SIM_TRY(sim::open_physical(*origin, &physical));
    if (physical->physical_device >= 0 && !sim::enable_reach(device, physical->physical_device)) {
        return fail(acl::kRtLinkNotSupported, "no link between these devices");
    }
    physical->properties.location.id = static_cast<uint32_t>(device);
    Memory& all = sim::memory();
    const std::scoped_lock lock(all.mutex);
    const uintptr_t key = all.next_handle++;
    all.handles[key] = {.physical = std::move(physical)};
    *handle = reinterpret_cast<void*>(key);
    return acl::kSuccess;
}

#if MC2_SIM_LEVEL >= 85
constexpr char kFabricMark[] = "mc2-sim-fabric";

uint64_t unpacked_handle(const void* shareable, int type, bool* is_valid) {
    uint64_t value = 0;
    *is_valid = type == acl::kShareDefault;
    if (type == acl::kShareDefault) {
        std::memcpy(&value, shareable, sizeof(value));
    } else if (type == acl::kShareFabric) {
        const auto* fabric = static_cast<const acl::FabricHandle*>(shareable);
        *is_valid = std::memcmp(fabric->data, kFabricMark, sizeof(kFabricMark)) == 0;
        std::memcpy(&value, fabric->data + 64, sizeof(value));
    }
    return value;
}
#endif

}  // namespace

SIM_API aclError aclrtMemExportToShareableHandle(aclrtDrvMemHandle handle, int type, uint64_t flags,
                                                 uint64_t* shareable) {
    SIM_ENTER();
    if (type != acl::kHandleTypeNone) {
        return fail(acl::kRtParamInvalid, "no handle type but none is known");
    }
    return export_handle(handle, flags, false, shareable);
}

SIM_API aclError aclrtMemSetPidToShareableHandle(uint64_t shareable, int32_t* pids,
                                                 size_t num_pids) {
    SIM_ENTER();
    return allow_shareable(shareable, pids, num_pids);
}

SIM_API aclError aclrtMemImportFromShareableHandle(uint64_t shareable, int32_t device,
                                                   aclrtDrvMemHandle* handle) {
    SIM_ENTER();
    sim::Context* context = nullptr;
    SIM_TRY(sim::need_context(&context));
    if (device < 0 || device >= sim::num_devices()) {
        return fail(acl::kRtInvalidDevice, "there is no device " + std::to_string(device));
    }
    return import_handle(shareable, device, false, handle);
}

#if MC2_SIM_LEVEL >= 85
SIM_API aclError aclrtMemExportToShareableHandleV2(aclrtDrvMemHandle handle, uint64_t flags,
                                                   int type, void* shareable) {
    SIM_ENTER();
    if (shareable == nullptr || (type != acl::kShareDefault && type != acl::kShareFabric)) {
        return fail(acl::kRtParamInvalid, "unknown type of handle, or no place for it");
    }
    uint64_t value = 0;
    SIM_TRY(export_handle(handle, flags, type == acl::kShareFabric, &value));
    if (type == acl::kShareDefault) {
        std::memcpy(shareable, &value, sizeof(value));
        return acl::kSuccess;
    }
    auto* fabric = static_cast<acl::FabricHandle*>(shareable);
    std::memset(fabric->data, 0x5a, sizeof(fabric->data));
    std::memcpy(fabric->data, kFabricMark, sizeof(kFabricMark));
    std::memcpy(fabric->data + 64, &value, sizeof(value));
    return acl::kSuccess;
}

SIM_API aclError aclrtMemSetPidToShareableHandleV2(void* shareable, int type, int32_t* pids,
                                                   size_t num_pids) {
    SIM_ENTER();
    bool is_valid = false;
    const uint64_t value = shareable == nullptr ? 0 : unpacked_handle(shareable, type, &is_valid);
    if (!is_valid) {
        return fail(acl::kRtParamInvalid, "not a handle of this type");
    }
    return allow_shareable(value, pids, num_pids);
}

SIM_API aclError aclrtMemImportFromShareableHandleV2(void* shareable, int type, uint64_t flags,
                                                     aclrtDrvMemHandle* handle) {
    SIM_ENTER();
    sim::Context* context = nullptr;
    SIM_TRY(sim::need_context(&context));
    bool is_valid = false;
    const uint64_t value = shareable == nullptr ? 0 : unpacked_handle(shareable, type, &is_valid);
    if (!is_valid || flags != 0) {
        return fail(acl::kRtParamInvalid, "not a handle of this type, or flags that are not 0");
    }
    const bool is_fabric = type == acl::kShareFabric;
    if (is_fabric && sim::number_setting("MC2_ACL_SIM_FABRIC", 0) == 0) {
        return fail(acl::kRtNotSupported, "this machine has no fabric");
    }
    return import_handle(value, context->device, is_fabric, handle);
}
#endif
