// Copies blocks of a peer's paged cache into blocks of the own one, by the devices' copy engines over several streams: pull.
//
// The source is imported memory, which the copier keeps mapped until close(). The destination is own device memory, which
// the caller keeps. Streams belong to the copier alone, so that no graph that is being captured ever sees a copy.
// Threading: any thread may call; one copy at a time goes through.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "ascend/device_import.h"
#include "ascend/owners.h"

namespace mc2::ascend {

// One run of equally spaced pieces on either side, as in memory/block_copy.h.
struct DeviceStrip {
    std::uintptr_t own_address;  // of block 0
    std::size_t own_stride;
    std::uintptr_t peer_address;  // of block 0, as the exporter counts
    std::size_t peer_stride;
    std::size_t num_bytes;  // of each block
};

class DeviceCopier {
 public:
    // Throws std::invalid_argument when a strip's blocks are not all mapped, or could not be anybody's.
    DeviceCopier(AclPointer acl, std::int32_t device, std::shared_ptr<ImportedMemory> source,
                 std::vector<DeviceStrip> strips, std::size_t num_dst_blocks,
                 std::size_t num_src_blocks, std::size_t num_streams);
    DeviceCopier(const DeviceCopier&) = delete;
    DeviceCopier& operator=(const DeviceCopier&) = delete;
    DeviceCopier(DeviceCopier&&) = delete;
    DeviceCopier& operator=(DeviceCopier&&) = delete;
    ~DeviceCopier();

    // Copies block src_ids[i] to dst_ids[i] in every strip and returns the number of bytes. Ids are checked before the
    // first byte moves. Throws AclError when ACL refuses or `timeout` is over: the blocks are half written then, but
    // nothing writes them any more. Where not even that could be had, the text says so, and every further copy() and
    // close() throws until it has been had.
    // NOLINTNEXTLINE(modernize-use-nodiscard): it is called for what it does
    std::size_t copy(std::span<const std::int64_t> dst_ids, std::span<const std::int64_t> src_ids,
                     std::size_t num_threads, std::chrono::duration<double> timeout);

    [[nodiscard]] std::size_t bytes_per_block() const { return bytes_per_block_; }

    // Gives back the streams and the use of the source. Idempotent; copy() throws std::invalid_argument afterwards. When
    // ACL refuses a step it throws, and a further close() tries the rest again.
    void close();

 private:
    struct Piece {
        std::uintptr_t dst;
        std::uintptr_t src;
        std::size_t num_bytes;
    };
    [[nodiscard]] std::vector<Piece> pieces_of(std::span<const std::int64_t> dst_ids,
                                               std::span<const std::int64_t> src_ids) const;
    void require_ids(std::span<const std::int64_t> dst_ids,
                     std::span<const std::int64_t> src_ids) const;
    void make_streams(std::size_t count);
    // Every count-th piece from `first` on, in one stream.
    void enqueue(std::span<const Piece> pieces, std::size_t first, std::size_t count) const;
    void wait(std::size_t count, std::chrono::duration<double> timeout) const;
    // Ends all streams, so that nothing of an earlier copy is still written; false when that cannot be had.
    [[nodiscard]] bool settle(FirstError* first);
    [[nodiscard]] bool settle_one(Stream& stream, FirstError* first) const;

    AclPointer acl_;
    std::int32_t device_;
    ImportUse source_;
    std::vector<DeviceStrip> strips_;  // peer_address is ours by now
    std::size_t num_dst_blocks_;
    std::size_t num_src_blocks_;
    std::size_t num_streams_;
    std::size_t bytes_per_block_ = 0;
    std::vector<Stream> streams_;
    bool is_unsettled_ = false;  // the streams are those of a copy that failed
    bool is_closed_ = false;
    std::mutex mutex_;
};

}  // namespace mc2::ascend
