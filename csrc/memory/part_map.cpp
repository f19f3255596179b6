#include "memory/part_map.h"

#include <iterator>
#include <string>

#include "memory/errors.h"

namespace mc2 {
namespace {

std::string stretch(std::size_t offset, std::size_t num_bytes) {
    return "[" + std::to_string(offset) + ", " + std::to_string(offset + num_bytes) + ")";
}

}  // namespace

PartMap::Parts::const_iterator PartMap::at_or_after(std::size_t offset) const {
    auto next = parts_.upper_bound(offset);
    if (next != parts_.begin()) {
        const auto previous = std::prev(next);
        if (previous->second.offset + previous->second.num_bytes > offset) {
            return previous;
        }
    }
    return next;
}

void PartMap::insert(const Part& part) { parts_.emplace(part.offset, part); }

void PartMap::erase(std::size_t offset, std::size_t num_bytes) {
    const std::size_t end = offset + num_bytes;
    auto it = at_or_after(offset);
    while (it != parts_.end() && it->second.offset < end) {
        const Part part = it->second;
        const std::size_t part_end = part.offset + part.num_bytes;
        it = parts_.erase(it);
        if (part.offset < offset) {
            Part left = part;
            left.num_bytes = offset - part.offset;
            insert(left);
        }
        if (part_end > end) {
            Part right = part;
            right.offset = end;
            right.num_bytes = part_end - end;
            insert(right);
        }
    }
}

void PartMap::require_free(std::size_t offset, std::size_t num_bytes) const {
    const auto it = at_or_after(offset);
    if (it != parts_.end() && it->second.offset < offset + num_bytes) {
        throw_invalid(stretch(offset, num_bytes) + " overlaps the mapped part " +
                      stretch(it->second.offset, it->second.num_bytes));
    }
}

void PartMap::require_cuttable(std::size_t offset, std::size_t num_bytes) const {
    for (const std::size_t cut : {offset, offset + num_bytes}) {
        const auto it = at_or_after(cut);
        if (it != parts_.end() && it->second.offset < cut &&
            (cut - it->second.offset) % it->second.page_bytes != 0) {
            throw_invalid("cannot cut " + stretch(it->second.offset, it->second.num_bytes) +
                          " at " + std::to_string(cut) + ": its pages have " +
                          std::to_string(it->second.page_bytes) + " bytes");
        }
    }
}

void PartMap::require_covered(std::size_t offset, std::size_t num_bytes, bool writable) const {
    const std::size_t end = offset + num_bytes;
    std::size_t covered = offset;
    for (auto it = at_or_after(offset); covered < end; ++it) {
        if (it == parts_.end() || it->second.offset > covered) {
            throw_invalid(stretch(offset, num_bytes) + " is not mapped at " +
                          std::to_string(covered));
        }
        if (writable && it->second.kind == PartKind::kPeer) {
            throw_invalid(stretch(offset, num_bytes) + " includes a peer's read-only memory");
        }
        covered = it->second.offset + it->second.num_bytes;
    }
}

std::vector<Part> PartMap::list() const {
    std::vector<Part> parts;
    parts.reserve(parts_.size());
    for (const auto& entry : parts_) {
        parts.push_back(entry.second);
    }
    return parts;
}

}  // namespace mc2
