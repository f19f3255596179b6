// The fuzz targets without a fuzzer: random inputs, the same ones each time, under every sanitizer. And prefill's scribbling
// at the very moment at which decode reads, which no single-threaded fuzzer does.
#include <atomic>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "fuzz_input.h"
#include "lease_fixture.h"

namespace {

constexpr std::size_t kNumInputs = 4'000;
constexpr std::size_t kMaxInputBytes = 200;

void run_random(mc2::fuzz::TargetFunction target, std::uint32_t seed) {
    // The same inputs each time.
    std::mt19937 random(seed);  // NOLINT(bugprone-random-generator-seed)
    std::vector<std::uint8_t> bytes;
    for (std::size_t i = 0; i < kNumInputs; ++i) {
        bytes.resize(random() % kMaxInputBytes);
        for (auto& each : bytes) {
            each = static_cast<std::uint8_t>(random());
        }
        mc2::fuzz::Input input(bytes);
        target(input);
    }
}

MC2_TEST(random_inputs) {
    std::uint32_t seed = 1;
    for (const auto& target : mc2::fuzz::kTargets) {
        run_random(target.run, seed++);
    }
}

// Below the limit, which is what the words' types want.
std::uint32_t below(std::mt19937& random, std::uint32_t limit) {
    return static_cast<std::uint32_t>(random() % limit);
}

MC2_TEST(an_index_table_that_changes_while_it_is_read) {
    constexpr std::size_t kNumSlots = 4;
    constexpr std::size_t kMaxBlocks = 12;
    constexpr std::uint32_t kPoolBlocks = 1000;
    mc2::lease::LeaseTable table(kNumSlots, kMaxBlocks);
    const auto ledger = table.add_ledger();
    const auto words = mc2::lease::TestAccess::index(table);
    std::atomic<bool> is_over{false};
    std::thread prefill([&] {
        std::mt19937 random(3);  // NOLINT(bugprone-random-generator-seed)
        while (!is_over.load()) {
            const std::size_t slot = below(random, kNumSlots);
            words.state(slot).store(mc2::lease::pack_state(
                below(random, 3), static_cast<mc2::lease::SlotState>(below(random, 5))));
            words.num_blocks(slot).store(below(random, 2 * kMaxBlocks));
            words.token_word(slot, 0).store(random());
            words.block_id(slot, below(random, kMaxBlocks)).store(below(random, kPoolBlocks + 50));
        }
    });
    mc2::lease::Claimant decode(words, mc2::lease::TestAccess::writable_ledger(table, ledger.id),
                                kNumSlots, kMaxBlocks);
    std::mt19937 random(4);  // NOLINT(bugprone-random-generator-seed)
    std::size_t num_tables = 0;
    std::size_t num_refused = 0;
    // Until both ends have been seen often enough: on few processors prefill must get its turns in between.
    for (std::size_t i = 0; i < 5'000'000 && (num_tables < 500 || num_refused < 100); ++i) {
        if (i % 32 == 0) {
            std::this_thread::yield();
        }
        const std::size_t slot = below(random, kNumSlots);
        const std::uint32_t generation = below(random, 3);
        const auto info = decode.peek(slot, generation);
        CHECK(!info || info->num_blocks <= kMaxBlocks);
        auto result = decode.claim(slot, generation);
        while (result == mc2::lease::ClaimResult::kPending) {
            std::this_thread::yield();
            result = decode.poll(slot, generation);
        }
        if (result != mc2::lease::ClaimResult::kHeld) {
            continue;
        }
        const bool refused = mc2::fuzz::is_refused([&] {
            const auto ids = decode.block_table(slot, generation, 7, kPoolBlocks);
            CHECK(ids.size() <= kMaxBlocks);
            for (const auto id : ids) {
                CHECK(id >= 7 && std::cmp_less(id, 7 + kPoolBlocks));
            }
            ++num_tables;
        });
        num_refused += refused ? 1 : 0;
        decode.release(slot, generation);
    }
    is_over.store(true);
    prefill.join();
    CHECK(num_tables >= 500);
    CHECK(num_refused >= 100);
}

}  // namespace
