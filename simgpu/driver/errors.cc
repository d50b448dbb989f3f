#include "simgpu/driver/entry.h"
#include "simgpu/driver/log.h"
#include "simgpu/driver/unsupported.h"

namespace simgpu {

bool DescribeError(int code, const char** name, const char** words);  // generated

int Unsupported(const char* name, bool* told) {
  if (state() == nullptr) return CUDA_ERROR_NOT_INITIALIZED;
  if (!*told) {
    *told = true;
    LogWarning("%s is not implemented: CUDA_ERROR_NOT_SUPPORTED.", name);
  }
  return CUDA_ERROR_NOT_SUPPORTED;
}

}  // namespace simgpu

using namespace simgpu;

SIMGPU_EXPORT cuGetErrorName(CUresult error, const char** text) {
  if (text == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const char* words = nullptr;
  *text = nullptr;
  return DescribeError(error, text, &words) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

SIMGPU_EXPORT cuGetErrorString(CUresult error, const char** text) {
  if (text == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const char* name = nullptr;
  *text = nullptr;
  return DescribeError(error, &name, text) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
