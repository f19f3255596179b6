#include "ascend/segment.h"

#include <limits>

#include "memory/errors.h"
#include "memory/page.h"

namespace mc2::ascend {

const char* name_of(SegmentKind kind) {
    switch (kind) {
        case SegmentKind::kHandleV2:
            return "handle_v2";
        case SegmentKind::kFabric:
            return "fabric";
        case SegmentKind::kHandleV1:
            return "handle_v1";
        case SegmentKind::kIpcKey:
            break;
    }
    return "ipc_key";
}

SegmentKind segment_kind_of(std::string_view name) {
    for (const SegmentKind kind : {SegmentKind::kHandleV2, SegmentKind::kFabric,
                                   SegmentKind::kHandleV1, SegmentKind::kIpcKey}) {
        if (name == name_of(kind)) {
            return kind;
        }
    }
    throw_invalid("segment of kind \"" + std::string(name.substr(0, 32)) +
                  "\", must be handle_v2, fabric, handle_v1 or ipc_key");
}

void require_range(const char* what, std::uintptr_t address, std::size_t num_bytes) {
    if (address == 0 || num_bytes == 0 || num_bytes > kMaxBytes ||
        address > std::numeric_limits<std::uintptr_t>::max() - num_bytes) {
        throw_invalid(std::string(what) + " of " + std::to_string(num_bytes) +
                      " bytes at address " + std::to_string(address));
    }
}

}  // namespace mc2::ascend
