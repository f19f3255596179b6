// What tests ask about the simulator.
#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <string>

#include "call.h"
#include "device.h"
#include "memory.h"
#include "stream.h"

namespace {

int64_t num_regions(sim::RegionKind kind) {
    const auto& regions = sim::memory().regions;
    return std::ranges::count_if(regions,
                                 [kind](const auto& entry) { return entry.second.kind == kind; });
}

// Memory that has a handle, or is still mapped through one that was freed.
int64_t num_handles(bool is_imported) {
    const auto& handles = sim::memory().handles;
    return std::ranges::count_if(handles, [is_imported](const auto& entry) {
        return entry.second.physical->is_imported() == is_imported;
    });
}

}  // namespace

// How many of these things the process has now; -1 for a name that is not known.
SIM_API int64_t mc2_sim_live(const char* what) {
    static const std::map<std::string, std::function<int64_t()>> counters = {
        {"reservations", [] { return static_cast<int64_t>(sim::memory().reservations.size()); }},
        {"mappings", [] { return num_regions(sim::RegionKind::kMapping); }},
        {"malloc", [] { return num_regions(sim::RegionKind::kMalloc); }},
        {"host", [] { return num_regions(sim::RegionKind::kPinnedHost); }},
        {"registered", [] { return num_regions(sim::RegionKind::kRegisteredHost); }},
        {"physical", [] { return num_handles(false); }},
        {"imports", [] { return num_handles(true); }},
        {"exports", [] { return static_cast<int64_t>(sim::memory().vmm_exports.size()); }},
        {"ipc_imports", [] { return static_cast<int64_t>(sim::memory().ipc_imports.size()); }},
        {"ipc_exports", [] { return static_cast<int64_t>(sim::memory().ipc_exports.size()); }},
        {"pending", [] { return static_cast<int64_t>(sim::memory().pending.size()); }},
        {"streams", [] { return sim::num_streams(); }},
        {"events", [] { return sim::num_events(); }},
        {"contexts", [] { return sim::num_contexts(); }},
    };
    const auto counter = counters.find(what);
    const std::scoped_lock lock(sim::memory().mutex);
    return counter == counters.end() ? -1 : counter->second();
}
