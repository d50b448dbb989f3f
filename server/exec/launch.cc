// Kernel launches. The parameter block arrives packed as the kernel's layout says and goes to the
// driver in one piece (CU_LAUNCH_PARAM_BUFFER_POINTER), so no pointer of the client is followed.
#include <cstring>

#include "protocol/operations.h"
#include "server/worker/operations.h"
#include "server/worker/worker.h"

namespace penstock::server {
namespace {

// Attributes whose value is numbers alone. Others hold handles or addresses of the client.
bool IsPlain(uint32_t id) {
  switch (id) {
    case CU_LAUNCH_ATTRIBUTE_COOPERATIVE:
    case CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY:
    case CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION:
    case CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE:
    case CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION:
    case CU_LAUNCH_ATTRIBUTE_PRIORITY:
    case CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP:
    case CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN:
    case CU_LAUNCH_ATTRIBUTE_PREFERRED_CLUSTER_DIMENSION:
    case CU_LAUNCH_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT:
      return true;
    default:
      return false;
  }
}

}  // namespace

CUresult ServeLaunch(CallContext& call, Reader& reader) {
  LaunchCommand command;
  std::span<const std::byte> parameters;
  std::span<const LaunchAttributeEntry> entries;
  if (!reader.Take(&command) || command.parameter_bytes > kMaxKernelParameterBytes ||
      !reader.TakeSection(command.parameter_bytes, &parameters) ||
      !reader.TakeArray(command.attribute_count, kMaxLaunchAttributes, &entries) ||
      !reader.AtEnd()) {
    return call.Malformed("A launch has an impossible size.");
  }
  CUfunction function;
  CUstream stream;
  if (!call.Stream(command.stream, &stream)) return call.error();
  const FunctionRecord* record = call.FindFunction(command.function, &function);
  if (record == nullptr) return call.error();
  // The driver would read beyond a block that is too short.
  if (record->parameter_bytes != command.parameter_bytes) return CUDA_ERROR_INVALID_VALUE;

  size_t bytes = parameters.size();
  void* extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, const_cast<std::byte*>(parameters.data()),
                   CU_LAUNCH_PARAM_BUFFER_SIZE, &bytes, CU_LAUNCH_PARAM_END};
  void** block = bytes == 0 ? nullptr : extra;
  const Driver& driver = call.driver();
  if (entries.empty() && (command.flags & kLaunchCooperative) == 0) {
    return driver.cuLaunchKernel(function, command.grid[0], command.grid[1], command.grid[2],
                                 command.block[0], command.block[1], command.block[2],
                                 command.shared_bytes, stream, nullptr, block);
  }
  CUlaunchAttribute attributes[kMaxLaunchAttributes + 1] = {};
  unsigned count = 0;
  for (const LaunchAttributeEntry& entry : entries) {
    if (!IsPlain(entry.id)) return CUDA_ERROR_NOT_SUPPORTED;
    attributes[count].id = static_cast<CUlaunchAttributeID>(entry.id);
    static_assert(sizeof attributes[count].value == sizeof entry.value);
    memcpy(&attributes[count].value, entry.value, sizeof entry.value);
    ++count;
  }
  if (command.flags & kLaunchCooperative) {
    attributes[count].id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
    attributes[count].value.cooperative = 1;
    ++count;
  }
  CUlaunchConfig config = {};
  config.gridDimX = command.grid[0];
  config.gridDimY = command.grid[1];
  config.gridDimZ = command.grid[2];
  config.blockDimX = command.block[0];
  config.blockDimY = command.block[1];
  config.blockDimZ = command.block[2];
  config.sharedMemBytes = command.shared_bytes;
  config.hStream = stream;
  config.attrs = attributes;
  config.numAttrs = count;
  return driver.cuLaunchKernelEx(&config, function, nullptr, block);
}

}  // namespace penstock::server
