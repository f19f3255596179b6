// An input of a fuzzer as a list of decisions. When it is used up, every decision is 0.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <limits>
#include <span>
#include <stdexcept>

namespace mc2::fuzz {

class Input {
 public:
    explicit Input(std::span<const std::uint8_t> bytes) : bytes_(bytes) {}

    [[nodiscard]] bool is_empty() const { return bytes_.empty(); }

    template <typename Number>
    Number take() {
        Number value{};
        const std::size_t size = sizeof(value) < bytes_.size() ? sizeof(value) : bytes_.size();
        std::memcpy(&value, bytes_.data(), size);
        bytes_ = bytes_.subspan(size);
        return value;
    }
    std::size_t below(std::size_t limit) { return take<std::uint16_t>() % limit; }
    // Numbers on which arithmetic goes wrong, small ones, and any at all.
    std::uint64_t number() {
        constexpr std::uint64_t kMost = std::numeric_limits<std::uint64_t>::max();
        constexpr std::array<std::uint64_t, 12> kEdges{0,
                                                       1,
                                                       0x7FFF'FFFF,
                                                       0x8000'0000,
                                                       0xFFFF'FFFF,
                                                       std::uint64_t{1} << 32U,
                                                       std::uint64_t{1} << 40U,
                                                       std::uint64_t{1} << 63U,
                                                       (std::uint64_t{1} << 63U) - 1,
                                                       kMost - 4095,
                                                       kMost - 1,
                                                       kMost};
        const auto kind = take<std::uint8_t>();
        if (kind < 128) {
            return kind;
        }
        return kind < 176 ? kEdges[kind % kEdges.size()] : take<std::uint64_t>();
    }
    // As number(), but mostly multiples of the page size within a few pages.
    std::uint64_t bytes() {
        const auto kind = take<std::uint8_t>();
        return kind < 200 ? std::uint64_t{4096} * (kind % 20) : number();
    }

 private:
    std::span<const std::uint8_t> bytes_;
};

// What must hold whatever the input is. Ends the process, for a fuzzer takes nothing else for a finding.
inline void require(bool condition, const char* what) {
    if (!condition) {
        std::cerr << "fuzz: " << what << '\n';
        std::abort();
    }
}

// Refusals are std::invalid_argument, and nothing else may come out. True when it was refused.
template <typename Body>
bool is_refused(const Body& body) {
    try {
        body();
        return false;
    } catch (const std::invalid_argument&) {
        return true;
    }
}

using TargetFunction = void (*)(Input&);

// By the names of tests/fuzz/native.py without "native-".
void fuzz_open(Input& input);
void fuzz_reader(Input& input);
void fuzz_table(Input& input);
void fuzz_copy(Input& input);

struct Target {
    const char* name;
    TargetFunction run;
};
inline constexpr std::array<Target, 4> kTargets{{{.name = "open", .run = fuzz_open},
                                                 {.name = "reader", .run = fuzz_reader},
                                                 {.name = "table", .run = fuzz_table},
                                                 {.name = "copy", .run = fuzz_copy}}};

}  // namespace mc2::fuzz
