// Page arithmetic that cannot overflow.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "memory/errors.h"

namespace mc2 {

inline constexpr std::size_t kPageBytes = 4096;
inline constexpr std::size_t kHugePageBytes = std::size_t{2} << 20U;

// Sizes reach the kernel as signed offsets; half of the 47-bit user space is far beyond any pool.
inline constexpr std::size_t kMaxBytes = std::size_t{1} << 46U;

// True when [offset, offset + num_bytes) lies in [0, limit).
constexpr bool fits(std::size_t offset, std::size_t num_bytes, std::size_t limit) {
    return num_bytes <= limit && offset <= limit - num_bytes;
}

// Only for values below kMaxBytes.
constexpr std::size_t round_up(std::size_t value, std::size_t multiple) {
    return (value + multiple - 1) / multiple * multiple;
}

inline void require_multiple(const char* name, std::size_t value, std::size_t page_bytes) {
    if (value % page_bytes != 0) {
        throw_invalid(std::string(name) + " is " + std::to_string(value) + ", not a multiple of " +
                      std::to_string(page_bytes));
    }
}

inline void require_size(const char* name, std::size_t value) {
    if (value == 0 || value > kMaxBytes) {
        throw_invalid(std::string(name) + " is " + std::to_string(value) +
                      ", must be between 1 and " + std::to_string(kMaxBytes));
    }
}

}  // namespace mc2
