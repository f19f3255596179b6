// The copy and fill calls, with the rules on which memory each of them takes.
#include <algorithm>
#include <cstring>
#include <string>

#include "call.h"
#include "copy.h"
#include "device.h"

namespace {

using sim::fail;
using sim::Side;

constexpr const char* kCopyTask = "copy-task";
constexpr const char* kFillTask = "fill-task";

struct Request {
    void* destination = nullptr;
    size_t destination_bytes = 0;
    const void* source = nullptr;
    size_t size_bytes = 0;
    int kind = 0;
};

struct Located {
    Side destination;
    Side source;
};

aclError check_kind(const Request& request, const Located& sides) {
    const bool from_device = sides.source.is_device;
    const bool to_device = sides.destination.is_device;
    const bool has_import = sides.source.is_imported || sides.destination.is_imported;
    bool is_right = false;
    switch (request.kind) {
        case acl::kHostToHost:
            is_right = !from_device && !to_device;
            break;
        case acl::kHostToDevice:
        case acl::kHostToBufferToDevice:
            is_right = !from_device && to_device && !has_import;
            break;
        case acl::kDeviceToHost:
            is_right = from_device && !to_device && !has_import;
            break;
        case acl::kDeviceToDevice:
        case acl::kInnerDevice:
        case acl::kInterDevice:
            is_right = from_device && to_device;
            break;
        case acl::kDefault:
            is_right = !has_import;
            break;
        default:
            break;
    }
    return is_right ? acl::kSuccess
                    : fail(acl::kRtParamInvalid,
                           "copy kind " + std::to_string(request.kind) +
                               " does not fit the memory, or imported memory does not take it");
}

aclError check_reach(int device, const Side& side) {
    if (side.is_device && !sim::can_reach(device, side.physical_device)) {
        return fail(acl::kRtParamInvalid,
                    "the memory is on a device that this one may not reach: enable peer access");
    }
    return acl::kSuccess;
}

aclError check(const Request& request, int device, Located* located) {
    if (request.size_bytes == 0 || request.size_bytes > request.destination_bytes) {
        return fail(acl::kRtParamInvalid, "a copy of " + std::to_string(request.size_bytes) +
                                              " bytes into " +
                                              std::to_string(request.destination_bytes));
    }
    sim::Memory& all = sim::memory();
    const std::scoped_lock lock(all.mutex);
    auto destination = sim::locate(all, request.destination, request.size_bytes);
    auto source = sim::locate(all, request.source, request.size_bytes);
    if (!destination || !destination->is_device) {
        all.blame_stale(request.destination);
    }
    if (!source || !source->is_device) {
        all.blame_stale(request.source);
    }
    if (!destination || !source) {
        return fail(acl::kRtParamInvalid,
                    std::string(destination ? "the source" : "the destination") +
                        " of a copy is not all live memory");
    }
    *located = {.destination = std::move(*destination), .source = std::move(*source)};
    SIM_TRY(check_kind(request, *located));
    SIM_TRY(check_reach(device, located->destination));
    return check_reach(device, located->source);
}

sim::Use use_of(const void* pointer, size_t size_bytes, const Side& side) {
    return {.pointer = pointer,
            .size_bytes = size_bytes,
            .was_device = side.is_device,
            .was_pinned = side.is_pinned};
}

std::vector<sim::Use> uses_of(const Request& request, const Located& sides) {
    return {use_of(request.destination, request.size_bytes, sides.destination),
            use_of(request.source, request.size_bytes, sides.source)};
}

void copy_work(std::vector<Side>& sides) { sim::copy_sides(sides[0], sides[1]); }

aclError copy_now(const Request& request) {
    sim::Context* context = nullptr;
    SIM_TRY(sim::need_context(&context));
    Located sides;
    SIM_TRY(check(request, context->device, &sides));
    const bool has_import = sides.source.is_imported || sides.destination.is_imported;
    if (has_import && sides.source.physical_device == sides.destination.physical_device) {
        return fail(acl::kRtParamInvalid,
                    "imported memory on the same device takes asynchronous copies only");
    }
    std::string text;
    const aclError code = sim::run_work(uses_of(request, sides), copy_work, kCopyTask, text);
    return code == acl::kSuccess ? code : fail(code, text);
}

bool is_aligned(const Request& request) {
    return (reinterpret_cast<uintptr_t>(request.destination) |
            reinterpret_cast<uintptr_t>(request.source)) %
               64 ==
           0;
}

aclError copy_in_stream(const Request& request, aclrtStream stream, const char* call) {
    std::shared_ptr<sim::Stream> found;
    SIM_TRY(sim::find_own_stream(stream, call, &found));
    Located sides;
    SIM_TRY(check(request, found->context->device, &sides));
    const bool is_on_devices = sides.source.is_device && sides.destination.is_device;
    if (is_on_devices && !is_aligned(request)) {
        sim::count("unaligned-copy");
    }
    SIM_TRY(sim::submit_work(found, uses_of(request, sides), copy_work, kCopyTask));
    const Side& host = sides.source.is_device ? sides.destination : sides.source;
    if (!is_on_devices && !host.is_pinned) {
        sim::count("pageable-copy");
        return found->synchronize(
            -1);  // the device cannot read memory that may move: the call itself waits
    }
    return acl::kSuccess;
}

struct Fill {
    void* pointer = nullptr;
    size_t capacity_bytes = 0;
    int value = 0;
    size_t size_bytes = 0;
};

aclError check_fill(const Fill& fill, int device) {
    if (fill.size_bytes == 0 || fill.size_bytes > fill.capacity_bytes) {
        return fail(acl::kRtParamInvalid, "a fill of " + std::to_string(fill.size_bytes) +
                                              " bytes into " + std::to_string(fill.capacity_bytes));
    }
    sim::Memory& all = sim::memory();
    const std::scoped_lock lock(all.mutex);
    const auto side = sim::locate(all, fill.pointer, fill.size_bytes);
    if (!side || !side->is_device) {
        return fail(acl::kRtParamInvalid, "only live device memory can be filled");
    }
    return check_reach(device, *side);
}

sim::Work fill_work(int value) {
    return [value](std::vector<Side>& sides) {
        for (sim::Piece& piece : sides[0].pieces) {
            std::memset(piece.at, value, piece.size_bytes);
        }
    };
}

struct Batch {
    void** destinations = nullptr;
    size_t* destination_bytes = nullptr;
    void** sources = nullptr;
    size_t* sizes = nullptr;
    size_t num = 0;
    acl::BatchAttribute* attributes = nullptr;
    size_t* first_entries = nullptr;
    size_t num_attributes = 0;
};

int kind_of(const acl::BatchAttribute& attribute) {
    if (attribute.source.type == acl::kHost && attribute.destination.type == acl::kDevice) {
        return acl::kHostToDevice;
    }
    if (attribute.source.type == acl::kDevice && attribute.destination.type == acl::kHost) {
        return acl::kDeviceToHost;
    }
    return -1;
}

aclError check_batch(const Batch& batch, size_t* failed, std::vector<Request>* requests) {
    sim::Context* context = nullptr;
    SIM_TRY(sim::need_context(&context));
    *failed = SIZE_MAX;
    if (batch.destinations == nullptr || batch.destination_bytes == nullptr ||
        batch.sources == nullptr || batch.sizes == nullptr || batch.attributes == nullptr ||
        batch.first_entries == nullptr || batch.num == 0 || batch.num > acl::kMaxBatch ||
        batch.num_attributes == 0 || batch.num_attributes > batch.num ||
        batch.first_entries[0] != 0) {
        return fail(acl::kRtParamInvalid,
                    "1 to 4096 copies and attributes from entry 0 on are needed");
    }
    size_t attribute = 0;
    for (size_t i = 0; i < batch.num; ++i) {
        while (attribute + 1 < batch.num_attributes && batch.first_entries[attribute + 1] <= i) {
            ++attribute;
        }
        const Request request = {.destination = batch.destinations[i],
                                 .destination_bytes = batch.destination_bytes[i],
                                 .source = batch.sources[i],
                                 .size_bytes = batch.sizes[i],
                                 .kind = kind_of(batch.attributes[attribute])};
        *failed = i;
        if (request.kind < 0) {
            return fail(acl::kRtParamInvalid, "a batch copies between a device and the host only");
        }
        Located sides;
        SIM_TRY(check(request, context->device, &sides));
        requests->push_back(request);
    }
    *failed = SIZE_MAX;
    return acl::kSuccess;
}

aclError batch_now(const Batch& batch, size_t* failed) {
    std::vector<Request> requests;
    SIM_TRY(check_batch(batch, failed, &requests));
    for (size_t i = requests.size(); i-- > 0;) {  // a batch has no order
        *failed = i;
        SIM_TRY(copy_now(requests[i]));
    }
    *failed = SIZE_MAX;
    return acl::kSuccess;
}

aclError batch_in_stream(const Batch& batch, size_t* failed, aclrtStream stream) {
    std::vector<Request> requests;
    SIM_TRY(check_batch(batch, failed, &requests));
    for (size_t i = requests.size(); i-- > 0;) {
        *failed = i;
        SIM_TRY(copy_in_stream(requests[i], stream, "aclrtMemcpyBatchAsync"));
    }
    *failed = SIZE_MAX;
    return acl::kSuccess;
}

}  // namespace

