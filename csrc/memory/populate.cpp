#include "memory/populate.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <string>
#include <thread>

#include "memory/errors.h"
#include "memory/linux_abi.h"
#include "memory/page.h"
#include "memory/parallel.h"

namespace mc2 {
namespace {

// Long enough to keep a thread busy for milliseconds, short enough to spread a small pool over several.
constexpr std::size_t kChunkBytes = 32 * kHugePageBytes;
// Zeroing memory is bound by bandwidth; more threads than this add nothing.
constexpr std::size_t kMaxThreads = 8;

// Calls visit(offset, num_bytes) for every chunk; the first exception stops the others and is rethrown.
void for_each_chunk(std::size_t num_bytes,
                    const std::function<void(std::size_t, std::size_t)>& visit) {
    const std::size_t num_chunks = (num_bytes + kChunkBytes - 1) / kChunkBytes;
    const auto num_threads =
        std::min<std::size_t>(kMaxThreads, std::max(1U, std::thread::hardware_concurrency()));
    parallel_for(num_chunks, num_threads, [&](std::size_t i) {
        visit(i * kChunkBytes, std::min(kChunkBytes, num_bytes - i * kChunkBytes));
    });
}

int advise(std::byte* start, std::size_t num_bytes, int advice) {
    int rc = 0;
    do {
        rc = ::madvise(start, num_bytes, advice);
    } while (rc != 0 && (errno == EINTR || errno == EAGAIN));
    return rc == 0 ? 0 : errno;
}

[[noreturn]] void throw_populate_error(int code, std::size_t num_bytes) {
    // EFAULT stands for "touching it would be SIGBUS", which for shared memory means there is none left.
    throw_system_error(code == EFAULT ? ENOMEM : code,
                       "madvise(MADV_POPULATE_WRITE) of " + std::to_string(num_bytes) + " bytes");
}

// pwrite reports a lack of memory as an error, where a store would be SIGBUS.
void touch_each_extent(int fd, std::size_t offset, std::size_t num_bytes) {
    for (std::size_t extent = offset; extent < offset + num_bytes; extent += kHugePageBytes) {
        const char zero = 0;
        if (::pwrite(fd, &zero, 1, static_cast<off_t>(extent)) != 1) {
            throw_errno("pwrite to commit " + std::to_string(kHugePageBytes) + " bytes at offset " +
                        std::to_string(extent));
        }
    }
}

}  // namespace

bool populate_with_huge_pages(const Mapping& mapping) {
    if (advise(mapping.data(), mapping.size(), MADV_HUGEPAGE) != 0) {
        return false;
    }
    std::atomic<bool> supported{true};
    for_each_chunk(mapping.size(), [&](std::size_t offset, std::size_t num_bytes) {
        const int code = advise(mapping.data() + offset, num_bytes, linux_abi::kMadvPopulateWrite);
        if (code == EINVAL) {
            supported = false;
        } else if (code != 0) {
            throw_populate_error(code, mapping.size());
        }
    });
    return supported;
}

void collapse_into_huge_pages(int fd, const Mapping& mapping) {
    for_each_chunk(mapping.size(), [&](std::size_t offset, std::size_t num_bytes) {
        touch_each_extent(fd, offset, num_bytes);
        // A refusal (old kernel, no free 2 MiB piece, an extent in transit) is no error: the kernel has gone through
        // all extents of the chunk, and what it left small works too. Who insists looks at huge_mapped_bytes().
        (void)::madvise(mapping.data() + offset, num_bytes, linux_abi::kMadvCollapse);
    });
}

}  // namespace mc2
