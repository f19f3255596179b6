// P's half of the lease protocol: publishes leases in the index table, reads the decodes' ledgers, ends leases.
//
// Owns the index table's memfd and one memfd per ledger. See protocol.h for the argument, layout.h for the bytes.
// Threading: publish and sweep by one thread (the scheduler's); add_ledger, drop_ledger and view by any. A mutex inside
// keeps those apart; it is held for memory accesses only, never for system calls that wait, and by view() for one lease at
// a time, so that an onlooker costs the scheduler microseconds whatever the number of leases.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "lease/protocol.h"
#include "lease/segment.h"

namespace mc2::lease {

struct LeaseId {
    std::uint32_t slot;
    std::uint32_t generation;
    friend bool operator==(const LeaseId&, const LeaseId&) = default;
};

struct Offer {
    Token token;
    Digest digest;
    std::uint64_t num_tokens;
    std::span<const std::uint32_t> block_ids;
    std::chrono::duration<double> timeout;  // an offer that nobody claims ends after it
    std::uint64_t num_pool_blocks = std::uint64_t{1} << 32U;  // ids are below it
    bool is_copy_wanted = false;                              // kCopyFlag
};

struct EndedLease {
    LeaseId id;
    Verdict reason;  // never kKeep
};

// What one living decode has done with a lease.
struct LeaseHolder {
    std::uint64_t ledger_id;
    std::uint32_t claims;
    std::uint32_t releases;
};

struct LeaseRow {
    LeaseId id;
    SlotState state;  // kOffered or kHeld
    Verdict verdict;  // what a sweep would say now; until there is one, the blocks stay pinned
    std::uint64_t num_tokens;
    std::uint64_t num_blocks;
    std::uint64_t claims;
    std::uint64_t releases;  // those of dropped ledgers included
    std::chrono::duration<double> age;
    std::vector<LeaseHolder> holders;
};

// For onlookers. Each row is consistent in itself; leases may come and go between two of them.
struct TableView {
    std::size_t num_leases = 0;  // all of them, also those without a row
    std::vector<LeaseRow> rows;  // the oldest first
};

struct LedgerHandle {
    std::uint64_t id;
    int fd;  // borrowed until the ledger is dropped
};

class LeaseTable {
 public:
    // Throws std::invalid_argument when the table would exceed kMaxSegmentBytes.
    LeaseTable(std::size_t num_slots, std::size_t max_blocks);

    // None when no slot is free. The caller keeps the blocks pinned until sweep() reports the end.
    std::optional<LeaseId> publish(const Offer& offer);
    // Leases that ended now; nobody reads their blocks any more.
    std::vector<EndedLease> sweep();
    // Rows of the oldest max_rows leases. Changes nothing.
    [[nodiscard]] TableView view(std::size_t max_rows) const;

    LedgerHandle add_ledger();
    // The decode is gone or has promised to read no block any more. Throws std::invalid_argument for an unknown id.
    void drop_ledger(std::uint64_t id);

    // Idempotent; every other call throws std::invalid_argument afterwards. Decodes keep what they mapped.
    void close();

    [[nodiscard]] int fd() const;
    [[nodiscard]] std::size_t num_slots() const { return geometry_.num_slots; }
    [[nodiscard]] std::size_t max_blocks() const { return geometry_.max_blocks; }
    [[nodiscard]] std::size_t num_active() const;

 private:
    friend struct TestAccess;

    using Clock = std::chrono::steady_clock;

    struct Lease {
        std::uint32_t generation = 0;
        SlotState state = SlotState::kFree;  // what the state word says; P is its only writer
        std::uint64_t num_tokens = 0;
        std::uint64_t num_blocks = 0;
        Clock::time_point published;
        std::chrono::duration<double> timeout{};
        Counts dropped;  // from ledgers that are no more
    };
    struct Ledger {
        NewSegment segment;
        Words words;
    };

    struct Sighting {
        LeaseId id;
        Clock::time_point published;
    };

    [[nodiscard]] std::vector<Sighting> sight() const;
    [[nodiscard]] LeaseRow row_of(std::size_t slot, Clock::time_point now) const;

    void require_open() const;
    void check(const Offer& offer) const;
    void write_payload(std::size_t slot, const Offer& offer) const;
    void set_state(std::size_t slot, SlotState state);
    [[nodiscard]] Counts look(std::size_t slot) const;
    Verdict decide(std::size_t slot, Clock::time_point now);
    void keep(std::size_t slot, const Counts& counts);

    mutable std::mutex mutex_;  // guards everything below
    Geometry geometry_;
    NewSegment segment_;
    Words words_;
    std::vector<Lease> leases_;          // by slot
    std::vector<std::uint32_t> free_;    // slots
    std::vector<std::uint32_t> active_;  // slots, in no order
    std::map<std::uint64_t, Ledger> ledgers_;
    std::uint64_t next_ledger_id_ = 1;
};

}  // namespace mc2::lease
