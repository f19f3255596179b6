#include "process_table.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <mutex>
#include <random>

#include "call.h"

namespace sim {
namespace {

constexpr uint64_t kMagic = 0x4d433253494d3031;
constexpr const char* kPrefix = "process-";

std::mutex own_mutex;      // NOLINT
TableView* own = nullptr;  // NOLINT
pid_t owner = 0;           // NOLINT
std::string own_path;      // NOLINT
uint32_t next_slot = 0;    // NOLINT
uint32_t salt = 0;         // NOLINT

// The pid that locks the file; 0 if nobody does. POSIX locks are not inherited by forked children, on purpose.
pid_t lock_holder(int fd) {
    struct flock lock = {};
    lock.l_type = F_WRLCK;
    lock.l_whence = SEEK_SET;
    if (::fcntl(fd, F_GETLK, &lock) != 0 || lock.l_type == F_UNLCK) {
        return 0;
    }
    return lock.l_pid;
}

void for_each_table_file(const std::function<void(const std::string&, const char*)>& visit) {
    const std::string folder = setting("MC2_ACL_SIM_DIR");
    if (folder.empty()) {
        return;
    }
    DIR* listing = ::opendir(folder.c_str());
    if (listing == nullptr) {
        return;
    }
    while (const dirent* entry = ::readdir(listing)) {
        if (std::strstr(entry->d_name, kPrefix) != nullptr) {
            visit(folder + "/" + entry->d_name, entry->d_name);
        }
    }
    ::closedir(listing);
}

void remove_leftovers() {
    for_each_table_file([](const std::string& path, const char*) {
        if (path == own_path) {  // closing any descriptor of it would end our own lock
            return;
        }
        const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
        if (fd < 0) {
            return;
        }
        if (lock_holder(fd) == 0) {
            ::unlink(path.c_str());
        }
        ::close(fd);
    });
}

[[noreturn]] void give_up(const std::string& what) {
    std::fprintf(stderr, "ACL simulator: %s: %s\n", what.c_str(), std::strerror(errno));
    std::abort();
}

Table* map_table(int fd) {
    void* at = ::mmap(nullptr, sizeof(Table), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    return at == MAP_FAILED ? nullptr : static_cast<Table*>(at);
}

// Locked before it gets its name: a file with a name that nobody locks is a leftover.
int make_file(const std::string& folder) {
    if (folder.empty()) {
        return ::memfd_create("mc2-acl-sim-table", MFD_CLOEXEC);
    }
    if (::mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST) {
        give_up("cannot make " + folder);
    }
    const std::string name = kPrefix + std::to_string(::getpid());
    const std::string path = folder + "/" + name;
    while (true) {
        const std::string draft = folder + "/new-" + name;
        const int fd = ::open(draft.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
        if (fd < 0) {
            give_up("cannot make " + draft);
        }
        struct flock lock = {};
        lock.l_type = F_WRLCK;
        lock.l_whence = SEEK_SET;
        if (::fcntl(fd, F_SETLK, &lock) == 0 && ::rename(draft.c_str(), path.c_str()) == 0) {
            own_path = path;
            return fd;
        }
        ::close(fd);  // another process took it for a leftover before it was locked
    }
}

void remove_own_file() {
    if (owner == ::getpid() && !own_path.empty()) {
        ::unlink(own_path.c_str());
        remove_leftovers();
    }
}

}  // namespace

TableView::~TableView() {
    ::munmap(table_, sizeof(Table));
    ::close(fd_);
}

bool TableView::is_owner_alive() const { return lock_holder(fd_) != 0; }

uint64_t Ticket::packed(int device) const {
    return static_cast<uint64_t>(slot) | (static_cast<uint64_t>(pid) << 14U) |
           (static_cast<uint64_t>(generation & 0xfffffU) << 36U) |
           (static_cast<uint64_t>(device) << 56U);
}

Ticket Ticket::unpacked(uint64_t value) {
    return {.pid = static_cast<pid_t>((value >> 14U) & 0x3fffffU),
            .slot = static_cast<uint32_t>(value & 0x3fffU),
            .generation = static_cast<uint32_t>((value >> 36U) & 0xfffffU)};
}

TableView& own_table() {
    const std::scoped_lock lock(own_mutex);
    if (own != nullptr && owner == ::getpid()) {
        return *own;
    }
    if (own != nullptr) {
        std::fprintf(stderr,
                     "ACL simulator: used in a forked child of the process that initialised it\n");
        std::abort();
    }
    owner = ::getpid();
    const int fd = make_file(setting("MC2_ACL_SIM_DIR"));
    if (fd < 0 || ::ftruncate(fd, sizeof(Table)) != 0) {
        give_up("cannot make the table of this process");
    }
    Table* table = map_table(fd);
    if (table == nullptr) {
        give_up("cannot map the table of this process");
    }
    table->pid = owner;
    table->server = static_cast<int32_t>(number_setting("MC2_ACL_SIM_SERVER", 0));
    table->magic = kMagic;
    own = new TableView(fd, table);
    salt = std::random_device{}();
    remove_leftovers();
    std::atexit(remove_own_file);
    return *own;
}

std::shared_ptr<TableView> table_of(pid_t pid) {
    const std::string folder = setting("MC2_ACL_SIM_DIR");
    if (folder.empty() || pid == ::getpid()) {
        return nullptr;
    }
    const std::string path = folder + "/" + kPrefix + std::to_string(pid);
    const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (fd < 0) {
        return nullptr;
    }
    struct stat info = {};
    Table* table = nullptr;
    if (lock_holder(fd) == pid && ::fstat(fd, &info) == 0 &&
        info.st_size >= static_cast<off_t>(sizeof(Table))) {
        table = map_table(fd);
    }
    if (table == nullptr || table->magic != kMagic || table->pid != pid) {
        if (table != nullptr) {
            ::munmap(table, sizeof(Table));
        }
        ::close(fd);
        return nullptr;
    }
    return std::make_shared<TableView>(fd, table);
}

int64_t used_bytes_of_all(int physical_device) {
    const auto index = static_cast<size_t>(physical_device);
    int64_t sum = own_table()->used_bytes[index];
    for_each_table_file([&](const std::string&, const char* name) {
        if (std::strncmp(name, kPrefix, std::strlen(kPrefix)) != 0) {
            return;
        }
        if (const auto table = table_of(std::atoi(name + std::strlen(kPrefix)))) {
            sum += (*table)->used_bytes[index];
        }
    });
    return sum;
}

std::optional<Ticket> claim_slot() {
    TableView& table = own_table();
    const std::scoped_lock lock(own_mutex);
    for (uint32_t tried = 0; tried < kNumSlots; ++tried) {
        const uint32_t index = next_slot++ % kNumSlots;
        Slot& slot = table->slots[index];
        if (slot.kind != SlotKind::kNone) {
            continue;
        }
        slot.num_pids = 0;
        for (auto& importer : slot.importers) {
            importer = 0;
        }
        const uint32_t generation = (++salt & 0xfffffU) == 0 ? ++salt : salt;
        slot.kind = SlotKind::kVmm;
        return Ticket{.pid = owner, .slot = index, .generation = generation & 0xfffffU};
    }
    return std::nullopt;
}

void publish(const Ticket& ticket) {
    own_table()->slots[ticket.slot].generation.store(ticket.generation, std::memory_order_release);
}

int retract(const Ticket& ticket) {
    Slot& slot = own_table()->slots[ticket.slot];
    const std::scoped_lock lock(own_mutex);
    slot.generation = 0;
    const int left = num_importers(slot);
    slot.kind = SlotKind::kNone;
    return left;
}

int num_importers(const Slot& slot) {
    int left = 0;
    for (const auto& importer : slot.importers) {
        const pid_t pid = importer;
        left += pid != 0 && table_of(pid) != nullptr ? 1 : 0;
    }
    return left;
}

bool add_importer(Slot& slot) {
    for (auto& importer : slot.importers) {
        int32_t expected = importer;
        if (expected != 0 && table_of(expected) != nullptr) {
            continue;
        }
        if (expected != ::getpid() && importer.compare_exchange_strong(expected, ::getpid())) {
            return true;
        }
    }
    return false;
}

void remove_importer(Slot& slot) {
    for (auto& importer : slot.importers) {
        int32_t expected = ::getpid();
        if (importer.compare_exchange_strong(expected, 0)) {
            return;
        }
    }
}

int open_memory(const TableView& table, const Ticket& ticket) {
    const Slot& slot = table->slots[ticket.slot];
    if (slot.generation.load(std::memory_order_acquire) != ticket.generation) {
        return -1;
    }
    const std::string path =
        "/proc/" + std::to_string(ticket.pid) + "/fd/" + std::to_string(slot.fd);
    const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
    struct stat info = {};
    // Asked again: the number may have been given to another file in between.
    if (fd >= 0 && (slot.generation != ticket.generation || ::fstat(fd, &info) != 0 ||
                    static_cast<uint64_t>(info.st_size) < slot.size_bytes)) {
        ::close(fd);
        return -1;
    }
    return fd;
}

}  // namespace sim
