// D's view of one P: maps the index table read-only and the ledger for writing, after checking both. Their maker is not
// trusted: nothing they contain can lead an access outside the mappings, which cannot shrink.
//
// Owns the mappings; the descriptors may be closed after construction.
// Threading: one thread, the scheduler's.
#pragma once

#include <optional>

#include "lease/claimant.h"
#include "lease/segment.h"

namespace mc2::lease {

class LeaseReader {
 public:
    // Throws std::invalid_argument on anything wrong with the segments.
    LeaseReader(int index_fd, int ledger_fd);

    // Throws std::invalid_argument after close().
    Claimant& claimant();
    // Unmaps. Does not release: closing says nothing about who still reads the blocks. Idempotent.
    void close() noexcept;

    [[nodiscard]] std::size_t num_slots() const { return index_.geometry.num_slots; }
    [[nodiscard]] std::size_t max_blocks() const { return index_.geometry.max_blocks; }

 private:
    OpenedSegment index_;
    OpenedSegment ledger_;
    std::optional<Claimant> claimant_;
};

}  // namespace mc2::lease
