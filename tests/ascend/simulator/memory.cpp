#include "memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "call.h"
#include "device.h"

namespace sim {

Memory& memory() {
    static Memory* const all = new Memory;
    return *all;
}

Physical::Physical(int descriptor, size_t num_bytes, int device, std::optional<Origin> from)
    : fd(descriptor), size_bytes(num_bytes), physical_device(device), origin(std::move(from)) {
    void* at =
        ::mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    view = at == MAP_FAILED ? nullptr : static_cast<std::byte*>(at);
}

Physical::~Physical() {
    if (view != nullptr) {
        ::munmap(view, size_bytes);
    }
    if (is_charged_) {
        own_table()->used_bytes[static_cast<size_t>(physical_device)] -=
            static_cast<int64_t>(size_bytes);
    }
    if (origin && origin->slot().generation == origin->ticket.generation) {
        remove_importer(origin->slot());
    }
    ::close(fd);
}

bool Physical::is_lost() const {
    return origin && number_setting("MC2_ACL_SIM_LOST", 0) != 0 && !origin->table->is_owner_alive();
}

std::shared_ptr<Physical> make_charged(size_t size_bytes, int device) {
    const int physical = device < 0 ? -1 : physical_of(device);
    if (device >= 0 &&
        used_bytes_of_all(physical) + static_cast<int64_t>(size_bytes) > device_bytes()) {
        (void)fail(acl::kRtMemoryAllocation, "device " + std::to_string(device) + " has no " +
                                                 std::to_string(size_bytes) + " bytes left");
        return nullptr;
    }
    const int fd = ::memfd_create("mc2-acl-sim", MFD_CLOEXEC);
    if (fd < 0 || ::ftruncate(fd, static_cast<off_t>(size_bytes)) != 0) {
        (void)fail(acl::kRtMemoryAllocation, std::string("no memory: ") + std::strerror(errno));
        if (fd >= 0) {
            ::close(fd);
        }
        return nullptr;
    }
    auto made = std::make_shared<Physical>(fd, size_bytes, physical, std::nullopt);
    if (made->view == nullptr) {
        (void)fail(acl::kRtMemoryAllocation, "no addresses left");
        return nullptr;
    }
    if (device >= 0) {
        made->is_charged_ = true;
        own_table()->used_bytes[static_cast<size_t>(physical)] += static_cast<int64_t>(size_bytes);
    }
    // A device gives memory as it was left; zeros would hide that somebody forgot to write them.
    if (const int64_t poison = number_setting("MC2_ACL_SIM_POISON", 0); poison != 0) {
        std::memset(made->view, static_cast<int>(poison), size_bytes);
    }
    return made;
}

std::shared_ptr<Physical> Physical::make(size_t size_bytes, int device) {
    return make_charged(size_bytes, device);
}

Region* Memory::find(const void* pointer) {
    const auto address = reinterpret_cast<uintptr_t>(pointer);
    auto next = regions.upper_bound(address);
    if (next == regions.begin()) {
        return nullptr;
    }
    Region& region = std::prev(next)->second;
    return address - region.start < region.size_bytes ? &region : nullptr;
}

Region* Memory::find(const void* pointer, size_t size_bytes) {
    Region* region = find(pointer);
    if (region == nullptr) {
        return nullptr;
    }
    const size_t offset = reinterpret_cast<uintptr_t>(pointer) - region->start;
    return size_bytes <= region->size_bytes - offset ? region : nullptr;
}

void Memory::erase(uintptr_t start) {
    const auto found = regions.find(start);
    if (found->second.is_device()) {
        released[start] = found->second.size_bytes;
    }
    regions.erase(found);
}

void Memory::blame_stale(const void* pointer) {
    const auto address = reinterpret_cast<uintptr_t>(pointer);
    const auto next = released.upper_bound(address);
    if (find(pointer) == nullptr && next != released.begin() &&
        address - std::prev(next)->first < std::prev(next)->second) {
        violation("use of device memory after its release");
    }
}

void Memory::require_idle(uintptr_t start, size_t size_bytes, const char* call) {
    for (const Pending& task : pending) {
        if (task.start < start + size_bytes && start < task.start + task.size_bytes) {
            violation(std::string(call) + " of memory that a task in a stream has yet to use");
            return;
        }
    }
}

void* reserve_addresses(size_t size_bytes, size_t alignment) {
    const size_t whole = rounded_up(size_bytes, kPageBytes);
    if (whole < size_bytes || whole + alignment < whole) {
        return nullptr;
    }
    void* at = ::mmap(nullptr, whole + alignment, PROT_NONE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) {
        return nullptr;
    }
    const auto start = reinterpret_cast<uintptr_t>(at);
    const uintptr_t aligned = rounded_up(start, alignment);
    if (aligned != start) {
        ::munmap(at, aligned - start);
    }
    if (const size_t tail = start + alignment - aligned; tail != 0) {
        ::munmap(reinterpret_cast<void*>(aligned + whole), tail);
    }
    return reinterpret_cast<void*>(aligned);
}

void release_addresses(void* start, size_t size_bytes) {
    ::munmap(start, rounded_up(size_bytes, kPageBytes));
}

void drop_handle(Memory& all, uintptr_t key) {
    const auto found = all.handles.find(key);
    if (found == all.handles.end() || found->second.references > 0 ||
        found->second.num_mappings > 0) {
        return;
    }
    if (found->second.has_export) {
        (void)retract(found->second.exported);
        std::erase_if(all.vmm_exports, [key](const auto& entry) { return entry.second == key; });
    }
    all.handles.erase(found);
}

}  // namespace sim
