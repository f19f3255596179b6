// What the system says about memory and huge pages. Snapshots: another process may take the memory a moment later.
#pragma once

#include <cstddef>

namespace mc2 {

// min(MemAvailable, limit - usage of every control group above us). What cannot be read does not limit.
std::size_t available_bytes();

// Free 2 MiB hugetlb memory that nobody has reserved; 0 when the default huge page size is another one.
std::size_t free_hugetlb_bytes();

// Whether shared memory may get transparent huge pages on MADV_HUGEPAGE.
bool shmem_thp_allowed();

// How much of [address, address + num_bytes) this process has mapped with 2 MiB page table entries of shared memory.
std::size_t huge_mapped_bytes(const void* address, std::size_t num_bytes);

}  // namespace mc2
