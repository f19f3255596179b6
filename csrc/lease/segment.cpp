#include "lease/segment.h"

#include <fcntl.h>

#include <string>
#include <utility>

#include "memory/errors.h"
#include "memory/linux_abi.h"
#include "memory/page.h"

namespace mc2::lease {
namespace {

constexpr std::size_t kCacheLineBytes = 64;

std::size_t checked_total(std::size_t num_slots, std::size_t slot_stride, std::size_t max_blocks) {
    if (num_slots == 0 || num_slots > (kMaxSegmentBytes - sizeof(Header)) / slot_stride) {
        throw_invalid("num_slots " + std::to_string(num_slots) + " with max_blocks " +
                      std::to_string(max_blocks) + " does not make a segment of 1 to " +
                      std::to_string(kMaxSegmentBytes) + " bytes");
    }
    return sizeof(Header) + num_slots * slot_stride;
}

std::atomic_ref<std::uint64_t> header_word(const Mapping& mapping, std::size_t offset) {
    return std::atomic_ref<std::uint64_t>(
        *reinterpret_cast<std::uint64_t*>(mapping.data() + offset));
}

void write_header(const Mapping& mapping, const Geometry& geometry) {
    const auto write = [&](std::size_t offset, std::uint64_t value) {
        header_word(mapping, offset).store(value, std::memory_order_release);
    };
    write(offsetof(Header, version), kVersion);
    write(offsetof(Header, table_id), geometry.table_id);
    write(offsetof(Header, num_slots), geometry.num_slots);
    write(offsetof(Header, max_blocks), geometry.max_blocks);
    write(offsetof(Header, slot_stride), geometry.slot_stride);
    write(offsetof(Header, total_bytes), geometry.total_bytes);
    write(offsetof(Header, magic), geometry.magic);
}

NewSegment make_segment(const Geometry& geometry, const char* name) {
    FileDescriptor file = make_memfd(name, geometry.total_bytes, /*hugetlb=*/false);
    commit(file.get(), geometry.total_bytes);
    Mapping mapping = Mapping::of_file(file.get(), geometry.total_bytes, Access::kReadWrite);
    write_header(mapping, geometry);
    return {.file = std::move(file), .mapping = std::move(mapping)};
}

Header copy_header(const Mapping& mapping) {
    const auto read = [&](std::size_t offset) {
        return header_word(mapping, offset).load(std::memory_order_acquire);
    };
    return {.magic = read(offsetof(Header, magic)),
            .version = read(offsetof(Header, version)),
            .table_id = read(offsetof(Header, table_id)),
            .num_slots = read(offsetof(Header, num_slots)),
            .max_blocks = read(offsetof(Header, max_blocks)),
            .slot_stride = read(offsetof(Header, slot_stride)),
            .total_bytes = read(offsetof(Header, total_bytes)),
            .reserved = 0};
}

void require_equal(const char* field, std::uint64_t value, std::uint64_t expected) {
    if (value != expected) {
        throw_invalid(std::string("lease segment: ") + field + " is " + std::to_string(value) +
                      ", expected " + std::to_string(expected));
    }
}

void require_writable(int fd, const SealedFile& file) {
    const int flags = ::fcntl(fd, F_GETFL);
    const int write_seals = F_SEAL_WRITE | linux_abi::kSealFutureWrite;
    if (flags < 0 || (flags & O_ACCMODE) != O_RDWR || (file.seals & write_seals) != 0) {
        throw_invalid("lease segment: descriptor " + std::to_string(fd) + " is not writable");
    }
}

}  // namespace

Geometry Geometry::of_index(std::size_t num_slots, std::size_t max_blocks, std::uint64_t table_id) {
    if (max_blocks == 0 || max_blocks > kMaxSegmentBytes / sizeof(std::uint32_t)) {
        throw_invalid("max_blocks " + std::to_string(max_blocks) + " with num_slots " +
                      std::to_string(num_slots) + " does not make a segment of 1 to " +
                      std::to_string(kMaxSegmentBytes) + " bytes");
    }
    // Whole cache lines, so that P's writes to one slot do not disturb D's reads of the next.
    const std::size_t stride =
        round_up(sizeof(SlotHead) + max_blocks * sizeof(std::uint32_t), kCacheLineBytes);
    return {.magic = kIndexMagic,
            .table_id = table_id,
            .num_slots = num_slots,
            .max_blocks = max_blocks,
            .slot_stride = stride,
            .total_bytes = checked_total(num_slots, stride, max_blocks)};
}

Geometry Geometry::of_ledger(std::size_t num_slots, std::uint64_t table_id) {
    return {.magic = kLedgerMagic,
            .table_id = table_id,
            .num_slots = num_slots,
            .max_blocks = 0,
            .slot_stride = sizeof(std::uint64_t),
            .total_bytes = checked_total(num_slots, sizeof(std::uint64_t), 0)};
}

NewSegment make_index(const Geometry& geometry) {
    NewSegment segment = make_segment(geometry, "mc2-index");
    add_seals(segment.file.get(),
              F_SEAL_SHRINK | F_SEAL_GROW | linux_abi::kSealFutureWrite | F_SEAL_SEAL);
    return segment;
}

NewSegment make_ledger(const Geometry& geometry) {
    NewSegment segment = make_segment(geometry, "mc2-ledger");
    add_seals(segment.file.get(), F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
    segment.mapping = Mapping::of_file(segment.file.get(), geometry.total_bytes, Access::kReadOnly);
    return segment;
}

OpenedSegment open_segment(int fd, std::uint64_t magic, Access access) {
    const SealedFile file = inspect_sealed(fd);
    if (access == Access::kReadWrite) {
        require_writable(fd, file);
    }
    if (file.hugetlb || file.num_bytes < sizeof(Header) || file.num_bytes > kMaxSegmentBytes) {
        throw_invalid("lease segment of " + std::to_string(file.num_bytes) + " bytes");
    }
    Mapping mapping = Mapping::of_file(fd, file.num_bytes, access);
    const Header header = copy_header(mapping);
    require_equal("magic", header.magic, magic);
    require_equal("version", header.version, kVersion);
    const Geometry geometry =
        magic == kIndexMagic
            ? Geometry::of_index(header.num_slots, header.max_blocks, header.table_id)
            : Geometry::of_ledger(header.num_slots, header.table_id);
    require_equal("max_blocks", header.max_blocks, geometry.max_blocks);
    require_equal("slot_stride", header.slot_stride, geometry.slot_stride);
    require_equal("total_bytes", header.total_bytes, geometry.total_bytes);
    require_equal("file size", file.num_bytes, geometry.total_bytes);
    return {.geometry = geometry, .mapping = std::move(mapping)};
}

}  // namespace mc2::lease
