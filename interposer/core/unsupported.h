// What an exported name that is not served does: it says so once in the log, with the reason that
// its row gives, and returns CUDA_ERROR_NOT_SUPPORTED. The callers are generated.
#pragma once

#include <cuda.h>

#include "functions.gen.h"

namespace penstock::interposer {

// Works before cuInit. Thread-safe.
CUresult NotSupported(Function function);

}  // namespace penstock::interposer
