// Device, pinned, registered and managed memory.
#include "simgpu/driver/memory.h"

#include <sys/mman.h>

#include "simgpu/driver/entry.h"
#include "simgpu/driver/log.h"
#include "simgpu/driver/pool.h"

namespace simgpu {
namespace {

constexpr size_t kGranularity = 512;  // of what a device's memory is charged in
constexpr size_t kPitchAlignment = 512;

size_t RoundUp(size_t value, size_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

std::shared_ptr<Allocation> NewAllocation(const std::shared_ptr<Context>& context, size_t bytes,
                                          MemoryKind kind, unsigned flags) {
  auto allocation = std::make_shared<Allocation>();
  allocation->bytes = bytes;
  allocation->kind = kind;
  allocation->flags = flags;
  allocation->device = context->device();
  allocation->context = context;
  allocation->context_key = context.get();
  return allocation;
}

}  // namespace

CUresult AllocateDevice(const std::shared_ptr<Context>& context, size_t bytes,
                        std::shared_ptr<MemoryPool> pool, CUdeviceptr* address) {
  if (address == nullptr || bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  Device* const device = context->device();
  if (bytes > device->memory_bytes) return CUDA_ERROR_OUT_OF_MEMORY;
  const size_t charged = RoundUp(bytes, kGranularity);
  if (!device->Charge(charged)) return CUDA_ERROR_OUT_OF_MEMORY;
  auto allocation = NewAllocation(context, bytes, MemoryKind::kDevice, 0);
  allocation->charged_bytes = charged;
  allocation->pool = pool;
  const uint64_t begin = state()->memory.Allocate(std::move(allocation), kGranularity);
  if (begin == 0) {
    device->Refund(charged);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  if (pool != nullptr) {
    const uint64_t used = pool->used_bytes += charged;
    if (used > pool->used_high) pool->used_high = used;
  }
  *address = begin;
  return CUDA_SUCCESS;
}

bool ReleaseAllocation(uint64_t begin) {
  const std::shared_ptr<Allocation> removed = state()->memory.Remove(begin);
  if (removed == nullptr) return false;
  removed->device->Refund(removed->charged_bytes);
  if (removed->pool != nullptr) removed->pool->used_bytes -= removed->charged_bytes;
  return true;
}

}  // namespace simgpu

#undef cuMemHostRegister

using namespace simgpu;

SIMGPU_EXPORT cuMemGetInfo_v2(size_t* free_bytes, size_t* total) {
  std::shared_ptr<Context> context;
  SIMGPU_RETURN_IF_ERROR(EnterContext(&context));
  const Device& device = *context->device();
  if (free_bytes != nullptr) *free_bytes = device.FreeBytes();
  if (total != nullptr) *total = device.memory_bytes;
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT cuMemAlloc_v2(CUdeviceptr* address, size_t bytes) {
  std::shared_ptr<Context> context;
  SIMGPU_RETURN_IF_ERROR(EnterContext(&context));
  return AllocateDevice(context, bytes, nullptr, address);
}

SIMGPU_EXPORT cuMemAllocPitch_v2(CUdeviceptr* address, size_t* pitch, size_t width, size_t height,
                                 unsigned int element) {
  std::shared_ptr<Context> context;
  SIMGPU_RETURN_IF_ERROR(EnterContext(&context));
  if (address == nullptr || pitch == nullptr || width == 0 || height == 0 ||
      (element != 4 && element != 8 && element != 16)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (width > context->device()->memory_bytes) return CUDA_ERROR_OUT_OF_MEMORY;
  *pitch = RoundUp(width, kPitchAlignment);
  if (height > SIZE_MAX / *pitch) return CUDA_ERROR_OUT_OF_MEMORY;
  return AllocateDevice(context, *pitch * height, nullptr, address);
}

SIMGPU_EXPORT cuMemFree_v2(CUdeviceptr address) {
  std::shared_ptr<Context> context;
  SIMGPU_RETURN_IF_ERROR(EnterContext(&context));
  if (address == 0) return CUDA_SUCCESS;
  const auto found = state()->memory.Find(address);
  if (found == nullptr || found->begin != address ||
      (found->kind != MemoryKind::kDevice && found->kind != MemoryKind::kManaged)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  // Freeing waits for all work that might use the memory.
  if (const auto owner = found->context.lock()) SIMGPU_RETURN_IF_ERROR(owner->Synchronise());
  return ReleaseAllocation(address) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

SIMGPU_EXPORT cuMemAllocManaged(CUdeviceptr* address, size_t bytes, unsigned int flags) {
  std::shared_ptr<Context> context;
  SIMGPU_RETURN_IF_ERROR(EnterContext(&context));
  if (address == nullptr || bytes == 0 ||
      (flags != CU_MEM_ATTACH_GLOBAL && flags != CU_MEM_ATTACH_HOST)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  Device* const device = context->device();
  const size_t charged = RoundUp(bytes, kGranularity);
  if (!device->Charge(charged)) return CUDA_ERROR_OUT_OF_MEMORY;
  auto allocation = NewAllocation(context, bytes, MemoryKind::kManaged, flags);
  allocation->charged_bytes = charged;
  *address = state()->memory.Allocate(std::move(allocation), kGranularity);
  if (*address != 0) return CUDA_SUCCESS;
  device->Refund(charged);
  return CUDA_ERROR_OUT_OF_MEMORY;
}

SIMGPU_EXPORT cuMemHostAlloc(void** pointer, size_t bytes, unsigned int flags) {
  std::shared_ptr<Context> context;
  SIMGPU_RETURN_IF_ERROR(EnterContext(&context));
  constexpr unsigned kKnown =
      CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP | CU_MEMHOSTALLOC_WRITECOMBINED;
  if (pointer == nullptr || bytes == 0 || (flags & ~kKnown) != 0) return CUDA_ERROR_INVALID_VALUE;
  // Page alignment, as pinned memory has it; the size is the machine's matter.
  const uint64_t begin = state()->memory.Allocate(
      NewAllocation(context, bytes, MemoryKind::kHost, flags | CU_MEMHOSTALLOC_DEVICEMAP), 4096);
  if (begin == 0) return CUDA_ERROR_OUT_OF_MEMORY;
  *pointer = reinterpret_cast<void*>(begin);
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT cuMemAllocHost_v2(void** pointer, size_t bytes) {
  return cuMemHostAlloc(pointer, bytes, 0);
}

SIMGPU_EXPORT cuMemFreeHost(void* pointer) {
  std::shared_ptr<Context> context;
  SIMGPU_RETURN_IF_ERROR(EnterContext(&context));
  if (pointer == nullptr) return CUDA_SUCCESS;
  const auto begin = reinterpret_cast<uint64_t>(pointer);
  const auto found = state()->memory.Find(begin);
  if (found == nullptr || found->begin != begin || found->kind != MemoryKind::kHost) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (const auto owner = found->context.lock()) SIMGPU_RETURN_IF_ERROR(owner->Synchronise());
  return ReleaseAllocation(begin) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

SIMGPU_EXPORT cuMemHostRegister_v2(void* pointer, size_t bytes, unsigned int flags) {
  std::shared_ptr<Context> context;
  SIMGPU_RETURN_IF_ERROR(EnterContext(&context));
  constexpr unsigned kKnown = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP |
                              CU_MEMHOSTREGISTER_IOMEMORY | CU_MEMHOSTREGISTER_READ_ONLY;
  if (pointer == nullptr || bytes == 0 || (flags & ~kKnown) != 0) return CUDA_ERROR_INVALID_VALUE;
  if ((flags & CU_MEMHOSTREGISTER_IOMEMORY) != 0) return CUDA_ERROR_NOT_SUPPORTED;
  const auto begin = reinterpret_cast<uint64_t>(pointer);
  if (begin + bytes < begin) return CUDA_ERROR_INVALID_VALUE;
  // The pages have to exist; the real driver finds that out when it pins them.
  constexpr uint64_t kPage = 4096;
  const uint64_t first = begin / kPage * kPage;
  const uint64_t last = RoundUp(begin + bytes, kPage);
  unsigned char resident[16];
  for (uint64_t page = first; page < last; page += kPage * sizeof(resident)) {
    const size_t length = std::min<uint64_t>(last - page, kPage * sizeof(resident));
    if (mincore(reinterpret_cast<void*>(page), length, resident) != 0) {
      return CUDA_ERROR_INVALID_VALUE;
    }
  }
  auto allocation = NewAllocation(context, bytes, MemoryKind::kRegistered, flags);
  allocation->begin = begin;
  allocation->read_only = (flags & CU_MEMHOSTREGISTER_READ_ONLY) != 0;
  if (state()->memory.InReserved(begin)) return CUDA_ERROR_INVALID_VALUE;
  return state()->memory.Enter(std::move(allocation)) ? CUDA_SUCCESS
                                                      : CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
}

SIMGPU_EXPORT cuMemHostRegister(void* pointer, size_t bytes, unsigned int flags) {
  return cuMemHostRegister_v2(pointer, bytes, flags);
}

SIMGPU_EXPORT cuMemHostUnregister(void* pointer) {
  std::shared_ptr<Context> context;
  SIMGPU_RETURN_IF_ERROR(EnterContext(&context));
  if (pointer == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const auto begin = reinterpret_cast<uint64_t>(pointer);
  const auto found = state()->memory.Find(begin);
  if (found == nullptr || found->begin != begin || found->kind != MemoryKind::kRegistered) {
    return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
  }
  if (const auto owner = found->context.lock()) SIMGPU_RETURN_IF_ERROR(owner->Synchronise());
  return ReleaseAllocation(begin) ? CUDA_SUCCESS : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
}

SIMGPU_EXPORT cuMemHostGetDevicePointer_v2(CUdeviceptr* address, void* pointer,
                                           unsigned int flags) {
  std::shared_ptr<Context> context;
  SIMGPU_RETURN_IF_ERROR(EnterContext(&context));
  const auto value = reinterpret_cast<uint64_t>(pointer);
  const auto found = state()->memory.Find(value);
  if (address == nullptr || flags != 0 || found == nullptr || !found->host_accessible()) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  *address = value;
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT cuMemHostGetFlags(unsigned int* flags, void* pointer) {
  std::shared_ptr<Context> context;
  SIMGPU_RETURN_IF_ERROR(EnterContext(&context));
  const auto found = state()->memory.Find(reinterpret_cast<uint64_t>(pointer));
  if (flags == nullptr || found == nullptr || found->kind != MemoryKind::kHost) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  *flags = found->flags;
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT cuMemGetAddressRange_v2(CUdeviceptr* base, size_t* bytes, CUdeviceptr address) {
  std::shared_ptr<Context> context;
  SIMGPU_RETURN_IF_ERROR(EnterContext(&context));
  const auto found = state()->memory.Find(address);
  if (found == nullptr) return CUDA_ERROR_NOT_FOUND;
  if (base != nullptr) *base = found->begin;
  if (bytes != nullptr) *bytes = found->bytes;
  return CUDA_SUCCESS;
}

// Managed memory here is one memory: advice and prefetching change nothing that can be seen.
SIMGPU_EXPORT cuMemAdvise_v2(CUdeviceptr address, size_t bytes, CUmem_advise, CUmemLocation) {
  std::shared_ptr<Context> context;
  SIMGPU_RETURN_IF_ERROR(EnterContext(&context));
  const auto found = state()->memory.FindRange(address, bytes);
  const bool managed = found != nullptr && found->managed();
  return managed ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

SIMGPU_EXPORT cuMemPrefetchAsync_v2(CUdeviceptr address, size_t bytes, CUmemLocation,
                                    unsigned int flags, CUstream handle) {
  std::shared_ptr<Stream> stream;
  std::shared_ptr<Context> context;
  SIMGPU_RETURN_IF_ERROR(ResolveStream(handle, &stream, &context));
  const auto found = state()->memory.FindRange(address, bytes);
  if (flags != 0 || found == nullptr || !found->managed()) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  context->Enqueue(stream, [] {});
  return CUDA_SUCCESS;
}
