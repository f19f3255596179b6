// libascendcl.so, loaded when it is first needed: a build or an installation without CANN has everything but this.
//
// Immutable after the constructor, so any thread may call. Nothing here ends ACL or resets a device, and the library is
// never unloaded: torch_npu in the same process owns all of that.
// The device and the text of the latest error belong to the calling thread, so every operation on a device begins with
// set_device, and an error is read by the thread that had it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "ascend/acl_abi.h"
#include "ascend/acl_error.h"

namespace mc2::ascend {

using RecentMessage = const char* (*)();

[[noreturn]] void throw_acl_error(const char* call, abi::Error code, RecentMessage recent);
[[noreturn]] void throw_missing(const char* call);

// One function of the library: called, it throws AclError for every answer but success.
template <typename Signature>
struct Call;

template <typename... Args>
struct Call<abi::Error(Args...)> {
    const char* name;
    abi::Error (*function)(Args...) = nullptr;
    RecentMessage recent = nullptr;

    void operator()(Args... args) const {
        if (function == nullptr) {
            throw_missing(name);
        }
        const abi::Error code = function(args...);
        if (code != abi::kSuccess) {
            throw_acl_error(name, code, recent);
        }
    }

    // The answer itself; a function that is missing answers like a driver that does not have it.
    [[nodiscard]] abi::Error code_of(Args... args) const {
        return function == nullptr ? abi::kRtFeatureNotSupport : function(args...);
    }

    // For clearing up, where the next step has to be tried too: true when it worked; `first` may be null.
    bool attempt(FirstError* first, Args... args) const {
        const abi::Error code = code_of(args...);
        if (code != abi::kSuccess && first != nullptr && !first->has_value()) {
            try {
                throw_acl_error(name, code, recent);
            } catch (const AclError& error) {
                first->add(error);
            }
        }
        return code == abi::kSuccess;
    }
};

template <>
struct Call<const char*()> {
    const char* name;
    const char* (*function)() = nullptr;
    RecentMessage recent = nullptr;

    [[nodiscard]] const char* operator()() const {
        return function == nullptr ? nullptr : function();
    }
};

struct AclTable {
    using Error = abi::Error;
    using Stream = abi::Stream;
    using DrvMemHandle = abi::DrvMemHandle;
    using PhysicalMemProp = abi::PhysicalMemProp;
#define MC2_MEMBER(symbol, ...) Call<__VA_ARGS__> symbol{.name = #symbol};
    MC2_ACL_FUNCTIONS(MC2_MEMBER, MC2_MEMBER)
#undef MC2_MEMBER
};

class Acl : public AclTable {
 public:
    // Throws std::system_error when the library cannot be loaded or lacks a required function.
    explicit Acl(const std::string& path);

    [[nodiscard]] bool has(const std::string& name) const;
    // Somebody else's initialisation is as good.
    void initialize() const;
    [[nodiscard]] std::uint32_t num_devices() const;
    // For the calling thread.
    void set_device(std::int32_t device) const { aclrtSetDevice(device); }
    // This process as a whitelist names it: its id outside any container.
    [[nodiscard]] std::int32_t bare_tgid() const;

    // Nothing where the library or the driver cannot tell.
    [[nodiscard]] std::optional<std::int64_t> device_info(std::uint32_t device,
                                                          std::uint32_t attribute) const;
    [[nodiscard]] std::optional<std::uint64_t> topology(std::uint32_t device,
                                                        std::uint32_t other) const;
    [[nodiscard]] std::optional<std::int32_t> physical_device(std::int32_t device) const;
    [[nodiscard]] std::optional<bool> can_access_peer(std::int32_t device, std::int32_t peer) const;
    [[nodiscard]] std::optional<std::string> soc_name() const;
    [[nodiscard]] std::optional<std::string> version(const std::string& package) const;

 private:
    void* library_;
};

using AclPointer = std::shared_ptr<const Acl>;

}  // namespace mc2::ascend
