// Streams run their tasks in order, each in a thread of its own; nothing orders two streams but events.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "abi.h"
#include "device.h"

namespace sim {

// An error of a task waits in its stream until somebody asks; an event takes along what its stream has.
struct TaskError {
    aclError code = acl::kSuccess;
    uint64_t number = 0;  // which error of the stream
    std::string text;
};

class Stream : public std::enable_shared_from_this<Stream> {
 public:
    using Task = std::function<aclError(std::string& text)>;

    Stream(const Context* owner, int32_t number) : context(owner), id(number) {}

    void submit(Task task);
    // Without a limit if timeout_ms is negative.
    aclError synchronize(int timeout_ms);
    [[nodiscard]] bool is_idle();
    [[nodiscard]] TaskError pending_error();
    // The error was reported through an event.
    void forget_error(uint64_t number);
    // Waiting tasks are dropped if it is at once.
    void stop(bool at_once);
    [[nodiscard]] bool is_stopping() const { return is_stopping_; }

    const Context* const context;
    const int32_t id;

 private:
    void run();

    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<Task> tasks_;
    uint64_t num_submitted_ = 0;
    uint64_t num_done_ = 0;
    TaskError error_;
    uint64_t num_errors_ = 0;
    bool has_thread_ = false;
    std::atomic<bool> is_stopping_ = false;
};

// A null stream is the default stream of the current context.
aclError find_stream(aclrtStream stream, std::shared_ptr<Stream>* found);
// Also that it belongs to the current context, as work for it must.
aclError find_own_stream(aclrtStream stream, const char* call, std::shared_ptr<Stream>* found);

int64_t num_streams();
int64_t num_events();

}  // namespace sim
