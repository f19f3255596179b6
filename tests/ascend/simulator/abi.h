// The part of Ascend's C interface that the simulator answers, declared from its documentation. Neither CANN's headers
// nor the project's own declarations are used: a mistake in one of them must not be hidden by the other.
#pragma once

#include <cstddef>
#include <cstdint>

#define SIM_API extern "C" __attribute__((visibility("default")))

using aclError = int;
using aclrtStream = void*;
using aclrtEvent = void*;
using aclrtContext = void*;
using aclrtDrvMemHandle = void*;

namespace acl {

inline constexpr aclError kSuccess = 0;
inline constexpr aclError kInvalidParam = 100000;
inline constexpr aclError kRepeatInitialize = 100002;
inline constexpr aclError kRtParamInvalid = 107000;
inline constexpr aclError kRtInvalidDevice = 107001;
inline constexpr aclError kRtContextNull = 107002;
inline constexpr aclError kRtStreamContext = 107003;
inline constexpr aclError kRtAddressUnaligned = 107008;
inline constexpr aclError kRtInvalidHandle = 107017;
inline constexpr aclError kRtNotSupported = 207000;
inline constexpr aclError kRtMemoryAllocation = 207001;
inline constexpr aclError kRtOverLimit = 207012;
inline constexpr aclError kRtLinkNotSupported = 207021;
inline constexpr aclError kRtStreamSyncTimeout = 507046;
inline constexpr aclError kRtEventSyncTimeout = 507047;
inline constexpr aclError kRtDeviceMemoryError = 507053;
inline constexpr aclError kRtSuspectRemote = 507057;
inline constexpr aclError kRtDriverInternal = 507899;

enum CopyKind : int {
    kHostToHost = 0,
    kHostToDevice = 1,
    kDeviceToHost = 2,
    kDeviceToDevice = 3,
    kDefault = 4,
    kHostToBufferToDevice = 5,
    kInnerDevice = 6,
    kInterDevice = 7,
};

enum LocationType : int {
    kHost = 0,
    kDevice = 1,
    kUnregistered = 2,
    kHostNuma = 4,
};

enum MallocPolicy : int { kHugeFirst = 0, kHugeOnly = 1, kNormalOnly = 2, kHuge1gOnly = 6 };

inline constexpr int kHandleTypeNone = 0;
inline constexpr int kAllocationPinned = 0;
inline constexpr int kShareDefault = 1;
inline constexpr int kShareFabric = 2;
inline constexpr uint32_t kEventIpc = 0x40;
inline constexpr size_t kIpcKeyBytes = 65;
inline constexpr size_t kMaxBatch = 4096;
inline constexpr size_t kMaxPidsPerCall = 31;

struct Location {
    uint32_t id;
    int type;
};

struct PhysicalProp {
    int handle_type;
    int allocation_type;
    int memory_attribute;
    Location location;
    uint64_t reserve;
};

struct AccessDesc {
    int flags;
    Location location;
    uint8_t reserved[12];
};

struct BatchAttribute {
    Location destination;
    Location source;
    uint8_t reserved[16];
};

struct PointerAttributes {
    Location location;
    uint32_t page_size;
    uint32_t reserved[4];
};

struct FabricHandle {
    uint8_t data[128];
};

struct IpcEventHandle {
    char reserved[64];
};

struct PackageVersion {
    char version[128];
    char major[64];
    char minor[64];
    char release[64];
    char patch[64];
    char reserved[128];
};

static_assert(sizeof(Location) == 8 && sizeof(PhysicalProp) == 32 &&
              offsetof(PhysicalProp, location) == 12);
static_assert(sizeof(AccessDesc) == 24 && sizeof(BatchAttribute) == 32 &&
              sizeof(PointerAttributes) == 28);

}  // namespace acl
