// One process's paged KV memory: a memfd that peers can map read-only.
//
// Owns the descriptor and, through it, the pages; mappings made from it keep the pages alive on their own.
// Life cycle: construct (all memory is committed, so no access can end in SIGBUS later) -> the owner maps what it
// needs (AddressRange::map_pool) -> seal() -> hand fd() to peers -> close(). Sealing is a separate step because
// F_SEAL_FUTURE_WRITE forbids the owner's further writable mappings as well.
// Threading: none of its own; one caller at a time.
#pragma once

#include <cstddef>
#include <string>

#include "memory/file_descriptor.h"

namespace mc2 {

enum class HugePages { kAuto, kOff, kRequire };

// Where a pool's huge pages come from.
enum class HugePageMethod { kNone, kHugetlb, kThp, kCollapse };

class Pool {
 public:
    // `num_bytes` is rounded up to 2 MiB. Throws std::system_error(ENOMEM) when there is too little memory, or too
    // little in huge pages where they are required.
    Pool(std::size_t num_bytes, HugePages huge_pages, const std::string& name);

    // As above, but with this way and no other; falls short silently. For tests and measurements.
    Pool(std::size_t num_bytes, HugePageMethod method, const std::string& name);

    // Idempotent. Afterwards the size is fixed and nobody can make a writable mapping or punch holes.
    void seal();
    // Idempotent.
    void close() noexcept;

    // To be handed to peers: throws std::invalid_argument before seal() and after close().
    [[nodiscard]] int exported_fd() const;
    // For the owner's writable mappings: throws std::invalid_argument after seal() or close().
    [[nodiscard]] int writable_fd() const;

    [[nodiscard]] std::size_t num_bytes() const { return num_bytes_; }
    [[nodiscard]] std::size_t huge_bytes() const { return huge_bytes_; }
    [[nodiscard]] std::size_t page_bytes() const;
    [[nodiscard]] HugePageMethod method() const { return method_; }
    [[nodiscard]] bool sealed() const { return sealed_; }

 private:
    bool try_hugetlb(const std::string& name);
    void allocate_shmem(const std::string& name, bool thp, bool collapse);

    std::size_t num_bytes_;
    std::size_t huge_bytes_ = 0;
    HugePageMethod method_ = HugePageMethod::kNone;
    bool sealed_ = false;
    FileDescriptor file_;
};

}  // namespace mc2
