// From the image that a program hands to cuModuleLoadData or cuLibraryLoadData to PTX text.
#pragma once

#include <cuda.h>

#include <string>

namespace simgpu {

// Accepts a fat binary wrapper (version 1, and version 2 of -rdc=true), a fat binary container and
// PTX text. Chooses the newest PTX that the compute capability (120 for 12.0) can run, else the
// oldest. On failure *log says why: CUDA_ERROR_NO_BINARY_FOR_GPU when there is machine code only,
// CUDA_ERROR_INVALID_IMAGE when the bytes are none of these.
CUresult PtxOfImage(const void* image, int compute_capability, std::string* ptx, std::string* log);

// False for what cannot be read to its end as a file, a directory for one.
bool ReadFile(const char* path, std::string* contents);

}  // namespace simgpu
