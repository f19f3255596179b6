#include "lease/reader.h"

#include <string>

#include "memory/errors.h"

namespace mc2::lease {

LeaseReader::LeaseReader(int index_fd, int ledger_fd)
    : index_(open_segment(index_fd, kIndexMagic, Access::kReadOnly)),
      ledger_(open_segment(ledger_fd, kLedgerMagic, Access::kReadWrite)) {
    if (index_.geometry.table_id != ledger_.geometry.table_id ||
        index_.geometry.num_slots != ledger_.geometry.num_slots) {
        throw_invalid("lease segment: the ledger is not one of this index table's");
    }
    claimant_.emplace(Words(index_.mapping, index_.geometry),
                      Words(ledger_.mapping, ledger_.geometry), index_.geometry.num_slots,
                      index_.geometry.max_blocks);
}

Claimant& LeaseReader::claimant() {
    if (!claimant_) {
        throw_invalid("lease reader is closed");
    }
    return *claimant_;
}

void LeaseReader::close() noexcept {
    claimant_.reset();
    index_.mapping.reset();
    ledger_.mapping.reset();
}

}  // namespace mc2::lease
