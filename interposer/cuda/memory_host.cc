// Pinned host memory: memory of this process that is registered with the transport, so that copies
// go between it and the device without passing through other buffers here.
//
// Kernels cannot read it (the attribute CAN_MAP_HOST_MEMORY is 0), so there is no device address to
// give.
#include <sys/mman.h>
#include <unistd.h>

#include "commands.gen.h"
#include "common/log.h"
#include "custom_client.gen.h"
#include "interposer/core/call.h"
#include "interposer/core/client.h"

namespace penstock::interposer {
namespace {

CUresult Allocate(Call& call, void** result, size_t bytes, unsigned flags) {
  if (!call.ready() || !call.Out(result)) return call.result();
  constexpr unsigned kKnown =
      CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP | CU_MEMHOSTALLOC_WRITECOMBINED;
  if (bytes == 0 || (flags & ~kKnown) != 0) return CUDA_ERROR_INVALID_VALUE;
  auto region = call.session().connection().Allocate(bytes, transport::Access::kPeerReadsAndWrites);
  if (!region) {
    LOG_ERROR("memory", "Cannot make pinned memory (%zu bytes): %s", bytes,
              region.error().message.c_str());
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  auto allocation = std::make_shared<HostAllocation>();
  allocation->base = (*region)->address();
  allocation->bytes = bytes;
  allocation->flags = flags;
  allocation->context = &call.context();
  allocation->first_server = call.session().index();
  allocation->regions[allocation->first_server] = region->release();
  *result = allocation->base;
  call.objects().plan.AddHost(std::move(allocation));
  return CUDA_SUCCESS;
}

// Copies that were posted from or to this memory must be over before it goes: the program may do
// anything with it then.
void WaitForUses(Call& call, HostAllocation& allocation) {
  OutgoingCall origin;
  origin.thread = call.thread().index;
  for (const HostAllocation::Use& use : call.objects().plan.TakeUses(allocation)) {
    Session& session = *use.context->session;
    if (use.orphan && use.context->active) {
      // Nobody tells of a stream that was destroyed meanwhile, but its context waits for it.
      OutgoingCall wait;
      wait.thread = kMaxThreads - 1;  // posts nothing, so that no error is taken from this one
      const commands::CuCtxSynchronize_v2 command{use.context->wire.bits};
      wait.function = command.kFunction;
      wait.context = command.ctx;
      wait.command = &command;
      wait.command_bytes = sizeof command;
      ReplyWaiter waiter;
      session.Invoke(wait, &waiter);
    } else if (use.stream->handle == use.stream_handle) {  // else it ended with its work done
      session.WaitForProgress(origin, use.stream, use.value);
    }
  }
}

// True if every page of the range is mapped. msync with MS_ASYNC does nothing else.
bool IsMapped(const void* memory, size_t bytes) {
  const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t begin = reinterpret_cast<uintptr_t>(memory) & ~(page - 1);
  uintptr_t end;
  if (__builtin_add_overflow(reinterpret_cast<uintptr_t>(memory), bytes, &end)) return false;
  return msync(reinterpret_cast<void*>(begin), end - begin, MS_ASYNC) == 0;
}

}  // namespace

CUresult CuMemAllocHost(void** memory, size_t bytes) {
  Call call(Function::kCuMemAllocHost, Call::kContext);
  return Allocate(call, memory, bytes, 0);
}

CUresult CuMemHostAlloc(void** memory, size_t bytes, unsigned int flags) {
  Call call(Function::kCuMemHostAlloc, Call::kContext);
  return Allocate(call, memory, bytes, flags);
}

CUresult CuMemFreeHost(void* memory) {
  Call call(Function::kCuMemFreeHost, Call::kInitialised);
  if (!call.ready()) return call.result();
  if (memory == nullptr) return CUDA_SUCCESS;
  AddressPlan& plan = call.objects().plan;
  const auto found = plan.FindHost(memory);
  if (found == nullptr || found->base != memory || found->registered) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  WaitForUses(call, *found);
  const auto allocation = plan.RemoveHost(memory);
  if (allocation == nullptr) return CUDA_ERROR_INVALID_VALUE;
  allocation->DropRegions();  // and the memory with it
  return CUDA_SUCCESS;
}

CUresult CuMemHostRegister(void* memory, size_t bytes, unsigned int flags) {
  Call call(Function::kCuMemHostRegister, Call::kContext);
  if (!call.ready() || !call.Out(memory)) return call.result();
  constexpr unsigned kKnown = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP |
                              CU_MEMHOSTREGISTER_IOMEMORY | CU_MEMHOSTREGISTER_READ_ONLY;
  if (bytes == 0 || (flags & ~kKnown) != 0) return CUDA_ERROR_INVALID_VALUE;
  if ((flags & (CU_MEMHOSTREGISTER_IOMEMORY | CU_MEMHOSTREGISTER_READ_ONLY)) != 0) {
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  if (!IsMapped(memory, bytes)) return CUDA_ERROR_INVALID_VALUE;
  auto region =
      call.session().connection().Register(memory, bytes, transport::Access::kPeerReadsAndWrites);
  if (!region) {
    LOG_ERROR("memory", "Cannot register host memory (%p, %zu bytes): %s", memory, bytes,
              region.error().message.c_str());
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  auto allocation = std::make_shared<HostAllocation>();
  allocation->base = static_cast<std::byte*>(memory);
  allocation->bytes = bytes;
  allocation->flags = flags;
  allocation->registered = true;
  allocation->context = &call.context();
  allocation->first_server = call.session().index();
  allocation->regions[allocation->first_server] = region->release();
  return call.objects().plan.AddHost(std::move(allocation))
             ? CUDA_SUCCESS
             : CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
}

CUresult CuMemHostUnregister(void* memory) {
  Call call(Function::kCuMemHostUnregister, Call::kInitialised);
  if (!call.ready() || !call.Out(memory)) return call.result();
  AddressPlan& plan = call.objects().plan;
  const auto found = plan.FindHost(memory);
  if (found == nullptr || found->base != memory || !found->registered) {
    return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
  }
  WaitForUses(call, *found);
  const auto allocation = plan.RemoveHost(memory);
  if (allocation == nullptr) return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
  allocation->DropRegions();
  return CUDA_SUCCESS;
}

CUresult CuMemHostGetDevicePointer(CUdeviceptr* address, void* memory, unsigned int flags) {
  Call call(Function::kCuMemHostGetDevicePointer, Call::kContext);
  if (!call.ready() || !call.Out(address)) return call.result();
  if (flags != 0 || call.objects().plan.FindHost(memory) == nullptr) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  LOG_WARNING("memory",
              "Kernels cannot use host memory of another machine: cuMemHostGetDevicePointer gives "
              "CUDA_ERROR_NOT_SUPPORTED.");
  return CUDA_ERROR_NOT_SUPPORTED;
}

CUresult CuMemHostGetFlags(unsigned int* flags, void* memory) {
  Call call(Function::kCuMemHostGetFlags, Call::kInitialised);
  if (!call.ready() || !call.Out(flags)) return call.result();
  const auto allocation = call.objects().plan.FindHost(memory);
  if (allocation == nullptr || allocation->registered) return CUDA_ERROR_INVALID_VALUE;
  *flags = allocation->flags;
  return CUDA_SUCCESS;
}

}  // namespace penstock::interposer
