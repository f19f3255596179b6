// What every call does first and last: counting, faults that a test asked for, and the words for what went wrong.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <string>

#include "abi.h"

namespace sim {

// Counts the call; an error if a test wants this call to fail or to be unsupported.
aclError enter(const char* call);

// The error of the next execution of this task that a test wants to fail.
aclError fault_of(const char* task);

// Remembers the sentence for aclGetRecentErrMsg in this thread; returns the code.
aclError fail(aclError code, const std::string& text);

// Something the documentation forbids and a device does not report.
void violation(const std::string& text);

void count(const char* what);

inline std::string setting(const char* name, const char* fallback = "") {
    const char* value = std::getenv(name);
    return value == nullptr ? fallback : value;
}

inline int64_t number_setting(const char* name, int64_t fallback) {
    const char* value = std::getenv(name);
    return value == nullptr || *value == '\0' ? fallback : std::strtoll(value, nullptr, 0);
}

}  // namespace sim

#define SIM_ENTER()                                        \
    do {                                                   \
        if (const aclError code_ = sim::enter(__func__)) { \
            return code_;                                  \
        }                                                  \
    } while (false)
#define SIM_TRY(expression)                         \
    do {                                            \
        if (const aclError tried_ = (expression)) { \
            return tried_;                          \
        }                                           \
    } while (false)
