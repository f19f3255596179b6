#include "ascend/address_probe.h"

#include <utility>

#include "memory/errors.h"
#include "memory/page.h"

namespace mc2::ascend {
namespace {

std::size_t peer_bytes_of(const std::vector<Segment>& segments) {
    std::size_t num_bytes = 0;
    for (const Segment& segment : segments) {
        if (segment.kind == SegmentKind::kIpcKey ||
            segment.base != segments.front().base + num_bytes) {
            throw_invalid("the peer's segments are not contiguous handles");
        }
        num_bytes += segment.num_bytes;
    }
    return num_bytes;
}

}  // namespace

AddressProbe::AddressProbe(AclPointer acl, std::int32_t device, std::size_t own_bytes,
                           std::vector<Segment> peer)
    : acl_(std::move(acl)), device_(device), own_bytes_(own_bytes) {
    require_size("own_bytes", own_bytes);
    require_multiple("own_bytes", own_bytes, kHugePageBytes);
    check_segments(peer);
    peer_bytes_ = peer_bytes_of(peer);
    acl_->set_device(device_);
    try {
        blocks_.reserve(1 + peer.size());
        reservation_ = reserve(acl_, own_bytes + peer_bytes_);
        blocks_.push_back({.memory = allocate(acl_, device_, own_bytes), .mapping = {}});
        blocks_.front().mapping =
            map(acl_, pointer_of(address()), own_bytes, blocks_.front().memory);
        for (const Segment& segment : peer) {
            blocks_.push_back(
                map_segment(acl_, device_, segment,
                            address() + own_bytes + (segment.base - peer.front().base)));
        }
    } catch (...) {
        (void)unmap(nullptr);  // the failure that began it is the one to tell
        throw;
    }
}

AddressProbe::~AddressProbe() {
    if (!reservation_) {
        return;
    }
    (void)acl_->aclrtSetDevice.attempt(nullptr, device_);
    (void)unmap(nullptr);  // see owners.h
}

std::uintptr_t AddressProbe::address() const {
    return reinterpret_cast<std::uintptr_t>(reservation_.get());
}

bool AddressProbe::unmap(FirstError* first) {
    return reset_all(blocks_, [&](MappedBlock& block) { return block.reset(first); }) &&
           reservation_.reset(first);
}

void AddressProbe::close() {
    if (!reservation_) {
        return;
    }
    acl_->set_device(device_);
    FirstError first;
    (void)unmap(&first);
    first.rethrow();
}

}  // namespace mc2::ascend
