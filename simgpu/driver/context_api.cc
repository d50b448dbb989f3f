// cuCtx* and cuDevicePrimaryCtx*. The current context is a matter of the calling thread; the calls
// about it work without touching the device.
#include "interop/export_tables.h"
#include "simgpu/driver/entry.h"
#include "simgpu/driver/log.h"

// cuda.h maps these names to their newest versions; here the old exports are defined as well.
#undef cuCtxDestroy
#undef cuCtxPopCurrent
#undef cuCtxPushCurrent
#undef cuCtxGetDevice
#undef cuCtxSynchronize
#undef cuDevicePrimaryCtxRelease
#undef cuDevicePrimaryCtxReset
#undef cuDevicePrimaryCtxSetFlags

using namespace simgpu;

namespace {

constexpr unsigned kApiVersion = 13000;

CUresult CheckFlags(unsigned flags) {
  const unsigned schedule = flags & CU_CTX_SCHED_MASK;
  const bool known = (flags & ~static_cast<unsigned>(CU_CTX_FLAGS_MASK)) == 0 &&
                     (schedule == CU_CTX_SCHED_AUTO || schedule == CU_CTX_SCHED_SPIN ||
                      schedule == CU_CTX_SCHED_YIELD || schedule == CU_CTX_SCHED_BLOCKING_SYNC);
  return known ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult Create(CUcontext* handle, unsigned flags, CUdevice number) {
  Device* device = nullptr;
  SIMGPU_RETURN_IF_ERROR(FindDevice(number, &device));
  if (handle == nullptr) return CUDA_ERROR_INVALID_VALUE;
  SIMGPU_RETURN_IF_ERROR(CheckFlags(flags));
  auto context = std::make_shared<Context>(device, /*primary=*/false, flags);
  const CUcontext created = state()->contexts.Insert(context);
  context->set_handle(created);
  if (!PushHandle(created)) {
    state()->contexts.Remove(created);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  *handle = created;
  return CUDA_SUCCESS;
}

void Deactivate(Device* device) {
  const std::shared_ptr<Context> context = std::move(device->primary_context);
  device->primary_context = nullptr;
  if (context == nullptr) return;
  state()->contexts.Remove(device->primary_handle);
  context->Destroy();
}

// A context argument that may be null for the current one.
CUresult FindOrCurrent(CUcontext handle, std::shared_ptr<Context>* context) {
  if (handle == nullptr) return EnterFailedContext(context);
  SIMGPU_RETURN_IF_ERROR(Enter());
  return FindContext(handle, context);
}

}  // namespace

SIMGPU_EXPORT cuCtxCreate_v2(CUcontext* handle, unsigned int flags, CUdevice device) {
  return Create(handle, flags, device);
}

SIMGPU_EXPORT cuCtxCreate_v3(CUcontext* handle, CUexecAffinityParam*, int parameters,
                             unsigned int flags, CUdevice device) {
  SIMGPU_RETURN_IF_ERROR(Enter());
  if (parameters != 0) return CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY;
  return Create(handle, flags, device);
}

SIMGPU_EXPORT cuCtxCreate_v4(CUcontext* handle, CUctxCreateParams* parameters, unsigned int flags,
                             CUdevice device) {
  SIMGPU_RETURN_IF_ERROR(Enter());
  if (parameters != nullptr && parameters->numExecAffinityParams != 0) {
    return CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY;
  }
  if (parameters != nullptr && parameters->cigParams != nullptr) return CUDA_ERROR_NOT_SUPPORTED;
  return Create(handle, flags, device);
}

SIMGPU_EXPORT cuCtxDestroy_v2(CUcontext handle) {
  SIMGPU_RETURN_IF_ERROR(Enter());
  if (OnWorkerThread()) return CUDA_ERROR_NOT_PERMITTED;
  std::shared_ptr<Context> context;
  const CUresult found = FindContext(handle, &context);
  if (found == CUDA_ERROR_CONTEXT_IS_DESTROYED || (context != nullptr && context->primary())) {
    return CUDA_ERROR_INVALID_CONTEXT;
  }
  if (found != CUDA_SUCCESS) return CUDA_ERROR_INVALID_CONTEXT;
  if (state()->contexts.Remove(handle) == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  CUcontext popped = nullptr;
  if (CurrentHandle() == handle) PopHandle(&popped);
  penstock::interop::DropContext(handle);
  context->Destroy();
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT cuCtxDestroy(CUcontext handle) {
  return cuCtxDestroy_v2(handle);
}

SIMGPU_EXPORT cuCtxPushCurrent_v2(CUcontext handle) {
  SIMGPU_RETURN_IF_ERROR(Enter());
  if (handle == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  std::shared_ptr<Context> context;
  if (FindContext(handle, &context) == CUDA_ERROR_INVALID_CONTEXT) {
    return CUDA_ERROR_INVALID_CONTEXT;
  }
  return PushHandle(handle) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

SIMGPU_EXPORT cuCtxPushCurrent(CUcontext handle) {
  return cuCtxPushCurrent_v2(handle);
}

SIMGPU_EXPORT cuCtxPopCurrent_v2(CUcontext* handle) {
  SIMGPU_RETURN_IF_ERROR(Enter());
  CUcontext popped = nullptr;
  if (!PopHandle(&popped)) return CUDA_ERROR_INVALID_CONTEXT;
  if (handle != nullptr) *handle = popped;
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT cuCtxPopCurrent(CUcontext* handle) {
  return cuCtxPopCurrent_v2(handle);
}

SIMGPU_EXPORT cuCtxSetCurrent(CUcontext handle) {
  SIMGPU_RETURN_IF_ERROR(Enter());
  if (handle != nullptr) {
    // A primary context may be made current before it is active: the runtime does.
    std::shared_ptr<Context> context;
    if (FindContext(handle, &context) == CUDA_ERROR_INVALID_CONTEXT) {
      return CUDA_ERROR_INVALID_CONTEXT;
    }
  }
  SetCurrentHandle(handle);
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT cuCtxGetCurrent(CUcontext* handle) {
  SIMGPU_RETURN_IF_ERROR(Enter());
  if (handle == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *handle = CurrentHandle();
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT cuCtxGetDevice_v2(CUdevice* number, CUcontext handle) {
  SIMGPU_RETURN_IF_ERROR(Enter());
  if (number == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (handle == nullptr) handle = CurrentHandle();
  if (handle == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  for (const auto& device : state()->devices) {
    if (device->primary_handle == handle) {
      *number = device->ordinal;
      return CUDA_SUCCESS;
    }
  }
  std::shared_ptr<Context> context;
  SIMGPU_RETURN_IF_ERROR(FindContext(handle, &context));
  *number = context->device()->ordinal;
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT cuCtxGetDevice(CUdevice* number) {
  return cuCtxGetDevice_v2(number, nullptr);
}

SIMGPU_EXPORT cuCtxGetId(CUcontext handle, unsigned long long* id) {
  std::shared_ptr<Context> context;
  SIMGPU_RETURN_IF_ERROR(FindOrCurrent(handle, &context));
  if (id == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *id = context->id();
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT cuCtxGetFlags(unsigned int* flags) {
  std::shared_ptr<Context> context;
  SIMGPU_RETURN_IF_ERROR(EnterFailedContext(&context));
  if (flags == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *flags = context->flags();
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT cuCtxSetFlags(unsigned int flags) {
  std::shared_ptr<Context> context;
  SIMGPU_RETURN_IF_ERROR(EnterFailedContext(&context));
  SIMGPU_RETURN_IF_ERROR(CheckFlags(flags));
  context->set_flags(flags);
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT cuCtxGetApiVersion(CUcontext handle, unsigned int* version) {
  std::shared_ptr<Context> context;
  SIMGPU_RETURN_IF_ERROR(FindOrCurrent(handle, &context));
  if (version == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *version = kApiVersion;
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT cuCtxSynchronize() {
  std::shared_ptr<Context> context;
  SIMGPU_RETURN_IF_ERROR(EnterContext(&context));
  return context->Synchronise();
}

SIMGPU_EXPORT cuCtxSynchronize_v2(CUcontext handle) {
  std::shared_ptr<Context> context;
  SIMGPU_RETURN_IF_ERROR(FindOrCurrent(handle, &context));
  if (OnWorkerThread()) return CUDA_ERROR_NOT_PERMITTED;
  return context->Synchronise();
}

SIMGPU_EXPORT cuCtxGetLimit(size_t* value, CUlimit limit) {
  std::shared_ptr<Context> context;
  SIMGPU_RETURN_IF_ERROR(EnterContext(&context));
  if (value == nullptr || limit < 0 || limit >= CU_LIMIT_MAX) return CUDA_ERROR_INVALID_VALUE;
  return context->GetLimit(limit, value);
}

SIMGPU_EXPORT cuCtxSetLimit(CUlimit limit, size_t value) {
  std::shared_ptr<Context> context;
  SIMGPU_RETURN_IF_ERROR(EnterContext(&context));
  if (limit < 0 || limit >= CU_LIMIT_MAX) return CUDA_ERROR_INVALID_VALUE;
  return context->SetLimit(limit, value);
}

SIMGPU_EXPORT cuCtxGetCacheConfig(CUfunc_cache* config) {
  std::shared_ptr<Context> context;
  SIMGPU_RETURN_IF_ERROR(EnterContext(&context));
  if (config == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *config = static_cast<CUfunc_cache>(context->cache_config.load());
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT cuCtxSetCacheConfig(CUfunc_cache config) {
  std::shared_ptr<Context> context;
  SIMGPU_RETURN_IF_ERROR(EnterContext(&context));
  if (config < CU_FUNC_CACHE_PREFER_NONE || config > CU_FUNC_CACHE_PREFER_EQUAL) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  context->cache_config = config;
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT cuCtxGetSharedMemConfig(CUsharedconfig* config) {
  std::shared_ptr<Context> context;
  SIMGPU_RETURN_IF_ERROR(EnterContext(&context));
  if (config == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *config = static_cast<CUsharedconfig>(context->shared_config.load());
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT cuCtxSetSharedMemConfig(CUsharedconfig config) {
  std::shared_ptr<Context> context;
  SIMGPU_RETURN_IF_ERROR(EnterContext(&context));
  if (config < CU_SHARED_MEM_CONFIG_DEFAULT_BANK_SIZE ||
      config > CU_SHARED_MEM_CONFIG_EIGHT_BYTE_BANK_SIZE) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  context->shared_config = config;
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  std::shared_ptr<Context> context;
  SIMGPU_RETURN_IF_ERROR(EnterContext(&context));
  if (least != nullptr) *least = kLeastPriority;
  if (greatest != nullptr) *greatest = kGreatestPriority;
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT cuCtxResetPersistingL2Cache() {
  std::shared_ptr<Context> context;
  return EnterContext(&context);
}

SIMGPU_EXPORT cuCtxEnablePeerAccess(CUcontext handle, unsigned int flags) {
  std::shared_ptr<Context> context;
  SIMGPU_RETURN_IF_ERROR(EnterContext(&context));
  std::shared_ptr<Context> peer;
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  if (FindContext(handle, &peer) != CUDA_SUCCESS) return CUDA_ERROR_INVALID_CONTEXT;
  if (peer->device() == context->device()) return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
  return context->EnablePeer(peer);
}

SIMGPU_EXPORT cuCtxDisablePeerAccess(CUcontext handle) {
  std::shared_ptr<Context> context;
  SIMGPU_RETURN_IF_ERROR(EnterContext(&context));
  std::shared_ptr<Context> peer;
  if (FindContext(handle, &peer) != CUDA_SUCCESS) return CUDA_ERROR_INVALID_CONTEXT;
  return context->DisablePeer(peer);
}

SIMGPU_EXPORT cuDevicePrimaryCtxRetain(CUcontext* handle, CUdevice number) {
  Device* device = nullptr;
  SIMGPU_RETURN_IF_ERROR(FindDevice(number, &device));
  if (handle == nullptr) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard lock(device->primary_mutex);
  ActivatePrimary(device);
  ++device->primary_retains;
  *handle = device->primary_handle;
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT cuDevicePrimaryCtxRelease_v2(CUdevice number) {
  Device* device = nullptr;
  SIMGPU_RETURN_IF_ERROR(FindDevice(number, &device));
  if (OnWorkerThread()) return CUDA_ERROR_NOT_PERMITTED;
  std::lock_guard lock(device->primary_mutex);
  if (device->primary_retains == 0) return CUDA_ERROR_INVALID_CONTEXT;
  if (--device->primary_retains == 0) {
    penstock::interop::DropContext(device->primary_handle);
    Deactivate(device);
  }
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT cuDevicePrimaryCtxRelease(CUdevice number) {
  return cuDevicePrimaryCtxRelease_v2(number);
}

SIMGPU_EXPORT cuDevicePrimaryCtxReset_v2(CUdevice number) {
  Device* device = nullptr;
  SIMGPU_RETURN_IF_ERROR(FindDevice(number, &device));
  if (OnWorkerThread()) return CUDA_ERROR_NOT_PERMITTED;
  penstock::interop::DropContext(device->primary_handle);
  std::lock_guard lock(device->primary_mutex);
  // The count goes with the rest: whoever uses the context again retains it again.
  device->primary_retains = 0;
  Deactivate(device);
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT cuDevicePrimaryCtxReset(CUdevice number) {
  return cuDevicePrimaryCtxReset_v2(number);
}

SIMGPU_EXPORT cuDevicePrimaryCtxSetFlags_v2(CUdevice number, unsigned int flags) {
  Device* device = nullptr;
  SIMGPU_RETURN_IF_ERROR(FindDevice(number, &device));
  SIMGPU_RETURN_IF_ERROR(CheckFlags(flags));
  std::lock_guard lock(device->primary_mutex);
  device->primary_flags = flags;
  if (device->primary_context != nullptr) device->primary_context->set_flags(flags);
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT cuDevicePrimaryCtxSetFlags(CUdevice number, unsigned int flags) {
  return cuDevicePrimaryCtxSetFlags_v2(number, flags);
}

SIMGPU_EXPORT cuDevicePrimaryCtxGetState(CUdevice number, unsigned int* flags, int* active) {
  Device* device = nullptr;
  SIMGPU_RETURN_IF_ERROR(FindDevice(number, &device));
  if (flags == nullptr || active == nullptr) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard lock(device->primary_mutex);
  *flags = device->primary_flags;
  *active = device->primary_context != nullptr ? 1 : 0;
  return CUDA_SUCCESS;
}
