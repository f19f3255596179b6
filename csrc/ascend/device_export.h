// What this process lets others map of its device memory.
//
// Keeps what it had to retain for that, and with it the physical memory. Nobody can map anything before admit() has named
// them, except by fabric handles, which are for other servers and belong to whoever has them. Threading: any thread may call; one call at a time goes through.
// ACL exports a block once: two objects must not export the same memory, and memory that torch_npu has exported by itself
// cannot be exported here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "ascend/owners.h"
#include "ascend/segment.h"

namespace mc2::ascend {

class DeviceExport {
 public:
    DeviceExport(AclPointer acl, std::int32_t device);
    DeviceExport(const DeviceExport&) = delete;
    DeviceExport& operator=(const DeviceExport&) = delete;
    DeviceExport(DeviceExport&&) = delete;
    DeviceExport& operator=(DeviceExport&&) = delete;
    ~DeviceExport();

    // The physical blocks that [address, address + num_bytes) lies in, in address order. All or nothing, but for one thing:
    // what ACL has exported it does not export again, so blocks exported before a failure stay retained, for the next try,
    // until close(). A block that was answered before is answered again. `fabric`: for other servers of a SuperPoD too.
    std::vector<Segment> add_allocation(std::uintptr_t address, std::size_t num_bytes, bool fabric);
    // Memory of one aclrtMalloc, from its beginning.
    Segment add_key(std::uintptr_t address, std::size_t num_bytes);
    // Lets one more process map everything that is and will be here. `pid` is what bare_tgid() says there. ACL cannot take
    // it back. When it throws, some segments may have admitted the process already.
    void admit(std::int32_t pid);

    [[nodiscard]] std::size_t num_segments() const;
    [[nodiscard]] std::size_t num_bytes() const;

    // Importers should have closed before. Idempotent; every other call throws std::invalid_argument afterwards. When ACL
    // refuses a step, all others are done, it throws, and a further close() tries the rest again.
    void close();

 private:
    struct Exported {
        Segment segment;
        PhysicalHandle memory;  // none for a key
        bool is_answered;       // not when something failed after it
    };
    using Exports = std::map<std::uintptr_t, Exported>;

    // The lock is held; sets the device.
    void enter() const;
    void require_room() const;
    [[nodiscard]] Exported& block_of(std::uintptr_t base, std::size_t num_bytes, SegmentKind kind);
    [[nodiscard]] Exported export_block(std::uintptr_t base, std::size_t num_bytes,
                                        SegmentKind kind) const;
    void admit_to(const Segment& segment, std::int32_t pid) const;
    void admit_all_to(const Segment& segment) const;
    [[nodiscard]] bool close_one(Exported& exported, FirstError* first) const;

    AclPointer acl_;
    std::int32_t device_;
    Exports exports_;
    std::set<std::int32_t> admitted_;
    bool is_closed_ = false;
    mutable std::mutex mutex_;
};

}  // namespace mc2::ascend
