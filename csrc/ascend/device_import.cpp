#include "ascend/device_import.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <exception>
#include <new>
#include <set>
#include <string_view>

#include "memory/errors.h"
#include "memory/page.h"

namespace mc2::ascend {
namespace {

void check_segment(const Segment& segment) {
    require_range("segment", segment.base, segment.num_bytes);
    if (segment.handle.size() != handle_bytes_of(segment.kind)) {
        throw_invalid(std::string(name_of(segment.kind)) + " of " +
                      std::to_string(segment.handle.size()) + " bytes, must have " +
                      std::to_string(handle_bytes_of(segment.kind)));
    }
    if (segment.kind != SegmentKind::kIpcKey) {
        require_multiple("segment's address", segment.base, kHugePageBytes);
        require_multiple("segment's size", segment.num_bytes, kHugePageBytes);
    }
}

bool can_follow(const Segment& segment, const Segment& next) {
    return segment.kind != SegmentKind::kIpcKey && next.kind != SegmentKind::kIpcKey &&
           segment.base + segment.num_bytes == next.base;
}

std::uint64_t number_of(const std::string& handle) {
    std::uint64_t number = 0;
    std::memcpy(&number, handle.data(), sizeof(number));
    return number;
}

}  // namespace

void check_segments(std::vector<Segment>& segments) {
    if (segments.empty() || segments.size() > kMaxSegments) {
        throw_invalid(std::to_string(segments.size()) + " segments, must be 1 to " +
                      std::to_string(kMaxSegments));
    }
    std::set<std::string_view> handles;
    std::size_t num_bytes = 0;
    for (const Segment& segment : segments) {
        check_segment(segment);
        if (!handles.insert(segment.handle).second) {
            throw_invalid("two segments with one handle");
        }
        num_bytes += segment.num_bytes;  // 65536 times kMaxBytes stay below 2^63
        if (num_bytes > kMaxBytes) {
            throw_invalid("segments of more than " + std::to_string(kMaxBytes) + " bytes");
        }
    }
    std::ranges::sort(segments, {}, &Segment::base);
    for (std::size_t i = 1; i < segments.size(); ++i) {
        if (segments[i].base - segments[i - 1].base < segments[i - 1].num_bytes) {
            throw_invalid("segments overlap at address " + std::to_string(segments[i].base));
        }
    }
}

MappedBlock map_segment(const AclPointer& acl, std::int32_t device, const Segment& segment,
                        std::uintptr_t address) {
    void* handle = nullptr;
    if (segment.kind == SegmentKind::kHandleV1) {
        acl->aclrtMemImportFromShareableHandle(number_of(segment.handle), device, &handle);
    } else {
        // Aligned for a handle that is a number.
        alignas(std::uint64_t) std::array<char, sizeof(abi::MemFabricHandle)> bytes{};
        std::memcpy(bytes.data(), segment.handle.data(), segment.handle.size());
        acl->aclrtMemImportFromShareableHandleV2(bytes.data(), share_type_of(segment.kind), 0,
                                                 &handle);
    }
    MappedBlock block{.memory = {acl, handle}, .mapping = {}};
    // The size came from the peer; ACL refuses one that is not the memory's.
    block.mapping = map(acl, pointer_of(address), segment.num_bytes, block.memory);
    return block;
}

ImportedMemory::ImportedMemory(AclPointer acl, std::int32_t device, std::vector<Segment> segments)
    : acl_(std::move(acl)), device_(device) {
    check_segments(segments);
    acl_->set_device(device_);
    try {
        const std::span<const Segment> all(segments);
        for (std::size_t begin = 0, end = 1; begin < all.size(); begin = end++) {
            std::size_t num_bytes = all[begin].num_bytes;
            while (end < all.size() && can_follow(all[end - 1], all[end])) {
                num_bytes += all[end++].num_bytes;
            }
            if (all[begin].kind == SegmentKind::kIpcKey) {
                map_key(all[begin]);
            } else {
                map_handles(all.subspan(begin, end - begin), num_bytes);
            }
            num_bytes_ += num_bytes;
        }
    } catch (...) {
        (void)unmap(nullptr);  // the failure that began it is the one to tell
        throw;
    }
}

ImportedMemory::~ImportedMemory() {
    if (!runs_.empty()) {
        (void)acl_->aclrtSetDevice.attempt(nullptr, device_);
        (void)unmap(nullptr);  // see owners.h
    }
}

void ImportedMemory::map_handles(std::span<const Segment> segments, std::size_t num_bytes) {
    // In its place before anything is mapped, so that unmap() finds whatever there is.
    runs_.push_back({.peer_base = segments.front().base,
                     .own_base = 0,
                     .num_bytes = num_bytes,
                     .reservation = {},
                     .blocks = {},
                     .key = {}});
    Run& run = runs_.back();
    run.blocks.reserve(segments.size());
    run.reservation = reserve(acl_, num_bytes);
    run.own_base = reinterpret_cast<std::uintptr_t>(run.reservation.get());
    for (const Segment& segment : segments) {
        run.blocks.push_back(
            map_segment(acl_, device_, segment, run.own_base + (segment.base - run.peer_base)));
    }
}

void ImportedMemory::map_key(const Segment& segment) {
    runs_.push_back({.peer_base = segment.base,
                     .own_base = 0,
                     .num_bytes = segment.num_bytes,
                     .reservation = {},
                     .blocks = {},
                     .key = {}});
    Run& run = runs_.back();
    std::string key = segment.handle;
    void* address = nullptr;
    acl_->aclrtIpcMemImportByKey(&address, key.c_str(), abi::kIpcImportFlagPeerAccess);
    run.key = std::move(key);
    run.own_base = reinterpret_cast<std::uintptr_t>(address);
}

std::uintptr_t ImportedMemory::translate(std::uintptr_t address, std::size_t num_bytes) const {
    const auto lock = reading();
    const auto after = std::ranges::upper_bound(runs_, address, {}, &Run::peer_base);
    if (num_bytes > 0 && after != runs_.begin()) {
        const Run& run = *std::prev(after);
        if (fits(address - run.peer_base, num_bytes, run.num_bytes)) {
            return run.own_base + (address - run.peer_base);
        }
    }
    throw_invalid(std::to_string(num_bytes) + " bytes at the peer's address " +
                  std::to_string(address) + " are not mapped in one piece");
}

bool ImportedMemory::unmap_run(Run& run, FirstError* first) const {
    if (!run.key.empty() && acl_->aclrtIpcMemClose.attempt(first, run.key.c_str())) {
        run.key.clear();
    }
    // Addresses at which something is still mapped stay reserved.
    return reset_all(run.blocks, [&](MappedBlock& block) { return block.reset(first); }) &&
           run.key.empty() && run.reservation.reset(first);
}

bool ImportedMemory::unmap(FirstError* first) {
    return reset_all(runs_, [&](Run& run) { return unmap_run(run, first); });
}

void ImportedMemory::add_user() {
    const std::scoped_lock lock(users_mutex_);
    if (is_over_) {
        throw_invalid("device import is closed");
    }
    ++num_users_;
}

void ImportedMemory::drop_user() {
    const std::scoped_lock lock(users_mutex_, in_use_);  // no copy is running now
    if (num_users_ == 1) {
        acl_->set_device(device_);
        is_over_ = true;
        FirstError first;
        (void)unmap(&first);
        first.rethrow();
    }
    --num_users_;
}

ImportUse::ImportUse(std::shared_ptr<ImportedMemory> memory) : memory_(std::move(memory)) {
    memory_->add_user();
}

ImportUse::~ImportUse() {
    try {
        drop();
        // NOLINTNEXTLINE(bugprone-empty-catch): ImportedMemory's destructor tries again
    } catch (const std::exception&) {
    }
}

void ImportUse::keep_for_ever() noexcept {
    const std::scoped_lock lock(mutex_);
    if (memory_ != nullptr) {
        // Its use stays counted and its owner is never destroyed.
        (void)new (std::nothrow)
            std::shared_ptr<ImportedMemory>(  // NOLINT(cppcoreguidelines-owning-memory)
                std::move(memory_));
    }
}

std::shared_ptr<ImportedMemory> ImportUse::get() const {
    const std::scoped_lock lock(mutex_);
    if (memory_ == nullptr) {
        throw_invalid("device import is closed");
    }
    return memory_;
}

void ImportUse::drop() {
    const std::scoped_lock lock(mutex_);
    if (memory_ != nullptr) {
        memory_->drop_user();
        memory_ = nullptr;
    }
}

}  // namespace mc2::ascend
