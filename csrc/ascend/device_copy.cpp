#include "ascend/device_copy.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "memory/errors.h"
#include "memory/page.h"
#include "memory/parallel.h"

namespace mc2::ascend {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kMaxStreams = 64;
// Below the 32 bits that copy engines count in.
constexpr std::size_t kMaxPieceBytes = std::size_t{1} << 30U;
// A copy that failed is given this long to come to rest before its streams are ended by force: what an engine is in the
// middle of may outlive its stream for a moment, so force is the last resort. Engines report a dead link sooner.
constexpr std::int32_t kSettleMilliseconds = 30000;
constexpr double kMaxTimeoutSeconds = 1e6;

std::size_t extent_of(std::size_t stride, std::size_t num_blocks, std::size_t num_bytes) {
    if (num_bytes == 0 || stride < num_bytes || stride > kMaxBytes ||
        num_blocks > kMaxBytes / stride) {
        throw_invalid("strip of " + std::to_string(num_blocks) + " blocks of " +
                      std::to_string(num_bytes) + " bytes with stride " + std::to_string(stride));
    }
    return (num_blocks - 1) * stride + num_bytes;
}

void require_id(const char* side, std::int64_t id, std::size_t num_blocks) {
    if (std::cmp_less(id, 0) || std::cmp_greater_equal(id, num_blocks)) {
        throw_invalid(std::string(side) + " block " + std::to_string(id) + " of " +
                      std::to_string(num_blocks));
    }
}

}  // namespace

DeviceCopier::DeviceCopier(AclPointer acl, std::int32_t device,
                           std::shared_ptr<ImportedMemory> source, std::vector<DeviceStrip> strips,
                           std::size_t num_dst_blocks, std::size_t num_src_blocks,
                           std::size_t num_streams)
    : acl_(std::move(acl)),
      device_(device),
      source_(std::move(source)),
      strips_(std::move(strips)),
      num_dst_blocks_(num_dst_blocks),
      num_src_blocks_(num_src_blocks),
      num_streams_(num_streams) {
    if (strips_.empty() || num_dst_blocks == 0 || num_src_blocks == 0) {
        throw_invalid("nothing to copy: " + std::to_string(strips_.size()) + " strips of " +
                      std::to_string(num_src_blocks) + " blocks to " +
                      std::to_string(num_dst_blocks));
    }
    if (num_streams == 0 || num_streams > kMaxStreams) {
        throw_invalid("num_streams is " + std::to_string(num_streams) + ", must be 1 to " +
                      std::to_string(kMaxStreams));
    }
    const auto memory = source_.get();
    for (DeviceStrip& strip : strips_) {
        require_range("strip", strip.own_address,
                      extent_of(strip.own_stride, num_dst_blocks, strip.num_bytes));
        strip.peer_address = memory->translate(
            strip.peer_address, extent_of(strip.peer_stride, num_src_blocks, strip.num_bytes));
        bytes_per_block_ += strip.num_bytes;
    }
}

DeviceCopier::~DeviceCopier() {
    if (streams_.empty()) {
        return;
    }
    (void)acl_->aclrtSetDevice.attempt(nullptr, device_);
    if (!settle(nullptr)) {
        // Something still reads. Addresses that stay mapped are better than a device that faults.
        for (Stream& stream : streams_) {
            stream.abandon();
        }
        source_.keep_for_ever();
    }
}

void DeviceCopier::require_ids(std::span<const std::int64_t> dst_ids,
                               std::span<const std::int64_t> src_ids) const {
    if (dst_ids.size() != src_ids.size()) {
        throw_invalid(std::to_string(src_ids.size()) + " blocks to " +
                      std::to_string(dst_ids.size()) + " places");
    }
    for (std::size_t i = 0; i < dst_ids.size(); ++i) {
        require_id("destination", dst_ids[i], num_dst_blocks_);
        require_id("source", src_ids[i], num_src_blocks_);
    }
    std::vector<std::int64_t> places(dst_ids.begin(), dst_ids.end());
    std::ranges::sort(places);
    if (std::ranges::adjacent_find(places) != places.end()) {
        throw_invalid("two blocks to one place");
    }
}

