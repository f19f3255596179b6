// The lease protocol: what P decides from the ledgers it sees, and why that is safe without locks.
//
// A lease is OFFERED, HELD once P has seen a claim, EXPIRING while P decides to end it, and FREE afterwards.
//
//   D claims:   (1) ledger word := claimed      (2) read the slot's state word
//   P ends:     (A) state word := EXPIRING      (B) read all ledgers      (C) state word := HELD or FREE
//
// All five are seq_cst operations, so there is one total order S of them that agrees with each program order.
//
// Why not relaxed accesses and two fences, the usual way to write Dekker's pattern: on x86-64 a seq_cst store costs the
// same one locked instruction, C++ gives both the same guarantee, and ThreadSanitizer understands operations on the
// words but no stand-alone fences.
//
// Never freed while claimed. Suppose D reads OFFERED or HELD at (2). Then (2) precedes the next (A) in S, hence
// (1) < (2) < (A) < (B): P's second look finds the claim, and so does each later one until D releases.
// Suppose D reads EXPIRING, P's look (B) may or may not have included (1). D waits for (C). FREE: P had not seen the
// claim, the lease is dead. HELD: perhaps only because of somebody else's claim, but (1) < (2) < (C) < every later (B), so
// from now on it counts. Either way the verdict that D reads is true.
// This is why every end needs the second look, also the one after the last release: at that very moment another D may be
// between (1) and (2).
//
// Never claimed after freed. Once FREE is stored, (2) reads FREE or a later generation. The generation is in the same
// word as the state, so a slot that was reused cannot be taken for the old lease (short of 2^32 reuses during one claim).
//
// A dead claim is undone by taking it back (claims - 1), not by counting it as released. D only writes the ledger after it
// saw the generation live, so a claim that then finds it dead is of a generation that is over, of which P looks at no
// word any more: taking back is invisible. Counting as released would be too, there; but a claim on a generation yet to
// come would make P, once it publishes it, see "claimed and released" and end it before its owner has claimed. The look
// before the first write excludes that: a ticket for a future generation never reaches the ledger. For the same reason P
// derives "was claimed" from the words as they are, and remembers nothing but what dropped ledgers said.
//
// Payload. P fills a slot while it is FREE (release stores), then stores OFFERED with the next generation. A reader that
// has claimed may read at ease: the payload changes only after its own release. A reader that only peeks reads the
// state, the payload (acquire loads) and the state again: had it seen a byte of the next lease, the second look would
// find FREE or the next generation, as these stores come before that byte.
//
// Blocks. D's release is a release store and P's look an acquire load, so that D's last read of a block happens before
// P's reuse of it.
//
// A ledger is registered before its descriptor is handed out, so that no claim can come from a ledger that P does not
// look at. When it is dropped, its claims count as claimed and over: a lease that only this D held ends, one that others
// hold goes on, and an offer that it never touched waits for its time.
#pragma once

#include <cstdint>

#include "lease/layout.h"

namespace mc2::lease {

// One lease's claims over all ledgers.
struct Counts {
    std::uint64_t claims = 0;
    std::uint64_t active = 0;
    std::uint64_t gone = 0;  // claims that were active when their ledger was dropped

    constexpr void add(const LedgerWord& word) {
        claims += word.claims;
        active += word.active();
    }
    // The ledger's owner is gone: nothing of it is active any more.
    constexpr void add_dropped(const LedgerWord& word) {
        claims += word.claims;
        gone += word.active();
    }
};

enum class Verdict { kKeep, kReleased, kExpired, kPeerGone };

// Taken twice for every end: before EXPIRING, to see whether there is anything to do, and after, when it counts.
constexpr Verdict judge(const Counts& counts, bool timed_out) {
    if (counts.active > 0) {
        return Verdict::kKeep;
    }
    if (counts.claims > 0) {
        return counts.gone > 0 ? Verdict::kPeerGone : Verdict::kReleased;
    }
    return timed_out ? Verdict::kExpired : Verdict::kKeep;
}

enum class ClaimResult { kHeld, kPending, kDead };

// What a claim that stands in the ledger is worth, by the state word read after it was written.
constexpr ClaimResult verdict_on_claim(std::uint64_t state_word, std::uint32_t generation) {
    if (generation_of(state_word) != generation) {
        return ClaimResult::kDead;
    }
    switch (state_of(state_word)) {
        case SlotState::kOffered:
        case SlotState::kHeld:
            return ClaimResult::kHeld;
        case SlotState::kExpiring:
            return ClaimResult::kPending;
        case SlotState::kFree:
            break;
    }
    return ClaimResult::kDead;
}

}  // namespace mc2::lease
