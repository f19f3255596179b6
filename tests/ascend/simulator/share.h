// What exports of physical memory, of plain memory and of events have in common.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "abi.h"
#include "memory.h"
#include "process_table.h"

namespace sim {

struct Offer {
    SlotKind kind = SlotKind::kNone;
    int fd = -1;
    int physical_device = -1;
    size_t size_bytes = 0;
    size_t page_bytes = 0;
    bool is_open_to_all = false;
    bool is_fabric = false;
    acl::PhysicalProp properties = {};
};

// Null and a message if the process offers too much.
std::optional<Ticket> offer(const Offer& what);

// Adds to who may import; an error for more than one call takes or the slot holds.
aclError allow(const Ticket& ticket, const int32_t* pids, size_t num_pids);

// The living, permitted slot behind a ticket; counts this process as its importer.
aclError open_offer(const Ticket& ticket, SlotKind kind, bool is_fabric,
                    std::optional<Origin>* origin);

// The memory behind an opened offer, mapped; gives the importer's place back on failure.
aclError open_physical(const Origin& origin, std::shared_ptr<Physical>* physical);

}  // namespace sim
