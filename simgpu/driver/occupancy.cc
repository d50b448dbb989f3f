#include "simgpu/driver/occupancy.h"

#include <algorithm>

#include "simgpu/driver/entry.h"

namespace simgpu {
namespace {

constexpr int kWarp = 32;
constexpr int kRegisterUnit = 256;   // registers are given to warps in units of this many
constexpr size_t kSharedUnit = 128;  // bytes

}  // namespace

int BlocksPerMultiprocessor(const Function& function, const Device& device, int threads,
                            size_t dynamic_shared_bytes) {
  const KernelInfo& info = function.info();
  if (threads <= 0 || threads > static_cast<int>(info.max_threads)) return 0;
  const Limits& limits = device.limits;
  const int warps = (threads + kWarp - 1) / kWarp;
  int blocks = std::min(limits.blocks_per_sm, limits.threads_per_sm / (warps * kWarp));
  if (info.registers > 0) {
    const int per_warp = (static_cast<int>(info.registers) * kWarp + kRegisterUnit - 1) /
                         kRegisterUnit * kRegisterUnit;
    blocks = std::min(blocks, kRegistersPerSm / per_warp / warps);
  }
  size_t shared =
      info.static_shared_bytes + dynamic_shared_bytes + static_cast<size_t>(limits.shared_reserved);
  shared = (shared + kSharedUnit - 1) / kSharedUnit * kSharedUnit;
  if (shared > 0) {
    blocks =
        std::min<int>(blocks, static_cast<int>(static_cast<size_t>(limits.shared_per_sm) / shared));
  }
  return blocks;
}

}  // namespace simgpu

using namespace simgpu;

namespace {

CUresult EnterOccupancy(CUfunction handle, std::shared_ptr<Context>* context,
                        std::shared_ptr<Function>* function) {
  SIMGPU_RETURN_IF_ERROR(EnterContext(context));
  return FindFunction(handle, *context, function);
}

// The block size, a multiple of a warp, with which most threads are resident; the largest of
// equals.
CUresult Potential(int* grid, int* block, CUfunction handle, CUoccupancyB2DSize shared_of,
                   size_t shared_bytes, int limit) {
  std::shared_ptr<Context> context;
  std::shared_ptr<Function> function;
  SIMGPU_RETURN_IF_ERROR(EnterOccupancy(handle, &context, &function));
  if (grid == nullptr || block == nullptr || limit < 0) return CUDA_ERROR_INVALID_VALUE;
  int most = static_cast<int>(function->info().max_threads);
  if (limit > 0) most = std::min(most, limit);
  int best_threads = 0;
  *block = 0;
  *grid = 0;
  for (int size = (most + kWarp - 1) / kWarp * kWarp; size > 0; size -= kWarp) {
    const int candidate = std::min(size, most);
    const size_t shared = shared_of != nullptr ? shared_of(candidate) : shared_bytes;
    const int blocks = BlocksPerMultiprocessor(*function, *context->device(), candidate, shared);
    if (blocks * candidate > best_threads) {
      best_threads = blocks * candidate;
      *block = candidate;
      *grid = blocks * kMultiprocessors;
    }
  }
  return *block > 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

}  // namespace

SIMGPU_EXPORT cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, CUfunction handle,
                                                                   int threads, size_t shared_bytes,
                                                                   unsigned int flags) {
  std::shared_ptr<Context> context;
  std::shared_ptr<Function> function;
  SIMGPU_RETURN_IF_ERROR(EnterOccupancy(handle, &context, &function));
  if (blocks == nullptr || threads <= 0 || flags > CU_OCCUPANCY_DISABLE_CACHING_OVERRIDE) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  *blocks = BlocksPerMultiprocessor(*function, *context->device(), threads, shared_bytes);
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction function,
                                                          int threads, size_t shared_bytes) {
  return cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, threads,
                                                              shared_bytes, 0);
}

SIMGPU_EXPORT cuOccupancyMaxPotentialBlockSizeWithFlags(int* grid, int* block, CUfunction function,
                                                        CUoccupancyB2DSize shared_of,
                                                        size_t shared_bytes, int limit,
                                                        unsigned int flags) {
  if (flags > CU_OCCUPANCY_DISABLE_CACHING_OVERRIDE) return CUDA_ERROR_INVALID_VALUE;
  return Potential(grid, block, function, shared_of, shared_bytes, limit);
}

SIMGPU_EXPORT cuOccupancyMaxPotentialBlockSize(int* grid, int* block, CUfunction function,
                                               CUoccupancyB2DSize shared_of, size_t shared_bytes,
                                               int limit) {
  return Potential(grid, block, function, shared_of, shared_bytes, limit);
}

SIMGPU_EXPORT cuOccupancyAvailableDynamicSMemPerBlock(size_t* bytes, CUfunction handle, int blocks,
                                                      int threads) {
  std::shared_ptr<Context> context;
  std::shared_ptr<Function> function;
  SIMGPU_RETURN_IF_ERROR(EnterOccupancy(handle, &context, &function));
  const Device& device = *context->device();
  if (bytes == nullptr || blocks <= 0 || threads <= 0 ||
      blocks > BlocksPerMultiprocessor(*function, device, threads, 0)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const int share = device.limits.shared_per_sm / blocks / static_cast<int>(kSharedUnit) *
                    static_cast<int>(kSharedUnit);
  const int available = share - device.limits.shared_reserved -
                        static_cast<int>(function->info().static_shared_bytes);
  *bytes = static_cast<size_t>(std::clamp(available, 0, device.limits.shared_per_block_max));
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT cuOccupancyMaxActiveClusters(int*, CUfunction, const CUlaunchConfig*) {
  SIMGPU_RETURN_IF_ERROR(Enter());
  return CUDA_ERROR_NOT_SUPPORTED;  // attribute CLUSTER_LAUNCH is 0
}
