// What a process shows to others: one small file of slots in the shared folder, and its memory through /proc.
//
// A file is locked by its owner for life. Whoever finds one that nobody locks removes it, so that a killed process
// leaves nothing for long. The memory itself has no name: it is freed with the last process that holds it.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

namespace sim {

enum class SlotKind : uint32_t { kNone = 0, kVmm = 1, kIpc = 2, kEvent = 3 };

inline constexpr size_t kMaxPids = 256;
inline constexpr size_t kMaxImporters = 64;
inline constexpr uint32_t kNumSlots = 8192;
inline constexpr size_t kMaxPhysicalDevices = 64;

struct Slot {
    std::atomic<uint32_t> generation;  // 0 while the slot is free
    SlotKind kind;
    int32_t fd;
    int32_t physical_device;
    uint64_t size_bytes;
    uint32_t page_bytes;
    uint32_t is_open_to_all;
    uint32_t is_fabric;
    std::atomic<uint32_t> num_pids;
    std::atomic<int32_t> pids[kMaxPids];
    std::atomic<int32_t> importers[kMaxImporters];
    unsigned char properties[32];
};

struct Table {
    uint64_t magic;
    int32_t pid;
    int32_t server;
    std::atomic<int64_t> used_bytes[kMaxPhysicalDevices];
    Slot slots[kNumSlots];
};

// A process's table, of this process or of another one.
class TableView {
 public:
    TableView(int fd, Table* table) : fd_(fd), table_(table) {}
    ~TableView();
    TableView(const TableView&) = delete;
    TableView& operator=(const TableView&) = delete;

    [[nodiscard]] Table* operator->() const { return table_; }
    [[nodiscard]] Table& operator*() const { return *table_; }
    [[nodiscard]] bool is_owner_alive() const;

 private:
    int fd_;
    Table* table_;
};

// Names a slot of a process for other processes; fits into the 64 bits of a shareable handle.
struct Ticket {
    pid_t pid = 0;
    uint32_t slot = 0;
    uint32_t generation = 0;

    [[nodiscard]] uint64_t packed(int device) const;
    static Ticket unpacked(uint64_t value);
};

// This process's table; made at first use.
TableView& own_table();

// The table of a living process, or null.
std::shared_ptr<TableView> table_of(pid_t pid);

// Sums what all living processes use of one device.
int64_t used_bytes_of_all(int physical_device);

// A free slot of this process, or nothing when all are taken. publish() makes it visible.
std::optional<Ticket> claim_slot();
void publish(const Ticket& ticket);
// How many other living processes still have it open.
int retract(const Ticket& ticket);
int num_importers(const Slot& slot);

bool add_importer(Slot& slot);
void remove_importer(Slot& slot);

// Opens the memory behind a slot of another process; -1 if it is gone.
int open_memory(const TableView& table, const Ticket& ticket);

}  // namespace sim
