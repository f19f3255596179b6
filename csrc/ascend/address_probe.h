// Whether own memory and a peer's can lie in one reserved range, so that one block table addresses both.
//
// ACL documents that they cannot; a driver on which they can would let decode read prefill's blocks in place. One attempt,
// to be made once at start. Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ascend/device_import.h"
#include "ascend/owners.h"

namespace mc2::ascend {

class AddressProbe {
 public:
    // Own memory in front, the peer's behind. The segments must be of handle kinds and contiguous.
    AddressProbe(AclPointer acl, std::int32_t device, std::size_t own_bytes,
                 std::vector<Segment> peer);
    AddressProbe(const AddressProbe&) = delete;
    AddressProbe& operator=(const AddressProbe&) = delete;
    AddressProbe(AddressProbe&&) = delete;
    AddressProbe& operator=(AddressProbe&&) = delete;
    ~AddressProbe();

    [[nodiscard]] std::uintptr_t address() const;
    [[nodiscard]] std::size_t own_bytes() const { return own_bytes_; }
    [[nodiscard]] std::size_t peer_bytes() const { return peer_bytes_; }

    // Idempotent. When ACL refuses a step it throws, and a further close() tries the rest again.
    void close();

 private:
    [[nodiscard]] bool unmap(FirstError* first);

    AclPointer acl_;
    std::int32_t device_;
    std::size_t own_bytes_;
    std::size_t peer_bytes_ = 0;
    Reservation reservation_;
    std::vector<MappedBlock> blocks_;  // ours first
};

}  // namespace mc2::ascend
