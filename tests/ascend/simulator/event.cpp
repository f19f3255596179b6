// Events: marks in streams that other streams and the host wait for.
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <map>
#include <thread>

#include "call.h"
#include "share.h"
#include "stream.h"

namespace {

using sim::fail;
using sim::Stream;

// What another process sees of an event that was made to be shared.
struct SharedMark {
    std::atomic<uint64_t> num_recorded;
    std::atomic<uint64_t> num_reached;
    std::atomic<int32_t> error;
};

struct Event {
    std::mutex mutex;
    std::condition_variable changed;
    uint64_t num_recorded = 0;
    uint64_t num_reached = 0;
    sim::TaskError error;
    std::weak_ptr<Stream> stream;
    std::chrono::steady_clock::time_point reached_at;
    SharedMark* shared = nullptr;
    int shared_fd = -1;
    std::optional<sim::Ticket> ticket;
    std::optional<sim::Origin> origin;
    bool is_ipc = false;

    ~Event() {
        if (ticket) {
            (void)sim::retract(*ticket);
        }
        if (shared != nullptr) {
            ::munmap(shared, sim::kPageBytes);
            ::close(shared_fd);
        }
    }
};

struct Events {
    std::mutex mutex;
    std::map<void*, std::shared_ptr<Event>> made;
};

Events& events() {
    static Events* const all = new Events;
    return *all;
}

aclError find_event(aclrtEvent event, std::shared_ptr<Event>* found) {
    const std::scoped_lock lock(events().mutex);
    const auto known = events().made.find(event);
    if (known == events().made.end()) {
        return fail(acl::kRtParamInvalid, "not a living event");
    }
    *found = known->second;
    return acl::kSuccess;
}

aclError add_event(std::shared_ptr<Event> made, aclrtEvent* event) {
    const std::scoped_lock lock(events().mutex);
    *event = made.get();
    events().made[*event] = std::move(made);
    return acl::kSuccess;
}

bool map_shared(Event& event, int fd) {
    void* at = fd < 0 ? MAP_FAILED
                      : ::mmap(nullptr, sim::kPageBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (at == MAP_FAILED) {
        return false;
    }
    event.shared = static_cast<SharedMark*>(at);
    event.shared_fd = fd;
    return true;
}

aclError create(aclrtEvent* event, uint32_t flag) {
    sim::Context* context = nullptr;
    SIM_TRY(sim::need_context(&context));
    if (event == nullptr) {
        return fail(acl::kRtParamInvalid, "a place for the event is needed");
    }
    auto made = std::make_shared<Event>();
    made->is_ipc = (flag & acl::kEventIpc) != 0;
    if (made->is_ipc) {
        const int fd = ::memfd_create("mc2-acl-sim-event", MFD_CLOEXEC);
        if (fd < 0 || ::ftruncate(fd, sim::kPageBytes) != 0 || !map_shared(*made, fd)) {
            return fail(acl::kRtMemoryAllocation, "no memory for an event");
        }
    }
    return add_event(std::move(made), event);
}

uint64_t last_recorded(Event& event) {
    const std::scoped_lock lock(event.mutex);
    return event.shared != nullptr ? event.shared->num_recorded.load() : event.num_recorded;
}

bool has_reached(Event& event, uint64_t wanted) {
    const std::scoped_lock lock(event.mutex);
    return (event.shared != nullptr ? event.shared->num_reached.load() : event.num_reached) >=
           wanted;
}

// False if it gave up: the time is over, or `stops` says so.
bool wait_for(Event& event, uint64_t wanted, int timeout_ms, const std::function<bool()>& stops) {
    using namespace std::chrono_literals;
    const auto start = std::chrono::steady_clock::now();
    while (!has_reached(event, wanted)) {
        if (stops() || (timeout_ms >= 0 && std::chrono::steady_clock::now() - start >=
                                               std::chrono::milliseconds(timeout_ms))) {
            return false;
        }
        if (event.shared != nullptr) {
            if (event.origin && !event.origin->table->is_owner_alive()) {
                return false;
            }
            std::this_thread::sleep_for(50us);  // the other process cannot wake this one
            continue;
        }
        std::unique_lock lock(event.mutex);
        event.changed.wait_for(lock, 20ms, [&] { return event.num_reached >= wanted; });
    }
    return true;
}

aclError error_of(Event& event) {
    sim::TaskError error;
    std::shared_ptr<Stream> stream;
    {
        const std::scoped_lock lock(event.mutex);
        error = event.error;
        stream = event.stream.lock();
        if (event.shared != nullptr && error.code == acl::kSuccess) {
            error.code = event.shared->error;
        }
    }
    if (error.code == acl::kSuccess) {
        return error.code;
    }
    if (stream != nullptr) {
        stream->forget_error(error.number);
    }
    return fail(error.code, error.text);
}

aclError record(const std::shared_ptr<Event>& event, const std::shared_ptr<Stream>& stream) {
    uint64_t mark = 0;
    {
        const std::scoped_lock lock(event->mutex);
        mark = ++event->num_recorded;
        if (event->shared != nullptr) {
            mark = ++event->shared->num_recorded;
        }
        event->stream = stream;
    }
    stream->submit([event, stream, mark](std::string&) {
        const sim::TaskError error = stream->pending_error();
        const std::scoped_lock lock(event->mutex);
        event->error = error;
        event->num_reached = mark;
        event->reached_at = std::chrono::steady_clock::now();
        if (event->shared != nullptr) {
            event->shared->error = error.code;
            event->shared->num_reached = mark;
        }
        event->changed.notify_all();
        return acl::kSuccess;
    });
    return acl::kSuccess;
}

aclError synchronize(aclrtEvent event, int timeout_ms) {
    std::shared_ptr<Event> found;
    SIM_TRY(find_event(event, &found));
    if (!wait_for(*found, last_recorded(*found), timeout_ms, [] { return false; })) {
        return fail(acl::kRtEventSyncTimeout,
                    "the event is not reached after " + std::to_string(timeout_ms) + " ms");
    }
    return error_of(*found);
}

aclError query(aclrtEvent event, bool* is_recorded, bool* is_reached) {
    std::shared_ptr<Event> found;
    SIM_TRY(find_event(event, &found));
    const uint64_t mark = last_recorded(*found);
    *is_recorded = mark > 0;
    *is_reached = has_reached(*found, mark);
    return acl::kSuccess;
}

aclError wait_in_stream(aclrtStream stream, aclrtEvent event, int timeout_ms) {
    std::shared_ptr<Stream> found;
    SIM_TRY(sim::find_stream(stream, &found));
    std::shared_ptr<Event> awaited;
    SIM_TRY(find_event(event, &awaited));
    const uint64_t mark = last_recorded(*awaited);
    found->submit([awaited, found, mark, timeout_ms](std::string& text) {
        if (wait_for(*awaited, mark, timeout_ms, [&] { return found->is_stopping(); })) {
            return acl::kSuccess;
        }
        text = "a stream waited in vain for an event";
        return acl::kRtEventSyncTimeout;
    });
    return acl::kSuccess;
}

}  // namespace

namespace sim {
int64_t num_events() {
    const std::scoped_lock lock(events().mutex);
    return static_cast<int64_t>(events().made.size());
}
}  // namespace sim

SIM_API aclError aclrtCreateEvent(aclrtEvent* event) {
    SIM_ENTER();
    return create(event, 0);
}

SIM_API aclError aclrtCreateEventWithFlag(aclrtEvent* event, uint32_t flag) {
    SIM_ENTER();
    return create(event, flag);
}

SIM_API aclError aclrtCreateEventExWithFlag(aclrtEvent* event, uint32_t flag) {
    SIM_ENTER();
    return create(event, flag);
}

SIM_API aclError aclrtDestroyEvent(aclrtEvent event) {
    SIM_ENTER();
    std::shared_ptr<Event> old;
    SIM_TRY(find_event(event, &old));
    const std::scoped_lock lock(events().mutex);
    events().made.erase(event);
    return acl::kSuccess;
}

SIM_API aclError aclrtRecordEvent(aclrtEvent event, aclrtStream stream) {
    SIM_ENTER();
    std::shared_ptr<Stream> found;
    SIM_TRY(sim::find_own_stream(stream, "aclrtRecordEvent", &found));
    std::shared_ptr<Event> recorded;
    SIM_TRY(find_event(event, &recorded));
    return record(recorded, found);
}

SIM_API aclError aclrtResetEvent(aclrtEvent event, aclrtStream /*stream*/) {
    SIM_ENTER();
    std::shared_ptr<Event> found;
    return find_event(event, &found);
}

SIM_API aclError aclrtQueryEvent(aclrtEvent event, int* status) {
    SIM_ENTER();
    bool is_recorded = false;
    bool is_reached = false;
    SIM_TRY(query(event, &is_recorded, &is_reached));
    *status = is_recorded && is_reached ? 0 : 1;
    return acl::kSuccess;
}

SIM_API aclError aclrtQueryEventStatus(aclrtEvent event, int* status) {
    SIM_ENTER();
    bool is_recorded = false;
    bool is_reached = false;
    SIM_TRY(query(event, &is_recorded, &is_reached));
    *status = is_recorded && is_reached ? 1 : 0;
    return acl::kSuccess;
}

SIM_API aclError aclrtQueryEventWaitStatus(aclrtEvent event, int* status) {
    SIM_ENTER();
    bool is_recorded = false;
    bool is_reached = false;
    SIM_TRY(query(event, &is_recorded, &is_reached));
    *status = is_reached ? 0 : 1;
    return acl::kSuccess;
}

SIM_API aclError aclrtSynchronizeEvent(aclrtEvent event) {
    SIM_ENTER();
    return synchronize(event, -1);
}

SIM_API aclError aclrtSynchronizeEventWithTimeout(aclrtEvent event, int32_t timeout_ms) {
    SIM_ENTER();
    return synchronize(event, timeout_ms);
}

SIM_API aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent event) {
    SIM_ENTER();
    return wait_in_stream(stream, event, -1);
}

