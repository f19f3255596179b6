// A memcpy that leaves the caches alone: for more bytes than they hold.
#pragma once

#include <cstddef>
#include <span>

namespace mc2 {

struct Span {
    std::byte* dst;
    const std::byte* src;
    std::size_t num_bytes;
};

// Writes past the cache where the processor can (x86): a store that first fetches the line it overwrites moves half as
// many bytes again. Sources and destinations do not overlap. Where it cannot, plain memcpy. Short spans are better copied in one
// call: the beginning of each is fetched while the one before is written.
void stream_copy(std::span<const Span> spans);

}  // namespace mc2
