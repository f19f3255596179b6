#include "memory/block_copy.h"

#include <algorithm>
#include <string>
#include <utility>

#include "memory/errors.h"
#include "memory/page.h"
#include "memory/parallel.h"

namespace mc2 {
namespace {

// A thread's unit of work: long enough to be worth taking, short enough to keep all threads busy to the end.
constexpr std::size_t kUnitBytes = std::size_t{1} << 20U;

// A prompt's KV of this size does not stay in a cache until attention has come to its last layer.
constexpr std::size_t kStreamBytes = std::size_t{16} << 20U;

std::size_t end_of(std::size_t stride, std::size_t num_blocks, std::size_t num_bytes) {
    return (num_blocks - 1) * stride + num_bytes;
}

void require_strip(const Strip& strip, const AddressRange& source, std::size_t num_src_blocks) {
    if (strip.num_bytes == 0 || strip.dst_stride < strip.num_bytes ||
        strip.src_stride < strip.num_bytes) {
        throw_invalid("strip of " + std::to_string(strip.num_bytes) + " bytes with strides " +
                      std::to_string(strip.dst_stride) + " and " +
                      std::to_string(strip.src_stride));
    }
    const std::size_t limit = source.num_bytes();
    if (strip.src_stride > limit || num_src_blocks > limit / strip.src_stride + 1 ||
        !fits(strip.src_offset, end_of(strip.src_stride, num_src_blocks, strip.num_bytes), limit)) {
        throw_invalid(std::to_string(num_src_blocks) + " blocks at offset " +
                      std::to_string(strip.src_offset) + " are outside an address range of " +
                      std::to_string(limit) + " bytes");
    }
}

void require_id(const char* side, std::int32_t id, std::size_t num_blocks) {
    if (std::cmp_less(id, 0) || std::cmp_greater_equal(id, num_blocks)) {
        throw_invalid(std::string(side) + " block " + std::to_string(id) + " of " +
                      std::to_string(num_blocks));
    }
}

}  // namespace

BlockCopier::BlockCopier(const AddressRange& source, std::vector<Strip> strips,
                         std::size_t num_dst_blocks, std::size_t num_src_blocks)
    : source_(source),
      strips_(std::move(strips)),
      num_dst_blocks_(num_dst_blocks),
      num_src_blocks_(num_src_blocks) {
    if (strips_.empty() || num_dst_blocks == 0 || num_src_blocks == 0) {
        throw_invalid("nothing to copy: " + std::to_string(strips_.size()) + " strips of " +
                      std::to_string(num_src_blocks) + " blocks to " +
                      std::to_string(num_dst_blocks));
    }
    std::size_t longest = 0;
    for (const Strip& strip : strips_) {
        require_strip(strip, source, num_src_blocks);
        bytes_per_block_ += strip.num_bytes;
        longest = std::max(longest, strip.num_bytes);
    }
    max_run_blocks_ = std::max<std::size_t>(1, kUnitBytes / longest);
}

std::vector<BlockCopier::Run> BlockCopier::runs_of(std::span<const std::int32_t> dst_ids,
                                                   std::span<const std::int32_t> src_ids) const {
    if (dst_ids.size() != src_ids.size()) {
        throw_invalid(std::to_string(src_ids.size()) + " blocks to " +
                      std::to_string(dst_ids.size()) + " places");
    }
    std::vector<std::int32_t> places(dst_ids.begin(), dst_ids.end());
    std::ranges::sort(places);
    if (std::ranges::adjacent_find(places) != places.end()) {
        throw_invalid("two blocks to one place");
    }
    std::vector<Run> runs;
    for (std::size_t i = 0; i < dst_ids.size(); ++i) {
        require_id("destination", dst_ids[i], num_dst_blocks_);
        require_id("source", src_ids[i], num_src_blocks_);
        const auto dst = static_cast<std::size_t>(dst_ids[i]);
        const auto src = static_cast<std::size_t>(src_ids[i]);
        if (!runs.empty() && runs.back().num_blocks < max_run_blocks_ &&
            runs.back().dst_block + runs.back().num_blocks == dst &&
            runs.back().src_block + runs.back().num_blocks == src) {
            ++runs.back().num_blocks;
        } else {
            runs.push_back({.dst_block = dst, .src_block = src, .num_blocks = 1});
        }
    }
    return runs;
}

void BlockCopier::copy_runs(const Strip& strip, std::span<const Run> runs, bool streams) const {
    const bool is_dense =
        strip.dst_stride == strip.num_bytes && strip.src_stride == strip.num_bytes;
    std::vector<AddressRange::CopyOut> pieces;
    for (const Run& run : runs) {
        const std::size_t step = is_dense ? run.num_blocks : 1;
        for (std::size_t i = 0; i < run.num_blocks; i += step) {
            pieces.push_back(
                {.dst = strip.dst + (run.dst_block + i) * strip.dst_stride,
                 .src_offset = strip.src_offset + (run.src_block + i) * strip.src_stride,
                 .num_bytes = step * strip.num_bytes});
        }
    }
    source_.copy_out(pieces, streams);
}

std::size_t BlockCopier::copy(std::span<const std::int32_t> dst_ids,
                              std::span<const std::int32_t> src_ids,
                              std::size_t num_threads) const {
    const std::vector<Run> runs = runs_of(dst_ids, src_ids);
    std::vector<std::span<const Run>> units;
    std::size_t num_blocks = 0;
    for (std::size_t begin = 0, end = 0; end < runs.size();) {
        num_blocks += runs[end++].num_blocks;
        if (num_blocks >= max_run_blocks_ || end == runs.size()) {
            units.push_back(std::span(runs).subspan(begin, end - begin));
            begin = end;
            num_blocks = 0;
        }
    }
    const std::size_t num_bytes = dst_ids.size() * bytes_per_block_;
    // Not worth a thread's start below a unit each.
    const std::size_t useful = std::max<std::size_t>(1, num_bytes / kUnitBytes);
    parallel_for(units.size() * strips_.size(), std::min(num_threads, useful), [&](std::size_t i) {
        copy_runs(strips_[i / units.size()], units[i % units.size()], num_bytes >= kStreamBytes);
    });
    return num_bytes;
}

}  // namespace mc2