SIM_API aclError aclrtStreamWaitEventWithTimeout(aclrtStream stream, aclrtEvent event,
                                                 int32_t timeout_ms) {
    SIM_ENTER();
    return wait_in_stream(stream, event, timeout_ms);
}

SIM_API aclError aclrtEventElapsedTime(float* milliseconds, aclrtEvent start, aclrtEvent end) {
    SIM_ENTER();
    std::shared_ptr<Event> from;
    std::shared_ptr<Event> to;
    SIM_TRY(find_event(start, &from));
    SIM_TRY(find_event(end, &to));
    if (last_recorded(*from) == 0 || last_recorded(*to) == 0 ||
        !has_reached(*from, last_recorded(*from)) || !has_reached(*to, last_recorded(*to))) {
        return fail(acl::kRtParamInvalid, "both events must be recorded and reached");
    }
    *milliseconds =
        std::chrono::duration<float, std::milli>(to->reached_at - from->reached_at).count();
    return acl::kSuccess;
}

SIM_API aclError aclrtIpcGetEventHandle(aclrtEvent event, acl::IpcEventHandle* handle) {
    SIM_ENTER();
    std::shared_ptr<Event> found;
    SIM_TRY(find_event(event, &found));
    if (!found->is_ipc || found->origin) {
        return fail(acl::kRtParamInvalid,
                    "only events that this process made for sharing can be shared");
    }
    if (!found->ticket) {
        found->ticket = sim::offer({.kind = sim::SlotKind::kEvent,
                                    .fd = found->shared_fd,
                                    .size_bytes = sim::kPageBytes,
                                    .is_open_to_all = true});
    }
    if (!found->ticket) {
        return acl::kRtOverLimit;
    }
    const uint64_t value = found->ticket->packed(0);
    std::memset(handle, 0, sizeof(*handle));
    std::memcpy(handle->reserved, &value, sizeof(value));
    return acl::kSuccess;
}

SIM_API aclError aclrtIpcOpenEventHandle(acl::IpcEventHandle handle, aclrtEvent* event) {
    SIM_ENTER();
    sim::Context* context = nullptr;
    SIM_TRY(sim::need_context(&context));
    uint64_t value = 0;
    std::memcpy(&value, handle.reserved, sizeof(value));
    auto made = std::make_shared<Event>();
    SIM_TRY(
        sim::open_offer(sim::Ticket::unpacked(value), sim::SlotKind::kEvent, false, &made->origin));
    const int fd = sim::open_memory(*made->origin->table, made->origin->ticket);
    sim::remove_importer(made->origin->slot());
    if (!map_shared(*made, fd)) {
        return fail(acl::kRtDriverInternal, "the event is gone");
    }
    made->is_ipc = true;
    return add_event(std::move(made), event);
}
