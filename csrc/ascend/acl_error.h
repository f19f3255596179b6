// How a call to ACL fails. The system's own refusals (a library that cannot be loaded) are std::system_error, misuse and
// hostile input std::invalid_argument, as everywhere in the core.
#pragma once

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>

#include "ascend/acl_abi.h"

namespace mc2::ascend {

// The code's name without its prefix, nullptr when it is not one that we know.
const char* name_of(abi::Error code);

class AclError : public std::runtime_error {
 public:
    AclError(std::string call, abi::Error code, const std::string& message);

    [[nodiscard]] const std::string& call() const { return *call_; }
    [[nodiscard]] abi::Error code() const { return code_; }
    // The call is not in this library, or the driver does not have it.
    [[nodiscard]] bool is_not_supported() const {
        return code_ == abi::kRtFeatureNotSupport || code_ == abi::kFeatureUnsupported;
    }

 private:
    std::shared_ptr<const std::string> call_;  // exceptions are copied, and copies must not throw
    abi::Error code_;
};

// Keeps the first failure of several steps that are all tried, to throw it at the end.
class FirstError {
 public:
    void add(const AclError& error) noexcept {
        if (!error_) {
            error_ = error;
        }
    }
    [[nodiscard]] bool has_value() const { return error_.has_value(); }
    void rethrow() const {
        if (error_) {
            throw AclError(*error_);
        }
    }

 private:
    std::optional<AclError> error_;
};

}  // namespace mc2::ascend
