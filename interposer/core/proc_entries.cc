// The table of cuGetProcAddress: every exported name with our own address of it. Apart from the
// search, because this file needs all of the driver API to link.
#include <cuda.h>
#include <cudaProfiler.h>

#include "interposer/core/proc_table.h"

#ifndef __CUDA_API_VERSION_INTERNAL
#error "cuda.h must declare every generation of every function: link penstock_codegen."
#endif

namespace penstock::interposer {

std::span<const ProcEntry> ProcTable() {
  static const ProcEntry table[] = {
#define PENSTOCK_PROC(name, symbol, version, per_thread) \
  {#name, version, per_thread != 0, reinterpret_cast<void*>(&::symbol)},
#include "proc_table.gen.inc"
#undef PENSTOCK_PROC
  };
  return table;
}

void* FindProc(std::string_view name, int version, uint64_t flags,
               CUdriverProcAddressQueryResult* status) {
  return FindProc(ProcTable(), name, version, flags, status);
}

}  // namespace penstock::interposer
