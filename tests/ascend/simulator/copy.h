// Where the bytes behind a pointer are, and work on them at once or in a stream.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "abi.h"
#include "memory.h"
#include "stream.h"

namespace sim {

// A contiguous part of memory that the simulator itself can touch.
struct Piece {
    std::byte* at = nullptr;
    size_t size_bytes = 0;
    std::shared_ptr<Physical> physical;  // keeps device memory; null for the host's
};

struct Side {
    std::vector<Piece> pieces;
    bool is_device = false;
    bool is_imported = false;
    bool is_pinned = false;
    int physical_device = -1;
};

// With the mutex of `all` held. Nothing if not every byte is live memory that a copy may use.
std::optional<Side> locate(Memory& all, const void* pointer, size_t size_bytes);

// Queues work on device or host memory. The addresses are looked up again when the work runs: memory that is gone by
// then is a violation and an error of the stream. It may be called by operators too.
struct Use {
    const void* pointer = nullptr;
    size_t size_bytes = 0;
    // What it was when the work was queued: released memory may look like something else by its turn.
    bool was_device = false;
    bool was_pinned = false;
};
using Work = std::function<void(std::vector<Side>& sides)>;
aclError submit_work(const std::shared_ptr<Stream>& stream, std::vector<Use> uses, Work work,
                     const char* fault);

// Runs the work in this thread; the uses say what was found when they were checked.
aclError run_work(const std::vector<Use>& uses, const Work& work, const char* fault,
                  std::string& text);

// A copy of all bytes, with the delay that tests may have set in the middle.
void copy_sides(Side& destination, const Side& source);

}  // namespace sim
