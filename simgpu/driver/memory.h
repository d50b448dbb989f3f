// Allocating and freeing, as the entry points of memory.cc and pool.cc share it.
#pragma once

#include <cuda.h>

#include <memory>

#include "simgpu/driver/context.h"

namespace simgpu {

// Device memory out of the context's device; 0 bytes is CUDA_ERROR_INVALID_VALUE.
CUresult AllocateDevice(const std::shared_ptr<Context>& context, size_t bytes,
                        std::shared_ptr<MemoryPool> pool, CUdeviceptr* address);
// Takes the allocation out and gives its bytes back to device and pool. False if there is none.
bool ReleaseAllocation(uint64_t begin);

}  // namespace simgpu
