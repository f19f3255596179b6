// All memory that the process knows: physical pieces, addresses and which lies where.
//
// Device addresses are reserved but never accessible: a program that touches device memory from the host dies here as
// it would with a device. The simulator itself works through a second mapping of the same memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "abi.h"
#include "process_table.h"

namespace sim {

inline constexpr size_t kPageBytes = size_t{4} << 10U;
inline constexpr size_t kHugeBytes = size_t{2} << 20U;

// Where memory of another process came from.
struct Origin {
    std::shared_ptr<TableView> table;
    Ticket ticket;

    [[nodiscard]] Slot& slot() const { return (*table)->slots[ticket.slot]; }
};

class Physical {
 public:
    // Takes the descriptor. A physical_device of -1 is host memory.
    Physical(int fd, size_t size_bytes, int physical_device, std::optional<Origin> origin);
    ~Physical();
    Physical(const Physical&) = delete;
    Physical& operator=(const Physical&) = delete;

    // Null and a reason in the thread's message if there is no memory left.
    static std::shared_ptr<Physical> make(size_t size_bytes, int device);

    [[nodiscard]] bool is_imported() const { return origin.has_value(); }
    // The memory of an exporter that died, where the settings say that it dies with it.
    [[nodiscard]] bool is_lost() const;

    const int fd;
    const size_t size_bytes;
    const int physical_device;
    const std::optional<Origin> origin;
    std::byte* view = nullptr;
    acl::PhysicalProp properties = {};
    size_t page_bytes = kHugeBytes;

 private:
    bool is_charged_ = false;
    friend std::shared_ptr<Physical> make_charged(size_t, int);
};

enum class RegionKind { kMalloc, kMapping, kIpcImport, kPinnedHost, kRegisteredHost };

struct Region {
    uintptr_t start = 0;
    size_t size_bytes = 0;
    RegionKind kind = RegionKind::kMalloc;
    std::shared_ptr<Physical> physical = {};
    std::byte* host = nullptr;  // of pinned memory
    int device = -1;            // whose addresses these are: the current device when they were made
    uintptr_t handle = 0;       // of a mapping
    uintptr_t reservation = 0;  // of a mapping
    [[nodiscard]] bool is_device() const { return kind != RegionKind::kPinnedHost; }
    [[nodiscard]] bool is_imported() const {
        return physical != nullptr && physical->is_imported();
    }
};

struct Reservation {
    size_t size_bytes = 0;
    size_t mapped_bytes = 0;
    int physical_device = -1;  // of what is mapped
    bool is_imported = false;
};

struct Handle {
    std::shared_ptr<Physical> physical = {};
    int references = 1;
    int num_mappings = 0;
    bool has_export = false;
    Ticket exported = {};
};

struct IpcExport {
    Ticket ticket;
    uintptr_t region = 0;
};

struct IpcImport {
    uintptr_t region = 0;
    int references = 1;
};

// A task that waits for its turn in a stream and the addresses that it will use.
struct Pending {
    uintptr_t start = 0;
    size_t size_bytes = 0;
    const void* stream = nullptr;
};

struct Memory {
    std::mutex mutex;
    std::map<uintptr_t, Region> regions;
    std::map<uintptr_t, Reservation> reservations;
    std::map<uintptr_t, Handle> handles;
    std::map<uint64_t, uintptr_t> vmm_exports;  // shareable handle -> handle
    std::map<std::string, IpcExport> ipc_exports;
    std::map<std::pair<std::string, int>, IpcImport> ipc_imports;  // by key and device
    std::list<Pending> pending;
    std::map<uintptr_t, size_t> released;  // device addresses that were live once
    uintptr_t next_handle = 0x51000001;

    // With the mutex held. Null if no region holds the address.
    Region* find(const void* pointer);
    // All bytes inside one region; null otherwise.
    Region* find(const void* pointer, size_t size_bytes);
    // The region is gone; a later use of its addresses is a violation.
    void erase(uintptr_t start);
    // Records a violation if this was device memory once and is none now.
    void blame_stale(const void* pointer);
    // Records a violation if a task that has not run yet uses these addresses.
    void require_idle(uintptr_t start, size_t size_bytes, const char* call);
};

// Never destroyed.
Memory& memory();

// Addresses without memory. Null if there are none left.
void* reserve_addresses(size_t size_bytes, size_t alignment);
void release_addresses(void* start, size_t size_bytes);

// With the mutex held: drops a reference and with the last one the memory, its export and its import.
void drop_handle(Memory& all, uintptr_t key);

inline size_t rounded_up(size_t value, size_t multiple) {
    return (value + multiple - 1) / multiple * multiple;
}

}  // namespace sim
