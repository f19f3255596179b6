#include "memory/mapping.h"

#include <sys/mman.h>

#include <cstdint>
#include <string>

#include "memory/errors.h"
#include "memory/page.h"

namespace mc2 {
namespace {

int protection(Access access) {
    return access == Access::kReadWrite ? PROT_READ | PROT_WRITE : PROT_READ;
}

void unmap_if_any(std::byte* data, std::size_t size) noexcept {
    if (size != 0) {
        ::munmap(data, size);
    }
}

}  // namespace

Mapping Mapping::reserve(std::size_t num_bytes) {
    const std::size_t padded = num_bytes + kHugePageBytes;
    void* start =
        ::mmap(nullptr, padded, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) {
        throw_errno("mmap to reserve " + std::to_string(num_bytes) + " bytes of address space");
    }
    auto* base = static_cast<std::byte*>(start);
    const auto misalignment = reinterpret_cast<std::uintptr_t>(start) % kHugePageBytes;
    const std::size_t head = misalignment == 0 ? 0 : kHugePageBytes - misalignment;
    unmap_if_any(base, head);
    unmap_if_any(base + head + num_bytes, padded - head - num_bytes);
    return {base + head, num_bytes};
}

Mapping Mapping::of_file(int fd, std::size_t num_bytes, Access access) {
    void* start = ::mmap(nullptr, num_bytes, protection(access), MAP_SHARED, fd, 0);
    if (start == MAP_FAILED) {
        throw_errno("mmap of " + std::to_string(num_bytes) + " bytes of shared memory");
    }
    return {static_cast<std::byte*>(start), num_bytes};
}

void Mapping::replace_with_file(int fd, Access access) {
    if (::mmap(data_, size_, protection(access), MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) {
        throw_errno("mmap of " + std::to_string(size_) + " bytes of shared memory");
    }
}

void Mapping::reset() noexcept {
    unmap_if_any(std::exchange(data_, nullptr), std::exchange(size_, 0));
}

}  // namespace mc2
