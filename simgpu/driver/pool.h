// Memory pools. Allocations from a pool are ordinary allocations whose freeing is an operation of a
// stream; nothing is cached, so "reserved" always equals "used".
#pragma once

#include <cuda.h>

#include <atomic>
#include <memory>
#include <mutex>

namespace simgpu {

struct Device;

struct MemoryPool {
  Device* device = nullptr;
  CUmemoryPool handle = nullptr;
  std::atomic<uint64_t> used_bytes{0};
  std::atomic<uint64_t> used_high{0};
  std::atomic<uint64_t> release_threshold{0};
  std::atomic<int> reuse_flags[3] = {1, 1, 1};
  size_t max_bytes = 0;  // 0: the device's
};

std::shared_ptr<MemoryPool> DefaultPool(Device* device);
std::shared_ptr<MemoryPool> CurrentPool(Device* device);

}  // namespace simgpu
