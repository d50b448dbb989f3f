// The search behind cuGetProcAddress.
//
// A name such as cuMemAlloc has several generations (cuMemAlloc, cuMemAlloc_v2), each with the CUDA
// version that introduced it. A caller asks for the name without suffix and for the version it was
// compiled for, and gets the newest generation not newer than that: so every generation is asked
// for by somebody. A caller compiled with per-thread default streams gets the twin (_ptds, _ptsz)
// where the name has twins at all; a version older than the first twin finds nothing then, as in
// NVIDIA's driver.
#pragma once

#include <cuda.h>

#include <span>
#include <string_view>

namespace penstock::interposer {

struct ProcEntry {
  std::string_view name;  // without suffix
  int version = 0;        // 3020 is CUDA 3.2
  bool per_thread = false;
  void* address = nullptr;
};

// The address, or null with *status saying why (if status is not null). `flags` are those of
// cuGetProcAddress. The table is sorted by name, per_thread, version.
void* FindProc(std::span<const ProcEntry> table, std::string_view name, int version, uint64_t flags,
               CUdriverProcAddressQueryResult* status);

// Every exported name with the address of our own function, and a search of it.
std::span<const ProcEntry> ProcTable();
void* FindProc(std::string_view name, int version, uint64_t flags,
               CUdriverProcAddressQueryResult* status);

}  // namespace penstock::interposer
