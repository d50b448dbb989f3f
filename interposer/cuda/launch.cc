// Launches: the hottest path. Everything that can be wrong with a launch's shape is checked here
// against limits that came with the device and the function, the arguments are packed as the
// function's layout says, and one frame goes out. No allocation, no system call, no lock but the
// call stream's.
#include <cstring>

#include "commands.gen.h"
#include "custom_client.gen.h"
#include "interposer/core/call.h"
#include "interposer/core/client.h"

namespace penstock::interposer {
namespace {

// Parameter blocks up to this size are packed on the stack.
constexpr uint32_t kStackParameterBytes = 4096;

struct LaunchShape {
  uint32_t grid[3];
  uint32_t block[3];
  uint32_t shared_bytes;
};

// CUDA's codes: a shape that the device can never run is INVALID_VALUE, one that only this function
// is too large for LAUNCH_OUT_OF_RESOURCES.
bool CheckShape(Call& call, const FunctionRecord& function, const LaunchShape& shape) {
  const Device& device = *call.client().FindDevice(static_cast<CUdevice>(call.context().device));
  const int32_t* const limits = device.info.attributes;
  uint64_t threads = 1;
  for (int axis = 0; axis < 3; ++axis) {
    const int64_t grid_limit = limits[CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X + axis];
    const int64_t block_limit = limits[CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X + axis];
    if (shape.grid[axis] == 0 || shape.grid[axis] > grid_limit || shape.block[axis] == 0 ||
        shape.block[axis] > block_limit) {
      return call.Refuse(CUDA_ERROR_INVALID_VALUE);
    }
    threads *= shape.block[axis];
  }
  if (threads > static_cast<uint64_t>(limits[CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK])) {
    return call.Refuse(CUDA_ERROR_INVALID_VALUE);
  }
  const FunctionInfo& info = function.info;
  const auto known = [&](int attribute) { return (info.attribute_known >> attribute & 1) != 0; };
  if (known(CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK) &&
      threads > static_cast<uint64_t>(info.attributes[CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK])) {
    return call.Refuse(CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES);
  }
  if (known(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) &&
      shape.shared_bytes >
          static_cast<uint32_t>(info.attributes[CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES])) {
    return call.Refuse(CUDA_ERROR_INVALID_VALUE);
  }
  return true;
}

// The program's packed parameters behind `extra`: a list of tags and values that ends with a tag.
bool ReadExtra(Call& call, void** extra, const void** buffer, size_t* bytes) {
  *buffer = nullptr;
  *bytes = 0;
  for (void** entry = extra; *entry != CU_LAUNCH_PARAM_END; entry += 2) {
    if (*entry == CU_LAUNCH_PARAM_BUFFER_POINTER) {
      *buffer = entry[1];
    } else if (*entry == CU_LAUNCH_PARAM_BUFFER_SIZE) {
      if (entry[1] == nullptr) return call.Refuse(CUDA_ERROR_INVALID_VALUE);
      *bytes = *static_cast<const size_t*>(entry[1]);
    } else {
      return call.Refuse(CUDA_ERROR_INVALID_VALUE);
    }
  }
  return *buffer != nullptr || *bytes == 0 || call.Refuse(CUDA_ERROR_INVALID_VALUE);
}

// Fills block[0, parameter_bytes).
bool PackParameters(Call& call, const FunctionRecord& function, void** parameters, void** extra,
                    std::byte* block) {
  const uint32_t block_bytes = function.info.parameter_bytes;
  if (parameters != nullptr && extra != nullptr) return call.Refuse(CUDA_ERROR_INVALID_VALUE);
  if (extra != nullptr) {
    const void* buffer;
    size_t bytes;
    if (!ReadExtra(call, extra, &buffer, &bytes)) return false;
    // What the kernel would read and nobody wrote is no parameter.
    if (bytes < block_bytes) return call.Refuse(CUDA_ERROR_INVALID_VALUE);
    if (block_bytes != 0) memcpy(block, buffer, block_bytes);
    return true;
  }
  if (function.parameters.empty()) return true;
  if (parameters == nullptr) return call.Refuse(CUDA_ERROR_INVALID_VALUE);
  uint32_t filled = 0;
  for (size_t i = 0; i < function.parameters.size(); ++i) {
    const KernelParameter& parameter = function.parameters[i];
    if (parameters[i] == nullptr) return call.Refuse(CUDA_ERROR_INVALID_VALUE);
    // Alignment gaps are zero, so that equal launches have equal frames.
    if (parameter.offset > filled) memset(block + filled, 0, parameter.offset - filled);
    memcpy(block + parameter.offset, parameters[i], parameter.size);
    filled = parameter.offset + parameter.size;
  }
  if (filled < block_bytes) memset(block + filled, 0, block_bytes - filled);
  return true;
}

CUresult Synchronize(Call& call, uint64_t stream) {
  commands::CuStreamSynchronize command{};
  command.hStream = stream;
  return call.Invoke(command);
}

CUresult Launch(Call& call, CUfunction hfunction, const LaunchShape& shape, CUstream hstream,
                bool per_thread, void** parameters, void** extra, uint32_t flags,
                std::span<const LaunchAttributeEntry> attributes) {
  if (!call.ready()) return call.result();
  LaunchCommand command;
  const FunctionRecord* const function = call.FindFunction(hfunction);
  if (function == nullptr || !call.Stream(hstream, per_thread, &command.stream) ||
      !CheckShape(call, *function, shape)) {
    return call.result();
  }
  // A stream of another context cannot run it, and a function of another one cannot be run here.
  if (call.stream()->context != &call.context() ||
      (function->context != nullptr && function->context != &call.context())) {
    return CUDA_ERROR_INVALID_HANDLE;
  }

  const uint32_t block_bytes = function->info.parameter_bytes;
  alignas(8) std::byte small_block[kStackParameterBytes];
  std::byte* block = small_block;
  if (block_bytes > kStackParameterBytes) {
    call.thread().scratch.resize(block_bytes);
    block = call.thread().scratch.data();
  }
  if (!PackParameters(call, *function, parameters, extra, block)) return call.result();

  command.function = function->handle.bits;
  memcpy(command.grid, shape.grid, sizeof command.grid);
  memcpy(command.block, shape.block, sizeof command.block);
  command.shared_bytes = shape.shared_bytes;
  command.flags = flags;
  command.parameter_bytes = block_bytes;
  command.attribute_count = static_cast<uint32_t>(attributes.size());
  const std::span<const std::byte> sections[] = {{block, block_bytes}, std::as_bytes(attributes)};
  const uint32_t operation = static_cast<uint32_t>(Operation::kLaunch);
  // Whether a cooperative grid fits is known to the driver alone, and programs try: so they wait.
  if ((flags & kLaunchCooperative) != 0) {
    return call.InvokeBytes(operation, &command, sizeof command, sections, nullptr, 0, nullptr);
  }
  call.context().launched.store(true, std::memory_order_relaxed);
  const CUresult result = call.PostBytes(operation, &command, sizeof command, sections, 1);
  if (result != CUDA_SUCCESS || !call.client().options().launch_blocking) return result;
  return Synchronize(call, command.stream);
}

}  // namespace

CUresult CuLaunchKernel(CUfunction function, unsigned int grid_x, unsigned int grid_y,
                        unsigned int grid_z, unsigned int block_x, unsigned int block_y,
                        unsigned int block_z, unsigned int shared_bytes, CUstream stream,
                        void** parameters, void** extra, bool per_thread) {
  Call call(Function::kCuLaunchKernel, Call::kContext);
  const LaunchShape shape = {{grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared_bytes};
  return Launch(call, function, shape, stream, per_thread, parameters, extra, 0, {});
}

CUresult CuLaunchCooperativeKernel(CUfunction function, unsigned int grid_x, unsigned int grid_y,
                                   unsigned int grid_z, unsigned int block_x, unsigned int block_y,
                                   unsigned int block_z, unsigned int shared_bytes, CUstream stream,
                                   void** parameters, bool per_thread) {
  Call call(Function::kCuLaunchCooperativeKernel, Call::kContext);
  const LaunchShape shape = {{grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared_bytes};
  return Launch(call, function, shape, stream, per_thread, parameters, nullptr, kLaunchCooperative,
                {});
}

CUresult CuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** parameters,
                          void** extra, bool per_thread) {
  Call call(Function::kCuLaunchKernelEx, Call::kContext);
  if (!call.ready() || !call.Out(config)) return call.result();
  if (config->numAttrs > kMaxLaunchAttributes ||
      (config->numAttrs > 0 && config->attrs == nullptr)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  uint32_t flags = 0, count = 0;
  LaunchAttributeEntry entries[kMaxLaunchAttributes];
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    const CUlaunchAttribute& attribute = config->attrs[i];
    switch (attribute.id) {
      case CU_LAUNCH_ATTRIBUTE_IGNORE:
        continue;
      case CU_LAUNCH_ATTRIBUTE_COOPERATIVE:
        if (attribute.value.cooperative != 0) flags |= kLaunchCooperative;
        continue;
      case CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION:
      case CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE:
      case CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY:
      case CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW:
      case CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION:
      case CU_LAUNCH_ATTRIBUTE_PRIORITY:
      case CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP:
      case CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN:
      case CU_LAUNCH_ATTRIBUTE_PREFERRED_CLUSTER_DIMENSION:
      case CU_LAUNCH_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT:
        break;
      default:
        // Those that hold events or graph nodes are not forwarded yet.
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    LaunchAttributeEntry& entry = entries[count++];
    entry.id = attribute.id;
    entry.reserved = 0;
    static_assert(sizeof entry.value == sizeof attribute.value);
    memcpy(entry.value, &attribute.value, sizeof entry.value);
  }
  const LaunchShape shape = {{config->gridDimX, config->gridDimY, config->gridDimZ},
                             {config->blockDimX, config->blockDimY, config->blockDimZ},
                             config->sharedMemBytes};
  return Launch(call, function, shape, config->hStream, per_thread, parameters, extra, flags,
                {entries, count});
}

}  // namespace penstock::interposer
