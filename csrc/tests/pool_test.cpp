#include "memory/pool.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <csignal>
#include <system_error>

#include "check.h"
#include "memory/errors.h"
#include "memory/linux_abi.h"
#include "memory/mapping.h"
#include "memory/memory_info.h"
#include "memory/page.h"

namespace {

using mc2::Access;
using mc2::HugePageMethod;
using mc2::HugePages;
using mc2::kHugePageBytes;
using mc2::Mapping;
using mc2::Pool;

int errno_of(const std::function<void()>& body) {
    try {
        body();
    } catch (const std::system_error& error) {
        return error.code().value();
    }
    return 0;
}

std::size_t committed_bytes(int fd) {
    struct stat status{};
    CHECK_EQ(::fstat(fd, &status), 0);
    constexpr std::size_t kStatBlockBytes = 512;
    return static_cast<std::size_t>(status.st_blocks) * kStatBlockBytes;
}

MC2_TEST(size_is_rounded_up_and_committed) {
    for (const auto method :
         {HugePageMethod::kNone, HugePageMethod::kThp, HugePageMethod::kCollapse}) {
        Pool pool(5 * kHugePageBytes + 1, method, "test");
        CHECK_EQ(pool.num_bytes(), 6 * kHugePageBytes);
        CHECK_EQ(committed_bytes(pool.writable_fd()), 6 * kHugePageBytes);
        CHECK(pool.huge_bytes() <= pool.num_bytes());
        CHECK_EQ(pool.page_bytes() == kHugePageBytes, pool.huge_bytes() == pool.num_bytes());
    }
}

MC2_TEST(fresh_pool_is_zero) {
    Pool pool(4 * kHugePageBytes, HugePages::kAuto, "test");
    const Mapping mapping =
        Mapping::of_file(pool.writable_fd(), pool.num_bytes(), Access::kReadOnly);
    std::size_t nonzero = 0;
    for (std::size_t i = 0; i < mapping.size(); ++i) {
        nonzero += mapping.data()[i] == std::byte{0} ? 0U : 1U;
    }
    CHECK_EQ(nonzero, 0U);
}

MC2_TEST(off_means_no_huge_pages) {
    Pool pool(1, HugePages::kOff, "test");
    CHECK(pool.method() == HugePageMethod::kNone);
    CHECK_EQ(pool.huge_bytes(), 0U);
    CHECK_EQ(pool.page_bytes(), mc2::kPageBytes);
}

MC2_TEST(seals_fix_size_and_writers) {
    Pool pool(1, HugePages::kAuto, "test");
    CHECK_THROWS(std::invalid_argument, pool.exported_fd());
    const Mapping before =
        Mapping::of_file(pool.writable_fd(), pool.num_bytes(), Access::kReadWrite);
    pool.seal();
    pool.seal();
    CHECK_THROWS(std::invalid_argument, pool.writable_fd());
    const int fd = pool.exported_fd();
    const int wanted = F_SEAL_SHRINK | F_SEAL_GROW | mc2::linux_abi::kSealFutureWrite | F_SEAL_SEAL;
    CHECK_EQ(::fcntl(fd, F_GET_SEALS) & wanted, wanted);
    CHECK(::ftruncate(fd, 0) != 0 && errno == EPERM);
    CHECK(::ftruncate(fd, 1 << 30) != 0 && errno == EPERM);
    CHECK_EQ(::fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096), -1);
    CHECK_EQ(errno_of([&] { Mapping::of_file(fd, pool.num_bytes(), Access::kReadWrite); }), EPERM);
    before.data()[0] = std::byte{42};  // the owner's mapping stays writable, peers see it
    const Mapping peer = Mapping::of_file(fd, pool.num_bytes(), Access::kReadOnly);
    CHECK(peer.data()[0] == std::byte{42});
    CHECK(::mprotect(peer.data(), peer.size(), PROT_READ | PROT_WRITE) != 0);
    CHECK_EQ(mc2::test::signal_of_child(
                 [&] { *static_cast<volatile std::byte*>(peer.data()) = std::byte{1}; }),
             SIGSEGV);
}

MC2_TEST(closed_pool_has_no_descriptor) {
    Pool pool(1, HugePages::kAuto, "test");
    pool.seal();
    pool.close();
    pool.close();
    CHECK_THROWS(std::invalid_argument, pool.exported_fd());
    CHECK_THROWS(std::invalid_argument, pool.writable_fd());
}

MC2_TEST(bad_arguments_are_refused) {
    CHECK_THROWS(std::invalid_argument, Pool(0, HugePages::kAuto, "test"));
    CHECK_THROWS(std::invalid_argument, Pool(~std::size_t{0}, HugePages::kAuto, "test"));
    CHECK_THROWS(std::invalid_argument, Pool(mc2::kMaxBytes + 1, HugePages::kAuto, "test"));
    CHECK_THROWS(std::invalid_argument, Pool(1, HugePages::kAuto, std::string(250, 'x')));
}

MC2_TEST(too_little_memory_names_both_sizes) {
    constexpr std::size_t kWanted = mc2::kMaxBytes;
    try {
        const Pool pool(kWanted, HugePages::kAuto, "test");
        CHECK(false);
    } catch (const std::system_error& error) {
        CHECK_EQ(error.code().value(), ENOMEM);
        const std::string message = error.what();
        CHECK(message.find(std::to_string(kWanted)) != std::string::npos);
        CHECK(message.find("available") != std::string::npos);
    }
}

MC2_TEST(memory_info_is_plausible) {
    CHECK(mc2::available_bytes() > 0);
    CHECK(mc2::available_bytes() < mc2::kMaxBytes);
}

}  // namespace
