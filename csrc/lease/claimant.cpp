#include "lease/claimant.h"

#include <cstring>
#include <limits>
#include <string>

#include "memory/errors.h"

namespace mc2::lease {
namespace {

[[noreturn]] void throw_no_claim(const char* kind, std::uint64_t slot, std::uint64_t generation) {
    throw_invalid("no " + std::string(kind) + " claim on slot " + std::to_string(slot) +
                  " generation " + std::to_string(generation));
}

template <std::size_t kBytes, typename ReadWord>
std::array<std::byte, kBytes> read_bytes(const ReadWord& read_word) {
    std::array<std::byte, kBytes> bytes{};
    for (std::size_t i = 0; i < kBytes / sizeof(std::uint64_t); ++i) {
        const std::uint64_t word = read_word(i).load(std::memory_order_acquire);
        std::memcpy(bytes.data() + i * sizeof(word), &word, sizeof(word));
    }
    return bytes;
}

bool is_live_as(std::uint64_t state_word, std::uint64_t generation) {
    return generation_of(state_word) == generation && is_live(state_word);
}

}  // namespace

Claimant::Claimant(const Words& index, const Words& ledger, std::size_t num_slots,
                   std::size_t max_blocks)
    : index_(index), ledger_(ledger), entries_(num_slots), max_blocks_(max_blocks) {
    for (std::size_t slot = 0; slot < num_slots; ++slot) {
        if (ledger_.ledger(slot).load(std::memory_order_acquire) != 0) {
            throw_invalid("ledger is in use: it belongs to one reader");
        }
    }
}

std::optional<LeaseInfo> Claimant::peek(std::uint64_t slot, std::uint64_t generation) const {
    if (slot >= entries_.size() ||
        !is_live_as(index_.state(slot).load(std::memory_order_acquire), generation)) {
        return std::nullopt;
    }
    const LeaseInfo info{
        .token = read_bytes<kTokenBytes>([&](std::size_t i) { return index_.token_word(slot, i); }),
        .digest =
            read_bytes<kDigestBytes>([&](std::size_t i) { return index_.digest_word(slot, i); }),
        .num_tokens = index_.num_tokens(slot).load(std::memory_order_acquire),
        .num_blocks = index_.num_blocks(slot).load(std::memory_order_acquire),
        .is_copy_wanted = (index_.flags(slot).load(std::memory_order_acquire) & kCopyFlag) != 0};
    // The acquire loads above keep this one behind them.
    if (!is_live_as(index_.state(slot).load(std::memory_order_acquire), generation) ||
        info.num_blocks > max_blocks_) {
        return std::nullopt;
    }
    return info;
}

ClaimResult Claimant::claim(std::uint64_t slot, std::uint64_t generation) {
    // The look before the first write: a ticket that is not of this moment must leave no trace in the ledger.
    if (slot >= entries_.size() ||
        !is_live_as(index_.state(slot).load(std::memory_order_acquire), generation)) {
        return ClaimResult::kDead;
    }
    const Entry& entry = entries_[slot];
    LedgerWord word{.generation = static_cast<std::uint32_t>(generation)};
    if (entry.word.generation == word.generation) {
        word = entry.word;
    } else if (entry.held + entry.pending > 0) {
        // P has moved on although we hold: it dropped our ledger. Overwriting the word would hide the older claims.
        return ClaimResult::kDead;
    }
    if (word.claims == std::numeric_limits<std::uint16_t>::max()) {
        return ClaimResult::kDead;
    }
    ++word.claims;
    ++entries_[slot].pending;
    write(slot, word);
    return settle(slot);
}

ClaimResult Claimant::poll(std::uint64_t slot, std::uint64_t generation) {
    if (slot >= entries_.size() || entries_[slot].word.generation != generation ||
        entries_[slot].pending == 0) {
        throw_no_claim("pending", slot, generation);
    }
    return settle(slot);
}

ClaimResult Claimant::settle(std::size_t slot) {
    Entry& entry = entries_[slot];
    const ClaimResult result =
        verdict_on_claim(index_.state(slot).load(std::memory_order_seq_cst), entry.word.generation);
    switch (result) {
        case ClaimResult::kPending:
            break;
        case ClaimResult::kHeld:
            --entry.pending;
            ++entry.held;
            break;
        case ClaimResult::kDead: {
            --entry.pending;
            LedgerWord word = entry.word;
            --word.claims;
            write(slot, word);
            break;
        }
    }
    return result;
}

std::vector<std::uint32_t> Claimant::blocks(std::uint64_t slot, std::uint64_t generation) const {
    (void)held_entry(slot, generation);
    std::vector<std::uint32_t> ids(num_blocks_of(slot));
    for (std::size_t i = 0; i < ids.size(); ++i) {
        ids[i] = index_.block_id(slot, i).load(std::memory_order_relaxed);
    }
    return ids;
}

std::vector<std::int32_t> Claimant::block_table(std::uint64_t slot, std::uint64_t generation,
                                                std::uint32_t base,
                                                std::uint32_t num_blocks) const {
    (void)held_entry(slot, generation);
    // Global ids live in int32 block tables.
    if (std::uint64_t{base} + num_blocks > std::numeric_limits<std::int32_t>::max()) {
        throw_invalid(std::to_string(num_blocks) + " blocks from " + std::to_string(base) +
                      " do not fit an int32 block table");
    }
    std::vector<std::int32_t> ids(num_blocks_of(slot));
    for (std::size_t i = 0; i < ids.size(); ++i) {
        const std::uint32_t id = index_.block_id(slot, i).load(std::memory_order_relaxed);
        if (id >= num_blocks) {
            throw_invalid("lease segment: slot " + std::to_string(slot) + " names block " +
                          std::to_string(id) + " of a pool of " + std::to_string(num_blocks));
        }
        ids[i] = static_cast<std::int32_t>(base + id);
    }
    return ids;
}

std::size_t Claimant::num_blocks_of(std::size_t slot) const {
    const std::uint64_t num_blocks = index_.num_blocks(slot).load(std::memory_order_relaxed);
    if (num_blocks > max_blocks_) {
        throw_invalid("lease segment: slot " + std::to_string(slot) + " says " +
                      std::to_string(num_blocks) + " blocks, the table takes " +
                      std::to_string(max_blocks_));
    }
    return num_blocks;
}

void Claimant::release(std::uint64_t slot, std::uint64_t generation) {
    LedgerWord word = held_entry(slot, generation).word;
    ++word.releases;
    --entries_[slot].held;
    write(slot, word);
}

const Claimant::Entry& Claimant::held_entry(std::uint64_t slot, std::uint64_t generation) const {
    if (slot >= entries_.size() || entries_[slot].word.generation != generation ||
        entries_[slot].held == 0) {
        throw_no_claim("held", slot, generation);
    }
    return entries_[slot];
}

void Claimant::write(std::size_t slot, const LedgerWord& word) {
    entries_[slot].word = word;
    ledger_.ledger(slot).store(word.pack(), std::memory_order_seq_cst);
}

}  // namespace mc2::lease
