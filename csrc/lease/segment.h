// One mapped shared segment and typed access to its words. See layout.h for what the words mean.
//
// Move-only. Reading and writing single words is safe from any thread; making and closing are not.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "lease/layout.h"
#include "memory/file_descriptor.h"
#include "memory/mapping.h"

namespace mc2::lease {

// Sizes of a segment, computed or checked: nothing is ever addressed with numbers that come straight from shared memory.
struct Geometry {
    std::uint64_t magic;
    std::uint64_t table_id;
    std::size_t num_slots;
    std::size_t max_blocks;
    std::size_t slot_stride;
    std::size_t total_bytes;

    // Throws std::invalid_argument when the segment would exceed kMaxSegmentBytes.
    static Geometry of_index(std::size_t num_slots, std::size_t max_blocks, std::uint64_t table_id);
    static Geometry of_ledger(std::size_t num_slots, std::uint64_t table_id);
};

// A committed memfd with the header written, mapped by its maker.
struct NewSegment {
    FileDescriptor file;
    Mapping mapping;
};
// P keeps a writable mapping; nobody else can make one.
NewSegment make_index(const Geometry& geometry);
// P keeps a read-only mapping; D makes the writable one.
NewSegment make_ledger(const Geometry& geometry);

// A foreign segment. The header is copied once and checked against the file and our own limits; throws
// std::invalid_argument on anything wrong.
struct OpenedSegment {
    Geometry geometry;
    Mapping mapping;
};
OpenedSegment open_segment(int fd, std::uint64_t magic, Access access);

// The words of a mapped segment, for as long as the mapping lives.
class Words {
 public:
    Words() = default;
    Words(const Mapping& mapping, const Geometry& geometry)
        : base_(mapping.data()), stride_(geometry.slot_stride) {}

    [[nodiscard]] std::atomic_ref<std::uint64_t> state(std::size_t slot) const {
        return word(slot, offsetof(SlotHead, state));
    }
    [[nodiscard]] std::atomic_ref<std::uint64_t> references(std::size_t slot) const {
        return word(slot, offsetof(SlotHead, references));
    }
    [[nodiscard]] std::atomic_ref<std::uint64_t> num_tokens(std::size_t slot) const {
        return word(slot, offsetof(SlotHead, num_tokens));
    }
    [[nodiscard]] std::atomic_ref<std::uint64_t> num_blocks(std::size_t slot) const {
        return word(slot, offsetof(SlotHead, num_blocks));
    }
    [[nodiscard]] std::atomic_ref<std::uint64_t> flags(std::size_t slot) const {
        return word(slot, offsetof(SlotHead, flags));
    }
    [[nodiscard]] std::atomic_ref<std::uint64_t> token_word(std::size_t slot, std::size_t i) const {
        return word(slot, offsetof(SlotHead, token) + i * sizeof(std::uint64_t));
    }
    [[nodiscard]] std::atomic_ref<std::uint64_t> digest_word(std::size_t slot,
                                                             std::size_t i) const {
        return word(slot, offsetof(SlotHead, digest) + i * sizeof(std::uint64_t));
    }
    [[nodiscard]] std::atomic_ref<std::uint32_t> block_id(std::size_t slot, std::size_t i) const {
        auto* at = address(slot, sizeof(SlotHead) + i * sizeof(std::uint32_t));
        return std::atomic_ref<std::uint32_t>(*reinterpret_cast<std::uint32_t*>(at));
    }
    // A ledger's slot is one word.
    [[nodiscard]] std::atomic_ref<std::uint64_t> ledger(std::size_t slot) const {
        return word(slot, 0);
    }

 private:
    [[nodiscard]] std::byte* address(std::size_t slot, std::size_t offset) const {
        return base_ + sizeof(Header) + slot * stride_ + offset;
    }
    [[nodiscard]] std::atomic_ref<std::uint64_t> word(std::size_t slot, std::size_t offset) const {
        return std::atomic_ref<std::uint64_t>(
            *reinterpret_cast<std::uint64_t*>(address(slot, offset)));
    }

    std::byte* base_ = nullptr;
    std::size_t stride_ = 0;
};

}  // namespace mc2::lease
