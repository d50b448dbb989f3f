// Functions of the program in a stream: core/host_functions.h.
#include "custom_client.gen.h"
#include "interposer/core/call.h"
#include "interposer/core/client.h"

namespace penstock::interposer {
namespace {

CUresult Enqueue(Call& call, HostFunction function, bool per_thread) {
  HostFunctionCommand command{};
  if (!call.Stream(function.stream, per_thread, &command.stream)) return call.result();
  if (!call.session().options().host_functions) return CUDA_ERROR_NOT_SUPPORTED;
  function.context = call.stream()->context;
  HostFunctions& functions = call.session().host_functions();
  command.id = functions.Add(function);
  if (command.id == 0) {
    const CUresult state = call.session().state();
    return state != CUDA_SUCCESS ? state : CUDA_ERROR_OUT_OF_MEMORY;
  }
  const CUresult result = call.PostBytes(static_cast<uint32_t>(Operation::kHostFunction), &command,
                                         sizeof command, {}, kHostFunctionCost);
  if (result != CUDA_SUCCESS) functions.Forget(command.id);
  return result;
}

}  // namespace

CUresult CuLaunchHostFunc(CUstream stream, CUhostFn function, void* user, bool per_thread) {
  Call call(Function::kCuLaunchHostFunc, Call::kContext);
  if (!call.ready()) return call.result();
  if (function == nullptr) return CUDA_ERROR_INVALID_VALUE;
  HostFunction entry;
  entry.function = function;
  entry.stream = stream;
  entry.user = user;
  return Enqueue(call, entry, per_thread);
}

CUresult CuStreamAddCallback(CUstream stream, CUstreamCallback callback, void* user,
                             unsigned int flags, bool per_thread) {
  Call call(Function::kCuStreamAddCallback, Call::kContext);
  if (!call.ready()) return call.result();
  if (callback == nullptr || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  HostFunction entry;
  entry.callback = callback;
  entry.stream = stream;
  entry.user = user;
  return Enqueue(call, entry, per_thread);
}

}  // namespace penstock::interposer
