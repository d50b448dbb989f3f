// Contexts. Which one is current is state of the thread and stays in the client; creating and
// destroying are calls.
#include "commands.gen.h"
#include "custom_client.gen.h"
#include "interposer/core/call.h"
#include "interposer/core/client.h"

namespace penstock::interposer {
namespace {

// The reported version of the context API, as of every driver since CUDA 3.2.
constexpr unsigned kApiVersion = 3020;
constexpr unsigned kContextFlags = CU_CTX_FLAGS_MASK;

Handle HandleOf(CUcontext context) {
  return Handle{reinterpret_cast<uint64_t>(context)};
}
CUcontext ContextOf(Handle handle) {
  return reinterpret_cast<CUcontext>(handle.bits);
}

// The named context, or the current one for null.
ContextRecord* Find(Call& call, CUcontext context) {
  if (!call.ready()) return nullptr;
  Handle handle = HandleOf(context);
  if (context == nullptr) {
    handle = call.thread().current();
    if (handle.null()) {
      call.Refuse(CUDA_ERROR_INVALID_CONTEXT);
      return nullptr;
    }
  }
  ContextRecord* const record = call.client().FindContext(handle);
  if (record == nullptr) {
    call.Refuse(context == nullptr ? CUDA_ERROR_CONTEXT_IS_DESTROYED : CUDA_ERROR_INVALID_CONTEXT);
  }
  return record;
}

CUresult Create(Call& call, CUcontext* result, unsigned flags, CUdevice device) {
  commands::CuCtxCreate command{};
  if (!call.ready() || !call.Out(result) || !call.Device(device, &command.dev) ||
      !call.Permitted()) {
    return call.result();
  }
  if ((flags & ~kContextFlags) != 0) return CUDA_ERROR_INVALID_VALUE;
  ContextRecord* const context =
      call.objects().contexts.Mint([&](ContextRecord& record, Handle handle) {
        record.wire = handle;
        record.session = &call.session();
        record.server = call.session().index();
        record.device = static_cast<uint32_t>(device);
        record.flags = flags;
        record.id = handle.id() + kMaxDevices;
        record.legacy.handle = kLegacyStream;
        record.legacy.context = &record;
        record.legacy.id = record.id;
      });
  if (context == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
  command.pctx = context->handle.bits;
  command.flags = flags;
  const CUresult created = call.Invoke(command);
  if (created != CUDA_SUCCESS) {
    call.objects().contexts.Remove(context->handle);
    return created;
  }
  context->active = true;
  call.thread().contexts.push_back(context->handle);
  *result = ContextOf(context->handle);
  return CUDA_SUCCESS;
}

}  // namespace

CUresult CuCtxCreate(CUcontext* context, unsigned int flags, CUdevice device) {
  Call call(Function::kCuCtxCreate, Call::kInitialised);
  return Create(call, context, flags, device);
}

CUresult CuCtxCreate_v3(CUcontext* context, CUexecAffinityParam*, int affinities,
                        unsigned int flags, CUdevice device) {
  Call call(Function::kCuCtxCreate_v3, Call::kInitialised);
  if (!call.ready()) return call.result();
  if (affinities != 0) return CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY;
  return Create(call, context, flags, device);
}

CUresult CuCtxCreate_v4(CUcontext* context, CUctxCreateParams* parameters, unsigned int flags,
                        CUdevice device) {
  Call call(Function::kCuCtxCreate_v4, Call::kInitialised);
  if (!call.ready()) return call.result();
  if (parameters != nullptr) {
    if (parameters->numExecAffinityParams != 0) return CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY;
    if (parameters->cigParams != nullptr) return CUDA_ERROR_NOT_SUPPORTED;
  }
  return Create(call, context, flags, device);
}

CUresult CuCtxDestroy(CUcontext context) {
  Call call(Function::kCuCtxDestroy, Call::kInitialised);
  if (!call.ready() || !call.Permitted()) return call.result();
  ContextRecord* const record = call.objects().contexts.Find(HandleOf(context));
  if (record == nullptr) return CUDA_ERROR_INVALID_CONTEXT;  // primary ones are released instead
  record->session->host_functions().Drain(*record);
  commands::CuCtxDestroy command{};
  if (!call.Bind(record, CUDA_ERROR_INVALID_CONTEXT)) return call.result();
  command.ctx = record->wire.bits;
  const Handle handle = record->handle;
  // Of two threads that destroy it, one does.
  if (!record->active.exchange(false)) return CUDA_ERROR_INVALID_CONTEXT;
  std::vector<Handle>& stack = call.thread().contexts;
  if (!stack.empty() && stack.back() == handle) stack.pop_back();
  const CUresult result = call.Invoke(command);
  call.client().DropContext(*record);
  call.objects().contexts.Remove(handle);
  return result;
}

CUresult CuCtxPushCurrent(CUcontext context) {
  Call call(Function::kCuCtxPushCurrent, Call::kInitialised);
  if (!call.ready()) return call.result();
  if (call.client().FindContext(HandleOf(context)) == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  call.thread().contexts.push_back(HandleOf(context));
  return CUDA_SUCCESS;
}

CUresult CuCtxPopCurrent(CUcontext* context) {
  Call call(Function::kCuCtxPopCurrent, Call::kInitialised);
  if (!call.ready()) return call.result();
  std::vector<Handle>& stack = call.thread().contexts;
  if (stack.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  if (context != nullptr) *context = ContextOf(stack.back());
  stack.pop_back();
  return CUDA_SUCCESS;
}

// Replaces the top of the stack; null empties that place. NVIDIA's runtime sets a primary context
// before it retains it.
CUresult CuCtxSetCurrent(CUcontext context) {
  Call call(Function::kCuCtxSetCurrent, Call::kInitialised);
  if (!call.ready()) return call.result();
  std::vector<Handle>& stack = call.thread().contexts;
  if (context == nullptr) {
    if (!stack.empty()) stack.pop_back();
    return CUDA_SUCCESS;
  }
  if (call.client().FindContext(HandleOf(context)) == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  if (stack.empty()) {
    stack.push_back(HandleOf(context));
  } else {
    stack.back() = HandleOf(context);
  }
  return CUDA_SUCCESS;
}

CUresult CuCtxGetCurrent(CUcontext* context) {
  Call call(Function::kCuCtxGetCurrent, Call::kInitialised);
  if (!call.ready() || !call.Out(context)) return call.result();
  *context = ContextOf(call.thread().current());
  return CUDA_SUCCESS;
}

CUresult CuCtxGetDevice(CUdevice* device) {
  Call call(Function::kCuCtxGetDevice, Call::kInitialised);
  const ContextRecord* const record = Find(call, nullptr);
  if (record == nullptr || !call.Out(device)) return call.result();
  *device = static_cast<CUdevice>(record->device);
  return CUDA_SUCCESS;
}

CUresult CuCtxGetDevice_v2(CUdevice* device, CUcontext context) {
  Call call(Function::kCuCtxGetDevice_v2, Call::kInitialised);
  const ContextRecord* const record = Find(call, context);
  if (record == nullptr || !call.Out(device)) return call.result();
  *device = static_cast<CUdevice>(record->device);
  return CUDA_SUCCESS;
}

CUresult CuCtxGetFlags(unsigned int* flags) {
  Call call(Function::kCuCtxGetFlags, Call::kInitialised);
  const ContextRecord* const record = Find(call, nullptr);
  if (record == nullptr || !call.Out(flags)) return call.result();
  *flags = record->flags;
  return CUDA_SUCCESS;
}

CUresult CuCtxSetFlags(unsigned int flags) {
  Call call(Function::kCuCtxSetFlags, Call::kInitialised);
  ContextRecord* const record = Find(call, nullptr);
  if (record == nullptr) return call.result();
  if ((flags & ~kContextFlags) != 0) return CUDA_ERROR_INVALID_VALUE;
  record->flags = flags;
  return CUDA_SUCCESS;
}

CUresult CuCtxGetId(CUcontext context, unsigned long long* id) {
  Call call(Function::kCuCtxGetId, Call::kInitialised);
  const ContextRecord* const record = Find(call, context);
  if (record == nullptr || !call.Out(id)) return call.result();
  *id = record->id;
  return CUDA_SUCCESS;
}

// Preferences that a driver may ignore: remembered, so that reading gives what was set. The server
// does not need them, as functions carry their own.
CUresult CuCtxGetCacheConfig(CUfunc_cache* config) {
  Call call(Function::kCuCtxGetCacheConfig, Call::kContext);
  if (!call.ready() || !call.Out(config)) return call.result();
  *config = static_cast<CUfunc_cache>(call.context().cache_config.load());
  return CUDA_SUCCESS;
}

CUresult CuCtxSetCacheConfig(CUfunc_cache config) {
  Call call(Function::kCuCtxSetCacheConfig, Call::kContext);
  if (!call.ready()) return call.result();
  if (config < CU_FUNC_CACHE_PREFER_NONE || config > CU_FUNC_CACHE_PREFER_EQUAL) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  call.context().cache_config = config;
  return CUDA_SUCCESS;
}

CUresult CuCtxGetSharedMemConfig(CUsharedconfig* config) {
  Call call(Function::kCuCtxGetSharedMemConfig, Call::kContext);
  if (!call.ready() || !call.Out(config)) return call.result();
  *config = static_cast<CUsharedconfig>(call.context().shared_config.load());
  return CUDA_SUCCESS;
}

CUresult CuCtxSetSharedMemConfig(CUsharedconfig config) {
  Call call(Function::kCuCtxSetSharedMemConfig, Call::kContext);
  if (!call.ready()) return call.result();
  if (config > CU_SHARED_MEM_CONFIG_EIGHT_BYTE_BANK_SIZE) return CUDA_ERROR_INVALID_VALUE;
  call.context().shared_config = config;
  return CUDA_SUCCESS;
}

CUresult CuCtxGetApiVersion(CUcontext context, unsigned int* version) {
  Call call(Function::kCuCtxGetApiVersion, Call::kInitialised);
  const ContextRecord* const record = Find(call, context);
  if (record == nullptr || !call.Out(version)) return call.result();
  *version = kApiVersion;
  return CUDA_SUCCESS;
}

CUresult CuCtxGetStreamPriorityRange(int* least, int* greatest) {
  Call call(Function::kCuCtxGetStreamPriorityRange, Call::kContext);
  if (!call.ready()) return call.result();
  const Device& device = *call.client().FindDevice(static_cast<CUdevice>(call.context().device));
  if (least != nullptr) *least = device.info.least_priority;
  if (greatest != nullptr) *greatest = device.info.greatest_priority;
  return CUDA_SUCCESS;
}

}  // namespace penstock::interposer
