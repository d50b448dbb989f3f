// What every entry point does first.
#pragma once

#include <cuda.h>

#include <memory>

#include "simgpu/driver/context.h"
#include "simgpu/driver/state.h"

// An exported function of the driver API, written with the exact exported name.
#define SIMGPU_EXPORT extern "C" __attribute__((visibility("default"))) CUresult

#define SIMGPU_RETURN_IF_ERROR(expression)                                            \
  do {                                                                                \
    if (const CUresult simgpu_result = (expression); simgpu_result != CUDA_SUCCESS) { \
      return simgpu_result;                                                           \
    }                                                                                 \
  } while (0)

namespace simgpu {

// cuInit was called.
inline CUresult Enter() {
  return state() == nullptr ? CUDA_ERROR_NOT_INITIALIZED : CUDA_SUCCESS;
}
// ... and there is a live current context, which has not failed.
CUresult EnterContext(std::shared_ptr<Context>* context);
// ... which may have failed.
CUresult EnterFailedContext(std::shared_ptr<Context>* context);
// The device of a number that the program passed.
CUresult FindDevice(CUdevice number, Device** device);

}  // namespace simgpu
