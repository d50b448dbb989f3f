// How many blocks of a kernel fit on a multiprocessor at once.
#pragma once

#include "simgpu/driver/device.h"
#include "simgpu/driver/module.h"

namespace simgpu {

int BlocksPerMultiprocessor(const Function& function, const Device& device, int threads,
                            size_t dynamic_shared_bytes);

}  // namespace simgpu
