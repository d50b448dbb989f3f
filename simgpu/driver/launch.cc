// Launching kernels and host functions.
//
// The shape and the arguments are checked and the arguments packed on the calling thread, so that
// mistakes are reported at once; the kernel runs on the stream's thread. A fault there poisons the
// context: the call that next synchronises, and every one after it, returns the error.
#include <cstdio>
#include <cstring>

#include "simgpu/driver/entry.h"
#include "simgpu/driver/event.h"
#include "simgpu/driver/log.h"
#include "simgpu/driver/module.h"
#include "simgpu/driver/occupancy.h"

namespace simgpu {
namespace {

CUresult ResultOf(Fault fault) {
  switch (fault) {
    case Fault::kNone:
      return CUDA_SUCCESS;
    case Fault::kIllegalAddress:
      return CUDA_ERROR_ILLEGAL_ADDRESS;
    case Fault::kMisalignedAddress:
      return CUDA_ERROR_MISALIGNED_ADDRESS;
    case Fault::kIllegalInstruction:
      return CUDA_ERROR_ILLEGAL_INSTRUCTION;
    case Fault::kAssert:
      return CUDA_ERROR_ASSERT;
    case Fault::kTrap:
    case Fault::kDeadlock:
      return CUDA_ERROR_LAUNCH_FAILED;
    case Fault::kStopped:
      return CUDA_SUCCESS;  // the context is going away
    case Fault::kOutOfMemory:
      return CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES;
  }
  return CUDA_ERROR_LAUNCH_FAILED;
}

struct Shape {
  unsigned grid[3] = {1, 1, 1};
  unsigned block[3] = {1, 1, 1};
  unsigned shared_bytes = 0;
  bool cooperative = false;
};

// The order of the checks is the real driver's as far as programs can tell: shape, then resources.
CUresult Check(const Function& function, const Device& device, const Shape& shape) {
  uint64_t threads = 1;
  for (int i = 0; i < 3; ++i) {
    if (shape.grid[i] == 0 || shape.grid[i] > kMaxGridDim[i] || shape.block[i] == 0 ||
        shape.block[i] > static_cast<unsigned>(kMaxBlockDim[i])) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    threads *= shape.block[i];
  }
  if (threads > kMaxThreadsPerBlock) return CUDA_ERROR_INVALID_VALUE;
  const KernelInfo& info = function.info();
  for (int i = 0; i < 3; ++i) {
    if (info.required_threads[0] != 0 && info.required_threads[i] != shape.block[i]) {
      return CUDA_ERROR_INVALID_VALUE;
    }
  }
  if (threads > info.max_threads) return CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES;
  if (shape.shared_bytes > static_cast<unsigned>(function.dynamic_shared_limit())) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (shape.cooperative) {
    const uint64_t resident =
        static_cast<uint64_t>(kMultiprocessors) *
        BlocksPerMultiprocessor(function, device, static_cast<int>(threads), shape.shared_bytes);
    const uint64_t blocks = static_cast<uint64_t>(shape.grid[0]) * shape.grid[1] * shape.grid[2];
    if (blocks > resident) return CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE;
  }
  return CUDA_SUCCESS;
}

// The packed parameter block from either way of passing arguments.
CUresult Pack(const KernelInfo& info, void** parameters, void** extra,
              std::vector<std::byte>* packed) {
  packed->assign(info.parameter_bytes, std::byte{0});
  if (parameters != nullptr && extra != nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (extra != nullptr) {
    const void* buffer = nullptr;
    size_t bytes = 0;
    for (; *extra != CU_LAUNCH_PARAM_END; extra += 2) {
      if (*extra == CU_LAUNCH_PARAM_BUFFER_POINTER) {
        buffer = extra[1];
      } else if (*extra == CU_LAUNCH_PARAM_BUFFER_SIZE) {
        std::memcpy(&bytes, extra[1], sizeof(bytes));
      } else {
        return CUDA_ERROR_INVALID_VALUE;
      }
    }
    if (bytes < info.parameter_bytes || (buffer == nullptr && bytes > 0)) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    if (info.parameter_bytes > 0) std::memcpy(packed->data(), buffer, info.parameter_bytes);
    return CUDA_SUCCESS;
  }
  if (parameters == nullptr && !info.parameters.empty()) return CUDA_ERROR_INVALID_VALUE;
  for (size_t i = 0; i < info.parameters.size(); ++i) {
    if (parameters[i] == nullptr) return CUDA_ERROR_INVALID_VALUE;
    std::memcpy(packed->data() + info.parameters[i].offset, parameters[i], info.parameters[i].size);
  }
  return CUDA_SUCCESS;
}

void Run(Context& context, const Function& function, const Shape& shape,
         const std::vector<std::byte>& packed) {
  LaunchRequest request;
  std::memcpy(request.grid, shape.grid, sizeof(request.grid));
  std::memcpy(request.block, shape.block, sizeof(request.block));
  request.dynamic_shared_bytes = shape.shared_bytes;
  request.parameters = packed.data();
  request.cooperative = shape.cooperative;
  request.stop = context.stop_flag();
  request.print = [](void* user, std::string_view text) {
    static_cast<Context*>(user)->Print(text);
  };
  request.print_error = [](void*, std::string_view text) {
    std::fwrite(text.data(), 1, text.size(), stderr);
  };
  request.print_user = &context;
  const LaunchResult result = function.kernel().Launch(request);
  const CUresult error = ResultOf(result.fault);
  if (error == CUDA_SUCCESS) return;
  if (result.fault != Fault::kAssert) {  // an assertion has spoken for itself
    LogWarning("%s (error %d)", result.message.c_str(), error);
  }
  context.Poison(error);
}

CUresult Launch(CUfunction handle, const Shape& shape, CUstream stream_handle, void** parameters,
                void** extra) {
  std::shared_ptr<Context> current;
  SIMGPU_RETURN_IF_ERROR(EnterContext(&current));
  std::shared_ptr<Stream> stream;
  std::shared_ptr<Context> context;
  SIMGPU_RETURN_IF_ERROR(ResolveStream(stream_handle, &stream, &context));
  if (context != current) return CUDA_ERROR_INVALID_HANDLE;
  std::shared_ptr<Function> function;
  SIMGPU_RETURN_IF_ERROR(FindFunction(handle, context, &function));
  if (function->module()->context() != context) return CUDA_ERROR_INVALID_HANDLE;
  SIMGPU_RETURN_IF_ERROR(Check(*function, *context->device(), shape));
  std::vector<std::byte> packed;
  SIMGPU_RETURN_IF_ERROR(Pack(function->info(), parameters, extra, &packed));
  Context* const owner = context.get();
  const Point point =
      context->Enqueue(stream, [owner, function, shape, packed = std::move(packed)] {
        Run(*owner, *function, shape, packed);
      });
  return state()->launch_blocking ? context->WaitFor({point}) : CUDA_SUCCESS;
}

CUresult LaunchHost(CUstream handle, std::function<void(CUresult)> function, bool always) {
  std::shared_ptr<Stream> stream;
  std::shared_ptr<Context> context;
  SIMGPU_RETURN_IF_ERROR(ResolveStream(handle, &stream, &context));
  Context* const owner = context.get();
  context->Enqueue(
      stream,
      [owner, function = std::move(function)] {
        owner->FlushPrint();
        function(owner->error());
      },
      {}, always);
  return CUDA_SUCCESS;
}

}  // namespace
}  // namespace simgpu

using namespace simgpu;

SIMGPU_EXPORT cuLaunchKernel(CUfunction function, unsigned int grid_x, unsigned int grid_y,
                             unsigned int grid_z, unsigned int block_x, unsigned int block_y,
                             unsigned int block_z, unsigned int shared_bytes, CUstream stream,
                             void** parameters, void** extra) {
  const Shape shape = {{grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared_bytes, false};
  return Launch(function, shape, stream, parameters, extra);
}

SIMGPU_EXPORT cuLaunchCooperativeKernel(CUfunction function, unsigned int grid_x,
                                        unsigned int grid_y, unsigned int grid_z,
                                        unsigned int block_x, unsigned int block_y,
                                        unsigned int block_z, unsigned int shared_bytes,
                                        CUstream stream, void** parameters) {
  const Shape shape = {{grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared_bytes, true};
  return Launch(function, shape, stream, parameters, nullptr);
}

SIMGPU_EXPORT cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** parameters,
                               void** extra) {
  SIMGPU_RETURN_IF_ERROR(Enter());
  if (config == nullptr || (config->numAttrs > 0 && config->attrs == nullptr)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  Shape shape = {{config->gridDimX, config->gridDimY, config->gridDimZ},
                 {config->blockDimX, config->blockDimY, config->blockDimZ},
                 config->sharedMemBytes,
                 false};
  CUevent completion = nullptr;
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    const CUlaunchAttribute& attribute = config->attrs[i];
    switch (attribute.id) {
      case CU_LAUNCH_ATTRIBUTE_IGNORE:
        break;
      case CU_LAUNCH_ATTRIBUTE_COOPERATIVE:
        shape.cooperative = attribute.value.cooperative != 0;
        break;
      case CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION: {
        const auto& cluster = attribute.value.clusterDim;
        if (cluster.x > 1 || cluster.y > 1 || cluster.z > 1) return CUDA_ERROR_NOT_SUPPORTED;
        break;
      }
      case CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT:
        completion = attribute.value.launchCompletionEvent.event;
        break;
      case CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT:
        completion = attribute.value.programmaticEvent.event;
        break;
      // Hints about scheduling, caches and overlap with the next kernel: in order is always right.
      case CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW:
      case CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY:
      case CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE:
      case CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION:
      case CU_LAUNCH_ATTRIBUTE_PRIORITY:
      case CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP:
      case CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN:
      case CU_LAUNCH_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT:
        break;
      default:
        return CUDA_ERROR_NOT_SUPPORTED;
    }
  }
  SIMGPU_RETURN_IF_ERROR(Launch(function, shape, config->hStream, parameters, extra));
  return completion == nullptr ? CUDA_SUCCESS : cuEventRecord(completion, config->hStream);
}

SIMGPU_EXPORT cuLaunchHostFunc(CUstream stream, CUhostFn function, void* user) {
  SIMGPU_RETURN_IF_ERROR(Enter());
  if (function == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return LaunchHost(
      stream, [function, user](CUresult) { function(user); }, /*always=*/false);
}

SIMGPU_EXPORT cuStreamAddCallback(CUstream stream, CUstreamCallback callback, void* user,
                                  unsigned int flags) {
  SIMGPU_RETURN_IF_ERROR(Enter());
  if (callback == nullptr || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  // A callback runs even in a failed context, and is told of the error.
  return LaunchHost(
      stream, [callback, stream, user](CUresult error) { callback(stream, error, user); },
      /*always=*/true);
}
