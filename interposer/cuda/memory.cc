// Device memory. Addresses are the server's own; each allocation's range is reserved here too
// (address_plan.h), and one whose range is taken in this process is exchanged for another.
#include <vector>

#include "commands.gen.h"
#include "common/log.h"
#include "custom_client.gen.h"
#include "interposer/core/call.h"
#include "interposer/core/client.h"

namespace penstock::interposer {
namespace {

// A collision is rare (the two address spaces would have to agree by chance); repeated ones mean
// that something is systematically in the way.
constexpr int kTries = 8;
// Servers with the same driver give the same addresses, so what one has given the others avoid.
constexpr int kTriesAmongServers = 64;

// Removes an allocation from the plan; the call goes where it lies.
bool Take(Call& call, CUdeviceptr address, ContextRecord** owner) {
  AddressPlan& plan = call.objects().plan;
  const auto found = plan.FindDevice(address, call.session().index());
  if (!found.has_value() || found->base != address || found->module_global) {
    return call.Refuse(CUDA_ERROR_INVALID_VALUE);
  }
  *owner = found->context;
  // Of two threads that free it, one does.
  return call.Bind(found->context, CUDA_ERROR_INVALID_VALUE) &&
         (plan.RemoveDevice(address).has_value() || call.Refuse(CUDA_ERROR_INVALID_VALUE));
}

void PostFree(Call& call, CUdeviceptr address) {
  commands::CuMemFree command{};
  command.dptr = address;
  call.Post(command);
}

// allocate() asks the server once: the result, with base and bytes of what it gave.
template <typename Allocate>
CUresult AllocateReserved(Call& call, bool pooled, CUdeviceptr* base, Allocate allocate) {
  // Kept until the end, so that the server cannot give the same address again.
  std::vector<CUdeviceptr> collided;
  CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
  const size_t tries = call.client().sessions().size() > 1 ? kTriesAmongServers : kTries;
  for (size_t i = 0; i < tries; ++i) {
    uint64_t bytes = 0;
    result = allocate(base, &bytes);
    if (result != CUDA_SUCCESS) break;
    if (call.objects().plan.AddDevice(*base, bytes, &call.context(), pooled)) break;
    LOG_INFO("memory",
             "The server's allocation (0x%llx, %llu bytes) lies where this program has memory "
             "already; asking for another.",
             *base, static_cast<unsigned long long>(bytes));
    collided.push_back(*base);
    result = CUDA_ERROR_OUT_OF_MEMORY;
  }
  for (const CUdeviceptr address : collided) PostFree(call, address);
  if (collided.size() == tries) {
    LOG_ERROR("memory",
              "No allocation of the server fits the addresses of this program (%zu tries).", tries);
  }
  return result;
}

CUresult AllocatePooled(Call& call, CUdeviceptr* result, size_t bytes, uint64_t stream,
                        uint64_t pool) {
  CUdeviceptr base = 0;
  const CUresult allocated =
      AllocateReserved(call, true, &base, [&](CUdeviceptr* address, uint64_t* got_bytes) {
        *got_bytes = bytes;
        CUresult outcome;
        if (pool == 0) {
          commands::CuMemAllocAsync command{};
          command.bytesize = bytes;
          command.hStream = stream;
          commands::CuMemAllocAsyncReply reply{};
          outcome = call.Invoke(command, &reply);
          *address = reply.dptr;
        } else {
          commands::CuMemAllocFromPoolAsync command{};
          command.bytesize = bytes;
          command.pool = pool;
          command.hStream = stream;
          commands::CuMemAllocFromPoolAsyncReply reply{};
          outcome = call.Invoke(command, &reply);
          *address = reply.dptr;
        }
        return outcome;
      });
  if (allocated == CUDA_SUCCESS) *result = base;
  return allocated;
}

bool IsFlagAttribute(CUmemPool_attribute attribute) {
  return attribute == CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES ||
         attribute == CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC ||
         attribute == CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES;
}

}  // namespace

CUresult CuMemGetInfo(size_t* free, size_t* total) {
  Call call(Function::kCuMemGetInfo, Call::kContext);
  if (!call.ready() || !call.Out(free) || !call.Out(total)) return call.result();
  commands::CuMemGetInfoReply reply{};
  const CUresult result = call.Invoke(commands::CuMemGetInfo{}, &reply);
  if (result != CUDA_SUCCESS) return result;
  *free = reply.free;
  *total = reply.total;
  return CUDA_SUCCESS;
}

CUresult CuMemAlloc(CUdeviceptr* address, size_t bytes) {
  Call call(Function::kCuMemAlloc, Call::kContext);
  if (!call.ready() || !call.Out(address)) return call.result();
  if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  CUdeviceptr base = 0;
  const CUresult result =
      AllocateReserved(call, false, &base, [&](CUdeviceptr* got, uint64_t* got_bytes) {
        commands::CuMemAlloc command{};
        command.bytesize = bytes;
        commands::CuMemAllocReply reply{};
        const CUresult outcome = call.Invoke(command, &reply);
        *got = reply.dptr;
        *got_bytes = bytes;
        return outcome;
      });
  if (result == CUDA_SUCCESS) *address = base;
  return result;
}

CUresult CuMemAllocPitch(CUdeviceptr* address, size_t* pitch, size_t width, size_t height,
                         unsigned int element_bytes) {
  Call call(Function::kCuMemAllocPitch, Call::kContext);
  if (!call.ready() || !call.Out(address) || !call.Out(pitch)) return call.result();
  if (width == 0 || height == 0 ||
      (element_bytes != 4 && element_bytes != 8 && element_bytes != 16)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  CUdeviceptr base = 0;
  const CUresult result =
      AllocateReserved(call, false, &base, [&](CUdeviceptr* got, uint64_t* got_bytes) {
        commands::CuMemAllocPitch command{};
        command.WidthInBytes = width;
        command.Height = height;
        command.ElementSizeBytes = element_bytes;
        commands::CuMemAllocPitchReply reply{};
        CUresult outcome = call.Invoke(command, &reply);
        *got = reply.dptr;
        *pitch = reply.pPitch;
        if (outcome == CUDA_SUCCESS && __builtin_mul_overflow(reply.pPitch, height, got_bytes)) {
          outcome = CUDA_ERROR_UNKNOWN;
        }
        return outcome;
      });
  if (result == CUDA_SUCCESS) *address = base;
  return result;
}

CUresult CuMemFree(CUdeviceptr address) {
  Call call(Function::kCuMemFree, Call::kContext);
  if (!call.ready()) return call.result();
  if (address == 0) return CUDA_SUCCESS;
  ContextRecord* owner = nullptr;
  if (!Take(call, address, &owner)) return call.result();
  // With a local driver a free waits for the context, and programs have come to read pinned memory
  // after it that a download before it fills. Where none is under way nobody can tell the
  // difference.
  CUresult waited = CUDA_SUCCESS;
  if (!call.DownloadsDone(*owner)) {
    waited = call.Invoke(commands::CuCtxSynchronize_v2{owner->wire.bits});
  }
  commands::CuMemFree command{};
  command.dptr = address;
  const CUresult freed = call.Post(command);
  return waited != CUDA_SUCCESS ? waited : freed;
}

CUresult CuMemGetAddressRange(CUdeviceptr* base, size_t* bytes, CUdeviceptr address) {
  Call call(Function::kCuMemGetAddressRange, Call::kContext);
  if (!call.ready()) return call.result();
  const auto allocation = call.objects().plan.FindDevice(address, call.session().index());
  if (!allocation.has_value()) return CUDA_ERROR_NOT_FOUND;
  if (base != nullptr) *base = allocation->base;
  if (bytes != nullptr) *bytes = allocation->bytes;
  return CUDA_SUCCESS;
}

// --- Stream-ordered allocations -----------------------------------------------------------------

CUresult CuMemAllocAsync(CUdeviceptr* address, size_t bytes, CUstream stream, bool per_thread) {
  Call call(Function::kCuMemAllocAsync, Call::kContext);
  uint64_t wire = 0;
  if (!call.ready() || !call.Out(address) || !call.Stream(stream, per_thread, &wire)) {
    return call.result();
  }
  return AllocatePooled(call, address, bytes, wire, 0);
}

CUresult CuMemAllocFromPoolAsync(CUdeviceptr* address, size_t bytes, CUmemoryPool pool,
                                 CUstream stream, bool per_thread) {
  Call call(Function::kCuMemAllocFromPoolAsync, Call::kContext);
  uint64_t wire_stream = 0, wire_pool = 0;
  if (!call.ready() || !call.Out(address) || !call.MemoryPool(pool, &wire_pool) ||
      !call.Stream(stream, per_thread, &wire_stream)) {
    return call.result();
  }
  return AllocatePooled(call, address, bytes, wire_stream, wire_pool);
}

CUresult CuMemFreeAsync(CUdeviceptr address, CUstream stream, bool per_thread) {
  Call call(Function::kCuMemFreeAsync, Call::kContext);
  commands::CuMemFreeAsync command{};
  if (!call.ready() || !call.Stream(stream, per_thread, &command.hStream)) return call.result();
  if (address == 0) return CUDA_SUCCESS;
  ContextRecord* owner = nullptr;
  if (!Take(call, address, &owner)) return call.result();
  command.dptr = address;
  return call.Post(command, {}, 1);
}

CUresult CuMemPoolSetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute, void* value) {
  Call call(Function::kCuMemPoolSetAttribute, Call::kInitialised);
  commands::CuMemPoolSetAttribute command{};
  if (!call.ready() || !call.Out(value) || !call.MemoryPool(pool, &command.pool)) {
    return call.result();
  }
  command.attribute = attribute;
  command.value = IsFlagAttribute(attribute) ? static_cast<uint64_t>(*static_cast<int*>(value))
                                             : *static_cast<cuuint64_t*>(value);
  return call.Invoke(command);
}

CUresult CuMemPoolGetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute, void* value) {
  Call call(Function::kCuMemPoolGetAttribute, Call::kInitialised);
  commands::CuMemPoolGetAttribute command{};
  if (!call.ready() || !call.Out(value) || !call.MemoryPool(pool, &command.pool)) {
    return call.result();
  }
  command.attribute = attribute;
  commands::CuMemPoolGetAttributeReply reply{};
  const CUresult result = call.Invoke(command, &reply);
  if (result != CUDA_SUCCESS) return result;
  if (IsFlagAttribute(attribute)) {
    *static_cast<int*>(value) = static_cast<int>(reply.value);
  } else {
    *static_cast<cuuint64_t*>(value) = reply.value;
  }
  return CUDA_SUCCESS;
}

}  // namespace penstock::interposer
