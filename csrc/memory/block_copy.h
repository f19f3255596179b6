// Copies blocks of one paged cache into blocks of another, with several threads: pull.
//
// A strip is one run of equally spaced pieces on either side: a layer, or the heads of a layer that both sides have. The
// source is an AddressRange in which a peer's pool is mapped; whatever is not mapped there when a piece is copied is an
// error, never a fault. The destination is plain memory, which the caller keeps.
// Threading: any thread may call copy, also several at once for different blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "memory/address_range.h"

namespace mc2 {

struct Strip {
    std::byte* dst;  // of block 0
    std::size_t dst_stride;
    std::size_t src_offset;  // of block 0, in the range
    std::size_t src_stride;
    std::size_t num_bytes;  // of each block
};

class BlockCopier {
 public:
    // The range must outlive the copier. Throws std::invalid_argument when a strip leaves the range, or its pieces overlap.
    BlockCopier(const AddressRange& source, std::vector<Strip> strips, std::size_t num_dst_blocks,
                std::size_t num_src_blocks);

    // Copies block src_ids[i] to dst_ids[i] in every strip and returns the number of bytes. Ids are checked before the
    // first byte moves; a source that is not mapped (any more) leaves the destination half written.
    // NOLINTNEXTLINE(modernize-use-nodiscard): it is called for what it does
    std::size_t copy(std::span<const std::int32_t> dst_ids, std::span<const std::int32_t> src_ids,
                     std::size_t num_threads) const;

    [[nodiscard]] std::size_t bytes_per_block() const { return bytes_per_block_; }

 private:
    // Blocks that follow each other on both sides.
    struct Run {
        std::size_t dst_block;
        std::size_t src_block;
        std::size_t num_blocks;
    };
    [[nodiscard]] std::vector<Run> runs_of(std::span<const std::int32_t> dst_ids,
                                           std::span<const std::int32_t> src_ids) const;
    // The runs of one strip that make up a thread's unit of work.
    void copy_runs(const Strip& strip, std::span<const Run> runs, bool streams) const;

    const AddressRange& source_;
    std::vector<Strip> strips_;
    std::size_t num_dst_blocks_;
    std::size_t num_src_blocks_;
    std::size_t bytes_per_block_ = 0;
    std::size_t max_run_blocks_ = 1;
};

}  // namespace mc2
