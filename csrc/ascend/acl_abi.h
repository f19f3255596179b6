// The part of ACL's binary interface that we call, written down once more: CANN's headers may not be vendored, and a build
// must not need CANN. tests/ascend/test_headers.py compares every line here with the headers of real releases.
//
// The layouts are the same in CANN 8.5 and in every later release up to 9.2 beta. Enumerations are 32 bits wide.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace mc2::ascend::abi {

using Error = int;
using DrvMemHandle = void*;
using Stream = void*;

struct MemLocation {
    std::uint32_t id;
    std::uint32_t type;
};
static_assert(sizeof(MemLocation) == 8 && offsetof(MemLocation, type) == 4);

struct PhysicalMemProp {
    std::uint32_t handle_type;
    std::uint32_t allocation_type;
    std::uint32_t mem_attr;
    MemLocation location;
    std::uint64_t reserve;
};
static_assert(sizeof(PhysicalMemProp) == 32 && offsetof(PhysicalMemProp, allocation_type) == 4 &&
              offsetof(PhysicalMemProp, mem_attr) == 8 &&
              offsetof(PhysicalMemProp, location) == 12 &&
              offsetof(PhysicalMemProp, reserve) == 24);

struct MemFabricHandle {
    std::uint8_t data[128];  // NOLINT(modernize-avoid-c-arrays): the layout is C's
};
static_assert(sizeof(MemFabricHandle) == 128);

// The key of aclrtIpcMemGetExportKey, always of this length.
inline constexpr std::size_t kIpcKeyBytes = 65;
// What aclsysGetVersionStr writes at most.
inline constexpr std::size_t kVersionBytes = 128;

inline constexpr std::uint64_t kIpcExportFlagDefault = 0;  // only processes on the whitelist
inline constexpr std::uint64_t kIpcImportFlagPeerAccess = 1;
inline constexpr std::uint64_t kVmmExportFlagDefault = 0;     // likewise
inline constexpr std::uint64_t kVmmExportFlagDisablePid = 1;  // whoever has the handle
// aclrtReserveMemAddress: huge pages. A plain number in its documentation.
inline constexpr std::uint64_t kReserveFlagHugePage = 1;

inline constexpr std::uint32_t kMemHandleTypeNone = 0;
inline constexpr std::uint32_t kMemAllocationTypePinned = 0;
inline constexpr std::uint32_t kHbmMemHuge = 4;
inline constexpr std::uint32_t kMemLocationTypeDevice = 1;
inline constexpr std::uint32_t kMemShareHandleTypeDefault = 1;
inline constexpr std::uint32_t kMemShareHandleTypeFabric = 2;
inline constexpr std::uint32_t kMemcpyDeviceToDevice = 3;

inline constexpr Error kSuccess = 0;
inline constexpr Error kInvalidParam = 100000;
inline constexpr Error kRepeatInitialize = 100002;
inline constexpr Error kInvalidFile = 100003;
inline constexpr Error kFeatureUnsupported = 200006;
inline constexpr Error kRtParamInvalid = 107000;
inline constexpr Error kRtFeatureNotSupport = 207000;
inline constexpr Error kRtStreamSyncTimeout = 507046;

}  // namespace mc2::ascend::abi

