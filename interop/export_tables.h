// The private function tables that NVIDIA's own libraries ask a libcuda.so.1 for through
// cuGetExportTable, so far as the unmodified CUDA 13 runtime, cuBLAS, cuDNN and cuFFT need them.
//
// cuda.h declares cuGetExportTable but not the tables. What stands here comes from public sources
// (the open-source projects ZLUDA, SCUDA and Wine's nvcuda answer the same tables; each fact names
// its source) and from observing what the runtime asks of a stand-in library. It is kept in this
// folder alone and used by every libcuda.so.1 of this project: the interposer and the simulated
// GPU. Everything is answered inside the calling process.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace penstock::interop {

// The numbers of one device that the runtime's self-test hashes. They must equal what
// cuDeviceGetUuid and the PCI attributes report, or the runtime fails with
// cudaErrorSoftwareValidityNotEstablished.
struct DeviceIdentity {
  unsigned char uuid[16] = {};
  int32_t pci_domain = 0;
  int32_t pci_bus = 0;
  int32_t pci_device = 0;
};

// What the tables ask of the driver around them. Every pointer but `log` must be set. The functions
// are called from any thread, and must answer without the driver's locks held by the caller.
struct Host {
  // The fixed handle of the primary context, without retaining or activating it.
  CUresult (*primary_context)(CUdevice device, CUcontext* context);
  // Current context of the calling thread; null if none.
  CUcontext (*current_context)();
  int (*driver_version)();
  int (*device_count)();
  CUresult (*device_identity)(int ordinal, DeviceIdentity* identity);
  CUresult (*context_id)(CUcontext context, unsigned long long* id);
  CUresult (*stream_id)(CUcontext context, CUstream stream, unsigned long long* id);
  // Calls visit once for each kernel of the module.
  CUresult (*enumerate_functions)(CUmodule module, void (*visit)(void* user, CUfunction function),
                                  void* user);
  // One line, no newline; may be null.
  void (*log)(const char* message);
};

// Once, before the first GetExportTable (library constructor or cuInit). Copies the struct.
void SetHost(const Host& host);

// cuGetExportTable: CUDA_ERROR_INVALID_VALUE with *table null for a table that is not provided.
CUresult GetExportTable(const void** table, const CUuuid* id);

// To be called when a context is destroyed or a primary context is reset or released for the last
// time: runs the destructors of what libraries stored with it.
void DropContext(CUcontext context);

}  // namespace penstock::interop
