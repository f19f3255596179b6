#include "copy.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>

#include "call.h"
#include "device.h"

namespace sim {
namespace {

std::atomic<int64_t>& copy_delay_us() {
    static std::atomic<int64_t> delay = number_setting("MC2_ACL_SIM_COPY_DELAY_US", 0);
    return delay;
}

bool is_host_memory(const Memory& all, uintptr_t start, size_t size_bytes) {
    const auto next = all.regions.lower_bound(start);
    if (next != all.regions.end() && next->first < start + size_bytes) {
        return false;
    }
    const auto reserved = all.reservations.upper_bound(start);
    return reserved == all.reservations.begin() ||
           start - std::prev(reserved)->first >= std::prev(reserved)->second.size_bytes;
}

void copy_bytes(Side& destination, const Side& source, size_t from, size_t to) {
    size_t at = 0;
    size_t into = 0;
    size_t into_start = 0;
    for (const Piece& piece : source.pieces) {
        size_t done = std::min(piece.size_bytes, from > at ? from - at : 0);
        const size_t end = std::min(piece.size_bytes, to > at ? to - at : 0);
        while (done < end) {
            while (at + done >= into_start + destination.pieces[into].size_bytes) {
                into_start += destination.pieces[into++].size_bytes;
            }
            Piece& target = destination.pieces[into];
            const size_t offset = at + done - into_start;
            const size_t num = std::min(end - done, target.size_bytes - offset);
            std::memmove(target.at + offset, piece.at + done, num);
            done += num;
        }
        at += piece.size_bytes;
    }
}

bool is_lost(const std::vector<Side>& sides) {
    return std::ranges::any_of(sides, [](const Side& side) {
        return std::ranges::any_of(side.pieces, [](const Piece& piece) {
            return piece.physical != nullptr && piece.physical->is_lost();
        });
    });
}

}  // namespace

std::optional<Side> locate(Memory& all, const void* pointer, size_t size_bytes) {
    auto at = reinterpret_cast<uintptr_t>(pointer);
    const uintptr_t end = at + size_bytes;
    if (pointer == nullptr || end < at) {
        return std::nullopt;
    }
    const Region* first = all.find(pointer);
    Side side;
    if (first == nullptr || first->kind == RegionKind::kPinnedHost) {
        side.is_pinned = first != nullptr;
        if (first == nullptr ? !is_host_memory(all, at, size_bytes)
                             : end > first->start + first->size_bytes) {
            return std::nullopt;
        }
        side.pieces.push_back(
            {.at = reinterpret_cast<std::byte*>(at), .size_bytes = size_bytes, .physical = {}});
        return side;
    }
    side.is_device = true;
    side.is_imported = first->is_imported();
    while (at < end) {
        // What lies side by side in one reservation is one range to a device; other neighbours are not.
        const Region* region = all.find(reinterpret_cast<void*>(at));
        if (region == nullptr || region->physical == nullptr ||
            region->reservation != first->reservation ||
            (region != first && region->reservation == 0)) {
            return std::nullopt;
        }
        const size_t offset = at - region->start;
        const size_t num = std::min(end - at, region->size_bytes - offset);
        side.pieces.push_back({.at = region->physical->view + offset,
                               .size_bytes = num,
                               .physical = region->physical});
        side.is_imported |= region->is_imported();
        side.physical_device = region->physical->physical_device;
        at += num;
    }
    return side;
}

void copy_sides(Side& destination, const Side& source) {
    size_t size_bytes = 0;
    for (const Piece& piece : source.pieces) {
        size_bytes += piece.size_bytes;
    }
    const int64_t delay = copy_delay_us();
    if (delay > 0) {
        copy_bytes(destination, source, 0, size_bytes / 2);
        std::this_thread::sleep_for(std::chrono::microseconds(delay));
        copy_bytes(destination, source, size_bytes / 2, size_bytes);
        return;
    }
    copy_bytes(destination, source, 0, size_bytes);
}

aclError run_work(const std::vector<Use>& uses, const Work& work, const char* fault,
                  std::string& text) {
    if (const aclError code = fault_of(fault)) {
        text = std::string(fault) + " fails because a test asked for it";
        return code;
    }
    std::vector<Side> sides;
    {
        const std::scoped_lock lock(memory().mutex);
        for (const Use& use : uses) {
            auto side = locate(memory(), use.pointer, use.size_bytes);
            if (!side || side->is_device != use.was_device || side->is_pinned != use.was_pinned) {
                violation(std::string(fault) + " on memory that was released before its turn");
                text = "memory is gone";
                return acl::kRtDeviceMemoryError;
            }
            sides.push_back(std::move(*side));
        }
    }
    if (!is_lost(sides)) {
        work(sides);
    }
    if (is_lost(sides)) {
        text = "the memory's owner is gone";
        return acl::kRtSuspectRemote;
    }
    return acl::kSuccess;
}

aclError submit_work(const std::shared_ptr<Stream>& stream, std::vector<Use> uses, Work work,
                     const char* fault) {
    Memory& all = memory();
    auto waiting = std::make_shared<std::vector<std::list<Pending>::iterator>>();
    {
        const std::scoped_lock lock(all.mutex);
        for (const Use& use : uses) {
            waiting->push_back(all.pending.insert(
                all.pending.end(), {.start = reinterpret_cast<uintptr_t>(use.pointer),
                                    .size_bytes = use.size_bytes,
                                    .stream = stream.get()}));
        }
    }
    // Also when the task is dropped unrun.
    const std::shared_ptr<void> done(nullptr, [waiting](void*) {
        const std::scoped_lock lock(memory().mutex);
        for (const auto& task : *waiting) {
            memory().pending.erase(task);
        }
    });
    stream->submit([uses = std::move(uses), work = std::move(work), fault,
                    done](std::string& text) { return run_work(uses, work, fault, text); });
    return acl::kSuccess;
}

}  // namespace sim

SIM_API void mc2_sim_set_copy_delay_us(int64_t delay) { sim::copy_delay_us() = delay; }
