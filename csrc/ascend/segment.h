// What one process tells another about a piece of device memory, so that it can map it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "ascend/acl_abi.h"

namespace mc2::ascend {

enum class SegmentKind : std::uint8_t {
    kHandleV2,  // one server; only for processes on the exporter's whitelist
    kFabric,    // beyond the server, inside one SuperPoD
    kHandleV1,  // as torch_npu exports
    kIpcKey,    // for memory of aclrtMalloc
};

struct Segment {
    SegmentKind kind;
    std::uintptr_t base;    // in the exporter
    std::size_t num_bytes;  // all of the physical memory, for the handle kinds
    std::string handle;
};

// More than any pool has: 128 GiB in pieces of 2 MiB.
inline constexpr std::size_t kMaxSegments = 65536;

[[nodiscard]] constexpr std::size_t handle_bytes_of(SegmentKind kind) {
    switch (kind) {
        case SegmentKind::kFabric:
            return sizeof(abi::MemFabricHandle);
        case SegmentKind::kIpcKey:
            return abi::kIpcKeyBytes;
        case SegmentKind::kHandleV2:
        case SegmentKind::kHandleV1:
            break;
    }
    return sizeof(std::uint64_t);
}

[[nodiscard]] constexpr std::uint32_t share_type_of(SegmentKind kind) {
    return kind == SegmentKind::kFabric ? abi::kMemShareHandleTypeFabric
                                        : abi::kMemShareHandleTypeDefault;
}

[[nodiscard]] const char* name_of(SegmentKind kind);
// Throws std::invalid_argument for any other name.
[[nodiscard]] SegmentKind segment_kind_of(std::string_view name);

// Addresses come and go as numbers; ACL takes pointers.
[[nodiscard]] inline void* pointer_of(std::uintptr_t address) {
    return reinterpret_cast<void*>(address);  // NOLINT(performance-no-int-to-ptr)
}

// Throws std::invalid_argument unless [address, address + num_bytes) is something, is of a size that memory can have, and
// does not wrap around.
void require_range(const char* what, std::uintptr_t address, std::size_t num_bytes);

}  // namespace mc2::ascend