SIM_API aclError aclrtMemcpy(void* destination, size_t destination_bytes, const void* source,
                             size_t count, int kind) {
    SIM_ENTER();
    return copy_now({destination, destination_bytes, source, count, kind});
}

SIM_API aclError aclrtMemcpyAsync(void* destination, size_t destination_bytes, const void* source,
                                  size_t count, int kind, aclrtStream stream) {
    SIM_ENTER();
    return copy_in_stream({destination, destination_bytes, source, count, kind}, stream,
                          "aclrtMemcpyAsync");
}

SIM_API aclError aclrtMemset(void* pointer, size_t capacity, int32_t value, size_t count) {
    SIM_ENTER();
    sim::Context* context = nullptr;
    SIM_TRY(sim::need_context(&context));
    SIM_TRY(check_fill({pointer, capacity, value, count}, context->device));
    std::string text;
    const aclError code =
        sim::run_work({{pointer, count, true, false}}, fill_work(value), kFillTask, text);
    return code == acl::kSuccess ? code : fail(code, text);
}

SIM_API aclError aclrtMemsetAsync(void* pointer, size_t capacity, int32_t value, size_t count,
                                  aclrtStream stream) {
    SIM_ENTER();
    std::shared_ptr<sim::Stream> found;
    SIM_TRY(sim::find_own_stream(stream, "aclrtMemsetAsync", &found));
    SIM_TRY(check_fill({pointer, capacity, value, count}, found->context->device));
    return sim::submit_work(found, {{pointer, count, true, false}}, fill_work(value), kFillTask);
}

