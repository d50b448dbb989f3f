// What an exported function without a body does.
#pragma once

namespace simgpu {

// CUDA_ERROR_NOT_SUPPORTED (CUDA_ERROR_NOT_INITIALIZED before cuInit), and one line for each name.
int Unsupported(const char* name, bool* told);

}  // namespace simgpu
