// Primary contexts: one per device, with a handle that is known before it exists. References are
// counted here; the server hears of the first and of the last.
#include "commands.gen.h"
#include "custom_client.gen.h"
#include "interposer/core/call.h"
#include "interposer/core/client.h"

namespace penstock::interposer {
namespace {

ContextRecord& PrimaryOf(Call& call, int32_t wire) {
  return call.session().primary_contexts[wire];
}

}  // namespace

CUresult CuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  Call call(Function::kCuDevicePrimaryCtxRetain, Call::kInitialised);
  commands::CuDevicePrimaryCtxRetain command{};
  if (!call.ready() || !call.Device(device, &command.dev) || !call.Out(context)) {
    return call.result();
  }
  std::lock_guard lock(call.client().contexts_mutex());
  ContextRecord& record = PrimaryOf(call, command.dev);
  if (!record.active) {
    const CUresult result = call.Invoke(command);
    if (result != CUDA_SUCCESS) return result;
    record.sticky = CUDA_SUCCESS;
    record.uploads_posted = 0;
    record.others_posted = 0;
    record.non_blocking_streams = 0;
    record.legacy.issued = 0;
    record.legacy.finished = 0;
    record.active = true;
  }
  ++record.retains;
  *context = reinterpret_cast<CUcontext>(record.handle.bits);
  return CUDA_SUCCESS;
}

CUresult CuDevicePrimaryCtxRelease(CUdevice device) {
  Call call(Function::kCuDevicePrimaryCtxRelease, Call::kInitialised);
  commands::CuDevicePrimaryCtxRelease command{};
  if (!call.ready() || !call.Device(device, &command.dev) || !call.Permitted()) {
    return call.result();
  }
  std::unique_lock lock(call.client().contexts_mutex());
  ContextRecord& record = PrimaryOf(call, command.dev);
  if (record.retains == 0) return CUDA_ERROR_INVALID_CONTEXT;
  if (--record.retains > 0 || !record.active) return CUDA_SUCCESS;
  call.session().host_functions().Drain(record);
  // Output of kernels appears when their context ends. Where there can be none, nobody needs to
  // wait: NVIDIA's runtime releases the context as the program exits.
  const bool wait = record.launched.exchange(false);
  const CUresult result = wait ? call.Invoke(command) : call.Post(command);
  record.active = false;
  lock.unlock();
  call.client().DropContext(record);
  return result;
}

// Destroys what the context holds, whoever retains it; those keep their references.
CUresult CuDevicePrimaryCtxReset(CUdevice device) {
  Call call(Function::kCuDevicePrimaryCtxReset, Call::kInitialised);
  commands::CuDevicePrimaryCtxReset command{};
  if (!call.ready() || !call.Device(device, &command.dev) || !call.Permitted()) {
    return call.result();
  }
  std::unique_lock lock(call.client().contexts_mutex());
  ContextRecord& record = PrimaryOf(call, command.dev);
  if (record.active) call.session().host_functions().Drain(record);
  if (!record.active.exchange(false)) return CUDA_SUCCESS;
  const CUresult result = call.Invoke(command);
  lock.unlock();
  call.client().DropContext(record);
  return result;
}

CUresult CuDevicePrimaryCtxSetFlags(CUdevice device, unsigned int flags) {
  Call call(Function::kCuDevicePrimaryCtxSetFlags, Call::kInitialised);
  int32_t wire = 0;
  if (!call.ready() || !call.Device(device, &wire)) return call.result();
  if ((flags & ~static_cast<unsigned>(CU_CTX_FLAGS_MASK)) != 0) return CUDA_ERROR_INVALID_VALUE;
  // How the server's threads wait is its own choice; the flags are kept for those who ask.
  PrimaryOf(call, wire).flags = flags;
  return CUDA_SUCCESS;
}

CUresult CuDevicePrimaryCtxGetState(CUdevice device, unsigned int* flags, int* active) {
  Call call(Function::kCuDevicePrimaryCtxGetState, Call::kInitialised);
  int32_t wire = 0;
  if (!call.ready() || !call.Device(device, &wire) || !call.Out(flags) || !call.Out(active)) {
    return call.result();
  }
  const ContextRecord& record = PrimaryOf(call, wire);
  *flags = record.flags;
  *active = record.active ? 1 : 0;
  return CUDA_SUCCESS;
}

}  // namespace penstock::interposer
