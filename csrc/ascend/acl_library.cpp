#include "ascend/acl_library.h"

#include <dlfcn.h>

#include <array>
#include <cerrno>
#include <cstring>

#include "memory/errors.h"

namespace mc2::ascend {
namespace {

// The driver's text may hold a whole stack; the beginning says what happened.
constexpr std::size_t kMaxMessageBytes = 2000;

void* open_library(const std::string& path) {
    void* library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
        const char* reason = ::dlerror();
        throw_system_error(ELIBACC, reason == nullptr ? path : std::string(reason));
    }
    return library;
}

template <typename Function>
void look_up(void* library, const char* name, Function*& function) {
    function = reinterpret_cast<Function*>(::dlsym(library, name));
}

template <typename Function>
void require(void* library, const std::string& path, const char* name, Function*& function) {
    look_up(library, name, function);
    if (function == nullptr) {
        throw_system_error(ENOSYS, path + " has no " + name);
    }
}

bool cannot_tell(abi::Error code) {
    return code == abi::kRtFeatureNotSupport || code == abi::kFeatureUnsupported;
}

template <typename Value, typename... Args, typename... Given>
std::optional<Value> ask(const Call<abi::Error(Args...)>& call, const Value& value,
                         Given... given) {
    const abi::Error code = call.code_of(given...);
    if (cannot_tell(code)) {
        return std::nullopt;
    }
    if (code != abi::kSuccess) {
        throw_acl_error(call.name, code, call.recent);
    }
    return value;
}

}  // namespace

void throw_acl_error(const char* call, abi::Error code, RecentMessage recent) {
    const char* text = recent == nullptr ? nullptr : recent();
    throw AclError(
        call, code,
        text == nullptr ? std::string() : std::string(text, ::strnlen(text, kMaxMessageBytes)));
}

void throw_missing(const char* call) {
    throw AclError(call, abi::kRtFeatureNotSupport, "this libascendcl does not have it");
}

Acl::Acl(const std::string& path) : library_(open_library(path)) {
#define MC2_REQUIRE(symbol, ...) require(library_, path, #symbol, symbol.function);
#define MC2_LOOK_UP(symbol, ...) look_up(library_, #symbol, symbol.function);
    MC2_ACL_FUNCTIONS(MC2_REQUIRE, MC2_LOOK_UP)
#undef MC2_REQUIRE
#undef MC2_LOOK_UP
#define MC2_RECENT(symbol, ...) symbol.recent = aclGetRecentErrMsg.function;
    MC2_ACL_FUNCTIONS(MC2_RECENT, MC2_RECENT)
#undef MC2_RECENT
}

bool Acl::has(const std::string& name) const { return ::dlsym(library_, name.c_str()) != nullptr; }

void Acl::initialize() const {
    const Error code = aclInit.code_of(nullptr);
    if (code != abi::kSuccess && code != abi::kRepeatInitialize) {
        throw_acl_error(aclInit.name, code, aclInit.recent);
    }
}

std::uint32_t Acl::num_devices() const {
    std::uint32_t count = 0;
    aclrtGetDeviceCount(&count);
    return count;
}

std::int32_t Acl::bare_tgid() const {
    std::int32_t pid = 0;
    aclrtDeviceGetBareTgid(&pid);
    return pid;
}

std::optional<std::int64_t> Acl::device_info(std::uint32_t device, std::uint32_t attribute) const {
    std::int64_t value = 0;
    const Error code = aclrtGetDeviceInfo.code_of(device, attribute, &value);
    // An attribute that this release does not know is an invalid parameter; an invalid device has a code of its own.
    if (cannot_tell(code) || code == abi::kInvalidParam || code == abi::kRtParamInvalid) {
        return std::nullopt;
    }
    if (code != abi::kSuccess) {
        throw_acl_error(aclrtGetDeviceInfo.name, code, aclrtGetDeviceInfo.recent);
    }
    return value;
}

std::optional<std::uint64_t> Acl::topology(std::uint32_t device, std::uint32_t other) const {
    std::uint64_t value = 0;
    return ask(aclrtGetDevicesTopo, value, device, other, &value);
}

std::optional<std::int32_t> Acl::physical_device(std::int32_t device) const {
    std::int32_t value = 0;
    return ask(aclrtGetPhyDevIdByLogicDevId, value, device, &value);
}

std::optional<bool> Acl::can_access_peer(std::int32_t device, std::int32_t peer) const {
    std::int32_t value = 0;
    const auto answer = ask(aclrtDeviceCanAccessPeer, value, &value, device, peer);
    return answer ? std::optional<bool>(*answer != 0) : std::nullopt;
}

std::optional<std::string> Acl::soc_name() const {
    const char* name = aclrtGetSocName();
    return name == nullptr ? std::nullopt : std::optional<std::string>(name);
}

std::optional<std::string> Acl::version(const std::string& package) const {
    std::string name = package;  // the call wants to write to it, by its signature
    std::array<char, 4 * abi::kVersionBytes> text{};
    const Error code = aclsysGetVersionStr.code_of(name.data(), text.data());
    // Not installed, or not one that this release knows.
    if (cannot_tell(code) || code == abi::kInvalidParam || code == abi::kInvalidFile) {
        return std::nullopt;
    }
    if (code != abi::kSuccess) {
        throw_acl_error(aclsysGetVersionStr.name, code, aclsysGetVersionStr.recent);
    }
    return std::string(text.data(), ::strnlen(text.data(), text.size()));
}

}  // namespace mc2::ascend
