#include "memory/file_descriptor.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "memory/errors.h"
#include "memory/linux_abi.h"

namespace mc2 {

void FileDescriptor::reset() noexcept {
    if (fd_ >= 0) {
        // Not retried on EINTR: Linux has released the number by then and another thread may own it.
        ::close(std::exchange(fd_, -1));
    }
}

FileDescriptor make_memfd(const std::string& name, std::size_t num_bytes, bool hugetlb) {
    constexpr std::size_t kMaxName = 249;  // NAME_MAX less the kernel's "memfd:" prefix
    if (name.size() > kMaxName || name.find('\0') != std::string::npos) {
        throw_invalid("memfd name must be at most 249 bytes without NUL");
    }
    unsigned flags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
    if (hugetlb) {
        flags |= MFD_HUGETLB | linux_abi::kMemfdHuge2Mb;
    }
    // Systems with vm.memfd_noexec=2 insist on the no-exec flag, kernels before 6.3 refuse it.
    int fd = ::memfd_create(name.c_str(), flags | linux_abi::kMemfdNoexecSeal);
    if (fd < 0 && errno == EINVAL) {
        fd = ::memfd_create(name.c_str(), flags);
    }
    if (fd < 0) {
        throw_errno("memfd_create for " + std::to_string(num_bytes) + " bytes");
    }
    FileDescriptor file(fd);
    if (::ftruncate(fd, static_cast<off_t>(num_bytes)) != 0) {
        throw_errno("ftruncate of memfd to " + std::to_string(num_bytes) + " bytes");
    }
    return file;
}

void commit(int fd, std::size_t num_bytes) {
    int rc = 0;
    do {
        rc = ::fallocate(fd, 0, 0, static_cast<off_t>(num_bytes));
    } while (rc != 0 && errno == EINTR);
    if (rc != 0) {
        throw_errno("fallocate of " + std::to_string(num_bytes) + " bytes of shared memory");
    }
}

void add_seals(int fd, int seals) {
    if (::fcntl(fd, F_ADD_SEALS, seals) != 0) {
        throw_errno("fcntl(F_ADD_SEALS, " + std::to_string(seals) + ")");
    }
}

SealedFile inspect_sealed(int fd) {
    const int seals = ::fcntl(fd, F_GET_SEALS);
    if (seals < 0) {
        throw_invalid("descriptor " + std::to_string(fd) + " is not a memfd");
    }
    if ((seals & F_SEAL_SHRINK) == 0) {
        throw_invalid("descriptor " + std::to_string(fd) + " is not sealed against shrinking");
    }
    struct stat status{};
    struct statfs filesystem{};
    if (::fstat(fd, &status) != 0 || ::fstatfs(fd, &filesystem) != 0) {
        throw_errno("fstat of descriptor " + std::to_string(fd));
    }
    return {.num_bytes = static_cast<std::size_t>(status.st_size),
            .hugetlb = static_cast<long>(filesystem.f_type) == linux_abi::kHugetlbfsMagic,
            .seals = seals};
}

}  // namespace mc2
