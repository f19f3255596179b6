// The targets under libFuzzer, built by GCC as well: its -fsanitize-coverage=trace-pc calls a function at every branch, which
// counts into what libFuzzer looks at. Usage: fuzz_native TARGET [libFuzzer's options]
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <string_view>

#include "check.h"
#include "fuzz_input.h"

extern "C" {
int LLVMFuzzerRunDriver(int* argc, char*** argv,
                        int (*run)(const std::uint8_t* data, std::size_t size));
void __sanitizer_cov_8bit_counters_init(std::uint8_t* begin, std::uint8_t* end);
}

namespace {

constexpr std::size_t kNumCounters = std::size_t{1} << 16U;
std::uint8_t counters[kNumCounters];
mc2::fuzz::TargetFunction target = nullptr;

int run(const std::uint8_t* data, std::size_t size) {
    mc2::fuzz::Input input({data, size});
    target(input);
    return 0;
}

}  // namespace

// libFuzzer's own is empty since LLVM 12; the linker is told to take this one instead (--wrap).
extern "C" __attribute__((no_sanitize_coverage)) void __wrap___sanitizer_cov_trace_pc() {
    const auto place = reinterpret_cast<std::uintptr_t>(__builtin_return_address(0));
    auto& counter = counters[(place ^ (place >> 16U)) % kNumCounters];
    ++counter;
}

// GCC reports comparisons of floating-point numbers too, which libFuzzer has no use for.
extern "C" {
__attribute__((no_sanitize_coverage)) void __sanitizer_cov_trace_cmpf(float, float) {}
__attribute__((no_sanitize_coverage)) void __sanitizer_cov_trace_cmpd(double, double) {}
}

// A failed CHECK of what the lease tests share.
void mc2::test::fail(const char* file, int line, const std::string& message) {
    std::cerr << file << ":" << line << ": " << message << '\n';
    std::abort();
}

int main(int argc, char** argv) {
    for (const auto& each : mc2::fuzz::kTargets) {
        if (argc > 1 && std::string_view(each.name) == argv[1]) {
            target = each.run;
        }
    }
    if (target == nullptr) {
        std::cerr << "usage: fuzz_native TARGET [libFuzzer's options]\n";
        return 2;
    }
    argv[1] = argv[0];
    --argc;
    ++argv;
    __sanitizer_cov_8bit_counters_init(counters, counters + kNumCounters);
    return LLVMFuzzerRunDriver(&argc, &argv, run);
}
