#include "memory/address_range.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstring>
#include <thread>

#include "check.h"
#include "memory/errors.h"
#include "memory/file_descriptor.h"
#include "memory/page.h"

namespace {

using mc2::AddressRange;
using mc2::FileDescriptor;
using mc2::HugePages;
using mc2::kHugePageBytes;
using mc2::kPageBytes;
using mc2::PartKind;
using mc2::Pool;

constexpr std::size_t kRangeBytes = 16 * kHugePageBytes;
constexpr std::size_t kNearOverflow =
    ~std::size_t{0} - kPageBytes + 1;  // still a multiple of the page size

FileDescriptor sealed_memfd(std::size_t num_bytes, int seals) {
    FileDescriptor file = mc2::make_memfd("test", num_bytes, false);
    if (seals != 0) {
        mc2::add_seals(file.get(), seals);
    }
    return file;
}

mc2::Copy copy_of(std::size_t dst_offset, std::size_t src_offset, std::size_t num_bytes) {
    return {.dst_offset = dst_offset, .src_offset = src_offset, .num_bytes = num_bytes};
}

void touch(const std::byte* at) { (void)*static_cast<const volatile std::byte*>(at); }

MC2_TEST(range_is_aligned_and_inaccessible) {
    const AddressRange range(kRangeBytes);
    CHECK_EQ(reinterpret_cast<std::uintptr_t>(range.address()) % kHugePageBytes, 0U);
    CHECK_EQ(mc2::test::signal_of_child([&] { touch(range.address()); }), SIGSEGV);
    CHECK(range.mappings().empty());
}

MC2_TEST(pool_appears_at_several_places) {
    Pool pool(2 * kHugePageBytes, HugePages::kAuto, "test");
    AddressRange range(kRangeBytes);
    range.map_pool(0, pool, kHugePageBytes, kHugePageBytes);
    range.map_pool(4 * kHugePageBytes, pool, 0, 2 * kHugePageBytes);
    pool.close();  // mappings need no descriptor
    range.address()[7] = std::byte{9};
    CHECK(range.address()[5 * kHugePageBytes + 7] == std::byte{9});
    const auto parts = range.mappings();
    CHECK_EQ(parts.size(), 2U);
    CHECK(parts[1].offset == 4 * kHugePageBytes && parts[1].kind == PartKind::kPool);
}

MC2_TEST(sealed_or_closed_pool_is_not_mapped) {
    Pool pool(1, HugePages::kAuto, "test");
    AddressRange range(kRangeBytes);
    pool.seal();
    CHECK_THROWS(std::invalid_argument, (range.map_pool(0, pool, 0, kHugePageBytes), 0));
    pool.close();
    CHECK_THROWS(std::invalid_argument, (range.map_pool(0, pool, 0, kHugePageBytes), 0));
}

MC2_TEST(peer_is_read_only) {
    Pool pool(kHugePageBytes, HugePages::kAuto, "test");
    AddressRange owner(kRangeBytes);
    owner.map_pool(0, pool, 0, kHugePageBytes);
    owner.address()[100] = std::byte{5};
    pool.seal();
    AddressRange range(kRangeBytes);
    range.map_peer(kHugePageBytes, pool.exported_fd(), 0, kHugePageBytes);
    range.prefault(kHugePageBytes, kHugePageBytes);
    std::byte* at = range.address() + kHugePageBytes + 100;
    CHECK(*at == std::byte{5});
    owner.address()[100] = std::byte{6};
    CHECK(*at == std::byte{6});
    CHECK_EQ(
        mc2::test::signal_of_child([&] { *static_cast<volatile std::byte*>(at) = std::byte{1}; }),
        SIGSEGV);
}

MC2_TEST(peer_must_be_sealed_and_long_enough) {
    AddressRange range(kRangeBytes);
    const FileDescriptor unsealed = sealed_memfd(4 * kPageBytes, 0);
    CHECK_THROWS(std::invalid_argument, (range.map_peer(0, unsealed.get(), 0, kPageBytes), 0));
    const FileDescriptor grow_only = sealed_memfd(4 * kPageBytes, F_SEAL_GROW);
    CHECK_THROWS(std::invalid_argument, (range.map_peer(0, grow_only.get(), 0, kPageBytes), 0));
    const FileDescriptor file = sealed_memfd(4 * kPageBytes, F_SEAL_SHRINK);
    range.map_peer(0, file.get(), kPageBytes, 3 * kPageBytes);
    CHECK_THROWS(std::invalid_argument,
                 (range.map_peer(kHugePageBytes, file.get(), kPageBytes, 4 * kPageBytes), 0));
    CHECK_THROWS(std::invalid_argument,
                 (range.map_peer(kHugePageBytes, file.get(), kNearOverflow, 2 * kPageBytes), 0));
    CHECK_THROWS(std::invalid_argument, (range.map_peer(kHugePageBytes, -1, 0, kPageBytes), 0));
    const FileDescriptor regular(::open("/proc/self/exe", O_RDONLY | O_CLOEXEC));
    CHECK_THROWS(std::invalid_argument,
                 (range.map_peer(kHugePageBytes, regular.get(), 0, kPageBytes), 0));
    CHECK_EQ(range.mappings().size(), 1U);
}

MC2_TEST(unmap_leaves_the_reservation) {
    AddressRange range(kRangeBytes);
    range.map_anonymous(0, kRangeBytes);
    std::memset(range.address(), 1, 3 * kHugePageBytes);
    range.unmap(kHugePageBytes, kHugePageBytes);
    CHECK_EQ(range.mappings().size(), 2U);
    CHECK_EQ(mc2::test::signal_of_child([&] { touch(range.address() + kHugePageBytes); }), SIGSEGV);
    // Still ours: the kernel refuses to put anything there, and mincore (ENOMEM for holes) knows the address.
    void* other = ::mmap(range.address() + kHugePageBytes, kPageBytes, PROT_READ,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    CHECK(other == MAP_FAILED && errno == EEXIST);
    CHECK(range.address()[0] == std::byte{1});
    range.map_anonymous(kHugePageBytes, kHugePageBytes);
    CHECK(range.address()[kHugePageBytes] == std::byte{0});
    range.unmap(0, kRangeBytes);
    range.unmap(0, kRangeBytes);
    CHECK(range.mappings().empty());
}

MC2_TEST(parts_do_not_overlap) {
    AddressRange range(kRangeBytes);
    range.map_anonymous(kHugePageBytes, kHugePageBytes);
    CHECK_THROWS(std::invalid_argument, (range.map_anonymous(0, kHugePageBytes + kPageBytes), 0));
    CHECK_THROWS(std::invalid_argument, (range.map_anonymous(kHugePageBytes, kPageBytes), 0));
    CHECK_THROWS(std::invalid_argument,
                 (range.map_anonymous(2 * kHugePageBytes - kPageBytes, kHugePageBytes), 0));
    CHECK_THROWS(std::invalid_argument, (range.map_anonymous(0, kRangeBytes), 0));
    range.map_anonymous(0, kHugePageBytes);
    range.map_anonymous(2 * kHugePageBytes, kHugePageBytes);
    CHECK_EQ(range.mappings().size(), 3U);
}

MC2_TEST(bad_offsets_are_refused) {
    CHECK_THROWS(std::invalid_argument, AddressRange(0));
    CHECK_THROWS(std::invalid_argument, AddressRange(kPageBytes + 1));
    CHECK_THROWS(std::invalid_argument, AddressRange(kNearOverflow));
    AddressRange range(kRangeBytes);
    Pool pool(kHugePageBytes, HugePages::kAuto, "test");
    CHECK_THROWS(std::invalid_argument, (range.map_anonymous(1, kPageBytes), 0));
    CHECK_THROWS(std::invalid_argument, (range.map_anonymous(0, 1), 0));
    CHECK_THROWS(std::invalid_argument, (range.map_anonymous(0, 0), 0));
    CHECK_THROWS(std::invalid_argument, (range.map_anonymous(kRangeBytes, kPageBytes), 0));
    CHECK_THROWS(std::invalid_argument, (range.map_anonymous(kPageBytes, kRangeBytes), 0));
    for (const std::size_t bytes : {kPageBytes, 2 * kPageBytes, kNearOverflow}) {
        CHECK_THROWS(std::invalid_argument, (range.map_anonymous(kNearOverflow, bytes), 0));
        CHECK_THROWS(std::invalid_argument, (range.unmap(kNearOverflow, bytes), 0));
        CHECK_THROWS(std::invalid_argument, (range.prefault(kNearOverflow, bytes), 0));
        CHECK_THROWS(std::invalid_argument, (range.map_pool(0, pool, kNearOverflow, bytes), 0));
        CHECK_THROWS(std::invalid_argument, (range.copy({{kNearOverflow, 0, bytes}}), 0));
        CHECK_THROWS(std::invalid_argument, (range.copy({{0, kNearOverflow, bytes}}), 0));
    }
    CHECK(range.mappings().empty());
}

MC2_TEST(prefault_wants_mapped_memory) {
    AddressRange range(kRangeBytes);
    range.map_anonymous(0, kHugePageBytes);
    range.map_anonymous(2 * kHugePageBytes, kHugePageBytes);
    range.prefault(0, kHugePageBytes);
    CHECK_THROWS(std::invalid_argument, (range.prefault(0, 3 * kHugePageBytes), 0));
}

MC2_TEST(copy_is_all_or_nothing) {
    AddressRange range(kRangeBytes);
    range.map_anonymous(0, 2 * kHugePageBytes);
    const FileDescriptor file = sealed_memfd(kHugePageBytes, F_SEAL_SHRINK);
    range.map_peer(4 * kHugePageBytes, file.get(), 0, kHugePageBytes);
    std::byte* base = range.address();
    std::memset(base + kHugePageBytes, 7, 1000);
    CHECK_THROWS(std::invalid_argument,  // the second destination is not mapped
                 (range.copy({{0, kHugePageBytes, 100}, {8 * kHugePageBytes, 0, 1}}), 0));
    CHECK(base[0] == std::byte{0});
    CHECK_THROWS(std::invalid_argument,  // a peer's memory is no destination
                 (range.copy({{4 * kHugePageBytes, 0, 1}}), 0));
    CHECK_THROWS(std::invalid_argument, (range.copy({{0, 50, 100}}), 0));
    CHECK_THROWS(std::invalid_argument, (range.copy({{0, 0, 100}}), 0));
    CHECK_THROWS(std::invalid_argument, (range.copy({{0, 500, 100}, {99, 700, 10}}), 0));
    CHECK_THROWS(std::invalid_argument,  // the first reads what the second writes
                 (range.copy({{0, 500, 100}, {599, 900, 1}}), 0));
    const std::vector<mc2::Copy> good = {copy_of(600, kHugePageBytes, 100),
                                         copy_of(0, kHugePageBytes, 600),
                                         copy_of(800, 4 * kHugePageBytes, 8)};
    range.copy(good);
    CHECK(base[0] == std::byte{7} && base[699] == std::byte{7} && base[700] == std::byte{0});
    range.copy({});
}

MC2_TEST(closed_range_refuses) {
    AddressRange range(kRangeBytes);
    range.map_anonymous(0, kPageBytes);
    range.close();
    range.close();
    CHECK_THROWS(std::invalid_argument, (range.map_anonymous(0, kPageBytes), 0));
    CHECK_THROWS(std::invalid_argument, (range.copy({{0, kPageBytes, 1}}), 0));
    CHECK_THROWS(std::invalid_argument, (range.prefault(0, kPageBytes), 0));
}

// Nothing to assert beyond "no fault": the sanitizers and the kernel are the judges.
MC2_TEST(prefault_and_unmap_from_two_threads) {
    AddressRange range(kRangeBytes);
    std::atomic<bool> stop{false};
    std::atomic<int> num_refused{0};
    const std::jthread prefaulter([&] {
        while (!stop) {
            try {
                range.prefault(0, kRangeBytes);
            } catch (const std::invalid_argument&) {
                ++num_refused;  // just unmapped
            }
        }
    });
    for (int i = 0; i < 200; ++i) {
        range.map_anonymous(0, kRangeBytes);
        range.unmap(0, kRangeBytes);
    }
    stop = true;
}

}  // namespace
