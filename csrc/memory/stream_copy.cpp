#include "memory/stream_copy.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace mc2 {

#ifdef __SSE2__

namespace {

constexpr std::size_t kLineBytes = 64;
constexpr std::size_t kVectorBytes = sizeof(__m128i);
// Four pages at a time, a line of each in turn: a processor fetches ahead within a page only, and a memory bank that opens
// one row after the other is slower than four that work at once. Measured: 1.4 times the speed of one page after the other.
constexpr std::size_t kStrandBytes = 4096;
constexpr std::size_t kStrands = 4;
constexpr std::size_t kPrefetchBytes = 4 * kLineBytes;

void stream_line(std::byte* dst, const std::byte* src, const std::byte* ahead) {
    _mm_prefetch(reinterpret_cast<const char*>(ahead), _MM_HINT_T0);
    for (std::size_t i = 0; i < kLineBytes; i += kVectorBytes) {
        const __m128i part = _mm_loadu_si128(reinterpret_cast<const __m128i*>(src + i));
        _mm_stream_si128(reinterpret_cast<__m128i*>(dst + i), part);
    }
}

// Four pages. `following`: what is copied after them, whose first lines are fetched in time.
void stream_strands(std::byte* dst, const std::byte* src, const std::byte* following) {
    for (std::size_t line = 0; line < kStrandBytes; line += kLineBytes) {
        const std::size_t ahead = line + kPrefetchBytes;
        const std::byte* from =
            ahead < kStrandBytes ? src + ahead : following + (ahead - kStrandBytes);
        for (std::size_t strand = 0; strand < kStrands; ++strand) {
            const std::size_t at = strand * kStrandBytes;
            stream_line(dst + at + line, src + at + line, from + at);
        }
    }
}

void stream_span(const Span& span, const std::byte* following) {
    const std::size_t misplaced = reinterpret_cast<std::uintptr_t>(span.dst) % kLineBytes;
    std::size_t done = std::min(span.num_bytes, misplaced == 0 ? 0 : kLineBytes - misplaced);
    std::memcpy(span.dst, span.src, done);
    constexpr std::size_t kStep = kStrands * kStrandBytes;
    for (; done + kStep <= span.num_bytes; done += kStep) {
        const bool is_last = done + 2 * kStep > span.num_bytes;
        stream_strands(span.dst + done, span.src + done,
                       is_last ? following : span.src + done + kStep);
    }
    for (; done + kLineBytes <= span.num_bytes; done += kLineBytes) {
        const std::byte* src = span.src + done;
        stream_line(span.dst + done, src, src + kPrefetchBytes);
    }
    std::memcpy(span.dst + done, span.src + done, span.num_bytes - done);
}

}  // namespace

void stream_copy(std::span<const Span> spans) {
    for (std::size_t i = 0; i < spans.size(); ++i) {
        // Fetching ahead never faults, whatever is there.
        stream_span(spans[i], spans[std::min(i + 1, spans.size() - 1)].src);
    }
    // Streamed stores are not ordered with those that tell others that the bytes are there.
    _mm_sfence();
}

#else

void stream_copy(std::span<const Span> spans) {
    for (const Span& span : spans) {
        std::memcpy(span.dst, span.src, span.num_bytes);
    }
}

#endif

}  // namespace mc2
