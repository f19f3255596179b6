#include "ascend/acl_error.h"

#include <array>
#include <utility>

namespace mc2::ascend {
namespace {

std::string text_of(const std::string& call, abi::Error code, const std::string& message) {
    std::string text = call + ": error " + std::to_string(code);
    if (const char* name = name_of(code)) {
        text += std::string(" (") + name + ")";
    }
    return message.empty() ? text : text + ": " + message;
}

}  // namespace

const char* name_of(abi::Error code) {
    struct Name {
        abi::Error code;
        const char* name;
    };
    static constexpr auto kNames = std::to_array<Name>({
        // NOLINT(modernize-avoid-c-arrays)
        {.code = abi::kInvalidParam, .name = "INVALID_PARAM"},
        {.code = 100001, .name = "UNINITIALIZE"},
        {.code = abi::kRepeatInitialize, .name = "REPEAT_INITIALIZE"},
        {.code = abi::kInvalidFile, .name = "INVALID_FILE"},
        {.code = abi::kFeatureUnsupported, .name = "FEATURE_UNSUPPORTED"},
        {.code = abi::kRtParamInvalid, .name = "PARAM_INVALID"},
        {.code = 107001, .name = "INVALID_DEVICEID"},
        {.code = 107002, .name = "CONTEXT_NULL"},
        {.code = 107003, .name = "STREAM_CONTEXT"},
        {.code = 107008, .name = "ADDR_UNALIGNED"},
        {.code = 107016, .name = "INVALID_MEMORY_TYPE"},
        {.code = 107017, .name = "INVALID_HANDLE"},
        {.code = 107018, .name = "INVALID_MALLOC_TYPE"},
        {.code = 107019, .name = "WAIT_TIMEOUT"},
        {.code = 107020, .name = "TASK_TIMEOUT"},
        {.code = 107022, .name = "DEVICE_TASK_ABORT"},
        {.code = 107023, .name = "STREAM_ABORT"},
        {.code = abi::kRtFeatureNotSupport, .name = "FEATURE_NOT_SUPPORT"},
        {.code = 207001, .name = "MEMORY_ALLOCATION"},
        {.code = 207002, .name = "MEMORY_FREE"},
        {.code = 207004, .name = "NO_DEVICE"},
        {.code = 207005, .name = "RESOURCE_ALLOC_FAIL"},
        {.code = 207006, .name = "NO_PERMISSION"},
        {.code = 207008, .name = "NO_STREAM_RESOURCE"},
        {.code = 207012, .name = "OVER_LIMIT"},
        {.code = 207018, .name = "DEVICE_OOM"},
        {.code = 207020, .name = "TIMEOUT"},
        {.code = 207021, .name = "LINK_TYPE_NOT_SUPPORTED"},
        {.code = 507000, .name = "INTERNAL_ERROR"},
        {.code = 507010, .name = "LOST_HEARTBEAT"},
        {.code = 507013, .name = "SYS_DMA"},
        {.code = 507022, .name = "IPC_ERROR"},
        {.code = abi::kRtStreamSyncTimeout, .name = "STREAM_SYNC_TIMEOUT"},
        {.code = 507052, .name = "COPY_DATA"},
        {.code = 507053, .name = "DEVICE_MEM_ERROR"},
        {.code = 507056, .name = "LINK_ERROR"},
        {.code = 507057, .name = "SUSPECT_REMOTE_ERROR"},
        {.code = 507899, .name = "DRV_INTERNAL_ERROR"},
    });
    for (const Name& entry : kNames) {
        if (entry.code == code) {
            return entry.name;
        }
    }
    return nullptr;
}

AclError::AclError(std::string call, abi::Error code, const std::string& message)
    : std::runtime_error(text_of(call, code, message)),
      call_(std::make_shared<const std::string>(std::move(call))),
      code_(code) {}

}  // namespace mc2::ascend
