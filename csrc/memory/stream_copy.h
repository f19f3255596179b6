// A memcpy that leaves the caches alone: for more bytes than they hold.
#pragma once

#include <cstddef>

namespace mc2 {

// Writes past the cache where the processor can (x86): a store that first fetches the line it overwrites moves half as
// many bytes again. The parts do not overlap. Where it cannot, a plain memcpy.
void stream_copy(std::byte* dst, const std::byte* src, std::size_t num_bytes);

}  // namespace mc2
