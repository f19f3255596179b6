#include "memory/block_copy.h"

#include <atomic>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "memory/page.h"
#include "memory/parallel.h"
#include "memory/pool.h"

namespace {

using mc2::AddressRange;
using mc2::BlockCopier;
using mc2::HugePages;
using mc2::kHugePageBytes;
using mc2::kPageBytes;
using mc2::Pool;
using mc2::Strip;
using Ids = std::vector<std::int32_t>;

constexpr std::size_t kSourceBytes = 2 * kHugePageBytes;
constexpr std::size_t kBlockBytes = 4096;

// A mapped pool whose every byte tells where it is.
class Source {
 public:
    Source() : pool_(kSourceBytes, HugePages::kOff, "test"), range_(kSourceBytes) {
        range_.map_pool(0, pool_, 0, kSourceBytes);
        for (std::size_t i = 0; i < kSourceBytes; ++i) {
            range_.address()[i] = value(i);
        }
    }
    static std::byte value(std::size_t offset) {
        return static_cast<std::byte>((offset * 2654435761U) >> 13U);
    }
    AddressRange& range() { return range_; }

 private:
    Pool pool_;
    AddressRange range_;
};

Strip strip_of(std::vector<std::byte>& dst, std::size_t dst_stride, std::size_t src_offset,
               std::size_t src_stride, std::size_t num_bytes) {
    return {.dst = dst.data(),
            .dst_stride = dst_stride,
            .src_offset = src_offset,
            .src_stride = src_stride,
            .num_bytes = num_bytes};
}

bool is_block(const std::byte* at, std::size_t src_offset, std::size_t num_bytes) {
    for (std::size_t i = 0; i < num_bytes; ++i) {
        if (at[i] != Source::value(src_offset + i)) {
            return false;
        }
    }
    return true;
}

MC2_TEST(scattered_blocks_of_two_layers_arrive) {
    Source source;
    std::vector<std::byte> first(8 * kBlockBytes);
    std::vector<std::byte> second(8 * kBlockBytes);
    const BlockCopier copier(
        source.range(),
        {strip_of(first, kBlockBytes, 0, kBlockBytes, kBlockBytes),
         strip_of(second, kBlockBytes, kHugePageBytes, kBlockBytes, kBlockBytes)},
        8, 100);
    CHECK_EQ(copier.bytes_per_block(), 2 * kBlockBytes);
    CHECK_EQ(copier.copy(Ids{7, 0, 3}, Ids{99, 5, 6}, 3), 6 * kBlockBytes);
    for (const auto& [dst, src] : {std::pair<std::size_t, std::size_t>{7, 99}, {0, 5}, {3, 6}}) {
        CHECK(is_block(first.data() + dst * kBlockBytes, src * kBlockBytes, kBlockBytes));
        CHECK(is_block(second.data() + dst * kBlockBytes, kHugePageBytes + src * kBlockBytes,
                       kBlockBytes));
    }
    for (const std::size_t untouched : {1U, 2U, 4U, 5U, 6U}) {
        CHECK(first[untouched * kBlockBytes] == std::byte{0} &&
              first[untouched * kBlockBytes + kBlockBytes - 1] == std::byte{0});
    }
}

MC2_TEST(slices_of_blocks_go_where_they_belong) {
    Source source;
    std::vector<std::byte> dst(std::size_t{4} * 100);
    // The second half of a source block is the first quarter of ours, at an offset of 10.
    const BlockCopier copier(source.range(),
                             {{.dst = dst.data() + 10,
                               .dst_stride = 100,
                               .src_offset = 25,
                               .src_stride = 50,
                               .num_bytes = 25}},
                             3, 40);
    CHECK_EQ(copier.copy(Ids{2, 1}, Ids{31, 32}, 1), 50U);
    CHECK(is_block(dst.data() + 210, 25 + std::size_t{31} * 50, 25));
    CHECK(is_block(dst.data() + 110, 25 + std::size_t{32} * 50, 25));
    CHECK(dst[209] == std::byte{0} && dst[235] == std::byte{0} && dst[10] == std::byte{0});
}

MC2_TEST(long_runs_are_shared_by_threads_and_complete) {
    Source source;
    constexpr std::size_t kBlock = 300;
    constexpr std::size_t kBlocks = kSourceBytes / kBlock;
    std::vector<std::byte> dst(kBlocks * kBlock);
    const BlockCopier copier(source.range(), {strip_of(dst, kBlock, 0, kBlock, kBlock)}, kBlocks,
                             kBlocks);
    Ids ids(kBlocks);
    for (std::size_t i = 0; i < kBlocks; ++i) {
        ids[i] = static_cast<std::int32_t>(i);
    }
    CHECK_EQ(copier.copy(ids, ids, 4), kBlocks * kBlock);
    CHECK(is_block(dst.data(), 0, dst.size()));
    // Each once, in an order that has nothing to do with the first.
    Ids shuffled(kBlocks);
    for (std::size_t i = 0; i < kBlocks; ++i) {
        shuffled[i] = static_cast<std::int32_t>(i * 7919 % kBlocks);
    }
    copier.copy(ids, shuffled, 3);
    for (std::size_t i = 0; i < kBlocks; i += 97) {
        CHECK(is_block(dst.data() + i * kBlock, static_cast<std::size_t>(shuffled[i]) * kBlock,
                       kBlock));
    }
}

MC2_TEST(wrong_ids_are_refused_before_a_byte_moves) {
    Source source;
    std::vector<std::byte> dst(std::size_t{4} * 64);
    const BlockCopier copier(source.range(), {strip_of(dst, 64, 0, 64, 64)}, 4, 10);
    CHECK_THROWS(std::invalid_argument, copier.copy(Ids{0, 4}, Ids{1, 2}, 1));
    CHECK_THROWS(std::invalid_argument, copier.copy(Ids{0, -1}, Ids{1, 2}, 1));
    CHECK_THROWS(std::invalid_argument, copier.copy(Ids{0, 1}, Ids{1, 10}, 1));
    CHECK_THROWS(std::invalid_argument, copier.copy(Ids{0, 1}, Ids{1, -2}, 1));
    CHECK_THROWS(std::invalid_argument, copier.copy(Ids{0, 0}, Ids{1, 2}, 1));
    CHECK_THROWS(std::invalid_argument, copier.copy(Ids{0}, Ids{1, 2}, 1));
    CHECK_EQ(copier.copy(Ids{}, Ids{}, 2), 0U);
    for (const std::byte byte : dst) {
        CHECK(byte == std::byte{0});
    }
}

MC2_TEST(wrong_strips_are_refused) {
    Source source;
    std::vector<std::byte> dst(std::size_t{4} * 64);
    const auto make = [&](std::size_t dst_stride, std::size_t src_offset, std::size_t src_stride,
                          std::size_t num_bytes, std::size_t num_src) {
        const BlockCopier copier(source.range(),
                                 {strip_of(dst, dst_stride, src_offset, src_stride, num_bytes)}, 4,
                                 num_src);
    };
    make(64, 0, 64, 64, kSourceBytes / 64);
    CHECK_THROWS(std::invalid_argument, make(64, 0, 64, 64, kSourceBytes / 64 + 1));
    CHECK_THROWS(std::invalid_argument, make(64, 1, 64, 64, kSourceBytes / 64));
    CHECK_THROWS(std::invalid_argument, make(32, 0, 64, 64, 4));
    CHECK_THROWS(std::invalid_argument, make(64, 0, 32, 64, 4));
    CHECK_THROWS(std::invalid_argument, make(64, 0, 64, 0, 4));
    CHECK_THROWS(std::invalid_argument, make(64, 0, 64, 64, 0));
    CHECK_THROWS(std::invalid_argument, make(64, 0, ~std::size_t{0}, 64, 2));
    CHECK_THROWS(std::invalid_argument, make(64, 0, ~std::size_t{0} / 2, 64, 3));
    CHECK_THROWS(std::invalid_argument, make(64, ~std::size_t{0}, 64, 64, 4));
    CHECK_THROWS(std::invalid_argument, BlockCopier(source.range(), {}, 4, 4));
}

MC2_TEST(a_source_that_is_not_mapped_is_an_error) {
    Source source;
    std::vector<std::byte> dst(std::size_t{4} * 64);
    const BlockCopier copier(source.range(), {strip_of(dst, 64, 0, 64, 64)}, 4, kSourceBytes / 64);
    source.range().unmap(kPageBytes, kPageBytes);
    CHECK_EQ(copier.copy(Ids{0}, Ids{63}, 1), 64U);
    CHECK_THROWS(std::invalid_argument, copier.copy(Ids{0}, Ids{64}, 1));
}

MC2_TEST(copies_go_on_while_other_parts_are_mapped_and_unmapped) {
    Source source;
    AddressRange range(4 * kHugePageBytes);
    Pool pool(kSourceBytes, HugePages::kOff, "test");
    range.map_pool(0, pool, 0, kHugePageBytes);
    std::atomic<bool> stop{false};
    std::jthread mapper([&] {
        while (!stop) {
            range.map_pool(2 * kHugePageBytes, pool, kHugePageBytes, kHugePageBytes);
            range.unmap(2 * kHugePageBytes, kHugePageBytes);
        }
    });
    std::vector<std::byte> one(64 * kBlockBytes);
    std::vector<std::byte> other(64 * kBlockBytes);
    const BlockCopier to_one(range, {strip_of(one, kBlockBytes, 0, kBlockBytes, kBlockBytes)}, 64,
                             64);
    const BlockCopier to_other(range, {strip_of(other, kBlockBytes, 0, kBlockBytes, kBlockBytes)},
                               64, 64);
    Ids ids(64);
    for (std::size_t i = 0; i < ids.size(); ++i) {
        ids[i] = static_cast<std::int32_t>(i);
    }
    {
        const std::jthread second([&] {
            for (int i = 0; i < 50; ++i) {
                to_other.copy(ids, ids, 2);
            }
        });
        for (int i = 0; i < 50; ++i) {
            to_one.copy(ids, ids, 2);
        }
    }
    stop = true;
    mapper.join();
    CHECK(one == other);
}

MC2_TEST(a_parallel_loop_visits_each_once_and_passes_the_first_error_on) {
    std::vector<std::atomic<int>> visits(1000);
    mc2::parallel_for(visits.size(), 4, [&](std::size_t i) { ++visits[i]; });
    for (const auto& count : visits) {
        CHECK_EQ(count.load(), 1);
    }
    mc2::parallel_for(0, 4, [](std::size_t) { throw std::runtime_error("never"); });
    CHECK_THROWS(std::runtime_error, mc2::parallel_for(1000, 4, [](std::size_t i) {
                     if (i == 17) {
                         throw std::runtime_error("seventeen");
                     }
                 }));
}

}  // namespace
