#include "ascend/device_export.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <utility>

#include "memory/errors.h"
#include "memory/page.h"

namespace mc2::ascend {
namespace {

constexpr std::size_t kMaxAdmitted = 65535;  // ACL's limit

struct Block {
    std::uintptr_t base;
    std::size_t num_bytes;
};

// The physical block that `address` lies in.
Block block_at(const Acl& acl, std::uintptr_t address) {
    void* base = nullptr;
    std::size_t num_bytes = 0;
    acl.aclrtMemGetAddressRange(pointer_of(address), &base, &num_bytes);
    const Block block{.base = reinterpret_cast<std::uintptr_t>(base), .num_bytes = num_bytes};
    require_range("block", block.base, block.num_bytes);
    if (address < block.base || address - block.base >= block.num_bytes) {
        throw_invalid("address " + std::to_string(address) + " is not in the block of " +
                      std::to_string(block.num_bytes) + " bytes at " + std::to_string(block.base) +
                      " that the driver names");
    }
    return block;
}

}  // namespace

DeviceExport::DeviceExport(AclPointer acl, std::int32_t device)
    : acl_(std::move(acl)), device_(device) {
    acl_->set_device(device_);
}

DeviceExport::~DeviceExport() {
    if (exports_.empty()) {
        return;
    }
    (void)acl_->aclrtSetDevice.attempt(nullptr, device_);
    for (auto& [base, exported] : exports_) {
        (void)close_one(exported, nullptr);  // see owners.h
    }
}

void DeviceExport::enter() const {
    if (is_closed_) {
        throw_invalid("device export is closed");
    }
    acl_->set_device(device_);
}

void DeviceExport::require_room() const {
    if (exports_.size() >= kMaxSegments) {
        throw_invalid("more than " + std::to_string(kMaxSegments) + " segments");
    }
}

std::vector<Segment> DeviceExport::add_allocation(std::uintptr_t address, std::size_t num_bytes,
                                                  bool fabric) {
    require_range("allocation", address, num_bytes);
    const std::scoped_lock lock(mutex_);
    enter();
    std::vector<Exported*> blocks;
    for (std::uintptr_t at = address; at < address + num_bytes;) {
        const Block block = block_at(*acl_, at);
        blocks.push_back(&block_of(block.base, block.num_bytes,
                                   fabric ? SegmentKind::kFabric : SegmentKind::kHandleV2));
        at = block.base + block.num_bytes;
    }
    std::vector<Segment> segments;
    segments.reserve(blocks.size());
    for (const Exported* block : blocks) {
        if (!block->is_answered) {
            admit_all_to(block->segment);
        }
        segments.push_back(block->segment);
    }
    for (Exported* block : blocks) {
        block->is_answered = true;
    }
    return segments;
}

DeviceExport::Exported& DeviceExport::block_of(std::uintptr_t base, std::size_t num_bytes,
                                               SegmentKind kind) {
    const auto known = exports_.find(base);
    if (known == exports_.end()) {
        require_room();
        return exports_.emplace(base, export_block(base, num_bytes, kind)).first->second;
    }
    const Segment& segment = known->second.segment;
    if (segment.kind != kind || segment.num_bytes != num_bytes) {
        throw_invalid("the memory at " + std::to_string(base) + " is exported already, as " +
                      name_of(segment.kind) + " of " + std::to_string(segment.num_bytes) +
                      " bytes");
    }
    return known->second;
}

DeviceExport::Exported DeviceExport::export_block(std::uintptr_t base, std::size_t num_bytes,
                                                  SegmentKind kind) const {
    void* handle = nullptr;
    acl_->aclrtMemRetainAllocationHandle(pointer_of(base), &handle);
    PhysicalHandle memory(acl_, handle);
    Segment segment{.kind = kind,
                    .base = base,
                    .num_bytes = num_bytes,
                    .handle = std::string(handle_bytes_of(kind), '\0')};
    // Aligned for a handle that is a number.
    alignas(std::uint64_t) std::array<char, sizeof(abi::MemFabricHandle)> bytes{};
    // Other servers have process numbers of their own, so that a list of them would name strangers here.
    const std::uint64_t flags =
        kind == SegmentKind::kFabric ? abi::kVmmExportFlagDisablePid : abi::kVmmExportFlagDefault;
    acl_->aclrtMemExportToShareableHandleV2(memory.get(), flags, share_type_of(kind), bytes.data());
    segment.handle.assign(bytes.data(), segment.handle.size());
    return {.segment = std::move(segment), .memory = std::move(memory), .is_answered = false};
}

Segment DeviceExport::add_key(std::uintptr_t address, std::size_t num_bytes) {
    require_range("allocation", address, num_bytes);
    const std::scoped_lock lock(mutex_);
    enter();
    if (exports_.contains(address)) {
        return block_of(address, num_bytes, SegmentKind::kIpcKey).segment;
    }
    require_room();
    std::array<char, abi::kIpcKeyBytes + 1> key{};  // one more, so that it ends in any case
    acl_->aclrtIpcMemGetExportKey(pointer_of(address), num_bytes, key.data(), abi::kIpcKeyBytes,
                                  abi::kIpcExportFlagDefault);
    Exported exported{.segment = {.kind = SegmentKind::kIpcKey,
                                  .base = address,
                                  .num_bytes = num_bytes,
                                  .handle = std::string(key.data(), abi::kIpcKeyBytes)},
                      .memory = {},
                      .is_answered = true};
    try {
        admit_all_to(exported.segment);
        return exports_.emplace(address, std::move(exported)).first->second.segment;
    } catch (...) {
        (void)acl_->aclrtIpcMemClose.attempt(nullptr, key.data());
        throw;
    }
}

void DeviceExport::admit_to(const Segment& segment, std::int32_t pid) const {
    if (segment.kind == SegmentKind::kFabric) {
        return;  // whoever has the handle may import it
    }
    std::string handle = segment.handle;
    if (segment.kind == SegmentKind::kIpcKey) {
        acl_->aclrtIpcMemSetImportPid(handle.c_str(), &pid, 1);
        return;
    }
    acl_->aclrtMemSetPidToShareableHandleV2(handle.data(), share_type_of(segment.kind), &pid, 1);
}

// One process a call: the limit for a call is 31, and differs between drivers.
void DeviceExport::admit_all_to(const Segment& segment) const {
    for (const std::int32_t pid : admitted_) {
        admit_to(segment, pid);
    }
}

void DeviceExport::admit(std::int32_t pid) {
    if (pid <= 0) {
        throw_invalid("process " + std::to_string(pid));
    }
    const std::scoped_lock lock(mutex_);
    enter();
    if (admitted_.contains(pid)) {
        return;
    }
    if (admitted_.size() >= kMaxAdmitted) {
        throw_invalid("more than " + std::to_string(kMaxAdmitted) + " processes");
    }
    for (const auto& [base, exported] : exports_) {
        admit_to(exported.segment, pid);
    }
    admitted_.insert(pid);
}

std::size_t DeviceExport::num_segments() const {
    const std::scoped_lock lock(mutex_);
    return static_cast<std::size_t>(std::ranges::count_if(
        exports_, [](const auto& entry) { return entry.second.is_answered; }));
}

std::size_t DeviceExport::num_bytes() const {
    const std::scoped_lock lock(mutex_);
    std::size_t sum = 0;
    for (const auto& [base, exported] : exports_) {
        sum += exported.is_answered ? exported.segment.num_bytes : 0;
    }
    return sum;
}

bool DeviceExport::close_one(Exported& exported, FirstError* first) const {
    return exported.segment.kind == SegmentKind::kIpcKey
               ? acl_->aclrtIpcMemClose.attempt(first, exported.segment.handle.c_str())
               : exported.memory.reset(first);
}

void DeviceExport::close() {
    const std::scoped_lock lock(mutex_);
    is_closed_ = true;
    if (exports_.empty()) {
        return;
    }
    acl_->set_device(device_);
    FirstError first;
    for (auto it = exports_.begin(); it != exports_.end();) {
        it = close_one(it->second, &first) ? exports_.erase(it) : std::next(it);
    }
    first.rethrow();
}

}  // namespace mc2::ascend
