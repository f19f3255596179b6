#include "stream.h"

#include <map>
#include <thread>
#include <utility>
#include <vector>

#include "call.h"
#include "memory.h"

namespace sim {
namespace {

struct Streams {
    std::mutex mutex;
    std::map<void*, std::shared_ptr<Stream>> made;
    std::map<const Context*, std::shared_ptr<Stream>> defaults;
    int32_t next_id = 1;
};

Streams& streams() {
    static Streams* const all = new Streams;
    return *all;
}

}  // namespace

void Stream::submit(Task task) {
    const std::scoped_lock lock(mutex_);
    tasks_.push_back(std::move(task));
    ++num_submitted_;
    if (!has_thread_) {
        has_thread_ = true;
        // The thread keeps the stream: it may be destroyed while tasks wait.
        std::thread([self = shared_from_this()] { self->run(); }).detach();
    }
    changed_.notify_all();
}

void Stream::run() {
    std::unique_lock lock(mutex_);
    while (true) {
        changed_.wait(lock, [this] { return !tasks_.empty() || is_stopping_; });
        if (tasks_.empty()) {
            return;
        }
        const Task task = std::move(tasks_.front());
        tasks_.pop_front();
        lock.unlock();
        std::string text;
        const aclError code = task(text);
        lock.lock();
        if (code != acl::kSuccess && error_.code == acl::kSuccess) {
            error_ = {.code = code, .number = ++num_errors_, .text = text};
        }
        ++num_done_;
        changed_.notify_all();
    }
}

aclError Stream::synchronize(int timeout_ms) {
    std::unique_lock lock(mutex_);
    const uint64_t wanted = num_submitted_;
    const auto is_done = [&] { return num_done_ >= wanted; };
    if (timeout_ms < 0) {
        changed_.wait(lock, is_done);
    } else if (!changed_.wait_for(lock, std::chrono::milliseconds(timeout_ms), is_done)) {
        return fail(acl::kRtStreamSyncTimeout,
                    "the stream is not done after " + std::to_string(timeout_ms) + " ms");
    }
    const TaskError error = std::exchange(error_, {});
    return error.code == acl::kSuccess ? error.code : fail(error.code, error.text);
}

bool Stream::is_idle() {
    const std::scoped_lock lock(mutex_);
    return num_done_ == num_submitted_;
}

TaskError Stream::pending_error() {
    const std::scoped_lock lock(mutex_);
    return error_;
}

void Stream::forget_error(uint64_t number) {
    const std::scoped_lock lock(mutex_);
    if (error_.number == number) {
        error_ = {};
    }
}

void Stream::stop(bool at_once) {
    const std::scoped_lock lock(mutex_);
    if (at_once) {
        num_done_ += tasks_.size();
        tasks_.clear();
    }
    is_stopping_ = true;
    changed_.notify_all();
}

aclError find_stream(aclrtStream stream, std::shared_ptr<Stream>* found) {
    Streams& all = streams();
    if (stream == nullptr) {
        Context* context = nullptr;
        SIM_TRY(need_context(&context));
        const std::scoped_lock lock(all.mutex);
        auto& made = all.defaults[context];
        if (made == nullptr) {
            made = std::make_shared<Stream>(context, 0);
        }
        *found = made;
        return acl::kSuccess;
    }
    const std::scoped_lock lock(all.mutex);
    const auto known = all.made.find(stream);
    if (known == all.made.end()) {
        return fail(acl::kRtParamInvalid, "not a living stream");
    }
    *found = known->second;
    return acl::kSuccess;
}

aclError find_own_stream(aclrtStream stream, const char* call, std::shared_ptr<Stream>* found) {
    Context* context = nullptr;
    SIM_TRY(need_context(&context));
    SIM_TRY(find_stream(stream, found));
    if ((*found)->context != context) {
        violation(std::string(call) + " with a stream of another device or context");
        return fail(acl::kRtStreamContext, "the stream does not belong to this thread's context");
    }
    return acl::kSuccess;
}

int64_t num_streams() {
    const std::scoped_lock lock(streams().mutex);
    return static_cast<int64_t>(streams().made.size());
}

}  // namespace sim

