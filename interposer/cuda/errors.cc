// Names and texts of CUresult.
#include <algorithm>

#include "custom_client.gen.h"
#include "interposer/core/call.h"

namespace penstock::interposer {
namespace {

struct ErrorText {
  CUresult error;
  const char* name;
  const char* text;
};

#define PENSTOCK_ERROR(error, text) \
  { error, #error, text }
// In the order of values.
constexpr ErrorText kErrors[] = {
    PENSTOCK_ERROR(CUDA_SUCCESS, "no error"),
    PENSTOCK_ERROR(CUDA_ERROR_INVALID_VALUE, "invalid argument"),
    PENSTOCK_ERROR(CUDA_ERROR_OUT_OF_MEMORY, "out of memory"),
    PENSTOCK_ERROR(CUDA_ERROR_NOT_INITIALIZED, "initialization error"),
    PENSTOCK_ERROR(CUDA_ERROR_DEINITIALIZED, "driver shutting down"),
    PENSTOCK_ERROR(CUDA_ERROR_PROFILER_DISABLED,
                   "profiler disabled while using external profiling tool"),
    PENSTOCK_ERROR(CUDA_ERROR_PROFILER_NOT_INITIALIZED,
                   "profiler not initialized: call cudaProfilerInitialize()"),
    PENSTOCK_ERROR(CUDA_ERROR_PROFILER_ALREADY_STARTED, "profiler already started"),
    PENSTOCK_ERROR(CUDA_ERROR_PROFILER_ALREADY_STOPPED, "profiler already stopped"),
    PENSTOCK_ERROR(CUDA_ERROR_STUB_LIBRARY, "CUDA driver is a stub library"),
    PENSTOCK_ERROR(CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER, "API call requires a newer CUDA driver"),
    PENSTOCK_ERROR(CUDA_ERROR_DEVICE_UNAVAILABLE,
                   "CUDA-capable device(s) is/are busy or unavailable"),
    PENSTOCK_ERROR(CUDA_ERROR_NO_DEVICE, "no CUDA-capable device is detected"),
    PENSTOCK_ERROR(CUDA_ERROR_INVALID_DEVICE, "invalid device ordinal"),
    PENSTOCK_ERROR(CUDA_ERROR_DEVICE_NOT_LICENSED, "device doesn't have valid Grid license"),
    PENSTOCK_ERROR(CUDA_ERROR_INVALID_IMAGE, "device kernel image is invalid"),
    PENSTOCK_ERROR(CUDA_ERROR_INVALID_CONTEXT, "invalid device context"),
    PENSTOCK_ERROR(CUDA_ERROR_CONTEXT_ALREADY_CURRENT, "context already current"),
    PENSTOCK_ERROR(CUDA_ERROR_MAP_FAILED, "mapping of buffer object failed"),
    PENSTOCK_ERROR(CUDA_ERROR_UNMAP_FAILED, "unmapping of buffer object failed"),
    PENSTOCK_ERROR(CUDA_ERROR_ARRAY_IS_MAPPED, "array is mapped"),
    PENSTOCK_ERROR(CUDA_ERROR_ALREADY_MAPPED, "resource already mapped"),
    PENSTOCK_ERROR(CUDA_ERROR_NO_BINARY_FOR_GPU,
                   "no kernel image is available for execution on the device"),
    PENSTOCK_ERROR(CUDA_ERROR_ALREADY_ACQUIRED, "resource already acquired"),
    PENSTOCK_ERROR(CUDA_ERROR_NOT_MAPPED, "resource not mapped"),
    PENSTOCK_ERROR(CUDA_ERROR_NOT_MAPPED_AS_ARRAY, "resource not mapped as array"),
    PENSTOCK_ERROR(CUDA_ERROR_NOT_MAPPED_AS_POINTER, "resource not mapped as pointer"),
    PENSTOCK_ERROR(CUDA_ERROR_ECC_UNCORRECTABLE, "uncorrectable ECC error encountered"),
    PENSTOCK_ERROR(CUDA_ERROR_UNSUPPORTED_LIMIT, "limit is not supported on this architecture"),
    PENSTOCK_ERROR(CUDA_ERROR_CONTEXT_ALREADY_IN_USE,
                   "exclusive-thread device already in use by a different thread"),
    PENSTOCK_ERROR(CUDA_ERROR_PEER_ACCESS_UNSUPPORTED,
                   "peer access is not supported between these two devices"),
    PENSTOCK_ERROR(CUDA_ERROR_INVALID_PTX, "a PTX JIT compilation failed"),
    PENSTOCK_ERROR(CUDA_ERROR_INVALID_GRAPHICS_CONTEXT, "invalid OpenGL or DirectX context"),
    PENSTOCK_ERROR(CUDA_ERROR_NVLINK_UNCORRECTABLE,
                   "uncorrectable NVLink error detected during the execution"),
    PENSTOCK_ERROR(CUDA_ERROR_JIT_COMPILER_NOT_FOUND, "PTX JIT compiler library not found"),
    PENSTOCK_ERROR(CUDA_ERROR_UNSUPPORTED_PTX_VERSION,
                   "the provided PTX was compiled with an unsupported toolchain."),
    PENSTOCK_ERROR(CUDA_ERROR_JIT_COMPILATION_DISABLED, "PTX JIT compilation was disabled"),
    PENSTOCK_ERROR(CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY,
                   "the provided execution affinity is not supported"),
    PENSTOCK_ERROR(
        CUDA_ERROR_UNSUPPORTED_DEVSIDE_SYNC,
        "the operation cannot be performed on a device that lacks device-side synchronization"),
    PENSTOCK_ERROR(CUDA_ERROR_CONTAINED, "an error was contained to the process that caused it"),
    PENSTOCK_ERROR(CUDA_ERROR_INVALID_SOURCE, "device kernel image is invalid"),
    PENSTOCK_ERROR(CUDA_ERROR_FILE_NOT_FOUND, "file not found"),
    PENSTOCK_ERROR(CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND, "shared object symbol not found"),
    PENSTOCK_ERROR(CUDA_ERROR_SHARED_OBJECT_INIT_FAILED, "shared object initialization failed"),
    PENSTOCK_ERROR(CUDA_ERROR_OPERATING_SYSTEM,
                   "OS call failed or operation not supported on this OS"),
    PENSTOCK_ERROR(CUDA_ERROR_INVALID_HANDLE, "invalid resource handle"),
    PENSTOCK_ERROR(CUDA_ERROR_ILLEGAL_STATE,
                   "the operation cannot be performed in the present state"),
    PENSTOCK_ERROR(CUDA_ERROR_LOSSY_QUERY, "attempted introspection would be semantically lossy"),
    PENSTOCK_ERROR(CUDA_ERROR_NOT_FOUND, "named symbol not found"),
    PENSTOCK_ERROR(CUDA_ERROR_NOT_READY, "device not ready"),
    PENSTOCK_ERROR(CUDA_ERROR_ILLEGAL_ADDRESS, "an illegal memory access was encountered"),
    PENSTOCK_ERROR(CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, "too many resources requested for launch"),
    PENSTOCK_ERROR(CUDA_ERROR_LAUNCH_TIMEOUT, "the launch timed out and was terminated"),
    PENSTOCK_ERROR(CUDA_ERROR_LAUNCH_INCOMPATIBLE_TEXTURING,
                   "launch uses incompatible texturing mode"),
    PENSTOCK_ERROR(CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED, "peer access is already enabled"),
    PENSTOCK_ERROR(CUDA_ERROR_PEER_ACCESS_NOT_ENABLED, "peer access has not been enabled"),
    PENSTOCK_ERROR(CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE,
                   "cannot set while device is active in this process"),
    PENSTOCK_ERROR(CUDA_ERROR_CONTEXT_IS_DESTROYED, "context is destroyed"),
    PENSTOCK_ERROR(CUDA_ERROR_ASSERT, "device-side assert triggered"),
    PENSTOCK_ERROR(CUDA_ERROR_TOO_MANY_PEERS, "peer mapping resources exhausted"),
    PENSTOCK_ERROR(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED,
                   "part or all of the requested memory range is already mapped"),
    PENSTOCK_ERROR(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED,
                   "pointer does not correspond to a registered memory region"),
    PENSTOCK_ERROR(CUDA_ERROR_HARDWARE_STACK_ERROR, "hardware stack error"),
    PENSTOCK_ERROR(CUDA_ERROR_ILLEGAL_INSTRUCTION, "an illegal instruction was encountered"),
    PENSTOCK_ERROR(CUDA_ERROR_MISALIGNED_ADDRESS, "misaligned address"),
    PENSTOCK_ERROR(CUDA_ERROR_INVALID_ADDRESS_SPACE,
                   "operation not supported on global/shared address space"),
    PENSTOCK_ERROR(CUDA_ERROR_INVALID_PC, "invalid program counter"),
    PENSTOCK_ERROR(CUDA_ERROR_LAUNCH_FAILED, "unspecified launch failure"),
    PENSTOCK_ERROR(CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE,
                   "too many blocks in cooperative launch"),
    PENSTOCK_ERROR(CUDA_ERROR_TENSOR_MEMORY_LEAK, "tensor memory was not freed by a kernel"),
    PENSTOCK_ERROR(CUDA_ERROR_NOT_PERMITTED, "operation not permitted"),
    PENSTOCK_ERROR(CUDA_ERROR_NOT_SUPPORTED, "operation not supported"),
    PENSTOCK_ERROR(CUDA_ERROR_SYSTEM_NOT_READY, "system not yet initialized"),
    PENSTOCK_ERROR(CUDA_ERROR_SYSTEM_DRIVER_MISMATCH,
                   "system has unsupported display driver / cuda driver combination"),
    PENSTOCK_ERROR(CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE,
                   "forward compatibility was attempted on non supported HW"),
    PENSTOCK_ERROR(CUDA_ERROR_MPS_CONNECTION_FAILED,
                   "MPS client failed to connect to the MPS control daemon or the MPS server"),
    PENSTOCK_ERROR(CUDA_ERROR_MPS_RPC_FAILURE,
                   "the remote procedural call between the MPS server and the MPS client failed"),
    PENSTOCK_ERROR(CUDA_ERROR_MPS_SERVER_NOT_READY,
                   "MPS server is not ready to accept new MPS client requests"),
    PENSTOCK_ERROR(CUDA_ERROR_MPS_MAX_CLIENTS_REACHED,
                   "the hardware resources required to create MPS client have been exhausted"),
    PENSTOCK_ERROR(
        CUDA_ERROR_MPS_MAX_CONNECTIONS_REACHED,
        "the hardware resources required to support device connections have been exhausted"),
    PENSTOCK_ERROR(CUDA_ERROR_MPS_CLIENT_TERMINATED,
                   "the MPS client has been terminated by the server"),
    PENSTOCK_ERROR(CUDA_ERROR_CDP_NOT_SUPPORTED, "device-side launch is not supported here"),
    PENSTOCK_ERROR(CUDA_ERROR_CDP_VERSION_MISMATCH, "the versions of device-side launch differ"),
    PENSTOCK_ERROR(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
                   "operation not permitted when stream is capturing"),
    PENSTOCK_ERROR(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,
                   "operation failed due to a previous error during capture"),
    PENSTOCK_ERROR(CUDA_ERROR_STREAM_CAPTURE_MERGE,
                   "operation would result in a merge of separate capture sequences"),
    PENSTOCK_ERROR(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED,
                   "capture was not ended in the same stream as it began"),
    PENSTOCK_ERROR(CUDA_ERROR_STREAM_CAPTURE_UNJOINED, "capturing stream has unjoined work"),
    PENSTOCK_ERROR(CUDA_ERROR_STREAM_CAPTURE_ISOLATION,
                   "dependency created on uncaptured work in another stream"),
    PENSTOCK_ERROR(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT,
                   "operation would make the legacy stream depend on a capturing blocking stream"),
    PENSTOCK_ERROR(CUDA_ERROR_CAPTURED_EVENT,
                   "operation not permitted on an event last recorded in a capturing stream"),
    PENSTOCK_ERROR(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD,
                   "attempt to terminate a thread-local capture sequence from another thread"),
    PENSTOCK_ERROR(CUDA_ERROR_TIMEOUT, "wait operation timed out"),
    PENSTOCK_ERROR(CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE,
                   "the graph update was not performed because it included changes which violated "
                   "constraints specific to instantiated graph update"),
    PENSTOCK_ERROR(CUDA_ERROR_EXTERNAL_DEVICE,
                   "an async error has occurred in external entity outside of CUDA"),
    PENSTOCK_ERROR(CUDA_ERROR_INVALID_CLUSTER_SIZE,
                   "a kernel launch error has occurred due to cluster misconfiguration"),
    PENSTOCK_ERROR(
        CUDA_ERROR_FUNCTION_NOT_LOADED,
        "the function handle is not loaded when calling an API that requires a loaded function"),
    PENSTOCK_ERROR(CUDA_ERROR_INVALID_RESOURCE_TYPE,
                   "the resource type is not valid for this operation"),
    PENSTOCK_ERROR(CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION,
                   "the resource configuration is not valid for this operation"),
    PENSTOCK_ERROR(CUDA_ERROR_KEY_ROTATION, "an encryption key rotation is due"),
    PENSTOCK_ERROR(CUDA_ERROR_UNKNOWN, "unknown error"),
};
#undef PENSTOCK_ERROR

const ErrorText* Find(CUresult error) {
  const auto place =
      std::lower_bound(std::begin(kErrors), std::end(kErrors), error,
                       [](const ErrorText& row, CUresult wanted) { return row.error < wanted; });
  return place != std::end(kErrors) && place->error == error ? place : nullptr;
}

}  // namespace

CUresult CuGetErrorName(CUresult error, const char** name) {
  Call call(Function::kCuGetErrorName, Call::kNothing);
  if (!call.Out(name)) return call.result();
  const ErrorText* const found = Find(error);
  *name = found == nullptr ? nullptr : found->name;
  return found == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult CuGetErrorString(CUresult error, const char** text) {
  Call call(Function::kCuGetErrorString, Call::kNothing);
  if (!call.Out(text)) return call.result();
  const ErrorText* const found = Find(error);
  *text = found == nullptr ? nullptr : found->text;
  return found == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

}  // namespace penstock::interposer
