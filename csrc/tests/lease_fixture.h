// What the lease tests share.
#pragma once

#include <sys/mman.h>

#include <chrono>
#include <vector>

#include "check.h"
#include "lease/claimant.h"
#include "lease/reader.h"
#include "lease/table.h"

namespace mc2::lease {

// Views into a table, so that threads of one process share one mapping: ThreadSanitizer knows memory by its address and
// would take two mappings of one file for two memories.
struct TestAccess {
    static Words index(const LeaseTable& table) { return table.words_; }
    static Words writable_ledger(LeaseTable& table, std::uint64_t id) {
        const std::scoped_lock lock(table.mutex_);
        const auto& ledger = table.ledgers_.at(id);
        const Mapping& mapping = ledger.segment.mapping;
        CHECK_EQ(::mprotect(mapping.data(), mapping.size(), PROT_READ | PROT_WRITE), 0);
        return ledger.words;
    }
    // What publish() will take next. Not while another thread publishes.
    static std::uint32_t next_slot(const LeaseTable& table) { return table.free_.back(); }
    static std::uint32_t next_generation(const LeaseTable& table, std::size_t slot) {
        return table.leases_[slot].generation + 1;
    }
    static void set_generation(LeaseTable& table, std::size_t slot, std::uint32_t generation) {
        table.leases_[slot].generation = generation;
    }
};

}  // namespace mc2::lease

namespace mc2::test {

inline constexpr double kForever = 1e6;

inline lease::Token token(int value) {
    lease::Token bytes{};
    bytes.fill(static_cast<std::byte>(value));
    return bytes;
}
inline lease::Digest digest(int value) {
    lease::Digest bytes{};
    bytes.fill(static_cast<std::byte>(value));
    return bytes;
}

inline std::optional<lease::LeaseId> publish(lease::LeaseTable& table, double timeout_seconds,
                                             const std::vector<std::uint32_t>& blocks = {1, 2, 3},
                                             int value = 7) {
    return table.publish({.token = token(value),
                          .digest = digest(value),
                          .num_tokens = 10 * blocks.size(),
                          .block_ids = blocks,
                          .timeout = std::chrono::duration<double>(timeout_seconds)});
}

// A decode: its ledger in P's table, and its reader.
struct Decode {
    explicit Decode(lease::LeaseTable& table)
        : ledger(table.add_ledger()), reader(table.fd(), ledger.fd) {}
    lease::ClaimResult claim(const lease::LeaseId& id) {
        return reader.claimant().claim(id.slot, id.generation);
    }
    void release(const lease::LeaseId& id) { reader.claimant().release(id.slot, id.generation); }

    lease::LedgerHandle ledger;
    lease::LeaseReader reader;
};

}  // namespace mc2::test
