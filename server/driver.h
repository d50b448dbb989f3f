// Opening the CUDA driver: NVIDIA's or the simulated one, through the same table of functions.
#pragma once

#include <string>

#include "common/result.h"
#include "driver.gen.h"  // struct Driver, LoadDriver

namespace penstock::server {

// Loads the library; refuses Penstock's own libcuda.so.1, which would call itself over the network.
Result<Driver> OpenDriver(const std::string& library);

// "CUDA_ERROR_OUT_OF_MEMORY", or "unknown error".
const char* ErrorName(const Driver& driver, CUresult result);

}  // namespace penstock::server
