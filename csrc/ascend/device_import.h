// A peer's device memory, mapped here.
//
// ImportedMemory is the mapping and is shared: by the DeviceImport that Python has, and by the copiers that read through
// it. It is unmapped when the last of them lets go.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "ascend/owners.h"
#include "ascend/segment.h"

namespace mc2::ascend {

// Throws std::invalid_argument unless the segments, which a peer sent, can be what an export gives. Sorts them by address.
void check_segments(std::vector<Segment>& segments);

// One segment of a handle kind. The mapping ends before its memory is given back.
struct MappedBlock {
    PhysicalHandle memory;
    DeviceMapping mapping;

    // True when nothing is left.
    [[nodiscard]] bool reset(FirstError* first) {
        return mapping.reset(first) && memory.reset(first);
    }
};

// For the current device, at `address`.
MappedBlock map_segment(const AclPointer& acl, std::int32_t device, const Segment& segment,
                        std::uintptr_t address);

// Any thread may call.
class ImportedMemory {
 public:
    // All or nothing.
    ImportedMemory(AclPointer acl, std::int32_t device, std::vector<Segment> segments);
    ImportedMemory(const ImportedMemory&) = delete;
    ImportedMemory& operator=(const ImportedMemory&) = delete;
    ImportedMemory(ImportedMemory&&) = delete;
    ImportedMemory& operator=(ImportedMemory&&) = delete;
    ~ImportedMemory();

    // The exporter's address as one of ours. Throws std::invalid_argument unless all of it is mapped in one piece.
    [[nodiscard]] std::uintptr_t translate(std::uintptr_t address, std::size_t num_bytes) const;
    [[nodiscard]] std::size_t num_bytes() const { return num_bytes_; }
    // Pieces that are contiguous on both sides.
    [[nodiscard]] std::size_t num_mappings() const {
        const auto lock = reading();
        return runs_.size();
    }

    // Throws std::invalid_argument when the last user is gone already.
    void add_user();
    // Waits for running copies; the last one unmaps. What throws AclError has kept its use, and may try again.
    void drop_user();

    // Held for as long as a copy reads; nothing is unmapped meanwhile. Not to be taken twice by one thread.
    [[nodiscard]] std::shared_lock<std::shared_mutex> reading() const {
        return std::shared_lock(in_use_);
    }

 private:
    struct Run {
        std::uintptr_t peer_base;
        std::uintptr_t own_base;
        std::size_t num_bytes;
        Reservation reservation;          // none for a key
        std::vector<MappedBlock> blocks;  // none for a key
        std::string key;                  // empty when there is none (any more)
    };
    // The device is set.
    void map_handles(std::span<const Segment> segments, std::size_t num_bytes);
    void map_key(const Segment& segment);
    // True when nothing is mapped any more.
    [[nodiscard]] bool unmap(FirstError* first);
    [[nodiscard]] bool unmap_run(Run& run, FirstError* first) const;

    AclPointer acl_;
    std::int32_t device_;
    std::size_t num_bytes_ = 0;
    std::vector<Run> runs_;  // by peer_base
    std::size_t num_users_ = 0;
    bool is_over_ = false;
    std::mutex users_mutex_;
    mutable std::shared_mutex in_use_;
};

// One use of imported memory.
class ImportUse {
 public:
    explicit ImportUse(std::shared_ptr<ImportedMemory> memory);
    ImportUse(const ImportUse&) = delete;
    ImportUse& operator=(const ImportUse&) = delete;
    ImportUse(ImportUse&&) = delete;
    ImportUse& operator=(ImportUse&&) = delete;
    ~ImportUse();

    // Throws std::invalid_argument after drop().
    [[nodiscard]] std::shared_ptr<ImportedMemory> get() const;
    // Waits for running copies. Idempotent. May throw AclError; it is still used then, and drop() can be tried again.
    void drop();
    // Nobody ever unmaps it.
    void keep_for_ever() noexcept;

 private:
    std::shared_ptr<ImportedMemory> memory_;
    mutable std::mutex mutex_;
};

// Throws std::invalid_argument for segments that cannot be, AclError when ACL refuses one; nothing is mapped then.
// Any thread may call.
class DeviceImport {
 public:
    DeviceImport(AclPointer acl, std::int32_t device, std::vector<Segment> segments)
        : use_(std::make_shared<ImportedMemory>(std::move(acl), device, std::move(segments))) {}

    [[nodiscard]] std::uintptr_t translate(std::uintptr_t address, std::size_t num_bytes) const {
        return use_.get()->translate(address, num_bytes);
    }
    [[nodiscard]] std::size_t num_bytes() const { return use_.get()->num_bytes(); }
    [[nodiscard]] std::size_t num_mappings() const { return use_.get()->num_mappings(); }
    [[nodiscard]] std::shared_ptr<ImportedMemory> share() const { return use_.get(); }

    // Copiers keep the mapping. Returns when no copy is running. Idempotent; every other call throws std::invalid_argument
    // afterwards. When ACL refuses a step it throws, and a further close() tries the rest again.
    void close() { use_.drop(); }

 private:
    ImportUse use_;
};

}  // namespace mc2::ascend
