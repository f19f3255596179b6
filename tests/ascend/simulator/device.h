// Devices, contexts and what the current thread has selected.
#pragma once

#include <cstdint>

#include "abi.h"

namespace sim {

struct Context {
    int device = 0;
    bool is_primary = false;
};

int num_devices();
// A visible device's number in the machine: ASCEND_RT_VISIBLE_DEVICES selects and orders.
int physical_of(int device);
int64_t device_bytes();

// The thread's context; null before aclrtSetDevice.
Context* current_context();
// kRtContextNull if the thread has none.
aclError need_context(Context** context);

// Whether `device` may reach the memory of a physical device.
bool can_reach(int device, int physical_device);
// By an import, which enables access by itself. False where the machine has no link.
bool enable_reach(int device, int physical_device);

int64_t num_contexts();

}  // namespace sim
