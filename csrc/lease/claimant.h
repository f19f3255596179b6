// D's half of the lease protocol, over words that somebody else keeps mapped. See protocol.h for the argument.
//
// Never reads its ledger back: what it wrote last is kept here, so nothing that shared memory says can confuse it.
// Threading: one thread, for it is the ledger's single writer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "lease/protocol.h"
#include "lease/segment.h"

namespace mc2::lease {

struct LeaseInfo {
    Token token;
    Digest digest;
    std::uint64_t num_tokens;
    std::uint64_t num_blocks;
    bool is_copy_wanted;
};

class Claimant {
 public:
    // Both segments belong together and are mapped for longer than this lives; the ledger is unused.
    Claimant(const Words& index, const Words& ledger, std::size_t num_slots,
             std::size_t max_blocks);

    // None when there is no such live lease. Writes nothing.
    [[nodiscard]] std::optional<LeaseInfo> peek(std::uint64_t slot, std::uint64_t generation) const;
    ClaimResult claim(std::uint64_t slot, std::uint64_t generation);
    // Resolves one pending claim. Throws std::invalid_argument when there is none.
    ClaimResult poll(std::uint64_t slot, std::uint64_t generation);
    // These throw std::invalid_argument unless a claim is held.
    [[nodiscard]] std::vector<std::uint32_t> blocks(std::uint64_t slot,
                                                    std::uint64_t generation) const;
    // The same ids as the receiver counts them, each plus base; every one is below num_blocks, or it throws
    // std::invalid_argument and the table cannot be trusted.
    [[nodiscard]] std::vector<std::int32_t> block_table(std::uint64_t slot,
                                                        std::uint64_t generation,
                                                        std::uint32_t base,
                                                        std::uint32_t num_blocks) const;
    void release(std::uint64_t slot, std::uint64_t generation);

    [[nodiscard]] std::size_t num_slots() const { return entries_.size(); }
    [[nodiscard]] std::size_t max_blocks() const { return max_blocks_; }

 private:
    struct Entry {
        LedgerWord word;  // as last written
        std::uint16_t held = 0;
        std::uint16_t pending = 0;
    };

    [[nodiscard]] const Entry& held_entry(std::uint64_t slot, std::uint64_t generation) const;
    [[nodiscard]] std::size_t num_blocks_of(std::size_t slot) const;
    void write(std::size_t slot, const LedgerWord& word);
    ClaimResult settle(std::size_t slot);

    Words index_;
    Words ledger_;
    std::vector<Entry> entries_;  // by slot
    std::size_t max_blocks_;
};

}  // namespace mc2::lease
