#include "interposer/core/unsupported.h"

#include <atomic>

#include "common/log.h"

namespace penstock::interposer {

CUresult NotSupported(Function function) {
  static std::atomic<bool> said[kFunctionCount];
  if (!said[FunctionIndex(function)].exchange(true, std::memory_order_relaxed)) {
    LOG_WARNING("cuda", "%s is not supported: %s.", FunctionName(function),
                FunctionReason(function));
  }
  return CUDA_ERROR_NOT_SUPPORTED;
}

}  // namespace penstock::interposer
