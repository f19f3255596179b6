// Committing shared memory in 2 MiB pages where the kernel lets us.
#pragma once

#include <cstddef>

#include "memory/mapping.h"

namespace mc2 {

// Commits a writable shared mapping with MADV_HUGEPAGE and MADV_POPULATE_WRITE, several threads. Pages may still come
// out small where no 2 MiB are free in one piece. False when the kernel is too old (< 5.14); nothing is lost then.
bool populate_with_huge_pages(const Mapping& mapping);

// Commits a writable shared mapping and merges it into 2 MiB pages with MADV_COLLAPSE, several threads. Extents that
// the kernel refuses stay as they are. Needs no system setting: this is the way for an unprivileged process where
// transparent huge pages for shared memory are switched off.
//
// One byte per extent is touched first. The kernel refuses to collapse an extent without any page, and fills the
// holes of a sparse one with zeros itself, so that 1 fault and no copy do for what would be 512 of each.
void collapse_into_huge_pages(int fd, const Mapping& mapping);

}  // namespace mc2
