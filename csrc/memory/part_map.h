// Which parts of an address range are mapped, and how. Bookkeeping only: no system calls.
//
// Parts never overlap. Not thread-safe; AddressRange holds a lock around it.
#pragma once

#include <cstddef>
#include <map>
#include <vector>

namespace mc2 {

enum class PartKind { kPool, kAnonymous, kPeer };

struct Part {
    std::size_t offset;
    std::size_t num_bytes;
    PartKind kind;
    std::size_t page_bytes;  // cuts must fall on multiples of it
};

class PartMap {
 public:
    void insert(const Part& part);
    // Takes [offset, offset + num_bytes) out, cutting the parts at its ends.
    void erase(std::size_t offset, std::size_t num_bytes);
    void clear() { parts_.clear(); }

    // Throws std::invalid_argument when something is mapped inside.
    void require_free(std::size_t offset, std::size_t num_bytes) const;
    // Throws when a cut at either end would fall inside a page.
    void require_cuttable(std::size_t offset, std::size_t num_bytes) const;
    // Throws unless parts cover the whole stretch, writable ones where asked.
    void require_covered(std::size_t offset, std::size_t num_bytes, bool writable) const;

    [[nodiscard]] std::vector<Part> list() const;

 private:
    using Parts = std::map<std::size_t, Part>;
    // The part that contains `offset`, or the first one after it.
    [[nodiscard]] Parts::const_iterator at_or_after(std::size_t offset) const;

    Parts parts_;  // by offset
};

}  // namespace mc2
