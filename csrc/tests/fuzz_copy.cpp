// Address ranges and copies with numbers that come from a peer.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <optional>
#include <vector>

#include "fuzz_input.h"
#include "memory/address_range.h"
#include "memory/block_copy.h"
#include "memory/file_descriptor.h"

namespace mc2::fuzz {
namespace {

constexpr std::size_t kPageBytes = 4096;
constexpr std::size_t kNumPages = 16;
constexpr std::size_t kFilePages = 12;
constexpr std::size_t kDestinationBytes = 3000;  // no multiple of anything

enum class Page : std::uint8_t { kNone, kAnonymous, kPeer };

// The file's byte at each place is the number of its page.
FileDescriptor peer_file() {
    FileDescriptor file = make_memfd("fuzz", kFilePages * kPageBytes, false);
    for (std::size_t page = 0; page < kFilePages; ++page) {
        const std::vector<std::uint8_t> bytes(kPageBytes, static_cast<std::uint8_t>(page + 1));
        require(::pwrite(file.get(), bytes.data(), kPageBytes,
                         static_cast<off_t>(page * kPageBytes)) == static_cast<ssize_t>(kPageBytes),
                "pwrite");
    }
    add_seals(file.get(), F_SEAL_SHRINK);
    return file;
}

class RangeSession {
 public:
    explicit RangeSession(const FileDescriptor& file) : file_(file) {}

    void run(Input& input) {
        while (!input.is_empty()) {
            step(input);
            check();
        }
        range_.close();
    }

