#include "simgpu/driver/pool.h"

#include <cstring>

#include "simgpu/driver/entry.h"
#include "simgpu/driver/memory.h"

namespace simgpu {

std::shared_ptr<MemoryPool> DefaultPool(Device* device) {
  std::lock_guard lock(device->pool_mutex);
  if (device->default_pool == nullptr) {
    device->default_pool = std::make_shared<MemoryPool>();
    device->default_pool->device = device;
    device->default_pool->handle = state()->pools.Insert(device->default_pool);
  }
  return device->default_pool;
}

std::shared_ptr<MemoryPool> CurrentPool(Device* device) {
  {
    std::lock_guard lock(device->pool_mutex);
    if (device->current_pool != nullptr) return device->current_pool;
  }
  return DefaultPool(device);
}

}  // namespace simgpu

using namespace simgpu;

namespace {

CUresult FindPool(CUmemoryPool handle, std::shared_ptr<MemoryPool>* pool) {
  SIMGPU_RETURN_IF_ERROR(Enter());
  *pool = state()->pools.Find(handle);
  return *pool == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult AllocateFrom(CUdeviceptr* address, size_t bytes, CUmemoryPool pool_handle,
                      CUstream stream_handle) {
  std::shared_ptr<Stream> stream;
  std::shared_ptr<Context> context;
  SIMGPU_RETURN_IF_ERROR(ResolveStream(stream_handle, &stream, &context));
  std::shared_ptr<MemoryPool> pool = CurrentPool(context->device());
  if (pool_handle != nullptr) SIMGPU_RETURN_IF_ERROR(FindPool(pool_handle, &pool));
  if (pool->max_bytes != 0 && pool->used_bytes + bytes > pool->max_bytes) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  // Memory that this stream has freed before is available to it: wait for the freeing, then retry.
  const CUresult first = AllocateDevice(context, bytes, pool, address);
  if (first != CUDA_ERROR_OUT_OF_MEMORY) return first;
  SIMGPU_RETURN_IF_ERROR(context->WaitFor(context->PendingOf(stream)));
  return AllocateDevice(context, bytes, pool, address);
}

}  // namespace

SIMGPU_EXPORT cuMemAllocAsync(CUdeviceptr* address, size_t bytes, CUstream stream) {
  return AllocateFrom(address, bytes, nullptr, stream);
}

SIMGPU_EXPORT cuMemAllocFromPoolAsync(CUdeviceptr* address, size_t bytes, CUmemoryPool pool,
                                      CUstream stream) {
  if (pool == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return AllocateFrom(address, bytes, pool, stream);
}

SIMGPU_EXPORT cuMemFreeAsync(CUdeviceptr address, CUstream handle) {
  std::shared_ptr<Stream> stream;
  std::shared_ptr<Context> context;
  SIMGPU_RETURN_IF_ERROR(ResolveStream(handle, &stream, &context));
  if (address == 0) return CUDA_SUCCESS;
  const auto found = state()->memory.Find(address);
  if (found == nullptr || found->begin != address || found->kind != MemoryKind::kDevice) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (found->freeing.exchange(true)) return CUDA_ERROR_INVALID_VALUE;
  context->Enqueue(
      stream, [address] { ReleaseAllocation(address); }, {}, /*always=*/true);
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT cuDeviceGetDefaultMemPool(CUmemoryPool* pool, CUdevice number) {
  Device* device = nullptr;
  SIMGPU_RETURN_IF_ERROR(FindDevice(number, &device));
  if (pool == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *pool = DefaultPool(device)->handle;
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT cuDeviceGetMemPool(CUmemoryPool* pool, CUdevice number) {
  Device* device = nullptr;
  SIMGPU_RETURN_IF_ERROR(FindDevice(number, &device));
  if (pool == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *pool = CurrentPool(device)->handle;
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT cuDeviceSetMemPool(CUdevice number, CUmemoryPool handle) {
  Device* device = nullptr;
  SIMGPU_RETURN_IF_ERROR(FindDevice(number, &device));
  std::shared_ptr<MemoryPool> pool;
  SIMGPU_RETURN_IF_ERROR(FindPool(handle, &pool));
  if (pool->device != device) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard lock(device->pool_mutex);
  device->current_pool = pool;
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT cuMemPoolCreate(CUmemoryPool* handle, const CUmemPoolProps* properties) {
  SIMGPU_RETURN_IF_ERROR(Enter());
  if (handle == nullptr || properties == nullptr ||
      properties->allocType != CU_MEM_ALLOCATION_TYPE_PINNED) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (properties->location.type != CU_MEM_LOCATION_TYPE_DEVICE ||
      properties->handleTypes != CU_MEM_HANDLE_TYPE_NONE) {
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  Device* device = nullptr;
  SIMGPU_RETURN_IF_ERROR(FindDevice(properties->location.id, &device));
  auto pool = std::make_shared<MemoryPool>();
  pool->device = device;
  pool->max_bytes = properties->maxSize;
  pool->handle = state()->pools.Insert(pool);
  *handle = pool->handle;
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT cuMemPoolDestroy(CUmemoryPool handle) {
  std::shared_ptr<MemoryPool> pool;
  SIMGPU_RETURN_IF_ERROR(FindPool(handle, &pool));
  std::lock_guard lock(pool->device->pool_mutex);
  if (pool == pool->device->default_pool) return CUDA_ERROR_INVALID_VALUE;
  if (pool == pool->device->current_pool) pool->device->current_pool = nullptr;
  state()->pools.Remove(handle);
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT cuMemPoolTrimTo(CUmemoryPool handle, size_t) {
  std::shared_ptr<MemoryPool> pool;
  return FindPool(handle, &pool);
}

SIMGPU_EXPORT cuMemPoolGetAttribute(CUmemoryPool handle, CUmemPool_attribute attribute,
                                    void* value) {
  std::shared_ptr<MemoryPool> pool;
  SIMGPU_RETURN_IF_ERROR(FindPool(handle, &pool));
  if (value == nullptr) return CUDA_ERROR_INVALID_VALUE;
  auto set_int = [&](int number) { std::memcpy(value, &number, sizeof(number)); };
  auto set_word = [&](uint64_t number) { std::memcpy(value, &number, sizeof(number)); };
  switch (attribute) {
    case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES:
      set_int(pool->reuse_flags[0]);
      break;
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC:
      set_int(pool->reuse_flags[1]);
      break;
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES:
      set_int(pool->reuse_flags[2]);
      break;
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
      set_word(pool->release_threshold);
      break;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT:
    case CU_MEMPOOL_ATTR_USED_MEM_CURRENT:
      set_word(pool->used_bytes);
      break;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
      set_word(pool->used_high);
      break;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT cuMemPoolSetAttribute(CUmemoryPool handle, CUmemPool_attribute attribute,
                                    void* value) {
  std::shared_ptr<MemoryPool> pool;
  SIMGPU_RETURN_IF_ERROR(FindPool(handle, &pool));
  if (value == nullptr) return CUDA_ERROR_INVALID_VALUE;
  int number = 0;
  uint64_t word = 0;
  switch (attribute) {
    case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES:
      std::memcpy(&number, value, sizeof(number));
      pool->reuse_flags[attribute - CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES] = number;
      break;
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
      std::memcpy(&word, value, sizeof(word));
      pool->release_threshold = word;
      break;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
      std::memcpy(&word, value, sizeof(word));
      if (word != 0) return CUDA_ERROR_INVALID_VALUE;  // only a reset is allowed
      pool->used_high = pool->used_bytes.load();
      break;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
  return CUDA_SUCCESS;
}

// Pool memory is visible to kernels of its own device only.
SIMGPU_EXPORT cuMemPoolSetAccess(CUmemoryPool handle, const CUmemAccessDesc* map, size_t count) {
  std::shared_ptr<MemoryPool> pool;
  SIMGPU_RETURN_IF_ERROR(FindPool(handle, &pool));
  if (map == nullptr && count != 0) return CUDA_ERROR_INVALID_VALUE;
  for (size_t i = 0; i < count; ++i) {
    if (map[i].location.type != CU_MEM_LOCATION_TYPE_DEVICE) return CUDA_ERROR_INVALID_VALUE;
    Device* device = nullptr;
    SIMGPU_RETURN_IF_ERROR(FindDevice(map[i].location.id, &device));
    if (device != pool->device && map[i].flags != CU_MEM_ACCESS_FLAGS_PROT_NONE) {
      return CUDA_ERROR_NOT_SUPPORTED;
    }
  }
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT cuMemPoolGetAccess(CUmemAccess_flags* flags, CUmemoryPool handle,
                                 CUmemLocation* location) {
  std::shared_ptr<MemoryPool> pool;
  SIMGPU_RETURN_IF_ERROR(FindPool(handle, &pool));
  if (flags == nullptr || location == nullptr || location->type != CU_MEM_LOCATION_TYPE_DEVICE) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  *flags = location->id == pool->device->ordinal ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE
                                                 : CU_MEM_ACCESS_FLAGS_PROT_NONE;
  return CUDA_SUCCESS;
}