std::vector<DeviceCopier::Piece> DeviceCopier::pieces_of(
    std::span<const std::int64_t> dst_ids, std::span<const std::int64_t> src_ids) const {
    std::vector<Piece> pieces;
    for (const DeviceStrip& strip : strips_) {
        for (std::size_t i = 0; i < dst_ids.size(); ++i) {
            const Piece piece{
                .dst = strip.own_address + static_cast<std::size_t>(dst_ids[i]) * strip.own_stride,
                .src =
                    strip.peer_address + static_cast<std::size_t>(src_ids[i]) * strip.peer_stride,
                .num_bytes = strip.num_bytes};
            // Adjacent on both sides, as blocks of a dense strip are. Not across strips: that may be another tensor.
            if (i > 0 && pieces.back().dst + pieces.back().num_bytes == piece.dst &&
                pieces.back().src + pieces.back().num_bytes == piece.src &&
                pieces.back().num_bytes + piece.num_bytes <= kMaxPieceBytes) {
                pieces.back().num_bytes += piece.num_bytes;
            } else {
                pieces.push_back(piece);
            }
        }
    }
    return pieces;
}

void DeviceCopier::make_streams(std::size_t count) {
    while (streams_.size() < count) {
        streams_.push_back(make_stream(acl_));
    }
}

void DeviceCopier::enqueue(std::span<const Piece> pieces, std::size_t first,
                           std::size_t count) const {
    acl_->set_device(device_);
    for (std::size_t i = first; i < pieces.size(); i += count) {
        const Piece& piece = pieces[i];
        acl_->aclrtMemcpyAsync(pointer_of(piece.dst), piece.num_bytes, pointer_of(piece.src),
                               piece.num_bytes, abi::kMemcpyDeviceToDevice, streams_[first].get());
    }
}

void DeviceCopier::wait(std::size_t count, std::chrono::duration<double> timeout) const {
    const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(timeout);
    for (std::size_t i = 0; i < count; ++i) {
        const auto left =
            std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
        // 0 asks without waiting. A stream of our own is done when it is empty, and says so with the errors of its tasks.
        acl_->aclrtSynchronizeStreamWithTimeout(
            streams_[i].get(), static_cast<std::int32_t>(std::clamp<std::int64_t>(
                                   left, 0, std::numeric_limits<std::int32_t>::max())));
    }
}

bool DeviceCopier::settle_one(Stream& stream, FirstError* first) const {
    if (acl_->aclrtSynchronizeStreamWithTimeout.code_of(stream.get(), kSettleMilliseconds) ==
        abi::kSuccess) {
        return stream.reset(first);
    }
    if (acl_->aclrtDestroyStreamForce.attempt(first, stream.get())) {
        stream.abandon();  // it is gone
        return true;
    }
    return false;
}

bool DeviceCopier::settle(FirstError* first) {
    is_unsettled_ = !reset_all(streams_, [&](Stream& stream) { return settle_one(stream, first); });
    return !is_unsettled_;
}

std::size_t DeviceCopier::copy(std::span<const std::int64_t> dst_ids,
                               std::span<const std::int64_t> src_ids, std::size_t num_threads,
                               std::chrono::duration<double> timeout) {
    if (!(timeout.count() > 0 && timeout.count() <= kMaxTimeoutSeconds)) {
        throw_invalid("timeout_seconds is " + std::to_string(timeout.count()));
    }
    require_ids(dst_ids, src_ids);
    const std::scoped_lock lock(mutex_);
    if (is_closed_) {
        throw_invalid("device copier is closed");
    }
    const auto memory = source_.get();
    const auto reading = memory->reading();
    const std::vector<Piece> pieces = pieces_of(dst_ids, src_ids);
    acl_->set_device(device_);
    if (is_unsettled_) {
        FirstError first;
        (void)settle(&first);
        first.rethrow();
    }
    try {
        const std::size_t count = std::min(num_streams_, pieces.size());
        make_streams(count);
        parallel_for(count, num_threads, [&](std::size_t i) { enqueue(pieces, i, count); });
        wait(count, timeout);
    } catch (const AclError& error) {
        if (!settle(nullptr)) {
            throw AclError(error.call(), error.code(),
                           "the streams cannot be ended, so the copy may still be writing; " +
                               std::string(error.what()));
        }
        throw;
    } catch (...) {
        (void)settle(nullptr);  // no memory or no thread; copy() and close() remember what is left
        throw;
    }
    return dst_ids.size() * bytes_per_block_;
}

void DeviceCopier::close() {
    const std::scoped_lock lock(mutex_);
    is_closed_ = true;
    if (!streams_.empty()) {
        acl_->set_device(device_);
        FirstError first;
        (void)settle(&first);
        first.rethrow();
    }
    source_.drop();
}

}  // namespace mc2::ascend
