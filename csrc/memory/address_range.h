// A reserved address range, parts of which are mapped and unmapped: D's view of its own and its peers' pools.
//
// Owns the range. Reserving costs no memory; what is not mapped is inaccessible but stays ours, so that nobody else's
// mapping can ever land inside. Mapped files need neither their Pool nor their descriptor afterwards.
// Threading: any thread may call. map and unmap are exclusive, copy keeps them out for its whole time, prefault for one
// chunk at a time, copy_out for one call. The lock cannot know about plain loads and stores: whoever unmaps knows that they have ended.
// Offsets and sizes are multiples of 4096, or of 2 MiB for hugetlb files; copies may be of any size.
#pragma once

#include <cstddef>
#include <shared_mutex>
#include <span>
#include <vector>

#include "memory/mapping.h"
#include "memory/part_map.h"
#include "memory/pool.h"

namespace mc2 {

struct Copy {
    std::size_t dst_offset;
    std::size_t src_offset;
    std::size_t num_bytes;
};

class AddressRange {
 public:
    explicit AddressRange(std::size_t num_bytes);

    // Shared and writable; the pool is not sealed yet.
    void map_pool(std::size_t offset, const Pool& pool, std::size_t pool_offset,
                  std::size_t num_bytes);
    // Private zeroed memory, huge pages preferred, allocated on first touch.
    void map_anonymous(std::size_t offset, std::size_t num_bytes);
    // Shared and read-only. Throws std::invalid_argument unless the memfd is sealed against shrinking and long enough.
    void map_peer(std::size_t offset, int fd, std::size_t fd_offset, std::size_t num_bytes);
    // Back to the reservation. What is not mapped stays so.
    void unmap(std::size_t offset, std::size_t num_bytes);
    // Fills the page tables without changing memory.
    void prefault(std::size_t offset, std::size_t num_bytes) const;
    // All or nothing: every bound and overlap is checked before the first byte moves, so the order does not matter.
    // Only addresses are compared; two parts that map the same pool bytes are the caller's business.
    void copy(const std::vector<Copy>& copies);
    // Out of the range into other memory, past the caches when `streams`. Throws std::invalid_argument when not all of it
    // is mapped; nothing was copied then.
    struct CopyOut {
        std::byte* dst;
        std::size_t src_offset;
        std::size_t num_bytes;
    };
    void copy_out(std::span<const CopyOut> pieces, bool streams) const;
    // Unmaps everything, the reservation too. Idempotent; every other call throws std::invalid_argument afterwards.
    void close();

    [[nodiscard]] std::byte* address() const { return range_.data(); }
    [[nodiscard]] std::size_t num_bytes() const { return num_bytes_; }
    [[nodiscard]] std::vector<Part> mappings() const;

 private:
    struct Source {
        int fd;
        std::size_t offset;
        std::size_t size;
        std::size_t page_bytes;
        PartKind kind;
    };
    void map_file(std::size_t offset, const Source& source, std::size_t num_bytes);
    // The lock is held.
    void map_part(const Part& part, int protection, int flags, int fd, std::size_t fd_offset);
    void map_over(std::size_t offset, std::size_t num_bytes, int protection, int flags, int fd,
                  std::size_t fd_offset);
    void require_inside(std::size_t offset, std::size_t num_bytes) const;
    void check_copies(const std::vector<Copy>& copies) const;

    std::size_t num_bytes_;
    Mapping range_;
    PartMap parts_;
    mutable std::shared_mutex mutex_;
};

}  // namespace mc2
