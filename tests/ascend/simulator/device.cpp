#include "device.h"

#include <dlfcn.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "call.h"
#include "memory.h"
#include "process_table.h"
#include "stream.h"

namespace sim {
namespace {

struct Devices {
    std::mutex mutex;
    std::vector<int> visible;
    std::vector<Context> primary;
    std::set<Context*> contexts;
    std::set<std::pair<int, int>> reach;  // device, physical device
    std::set<int> active;

    Devices() {
        const int all = static_cast<int>(number_setting("MC2_ACL_SIM_DEVICES", 2));
        const std::string wanted = setting("ASCEND_RT_VISIBLE_DEVICES");
        if (wanted.empty()) {
            for (int i = 0; i < all; ++i) {
                visible.push_back(i);
            }
        } else {
            std::istringstream numbers(wanted);
            for (std::string number; std::getline(numbers, number, ',');) {
                const int id = std::atoi(number.c_str());
                if (id < 0 || id >= all) {
                    break;  // as with other accelerators, the list ends at the first one that is not there
                }
                visible.push_back(id);
            }
        }
        primary.resize(visible.size());
        for (size_t i = 0; i < primary.size(); ++i) {
            primary[i] = {.device = static_cast<int>(i), .is_primary = true};
        }
    }
};

Devices& devices() {
    static Devices* const all = new Devices;
    return *all;
}

std::atomic<int> num_inits = 0;
thread_local Context* current = nullptr;

bool is_device(int64_t device) { return device >= 0 && device < num_devices(); }

aclError no_device(int64_t device) {
    return fail(acl::kRtInvalidDevice, "there is no device " + std::to_string(device));
}

}  // namespace

int num_devices() { return static_cast<int>(devices().visible.size()); }
int physical_of(int device) { return devices().visible.at(static_cast<size_t>(device)); }
int64_t device_bytes() { return number_setting("MC2_ACL_SIM_MEMORY_BYTES", int64_t{64} << 30); }

Context* current_context() { return current; }

aclError need_context(Context** context) {
    if (current == nullptr) {
        return fail(acl::kRtContextNull,
                    "this thread has no context: aclrtSetDevice was not called in it");
    }
    const std::scoped_lock lock(devices().mutex);
    if (!current->is_primary && !devices().contexts.contains(current)) {
        return fail(acl::kRtContextNull, "the context of this thread was destroyed");
    }
    *context = current;
    return acl::kSuccess;
}

bool can_reach(int device, int physical_device) {
    const std::scoped_lock lock(devices().mutex);
    return physical_device < 0 ||
           devices().visible[static_cast<size_t>(device)] == physical_device ||
           devices().reach.contains({device, physical_device});
}

bool enable_reach(int device, int physical_device) {
    if (physical_of(device) != physical_device && number_setting("MC2_ACL_SIM_NO_PEER", 0) != 0) {
        return false;
    }
    const std::scoped_lock lock(devices().mutex);
    devices().reach.insert({device, physical_device});
    return true;
}

int64_t num_contexts() {
    const std::scoped_lock lock(devices().mutex);
    return static_cast<int64_t>(devices().contexts.size());
}

}  // namespace sim

using sim::Context;
using sim::devices;
using sim::fail;

SIM_API aclError aclInit(const char* /*config*/) {
    SIM_ENTER();
    (void)sim::own_table();
    if (sim::num_inits.fetch_add(1) > 0) {
        return fail(acl::kRepeatInitialize, "aclInit was called before");
    }
    return acl::kSuccess;
}

namespace {

// torch_npu made the runtime and may end it at exit, whatever is still in use then; nobody else may.
bool is_torch_npu(void* caller) {
    Dl_info info = {};
    return ::dladdr(caller, &info) != 0 && info.dli_fname != nullptr &&
           std::strstr(info.dli_fname, "libtorch_npu") != nullptr;
}

}  // namespace

SIM_API aclError aclFinalize() {
    SIM_ENTER();
    if (!is_torch_npu(__builtin_return_address(0))) {
        const std::scoped_lock lock(sim::memory().mutex);
        if (!sim::memory().regions.empty() || !sim::memory().handles.empty()) {
            sim::violation("aclFinalize while memory is in use");
        }
    }
    sim::num_inits = 0;
    return acl::kSuccess;
}

SIM_API aclError aclrtGetDeviceCount(uint32_t* count) {
    SIM_ENTER();
    *count = static_cast<uint32_t>(sim::num_devices());
    return acl::kSuccess;
}

