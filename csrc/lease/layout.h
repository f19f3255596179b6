// The bytes that prefill (P) and decode (D) share, and who may write them.
//
//   index table  memfd of P, written by P only; D maps it read-only (F_SEAL_FUTURE_WRITE leaves no other way)
//   ledger       memfd made by P for one D, written by that D only; P maps it read-only
//
// Every word is accessed through std::atomic_ref: two processes share it, and P never waits for D or the other way round.
// Native byte order: both ends run on one host. No pointers, no clock readings, no locks that a crash could leave behind.
//
// Index table: Header, then num_slots slots of slot_stride bytes.
//   slot: SlotHead, then uint32 block_ids[max_blocks], padded to 64 bytes
//   state word: generation << 32 | SlotState, in one word so that neither can be seen without the other
// Ledger: Header, then num_slots words: generation << 32 | claims << 16 | releases.
//   `claims` counts the claims D ever made on that generation, `releases` how many of them it gave up.
// A change of anything here needs another kVersion.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace mc2::lease {

inline constexpr std::uint64_t kIndexMagic = 0x78656449'3243'4D00;   // "\0MC2Idex"
inline constexpr std::uint64_t kLedgerMagic = 0x7267644C'3243'4D00;  // "\0MC2Ldgr"
inline constexpr std::uint64_t kVersion = 2;

inline constexpr std::size_t kMaxSegmentBytes = std::size_t{256} << 20U;
inline constexpr std::size_t kTokenBytes = 16;
inline constexpr std::size_t kDigestBytes = 32;

using Token = std::array<std::byte, kTokenBytes>;
using Digest = std::array<std::byte, kDigestBytes>;

// In SlotHead::flags. P lends more than it likes to: whoever claims this lease is to copy the blocks and to give it back.
inline constexpr std::uint64_t kCopyFlag = 1;

enum class SlotState : std::uint8_t { kFree = 0, kOffered = 1, kHeld = 2, kExpiring = 3 };

struct Header {
    std::uint64_t magic;
    std::uint64_t version;
    std::uint64_t table_id;  // random; the same in a table and its ledgers
    std::uint64_t num_slots;
    std::uint64_t max_blocks;   // 0 in a ledger
    std::uint64_t slot_stride;  // bytes
    std::uint64_t total_bytes;
    std::uint64_t reserved;
};
static_assert(sizeof(Header) == 64);
static_assert(offsetof(Header, total_bytes) == 48);

struct SlotHead {
    std::uint64_t state;
    std::uint64_t references;  // 1 by prefill + active claims, as P last saw it; for onlookers
    std::array<std::uint64_t, 2> token;
    std::array<std::uint64_t, 4> digest;
    std::uint64_t num_tokens;
    std::uint64_t num_blocks;
    std::uint64_t flags;
};
static_assert(sizeof(SlotHead) == 88);
static_assert(offsetof(SlotHead, token) == 16);
static_assert(offsetof(SlotHead, digest) == 32);
static_assert(offsetof(SlotHead, num_tokens) == 64);
static_assert(offsetof(SlotHead, num_blocks) == 72);
static_assert(offsetof(SlotHead, flags) == 80);
static_assert(sizeof(SlotHead::token) == kTokenBytes);
static_assert(sizeof(SlotHead::digest) == kDigestBytes);

static_assert(std::atomic_ref<std::uint64_t>::is_always_lock_free);
static_assert(std::atomic_ref<std::uint32_t>::is_always_lock_free);

constexpr std::uint64_t pack_state(std::uint32_t generation, SlotState state) {
    return std::uint64_t{generation} << 32U | static_cast<std::uint64_t>(state);
}
constexpr std::uint32_t generation_of(std::uint64_t word) {
    return static_cast<std::uint32_t>(word >> 32U);
}
constexpr SlotState state_of(std::uint64_t state_word) {
    return static_cast<SlotState>(state_word & 0xFFU);
}
constexpr bool is_live(std::uint64_t state_word) {
    const SlotState state = state_of(state_word);
    return state == SlotState::kOffered || state == SlotState::kHeld ||
           state == SlotState::kExpiring;
}

struct LedgerWord {
    std::uint32_t generation = 0;
    std::uint16_t claims = 0;
    std::uint16_t releases = 0;

    [[nodiscard]] constexpr std::uint64_t pack() const {
        return std::uint64_t{generation} << 32U | std::uint64_t{claims} << 16U | releases;
    }
    static constexpr LedgerWord unpack(std::uint64_t word) {
        return {.generation = generation_of(word),
                .claims = static_cast<std::uint16_t>(word >> 16U),
                .releases = static_cast<std::uint16_t>(word)};
    }
    // A hostile D may claim to have released more than it claimed: that only ends its own claims.
    [[nodiscard]] constexpr std::uint32_t active() const {
        return claims > releases ? claims - releases : 0U;
    }
};

}  // namespace mc2::lease
