// The block size with the best occupancy. Each candidate is a question to the driver, which alone
// knows how registers and shared memory are given out on its devices; the largest candidates come
// first and the search ends when a multiprocessor is full, which is nearly always at once.
#include "custom_client.gen.h"
#include "interposer/core/call.h"
#include "interposer/core/client.h"

namespace penstock::interposer {
namespace {

CUresult Search(Call& call, int* grid_size, int* block_size, CUfunction function,
                CUoccupancyB2DSize shared_of_block, size_t shared_bytes, int block_limit,
                unsigned flags) {
  if (!call.ready() || !call.Out(grid_size) || !call.Out(block_size)) return call.result();
  const Device& device = *call.client().FindDevice(static_cast<CUdevice>(call.context().device));
  int function_limit = 0;
  const CUresult asked =
      CuFuncGetAttribute(&function_limit, CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, function);
  if (asked != CUDA_SUCCESS) return asked;
  const int device_limit = device.AttributeOr(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, 1024);
  const int warp = device.AttributeOr(CU_DEVICE_ATTRIBUTE_WARP_SIZE, 32);
  const int full = device.AttributeOr(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, 2048);
  int limit = std::min(device_limit, function_limit);
  if (block_limit > 0) limit = std::min(limit, block_limit);
  int best_threads = 0, best_block = 0, best_blocks = 0;
  // The limit itself first, then whole warps below it.
  for (int candidate = limit; candidate > 0; candidate = (candidate - 1) / warp * warp) {
    const size_t shared = shared_of_block != nullptr ? shared_of_block(candidate) : shared_bytes;
    int blocks = 0;
    const CUresult result = CuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
        &blocks, function, candidate, shared, flags);
    if (result != CUDA_SUCCESS) return result;
    if (blocks * candidate > best_threads) {
      best_threads = blocks * candidate;
      best_block = candidate;
      best_blocks = blocks;
    }
    if (best_threads >= full) break;
  }
  *block_size = best_block;
  *grid_size = best_blocks * device.AttributeOr(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 1);
  return CUDA_SUCCESS;
}

}  // namespace

CUresult CuOccupancyMaxPotentialBlockSize(int* grid_size, int* block_size, CUfunction function,
                                          CUoccupancyB2DSize shared_of_block, size_t shared_bytes,
                                          int block_limit) {
  Call call(Function::kCuOccupancyMaxPotentialBlockSize, Call::kContext);
  return Search(call, grid_size, block_size, function, shared_of_block, shared_bytes, block_limit,
                0);
}

CUresult CuOccupancyMaxPotentialBlockSizeWithFlags(int* grid_size, int* block_size,
                                                   CUfunction function,
                                                   CUoccupancyB2DSize shared_of_block,
                                                   size_t shared_bytes, int block_limit,
                                                   unsigned int flags) {
  Call call(Function::kCuOccupancyMaxPotentialBlockSizeWithFlags, Call::kContext);
  return Search(call, grid_size, block_size, function, shared_of_block, shared_bytes, block_limit,
                flags);
}

}  // namespace penstock::interposer
