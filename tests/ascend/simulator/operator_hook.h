// How the library of operators gets at device memory: the runtime runs its function in a stream.
#pragma once

#include <cstddef>

#include "abi.h"

struct mc2_sim_extent {
    void* pointer;
    size_t size_bytes;
    int is_written;
};

// `work` gets one accessible address per extent; `release` is called once afterwards, also if the work never ran.
SIM_API aclError mc2_sim_submit_operator(aclrtStream stream, const mc2_sim_extent* extents,
                                         size_t num,
                                         void (*work)(void* argument, std::byte* const* views),
                                         void (*release)(void* argument), void* argument);
