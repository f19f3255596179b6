// How the core reports failure: std::system_error for the system's refusals (the bindings make it OSError),
// std::invalid_argument for misuse and hostile input (ValueError).
#pragma once

#include <cerrno>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>

namespace mc2 {

// `what` names the call and the sizes; the system appends its own words for the code.
[[noreturn]] inline void throw_system_error(int code, std::string_view what) {
    throw std::system_error(code, std::generic_category(), std::string(what));
}

[[noreturn]] inline void throw_errno(std::string_view what) { throw_system_error(errno, what); }

[[noreturn]] inline void throw_invalid(const std::string& what) {
    throw std::invalid_argument(what);
}

}  // namespace mc2
