#include "memory/address_range.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <string>

#include "memory/errors.h"
#include "memory/linux_abi.h"
#include "memory/page.h"
#include "memory/stream_copy.h"

#ifndef MAP_FIXED_NOREPLACE
#define MAP_FIXED_NOREPLACE 0x100000
#endif

namespace mc2 {
namespace {

constexpr int kReservation = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

// Milliseconds of page table work: so long may a map or unmap have to wait.
constexpr std::size_t kPrefaultChunkBytes = 64 * kHugePageBytes;

std::size_t checked_size(std::size_t num_bytes) {
    require_size("address range num_bytes", num_bytes);
    require_multiple("address range num_bytes", num_bytes, kPageBytes);
    return num_bytes;
}

void touch_pages(const std::byte* start, std::size_t num_bytes) {
    for (std::size_t offset = 0; offset < num_bytes; offset += kPageBytes) {
        (void)*static_cast<const volatile std::byte*>(start + offset);
    }
}

void populate_read(std::byte* start, std::size_t num_bytes) {
    int rc = 0;
    do {
        rc = ::madvise(start, num_bytes, linux_abi::kMadvPopulateRead);
    } while (rc != 0 && (errno == EINTR || errno == EAGAIN));
    if (rc != 0 && errno == EINVAL) {  // before Linux 5.14
        touch_pages(start, num_bytes);
    } else if (rc != 0) {
        throw_errno("madvise(MADV_POPULATE_READ) of " + std::to_string(num_bytes) + " bytes");
    }
}

void require_disjoint(const Copy& copy, std::size_t other_offset, std::size_t other_bytes) {
    if (copy.dst_offset < other_offset + other_bytes &&
        other_offset < copy.dst_offset + copy.num_bytes) {
        throw_invalid("copy of " + std::to_string(copy.num_bytes) + " bytes to offset " +
                      std::to_string(copy.dst_offset) + " overlaps " + std::to_string(other_bytes) +
                      " bytes at offset " + std::to_string(other_offset));
    }
}

// Sorted destinations are disjoint, so only the neighbours of a source's place can overlap it.
void require_disjoint(const std::vector<Copy>& copies) {
    std::vector<Copy> sorted = copies;
    std::ranges::sort(sorted, {}, &Copy::dst_offset);
    for (std::size_t i = 1; i < sorted.size(); ++i) {
        require_disjoint(sorted[i], sorted[i - 1].dst_offset, sorted[i - 1].num_bytes);
    }
    for (const Copy& copy : copies) {
        // The first destination that ends after the source begins.
        const auto it = std::ranges::upper_bound(
            sorted, copy.src_offset, {},
            [](const Copy& other) { return other.dst_offset + other.num_bytes; });
        if (it != sorted.end()) {
            require_disjoint(*it, copy.src_offset, copy.num_bytes);
        }
    }
}

}  // namespace

AddressRange::AddressRange(std::size_t num_bytes)
    : num_bytes_(checked_size(num_bytes)), range_(Mapping::reserve(num_bytes)) {}

void AddressRange::map_pool(std::size_t offset, const Pool& pool, std::size_t pool_offset,
                            std::size_t num_bytes) {
    const bool hugetlb = pool.method() == HugePageMethod::kHugetlb;
    map_file(offset,
             {.fd = pool.writable_fd(),
              .offset = pool_offset,
              .size = pool.num_bytes(),
              .page_bytes = hugetlb ? kHugePageBytes : kPageBytes,
              .kind = PartKind::kPool},
             num_bytes);
}

void AddressRange::map_peer(std::size_t offset, int fd, std::size_t fd_offset,
                            std::size_t num_bytes) {
    const SealedFile file = inspect_sealed(fd);
    map_file(offset,
             {.fd = fd,
              .offset = fd_offset,
              .size = file.num_bytes,
              .page_bytes = file.hugetlb ? kHugePageBytes : kPageBytes,
              .kind = PartKind::kPeer},
             num_bytes);
}

void AddressRange::map_anonymous(std::size_t offset, std::size_t num_bytes) {
    require_multiple("offset", offset, kPageBytes);
    require_multiple("num_bytes", num_bytes, kPageBytes);
    const std::scoped_lock lock(mutex_);
    map_part({.offset = offset,
              .num_bytes = num_bytes,
              .kind = PartKind::kAnonymous,
              .page_bytes = kPageBytes},
             PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    // Only a wish; kernels without transparent huge pages refuse it.
    (void)::madvise(address() + offset, num_bytes, MADV_HUGEPAGE);
}

void AddressRange::map_file(std::size_t offset, const Source& source, std::size_t num_bytes) {
    require_multiple("offset", offset, source.page_bytes);
    require_multiple("file offset", source.offset, source.page_bytes);
    require_multiple("num_bytes", num_bytes, source.page_bytes);
    if (!fits(source.offset, num_bytes, source.size)) {
        throw_invalid(std::to_string(num_bytes) + " bytes at file offset " +
                      std::to_string(source.offset) + " are outside a file of " +
                      std::to_string(source.size) + " bytes");
    }
    const int protection = source.kind == PartKind::kPeer ? PROT_READ : PROT_READ | PROT_WRITE;
    const std::scoped_lock lock(mutex_);
    map_part({.offset = offset,
              .num_bytes = num_bytes,
              .kind = source.kind,
              .page_bytes = source.page_bytes},
             protection, MAP_SHARED, source.fd, source.offset);
}

void AddressRange::map_part(const Part& part, int protection, int flags, int fd,
                            std::size_t fd_offset) {
    require_inside(part.offset, part.num_bytes);
    parts_.require_free(part.offset, part.num_bytes);
    parts_.insert(part);
    try {
        map_over(part.offset, part.num_bytes, protection, flags, fd, fd_offset);
    } catch (...) {
        parts_.erase(part.offset, part.num_bytes);
        throw;
    }
}

void AddressRange::map_over(std::size_t offset, std::size_t num_bytes, int protection, int flags,
                            int fd, std::size_t fd_offset) {
    std::byte* target = address() + offset;
    if (::mmap(target, num_bytes, protection, flags | MAP_FIXED, fd,
               static_cast<off_t>(fd_offset)) != MAP_FAILED) {
        return;
    }
    const int code = errno;
    // A late failure may have removed the reservation already. Take the addresses back unless they are still taken.
    (void)::mmap(target, num_bytes, PROT_NONE, kReservation | MAP_FIXED_NOREPLACE, -1, 0);
    throw_system_error(code, "mmap of " + std::to_string(num_bytes) + " bytes at offset " +
                                 std::to_string(offset) + " of the address range");
}

void AddressRange::unmap(std::size_t offset, std::size_t num_bytes) {
    require_multiple("offset", offset, kPageBytes);
    require_multiple("num_bytes", num_bytes, kPageBytes);
    const std::scoped_lock lock(mutex_);
    require_inside(offset, num_bytes);
    parts_.require_cuttable(offset, num_bytes);
    // One call that replaces: between an munmap and an mmap another thread's mapping could land here.
    map_over(offset, num_bytes, PROT_NONE, kReservation, -1, 0);
    parts_.erase(offset, num_bytes);
}

void AddressRange::prefault(std::size_t offset, std::size_t num_bytes) const {
    require_multiple("offset", offset, kPageBytes);
    require_multiple("num_bytes", num_bytes, kPageBytes);
    {
        const std::shared_lock lock(mutex_);
        require_inside(offset, num_bytes);
    }
    const std::size_t end = offset + num_bytes;
    for (std::size_t at = offset; at < end; at += kPrefaultChunkBytes) {
        const std::size_t chunk = std::min(kPrefaultChunkBytes, end - at);
        const std::shared_lock lock(mutex_);
        parts_.require_covered(at, chunk, /*writable=*/false);
        populate_read(address() + at, chunk);
    }
}

void AddressRange::copy(const std::vector<Copy>& copies) {
    const std::shared_lock lock(mutex_);
    check_copies(copies);
    for (const Copy& copy : copies) {
        std::memcpy(address() + copy.dst_offset, address() + copy.src_offset, copy.num_bytes);
    }
}

void AddressRange::copy_out(std::span<const CopyOut> pieces, bool streams) const {
    const std::shared_lock lock(mutex_);
    std::vector<Span> spans;
    spans.reserve(pieces.size());
    for (const CopyOut& piece : pieces) {
        require_inside(piece.src_offset, piece.num_bytes);
        parts_.require_covered(piece.src_offset, piece.num_bytes, /*writable=*/false);
        spans.push_back(
            {.dst = piece.dst, .src = address() + piece.src_offset, .num_bytes = piece.num_bytes});
    }
    if (streams) {
        stream_copy(spans);
        return;
    }
    for (const Span& span : spans) {
        std::memcpy(span.dst, span.src, span.num_bytes);
    }
}

void AddressRange::check_copies(const std::vector<Copy>& copies) const {
    for (const Copy& copy : copies) {
        require_inside(copy.dst_offset, copy.num_bytes);
        require_inside(copy.src_offset, copy.num_bytes);
        parts_.require_covered(copy.dst_offset, copy.num_bytes, /*writable=*/true);
        parts_.require_covered(copy.src_offset, copy.num_bytes, /*writable=*/false);
    }
    require_disjoint(copies);
}

void AddressRange::require_inside(std::size_t offset, std::size_t num_bytes) const {
    if (num_bytes == 0 || !fits(offset, num_bytes, range_.size())) {
        throw_invalid(std::to_string(num_bytes) + " bytes at offset " + std::to_string(offset) +
                      " are not inside an address range of " + std::to_string(range_.size()) +
                      " bytes");
    }
}

void AddressRange::close() {
    const std::scoped_lock lock(mutex_);
    parts_.clear();
    range_.reset();
}

std::vector<Part> AddressRange::mappings() const {
    const std::shared_lock lock(mutex_);
    return parts_.list();
}

}  // namespace mc2
