#include "call.h"

#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <sstream>

namespace sim {
namespace {

struct Fault {
    int skip = 0;
    aclError code = 0;
    int times = 0;
};

struct Records {
    std::mutex mutex;
    std::map<std::string, int64_t> calls;
    std::map<std::string, Fault> faults;
    std::set<std::string> unsupported;
    std::string violations;
    int64_t num_violations = 0;

    Records() {
        std::istringstream names(setting("MC2_ACL_SIM_UNSUPPORTED"));
        for (std::string name; std::getline(names, name, ',');) {
            unsupported.insert(name);
        }
        std::istringstream wanted(setting("MC2_ACL_SIM_FAIL"));
        for (std::string entry; std::getline(wanted, entry, ',');) {
            Fault fault;
            char name[128] = {};
            const int num = std::sscanf(entry.c_str(), "%127[^:]:%d:%d:%d", name, &fault.skip,
                                        &fault.code, &fault.times);
            if (num == 4) {
                faults[name] = fault;
            } else {
                std::fprintf(stderr, "MC2_ACL_SIM_FAIL: \"%s\" is not call:skip:code:times\n",
                             entry.c_str());
                std::abort();
            }
        }
    }
};

// Never destroyed: threads of streams may still run while the process exits.
Records& records() {
    static Records* const all = new Records;
    return *all;
}

thread_local std::string recent;       // NOLINT(cert-err58-cpp)
thread_local std::string recent_read;  // NOLINT(cert-err58-cpp)

}  // namespace

aclError fault_of(const char* task) {
    Records& all = records();
    const std::scoped_lock lock(all.mutex);
    const auto found = all.faults.find(task);
    if (found == all.faults.end()) {
        return acl::kSuccess;
    }
    Fault& fault = found->second;
    if (fault.skip > 0) {
        --fault.skip;
        return acl::kSuccess;
    }
    const aclError code = fault.code;
    if (--fault.times <= 0) {
        all.faults.erase(found);
    }
    return code;
}

aclError enter(const char* call) {
    Records& all = records();
    {
        const std::scoped_lock lock(all.mutex);
        ++all.calls[call];
        if (all.unsupported.contains(call)) {
            recent = std::string(call) + " is not supported by this driver.";
            return acl::kRtNotSupported;
        }
    }
    const aclError code = fault_of(call);
    return code == 0 ? code : fail(code, std::string(call) + " fails because a test asked for it.");
}

aclError fail(aclError code, const std::string& text) {
    recent = "E" + std::to_string(code) + ": " + text;
    return code;
}

void violation(const std::string& text) {
    Records& all = records();
    const std::scoped_lock lock(all.mutex);
    ++all.num_violations;
    all.violations += text + "\n";
    const std::string log = setting("MC2_ACL_SIM_VIOLATIONS");
    if (log.empty()) {
        return;
    }
    if (std::FILE* file = std::fopen(log.c_str(), "ae")) {
        std::fprintf(file, "%d: %s\n", ::getpid(), text.c_str());
        std::fclose(file);
    }
}

void count(const char* what) {
    Records& all = records();
    const std::scoped_lock lock(all.mutex);
    ++all.calls[what];
}

}  // namespace sim

// The pointer is valid until this thread's next call, and reading forgets the message.
SIM_API const char* aclGetRecentErrMsg() {
    sim::recent_read = std::move(sim::recent);
    sim::recent.clear();
    return sim::recent_read.empty() ? nullptr : sim::recent_read.c_str();
}

SIM_API void mc2_sim_fail(const char* call, int skip, int code, int times) {
    sim::Records& all = sim::records();
    const std::scoped_lock lock(all.mutex);
    all.faults[call] = {.skip = skip, .code = code, .times = times};
}

SIM_API void mc2_sim_clear_faults() {
    sim::Records& all = sim::records();
    const std::scoped_lock lock(all.mutex);
    all.faults.clear();
}

SIM_API int64_t mc2_sim_calls(const char* call) {
    sim::Records& all = sim::records();
    const std::scoped_lock lock(all.mutex);
    const auto found = all.calls.find(call);
    return found == all.calls.end() ? 0 : found->second;
}

SIM_API int64_t mc2_sim_violations() {
    sim::Records& all = sim::records();
    const std::scoped_lock lock(all.mutex);
    return all.num_violations;
}

SIM_API const char* mc2_sim_violation_text() {
    static thread_local std::string text;
    sim::Records& all = sim::records();
    const std::scoped_lock lock(all.mutex);
    text = all.violations;
    return text.c_str();
}