 private:
    void step(Input& input) {
        const auto action = input.take<std::uint8_t>();
        switch (action % 8) {
            case 0:
            case 1:
                map_peer(input);
                break;
            case 2:
                map_anonymous(input);
                break;
            case 3:
                unmap(input);
                break;
            case 4:
                prefault(input);
                break;
            case 5:
                copy(input);
                break;
            default:
                copy_blocks(input);
        }
    }
    [[nodiscard]] static bool fits(std::uint64_t offset, std::uint64_t num_bytes,
                                   std::uint64_t limit) {
        return num_bytes <= limit && offset <= limit - num_bytes;
    }
    [[nodiscard]] static bool is_paged(std::uint64_t offset, std::uint64_t num_bytes) {
        return offset % kPageBytes == 0 && num_bytes % kPageBytes == 0 && num_bytes > 0;
    }
    [[nodiscard]] bool is_mapped(std::uint64_t offset, std::uint64_t num_bytes,
                                 bool writable) const {
        if (!fits(offset, num_bytes, kNumPages * kPageBytes)) {
            return false;
        }
        for (std::size_t at = offset; at < offset + num_bytes;
             at = (at / kPageBytes + 1) * kPageBytes) {
            const Page page = pages_[at / kPageBytes];
            if (page == Page::kNone || (writable && page != Page::kAnonymous)) {
                return false;
            }
        }
        return true;
    }
    [[nodiscard]] bool is_free(std::uint64_t offset, std::uint64_t num_bytes) const {
        return fits(offset, num_bytes, kNumPages * kPageBytes) && is_paged(offset, num_bytes) &&
               std::all_of(
                   pages_.begin() + static_cast<std::ptrdiff_t>(offset / kPageBytes),
                   pages_.begin() + static_cast<std::ptrdiff_t>((offset + num_bytes) / kPageBytes),
                   [](Page page) { return page == Page::kNone; });
    }
    void mark(std::uint64_t offset, std::uint64_t num_bytes, Page page) {
        std::fill_n(pages_.begin() + static_cast<std::ptrdiff_t>(offset / kPageBytes),
                    num_bytes / kPageBytes, page);
    }
    void map_peer(Input& input) {
        const std::uint64_t offset = input.bytes();
        const std::uint64_t from = input.bytes();
        const std::uint64_t num_bytes = input.bytes();
        const bool is_right = is_free(offset, num_bytes) && from % kPageBytes == 0 &&
                              fits(from, num_bytes, kFilePages * kPageBytes);
        const bool refused =
            is_refused([&] { range_.map_peer(offset, file_.get(), from, num_bytes); });
        require(refused != is_right, "a peer's pages where they do not fit");
        if (is_right) {
            mark(offset, num_bytes, Page::kPeer);
        }
    }
    void map_anonymous(Input& input) {
        const std::uint64_t offset = input.bytes();
        const std::uint64_t num_bytes = input.bytes();
        const bool is_right = is_free(offset, num_bytes);
        require(is_refused([&] { range_.map_anonymous(offset, num_bytes); }) != is_right,
                "own pages where they do not fit");
        if (is_right) {
            mark(offset, num_bytes, Page::kAnonymous);
        }
    }
    void unmap(Input& input) {
        const std::uint64_t offset = input.bytes();
        const std::uint64_t num_bytes = input.bytes();
        const bool refused = is_refused([&] { range_.unmap(offset, num_bytes); });
        const bool is_right =
            fits(offset, num_bytes, kNumPages * kPageBytes) && is_paged(offset, num_bytes);
        require(refused != is_right, "unmapped outside, or not inside");
        if (is_right) {
            mark(offset, num_bytes, Page::kNone);
        }
    }
    void prefault(Input& input) {
        const std::uint64_t offset = input.bytes();
        const std::uint64_t num_bytes = input.bytes();
        (void)is_refused([&] { range_.prefault(offset, num_bytes); });
    }
    void copy(Input& input) {
        std::vector<Copy> copies;
        bool is_right = true;
        for (auto count = 1 + input.take<std::uint8_t>() % 3; count > 0; --count) {
            // Any byte within a page, mostly.
            const Copy each{.dst_offset = input.bytes() + input.take<std::uint8_t>(),
                            .src_offset = input.bytes() + input.take<std::uint8_t>(),
                            .num_bytes = input.number()};
            is_right = is_right && is_mapped(each.src_offset, each.num_bytes, false) &&
                       is_mapped(each.dst_offset, each.num_bytes, true);
            copies.push_back(each);
        }
        const bool refused = is_refused([&] { range_.copy(copies); });
        require(refused || is_right, "copied from or to what is not mapped");
    }
    // A destination of the caller's, and blocks of a peer wherever it says that they are.
    void copy_blocks(Input& input) {
        std::vector<std::byte> destination(kDestinationBytes);
        const std::size_t num_bytes = 1 + input.below(700);
        const std::size_t dst_stride = num_bytes + input.below(100);
        const std::size_t num_dst = 1 + (kDestinationBytes - num_bytes) / dst_stride;
        const Strip strip{
            .dst = destination.data(),
            .dst_stride = dst_stride,
            .src_offset = input.bytes(),
            .src_stride = input.take<std::uint8_t>() < 200 ? num_bytes : input.bytes(),
            .num_bytes = num_bytes};
        const std::size_t num_src = input.number();
        std::optional<BlockCopier> copier;
        if (is_refused([&] { copier.emplace(range_, std::vector{strip}, num_dst, num_src); })) {
            return;
        }
        std::vector<std::int32_t> dst_ids;
        std::vector<std::int32_t> src_ids;
        for (auto count = input.take<std::uint8_t>() % 4; count > 0; --count) {
            dst_ids.push_back(static_cast<std::int32_t>(input.number()));
            src_ids.push_back(static_cast<std::int32_t>(input.number()));
        }
        std::size_t copied = 0;
        const bool refused = is_refused([&] { copied = copier->copy(dst_ids, src_ids, 1); });
        bool is_right = true;
        for (std::size_t i = 0; i < src_ids.size(); ++i) {
            is_right = is_right && std::cmp_greater_equal(dst_ids[i], 0) &&
                       std::cmp_less(dst_ids[i], num_dst) &&
                       std::cmp_greater_equal(src_ids[i], 0) &&
                       std::cmp_less(src_ids[i], num_src) &&
                       is_mapped(strip.src_offset +
                                     static_cast<std::size_t>(src_ids[i]) * strip.src_stride,
                                 num_bytes, false);
        }
        require(refused || is_right, "copied what is not mapped, or to nowhere");
        if (!refused) {
            require(copied == num_bytes * src_ids.size(), "another number of bytes");
            for (std::size_t i = 0; i < src_ids.size(); ++i) {
                const std::byte* from = range_.address() + strip.src_offset +
                                        static_cast<std::size_t>(src_ids[i]) * strip.src_stride;
                const std::byte* to =
                    destination.data() + static_cast<std::size_t>(dst_ids[i]) * dst_stride;
                require(std::equal(to, to + num_bytes, from), "other bytes than the peer's");
            }
        }
    }
    // What the range says of itself is what was done.
    void check() const {
        std::array<Page, kNumPages> seen{};
        for (const Part& part : range_.mappings()) {
            require(is_paged(part.offset, part.num_bytes) &&
                        fits(part.offset, part.num_bytes, kNumPages * kPageBytes),
                    "a part outside");
            for (std::size_t page = part.offset / kPageBytes;
                 page < (part.offset + part.num_bytes) / kPageBytes; ++page) {
                require(seen[page] == Page::kNone, "two parts overlap");
                seen[page] = part.kind == PartKind::kPeer ? Page::kPeer : Page::kAnonymous;
            }
        }
        require(seen == pages_, "other parts than were mapped");
    }

    const FileDescriptor& file_;
    AddressRange range_{kNumPages * kPageBytes};
    std::array<Page, kNumPages> pages_{};
};

}  // namespace

void fuzz_copy(Input& input) {
    static const FileDescriptor file = peer_file();
    RangeSession session(file);
    session.run(input);
}

}  // namespace mc2::fuzz
