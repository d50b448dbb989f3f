// Device memory for other devices (GPUDirect RDMA), with SIMGPU_GPUDIRECT only.
//
// There is no NIC here and no dma-buf. What is exported is a memory file that holds the bytes of
// the range from its first one on, as a dma-buf would: whoever maps it (a test's provider of verbs)
// reads and writes device memory without this library. It keeps the memory alive after a free,
// which a real dma-buf does as well.
#include "simgpu/driver/entry.h"

using namespace simgpu;

SIMGPU_EXPORT cuMemGetHandleForAddressRange(void* handle, CUdeviceptr address, size_t bytes,
                                            CUmemRangeHandleType type, unsigned long long flags) {
  std::shared_ptr<Context> context;
  SIMGPU_RETURN_IF_ERROR(EnterContext(&context));
  constexpr uint64_t kPage = 4096;
  if (handle == nullptr || bytes == 0 || address % kPage != 0 || bytes % kPage != 0 ||
      type != CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD || flags != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (!context->device()->gpu_direct) return CUDA_ERROR_NOT_SUPPORTED;
  const auto found = state()->memory.Find(address);
  if (found == nullptr || found->kind != MemoryKind::kDevice || found->pool != nullptr ||
      address + bytes > (found->end() + kPage - 1) / kPage * kPage) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const int file = state()->memory.Export(address, bytes);
  if (file < 0) return CUDA_ERROR_INVALID_VALUE;
  *static_cast<int*>(handle) = file;
  return CUDA_SUCCESS;
}

// What has been written to the file is there for everybody at once.
SIMGPU_EXPORT cuFlushGPUDirectRDMAWrites(CUflushGPUDirectRDMAWritesTarget target,
                                         CUflushGPUDirectRDMAWritesScope scope) {
  std::shared_ptr<Context> context;
  SIMGPU_RETURN_IF_ERROR(EnterContext(&context));
  if (target != CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX ||
      (scope != CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER &&
       scope != CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_ALL_DEVICES)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  return context->device()->gpu_direct ? CUDA_SUCCESS : CUDA_ERROR_NOT_SUPPORTED;
}
