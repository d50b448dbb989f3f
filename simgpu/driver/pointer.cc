// What a pointer is: cuPointerGetAttribute(s) and their setter.
#include <cstring>

#include "simgpu/driver/entry.h"
#include "simgpu/driver/pool.h"

namespace simgpu {
namespace {

template <typename T>
CUresult Give(void* data, T value) {
  std::memcpy(data, &value, sizeof(value));
  return CUDA_SUCCESS;
}

// The allocation may be null: cuPointerGetAttributes then gives each attribute's null value.
CUresult Attribute(CUpointer_attribute attribute, const Allocation* allocation, uint64_t pointer,
                   void* data) {
  const bool known = allocation != nullptr;
  const bool host = known && allocation->host_accessible();
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT: {
      const auto context = known ? allocation->context.lock() : nullptr;
      return Give<CUcontext>(data, context == nullptr ? nullptr : context->handle());
    }
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      if (!known) return Give<unsigned>(data, 0);
      return Give<unsigned>(
          data, host && !allocation->managed() ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE);
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
      return Give<uint64_t>(data, known ? pointer : 0);
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
      if (known && !host) {
        Give<uint64_t>(data, 0);
        return CUDA_ERROR_INVALID_VALUE;
      }
      return Give<uint64_t>(data, known ? pointer : 0);
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
      return Give<int>(data, known && allocation->sync_memops ? 1 : 0);
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
      return Give<unsigned long long>(data, known ? allocation->buffer_id : 0);
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
      return Give<unsigned>(data, known && allocation->managed() ? 1 : 0);
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      return Give<int>(data, known ? allocation->device->ordinal : -2);
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
      return Give<uint64_t>(data, known ? allocation->begin : 0);
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
      return Give<size_t>(data, known ? allocation->bytes : 0);
    case CU_POINTER_ATTRIBUTE_MAPPED:
      return Give<int>(data, known ? 1 : 0);
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
      return Give<uint64_t>(data, 0);
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
    case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE:
    case CU_POINTER_ATTRIBUTE_IS_HW_DECOMPRESS_CAPABLE:
      return Give<int>(data, 0);
    case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS:
      return Give<int>(data, !known                  ? CU_MEM_ACCESS_FLAGS_PROT_NONE
                             : allocation->read_only ? CU_MEM_ACCESS_FLAGS_PROT_READ
                                                     : CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
      return Give<CUmemoryPool>(
          data, known && allocation->pool != nullptr ? allocation->pool->handle : nullptr);
    case CU_POINTER_ATTRIBUTE_MAPPING_SIZE:
      return Give<size_t>(data, known ? allocation->bytes : 0);
    case CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR:
      return Give<uint64_t>(data, known ? allocation->begin : 0);
    case CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID:
      return Give<unsigned long long>(data, known ? allocation->buffer_id : 0);
    case CU_POINTER_ATTRIBUTE_P2P_TOKENS:
      return CUDA_ERROR_NOT_SUPPORTED;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}

}  // namespace
}  // namespace simgpu

using namespace simgpu;

SIMGPU_EXPORT cuPointerGetAttribute(void* data, CUpointer_attribute attribute,
                                    CUdeviceptr pointer) {
  SIMGPU_RETURN_IF_ERROR(Enter());
  if (data == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const auto found = state()->memory.Find(pointer);
  if (found == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return Attribute(attribute, found.get(), pointer, data);
}

SIMGPU_EXPORT cuPointerGetAttributes(unsigned int count, CUpointer_attribute* attributes,
                                     void** data, CUdeviceptr pointer) {
  SIMGPU_RETURN_IF_ERROR(Enter());
  if (count == 0 || attributes == nullptr || data == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const auto found = state()->memory.Find(pointer);
  for (unsigned i = 0; i < count; ++i) {
    if (data[i] == nullptr) return CUDA_ERROR_INVALID_VALUE;
    // An attribute that this pointer lacks is null and no error here.
    const CUresult result = Attribute(attributes[i], found.get(), pointer, data[i]);
    if (result == CUDA_ERROR_INVALID_VALUE && attributes[i] != CU_POINTER_ATTRIBUTE_HOST_POINTER) {
      return result;
    }
  }
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT cuPointerSetAttribute(const void* value, CUpointer_attribute attribute,
                                    CUdeviceptr pointer) {
  SIMGPU_RETURN_IF_ERROR(Enter());
  const auto found = state()->memory.Find(pointer);
  if (value == nullptr || found == nullptr || attribute != CU_POINTER_ATTRIBUTE_SYNC_MEMOPS) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  int flag = 0;
  std::memcpy(&flag, value, sizeof(flag));
  found->sync_memops = flag != 0;
  return CUDA_SUCCESS;
}