// Every function that we look up: REQUIRED(name, signature) in every release that we can work with at all, OPTIONAL where a
// release or a driver may lack it.
// NOLINTBEGIN(cppcoreguidelines-macro-usage)
#define MC2_ACL_FUNCTIONS(REQUIRED, OPTIONAL)                                                      \
    REQUIRED(aclInit, Error(const char* config_path))                                              \
    REQUIRED(aclrtGetDeviceCount, Error(std::uint32_t* count))                                     \
    REQUIRED(aclrtSetDevice, Error(std::int32_t device))                                           \
    REQUIRED(aclrtCreateStream, Error(Stream* stream))                                             \
    REQUIRED(aclrtDestroyStream, Error(Stream stream))                                             \
    REQUIRED(aclrtDestroyStreamForce, Error(Stream stream))                                        \
    REQUIRED(aclrtSynchronizeStreamWithTimeout, Error(Stream stream, std::int32_t timeout_ms))     \
    REQUIRED(aclrtMemcpyAsync, Error(void* dst, std::size_t dst_bytes, const void* src,            \
                                     std::size_t num_bytes, std::uint32_t kind, Stream stream))    \
    REQUIRED(aclrtReserveMemAddress,                                                               \
             Error(void** address, std::size_t num_bytes, std::size_t alignment, void* hint,       \
                   std::uint64_t flags))                                                           \
    REQUIRED(aclrtReleaseMemAddress, Error(void* address))                                         \
    REQUIRED(aclrtMallocPhysical, Error(DrvMemHandle* handle, std::size_t num_bytes,               \
                                        const PhysicalMemProp* prop, std::uint64_t flags))         \
    REQUIRED(aclrtFreePhysical, Error(DrvMemHandle handle))                                        \
    REQUIRED(aclrtMapMem, Error(void* address, std::size_t num_bytes, std::size_t offset,          \
                                DrvMemHandle handle, std::uint64_t flags))                         \
    REQUIRED(aclrtUnmapMem, Error(void* address))                                                  \
    OPTIONAL(aclrtMemGetAddressRange, Error(void* pointer, void** base, std::size_t* num_bytes))   \
    OPTIONAL(aclrtMemRetainAllocationHandle, Error(void* address, DrvMemHandle* handle))           \
    OPTIONAL(aclrtMemExportToShareableHandleV2,                                                    \
             Error(DrvMemHandle handle, std::uint64_t flags, std::uint32_t type, void* shareable)) \
    OPTIONAL(aclrtMemImportFromShareableHandle,                                                    \
             Error(std::uint64_t shareable, std::int32_t device, DrvMemHandle* handle))            \
    OPTIONAL(                                                                                      \
        aclrtMemImportFromShareableHandleV2,                                                       \
        Error(void* shareable, std::uint32_t type, std::uint64_t flags, DrvMemHandle* handle))     \
    OPTIONAL(aclrtMemSetPidToShareableHandleV2,                                                    \
             Error(void* shareable, std::uint32_t type, std::int32_t* pids, std::size_t num_pids)) \
    OPTIONAL(aclrtIpcMemGetExportKey, Error(void* address, std::size_t num_bytes, char* key,       \
                                            std::size_t key_bytes, std::uint64_t flags))           \
    OPTIONAL(aclrtIpcMemSetImportPid,                                                              \
             Error(const char* key, std::int32_t* pids, std::size_t num_pids))                     \
    OPTIONAL(aclrtIpcMemImportByKey, Error(void** address, const char* key, std::uint64_t flags))  \
    OPTIONAL(aclrtIpcMemClose, Error(const char* key))                                             \
    OPTIONAL(aclrtDeviceGetBareTgid, Error(std::int32_t* pid))                                     \
    OPTIONAL(aclrtDeviceCanAccessPeer,                                                             \
             Error(std::int32_t* can_access, std::int32_t device, std::int32_t peer))              \
    OPTIONAL(aclrtGetDevicesTopo,                                                                  \
             Error(std::uint32_t device, std::uint32_t other, std::uint64_t* value))               \
    OPTIONAL(aclrtGetDeviceInfo,                                                                   \
             Error(std::uint32_t device, std::uint32_t attribute, std::int64_t* value))            \
    OPTIONAL(aclrtGetPhyDevIdByLogicDevId, Error(std::int32_t logical, std::int32_t* physical))    \
    OPTIONAL(aclsysGetVersionStr, Error(char* package, char* version))                             \
    OPTIONAL(aclrtGetSocName, const char*())                                                       \
    OPTIONAL(aclGetRecentErrMsg, const char*())
// NOLINTEND(cppcoreguidelines-macro-usage)