using sim::fail;
using sim::Stream;

namespace {

aclError create(aclrtStream* stream) {
    sim::Context* context = nullptr;
    SIM_TRY(sim::need_context(&context));
    sim::Streams& all = sim::streams();
    const std::scoped_lock lock(all.mutex);
    auto made = std::make_shared<Stream>(context, all.next_id++);
    *stream = made.get();
    all.made[*stream] = std::move(made);
    return acl::kSuccess;
}

aclError destroy(aclrtStream stream, bool at_once) {
    sim::Streams& all = sim::streams();
    std::shared_ptr<Stream> old;
    {
        const std::scoped_lock lock(all.mutex);
        const auto found = all.made.find(stream);
        if (found == all.made.end()) {
            return fail(acl::kRtParamInvalid, "not a living stream");
        }
        old = found->second;
        all.made.erase(found);
    }
    if (!old->is_idle() && !at_once) {
        (void)old->synchronize(-1);
    }
    old->stop(at_once);
    return acl::kSuccess;
}

}  // namespace

SIM_API aclError aclrtCreateStream(aclrtStream* stream) {
    SIM_ENTER();
    return create(stream);
}

SIM_API aclError aclrtCreateStreamWithConfig(aclrtStream* stream, uint32_t /*priority*/,
                                             uint32_t /*flag*/) {
    SIM_ENTER();
    return create(stream);
}

SIM_API aclError aclrtDestroyStream(aclrtStream stream) {
    SIM_ENTER();
    return destroy(stream, false);
}

SIM_API aclError aclrtDestroyStreamForce(aclrtStream stream) {
    SIM_ENTER();
    return destroy(stream, true);
}

SIM_API aclError aclrtSynchronizeStream(aclrtStream stream) {
    SIM_ENTER();
    std::shared_ptr<Stream> found;
    SIM_TRY(sim::find_stream(stream, &found));
    return found->synchronize(-1);
}

SIM_API aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t timeout_ms) {
    SIM_ENTER();
    std::shared_ptr<Stream> found;
    SIM_TRY(sim::find_stream(stream, &found));
    return found->synchronize(timeout_ms);
}

SIM_API aclError aclrtStreamQuery(aclrtStream stream, int* status) {
    SIM_ENTER();
    std::shared_ptr<Stream> found;
    SIM_TRY(sim::find_stream(stream, &found));
    *status = found->is_idle() ? 0 : 1;
    return acl::kSuccess;
}

SIM_API aclError aclrtStreamGetId(aclrtStream stream, int32_t* id) {
    SIM_ENTER();
    std::shared_ptr<Stream> found;
    SIM_TRY(sim::find_stream(stream, &found));
    *id = found->id;
    return acl::kSuccess;
}

namespace {

// All streams of the current device, whatever their context.
aclError synchronize_device(int timeout_ms) {
    sim::Context* context = nullptr;
    SIM_TRY(sim::need_context(&context));
    std::vector<std::shared_ptr<Stream>> own;
    {
        sim::Streams& all = sim::streams();
        const std::scoped_lock lock(all.mutex);
        for (const auto& [key, stream] : all.made) {
            own.push_back(stream);
        }
        for (const auto& [key, stream] : all.defaults) {
            own.push_back(stream);
        }
    }
    aclError first = acl::kSuccess;
    for (const auto& stream : own) {
        if (stream->context->device == context->device) {
            const aclError code = stream->synchronize(timeout_ms);
            first = first == acl::kSuccess ? code : first;
        }
    }
    return first;
}

}  // namespace

SIM_API aclError aclrtSynchronizeDevice() {
    SIM_ENTER();
    return synchronize_device(-1);
}

SIM_API aclError aclrtSynchronizeDeviceWithTimeout(int32_t timeout_ms) {
    SIM_ENTER();
    return synchronize_device(timeout_ms);
}