SIM_API aclError aclrtMemcpyBatch(void** destinations, size_t* destination_bytes, void** sources,
                                  size_t* sizes, size_t num, acl::BatchAttribute* attributes,
                                  size_t* first_entries, size_t num_attributes, size_t* failed) {
    SIM_ENTER();
    return batch_now({destinations, destination_bytes, sources, sizes, num, attributes,
                      first_entries, num_attributes},
                     failed);
}

SIM_API aclError aclrtMemcpyBatchAsync(void** destinations, size_t* destination_bytes,
                                       void** sources, size_t* sizes, size_t num,
                                       acl::BatchAttribute* attributes, size_t* first_entries,
                                       size_t num_attributes, size_t* failed, aclrtStream stream) {
    SIM_ENTER();
    return batch_in_stream({destinations, destination_bytes, sources, sizes, num, attributes,
                            first_entries, num_attributes},
                           failed, stream);
}

#if MC2_SIM_LEVEL >= 90
SIM_API aclError aclrtMemcpyBatchV2(void** destinations, size_t* destination_bytes, void** sources,
                                    size_t* sizes, size_t num, acl::BatchAttribute* attributes,
                                    size_t* first_entries, size_t num_attributes) {
    SIM_ENTER();
    size_t failed = 0;
    return batch_now({destinations, destination_bytes, sources, sizes, num, attributes,
                      first_entries, num_attributes},
                     &failed);
}

SIM_API aclError aclrtMemcpyBatchAsyncV2(void** destinations, size_t* destination_bytes,
                                         void** sources, size_t* sizes, size_t num,
                                         acl::BatchAttribute* attributes, size_t* first_entries,
                                         size_t num_attributes, aclrtStream stream) {
    SIM_ENTER();
    size_t failed = 0;
    return batch_in_stream({destinations, destination_bytes, sources, sizes, num, attributes,
                            first_entries, num_attributes},
                           &failed, stream);
}
#endif
