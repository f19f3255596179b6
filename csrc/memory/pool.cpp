#include "memory/pool.h"

#include <fcntl.h>

#include <system_error>

#include "memory/errors.h"
#include "memory/linux_abi.h"
#include "memory/mapping.h"
#include "memory/memory_info.h"
#include "memory/page.h"
#include "memory/populate.h"

namespace mc2 {
namespace {

std::size_t checked_size(std::size_t num_bytes) {
    require_size("pool num_bytes", num_bytes);
    return round_up(num_bytes, kHugePageBytes);
}

// Shared memory is over-committed: without this look the kernel would start killing instead of refusing.
void require_available(std::size_t num_bytes) {
    const std::size_t available = available_bytes();
    if (num_bytes > available) {
        throw_system_error(ENOMEM, "pool of " + std::to_string(num_bytes) + " bytes wanted, " +
                                       std::to_string(available) + " bytes available");
    }
}

}  // namespace

Pool::Pool(std::size_t num_bytes, HugePages huge_pages, const std::string& name)
    : num_bytes_(checked_size(num_bytes)) {
    const bool want_huge = huge_pages != HugePages::kOff;
    if (want_huge && try_hugetlb(name)) {
        return;
    }
    allocate_shmem(name, want_huge && shmem_thp_allowed(), want_huge);
    if (huge_pages == HugePages::kRequire && huge_bytes_ < num_bytes_) {
        throw_system_error(ENOMEM, "pool of " + std::to_string(num_bytes_) +
                                       " bytes required in huge pages, got " +
                                       std::to_string(huge_bytes_) + " bytes");
    }
}

Pool::Pool(std::size_t num_bytes, HugePageMethod method, const std::string& name)
    : num_bytes_(checked_size(num_bytes)) {
    if (method == HugePageMethod::kHugetlb && try_hugetlb(name)) {
        return;
    }
    allocate_shmem(name, method == HugePageMethod::kThp, method == HugePageMethod::kCollapse);
}

bool Pool::try_hugetlb(const std::string& name) {
    if (free_hugetlb_bytes() < num_bytes_) {
        return false;
    }
    try {
        FileDescriptor file = make_memfd(name, num_bytes_, /*hugetlb=*/true);
        commit(file.get(), num_bytes_);
        file_ = std::move(file);
    } catch (const std::system_error&) {
        return false;  // somebody was faster, or a hugetlb control group says no; shmem may do
    }
    method_ = HugePageMethod::kHugetlb;
    huge_bytes_ = num_bytes_;
    return true;
}

void Pool::allocate_shmem(const std::string& name, bool thp, bool collapse) {
    require_available(num_bytes_);
    file_ = make_memfd(name, num_bytes_, /*hugetlb=*/false);
    if (thp || collapse) {
        // A mapping of our own for the time of the allocation: the owner's come later, at addresses of its choice.
        Mapping mapping = Mapping::reserve(num_bytes_);
        mapping.replace_with_file(file_.get(), Access::kReadWrite);
        if (thp && populate_with_huge_pages(mapping)) {
            huge_bytes_ = huge_mapped_bytes(mapping.data(), num_bytes_);
            method_ = huge_bytes_ > 0 ? HugePageMethod::kThp : HugePageMethod::kNone;
        }
        if (collapse && huge_bytes_ < num_bytes_) {
            collapse_into_huge_pages(file_.get(), mapping);
            const std::size_t collapsed = huge_mapped_bytes(mapping.data(), num_bytes_);
            method_ = collapsed > huge_bytes_ ? HugePageMethod::kCollapse : method_;
            huge_bytes_ = collapsed;
        }
    }
    commit(file_.get(), num_bytes_);
}

void Pool::seal() {
    if (sealed_) {
        return;
    }
    add_seals(writable_fd(),
              F_SEAL_SHRINK | F_SEAL_GROW | linux_abi::kSealFutureWrite | F_SEAL_SEAL);
    sealed_ = true;
}

void Pool::close() noexcept { file_.reset(); }

int Pool::exported_fd() const {
    if (!file_.valid()) {
        throw_invalid("pool is closed");
    }
    if (!sealed_) {
        throw_invalid("pool is not sealed: peers could write to it or truncate it");
    }
    return file_.get();
}

int Pool::writable_fd() const {
    if (!file_.valid()) {
        throw_invalid("pool is closed");
    }
    if (sealed_) {
        throw_invalid("pool is sealed: no new writable mapping can be made");
    }
    return file_.get();
}

std::size_t Pool::page_bytes() const {
    return huge_bytes_ == num_bytes_ ? kHugePageBytes : kPageBytes;
}

}  // namespace mc2
