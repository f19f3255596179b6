#include "ascend/owners.h"

namespace mc2::ascend {

Reservation reserve(const AclPointer& acl, std::size_t num_bytes) {
    void* address = nullptr;
    acl->aclrtReserveMemAddress(&address, num_bytes, 0, nullptr, abi::kReserveFlagHugePage);
    return {acl, address};
}

PhysicalHandle allocate(const AclPointer& acl, std::int32_t device, std::size_t num_bytes) {
    const abi::PhysicalMemProp prop{
        .handle_type = abi::kMemHandleTypeNone,
        .allocation_type = abi::kMemAllocationTypePinned,
        .mem_attr = abi::kHbmMemHuge,
        .location = {.id = static_cast<std::uint32_t>(device), .type = abi::kMemLocationTypeDevice},
        .reserve = 0};
    void* handle = nullptr;
    acl->aclrtMallocPhysical(&handle, num_bytes, &prop, 0);
    return {acl, handle};
}

DeviceMapping map(const AclPointer& acl, void* address, std::size_t num_bytes,
                  const PhysicalHandle& handle) {
    acl->aclrtMapMem(address, num_bytes, 0, handle.get(), 0);
    return {acl, address};
}

Stream make_stream(const AclPointer& acl) {
    void* stream = nullptr;
    acl->aclrtCreateStream(&stream);
    return {acl, stream};
}

}  // namespace mc2::ascend