SIM_API aclError aclrtSetDevice(int32_t device) {
    SIM_ENTER();
    if (!sim::is_device(device)) {
        return sim::no_device(device);
    }
    const std::scoped_lock lock(devices().mutex);
    devices().active.insert(device);
    sim::current = &devices().primary[static_cast<size_t>(device)];
    return acl::kSuccess;
}

SIM_API aclError aclrtResetDevice(int32_t device) {
    SIM_ENTER();
    if (!sim::is_device(device)) {
        return sim::no_device(device);
    }
    const std::scoped_lock lock(devices().mutex);
    devices().active.erase(device);
    if (sim::current == &devices().primary[static_cast<size_t>(device)]) {
        sim::current = nullptr;
    }
    return acl::kSuccess;
}

SIM_API aclError aclrtGetDevice(int32_t* device) {
    SIM_ENTER();
    Context* context = nullptr;
    SIM_TRY(sim::need_context(&context));
    *device = context->device;
    return acl::kSuccess;
}

SIM_API aclError aclrtGetPrimaryCtxState(int32_t device, uint32_t* flags, int32_t* active) {
    SIM_ENTER();
    if (!sim::is_device(device)) {
        return sim::no_device(device);
    }
    if (flags != nullptr) {
        *flags = 0;
    }
    const std::scoped_lock lock(devices().mutex);
    *active = devices().active.contains(device) ? 1 : 0;
    return acl::kSuccess;
}

SIM_API aclError aclrtCreateContext(aclrtContext* context, int32_t device) {
    SIM_ENTER();
    if (!sim::is_device(device)) {
        return sim::no_device(device);
    }
    auto* made = new Context{.device = device};
    const std::scoped_lock lock(devices().mutex);
    devices().contexts.insert(made);
    devices().active.insert(device);
    sim::current = made;
    *context = made;
    return acl::kSuccess;
}

SIM_API aclError aclrtDestroyContext(aclrtContext context) {
    SIM_ENTER();
    const std::scoped_lock lock(devices().mutex);
    auto* old = static_cast<Context*>(context);
    if (devices().contexts.erase(old) == 0) {
        return fail(acl::kRtParamInvalid, "not a context that aclrtCreateContext made");
    }
    if (sim::current == old) {
        sim::current = nullptr;
    }
    return acl::kSuccess;  // the few bytes stay: another thread may have it as its own
}

SIM_API aclError aclrtSetCurrentContext(aclrtContext context) {
    SIM_ENTER();
    auto* wanted = static_cast<Context*>(context);
    const std::scoped_lock lock(devices().mutex);
    bool is_known = devices().contexts.contains(wanted);
    for (Context& primary : devices().primary) {
        is_known |= wanted == &primary;
    }
    if (!is_known) {
        return fail(acl::kRtContextNull, "not a living context");
    }
    sim::current = wanted;
    return acl::kSuccess;
}

SIM_API aclError aclrtGetCurrentContext(aclrtContext* context) {
    SIM_ENTER();
    Context* own = nullptr;
    SIM_TRY(sim::need_context(&own));
    *context = own;
    return acl::kSuccess;
}

SIM_API aclError aclrtDeviceGetBareTgid(int32_t* pid) {
    SIM_ENTER();
    *pid = ::getpid();
    return acl::kSuccess;
}

SIM_API aclError aclrtDeviceCanAccessPeer(int32_t* can, int32_t device, int32_t peer) {
    SIM_ENTER();
    if (!sim::is_device(device) || !sim::is_device(peer)) {
        return sim::no_device(device);
    }
    *can = device != peer && sim::number_setting("MC2_ACL_SIM_NO_PEER", 0) == 0 ? 1 : 0;
    return acl::kSuccess;
}

SIM_API aclError aclrtDeviceEnablePeerAccess(int32_t peer, uint32_t flags) {
    SIM_ENTER();
    Context* context = nullptr;
    SIM_TRY(sim::need_context(&context));
    if (flags != 0 || !sim::is_device(peer) || peer == context->device) {
        return fail(acl::kRtParamInvalid, "peer access needs another device and no flags");
    }
    if (!sim::enable_reach(context->device, sim::physical_of(peer))) {
        return fail(acl::kRtLinkNotSupported, "no link between these devices");
    }
    return acl::kSuccess;
}

SIM_API aclError aclrtDeviceDisablePeerAccess(int32_t peer) {
    SIM_ENTER();
    Context* context = nullptr;
    SIM_TRY(sim::need_context(&context));
    if (!sim::is_device(peer)) {
        return sim::no_device(peer);
    }
    const std::scoped_lock lock(devices().mutex);
    devices().reach.erase({context->device, devices().visible[static_cast<size_t>(peer)]});
    return acl::kSuccess;
}
