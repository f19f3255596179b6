// What the machine says about itself: versions, numbers, links.
#include <array>
#include <cstdio>
#include <cstring>
#include <string>

#include "call.h"
#include "device.h"
#include "process_table.h"

#ifndef MC2_SIM_CANN
#define MC2_SIM_CANN "9.1.0"
#endif

namespace {

using sim::fail;
using sim::number_setting;

std::string cann_version() { return sim::setting("MC2_ACL_SIM_CANN", MC2_SIM_CANN); }

std::array<int, 3> version_parts() {
    std::array<int, 3> parts = {};
    (void)std::sscanf(cann_version().c_str(), "%d.%d.%d", &parts[0], &parts[1], &parts[2]);
    return parts;
}

bool is_device(uint32_t device) { return device < static_cast<uint32_t>(sim::num_devices()); }

}  // namespace

SIM_API const char* aclrtGetSocName() {
    static const std::string name = sim::setting("MC2_ACL_SIM_SOC", "Ascend910B3");
    return name.c_str();
}

SIM_API aclError aclrtGetVersion(int32_t* major, int32_t* minor, int32_t* patch) {
    SIM_ENTER();
    const auto parts = version_parts();
    *major = parts[0];
    *minor = parts[1];
    *patch = parts[2];
    return acl::kSuccess;
}

// "driver" has its own numbering; all other packages carry CANN's.
SIM_API aclError aclsysGetVersionStr(char* package, char* version) {
    SIM_ENTER();
    if (package == nullptr || version == nullptr) {
        return fail(acl::kInvalidParam, "a name and a place for the version are needed");
    }
    const bool is_driver = std::strcmp(package, "driver") == 0;
    const std::string text =
        is_driver ? sim::setting("MC2_ACL_SIM_DRIVER", "26.0.RC1") : cann_version();
    std::snprintf(version, 128, "%s", text.c_str());
    return acl::kSuccess;
}

SIM_API aclError aclsysGetCANNVersion(int /*package*/, acl::PackageVersion* version) {
    SIM_ENTER();
    *version = {};
    const auto parts = version_parts();
    std::snprintf(version->version, sizeof(version->version), "%s", cann_version().c_str());
    std::snprintf(version->major, sizeof(version->major), "%d", parts[0]);
    std::snprintf(version->minor, sizeof(version->minor), "%d", parts[1]);
    std::snprintf(version->release, sizeof(version->release), "%d", parts[2]);
    return acl::kSuccess;
}

SIM_API aclError aclrtGetLogicDevIdByUserDevId(int32_t user, int32_t* logic) {
    SIM_ENTER();
    if (user < 0 || user >= sim::num_devices()) {
        return fail(acl::kRtInvalidDevice, "there is no device " + std::to_string(user));
    }
    *logic = sim::physical_of(user);
    return acl::kSuccess;
}

// Logic numbers are those of the container, before the visible devices are chosen.
SIM_API aclError aclrtGetPhyDevIdByLogicDevId(int32_t logic, int32_t* physical) {
    SIM_ENTER();
    if (logic < 0 || logic >= number_setting("MC2_ACL_SIM_DEVICES", 2)) {
        return fail(acl::kRtInvalidDevice, "there is no device " + std::to_string(logic));
    }
    *physical = logic + static_cast<int32_t>(number_setting("MC2_ACL_SIM_FIRST_PHYSICAL", 0));
    return acl::kSuccess;
}

SIM_API aclError aclrtGetDevicesTopo(uint32_t device, uint32_t other, uint64_t* value) {
    SIM_ENTER();
    if (!is_device(device) || !is_device(other)) {
        return fail(acl::kRtInvalidDevice, "there is no such device");
    }
    *value = static_cast<uint64_t>(number_setting("MC2_ACL_SIM_TOPOLOGY", 0x1));
    return acl::kSuccess;
}

SIM_API aclError aclrtGetDeviceInfo(uint32_t device, int attribute, int64_t* value) {
    SIM_ENTER();
    if (!is_device(device)) {
        return fail(acl::kRtInvalidDevice, "there is no such device");
    }
    const int64_t chip = sim::physical_of(static_cast<int>(device));
    const int64_t server = number_setting("MC2_ACL_SIM_SERVER", 0);
    const bool has_pod = number_setting("MC2_ACL_SIM_FABRIC", 0) != 0;
    switch (attribute) {
        case 1:  // AI Core number
        case 101:
            *value = 20;
            return acl::kSuccess;
        case 201:  // vector core number
            *value = 40;
            return acl::kSuccess;
        case 402:
            *value = chip;
            return acl::kSuccess;
        case 403:
            *value = has_pod ? server << 16 | chip : -1;
            return acl::kSuccess;
        case 404:
            *value = has_pod ? server : -1;
            return acl::kSuccess;
        case 405:
            *value = has_pod ? 0 : -1;
            return acl::kSuccess;
        case 408:
            *value = 1;
            return acl::kSuccess;
        default:
            return fail(acl::kRtNotSupported, "device attribute " + std::to_string(attribute));
    }
}

SIM_API aclError aclGetDeviceCapability(uint32_t /*device*/, int /*info*/, int64_t* value) {
    SIM_ENTER();
    *value = 1;
    return acl::kSuccess;
}

SIM_API aclError aclrtGetMemInfo(int /*attribute*/, size_t* free_bytes, size_t* total_bytes) {
    SIM_ENTER();
    sim::Context* context = nullptr;
    SIM_TRY(sim::need_context(&context));
    const int64_t used = sim::used_bytes_of_all(sim::physical_of(context->device));
    *total_bytes = static_cast<size_t>(sim::device_bytes());
    *free_bytes = static_cast<size_t>(sim::device_bytes() - used);
    return acl::kSuccess;
}
