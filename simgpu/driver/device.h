// A simulated device: what it claims to be, and its primary context.
#pragma once

#include <cuda.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "simgpu/driver/handle_table.h"
#include "simgpu/driver/ledger.h"

namespace simgpu {

class Context;
struct MemoryPool;

// Per compute capability: what bounds a launch and an occupancy calculation.
struct Limits {
  int threads_per_sm = 0;
  int blocks_per_sm = 0;
  int shared_per_sm = 0;         // bytes
  int shared_per_block_max = 0;  // opt-in
  int shared_reserved = 0;       // per block, by the system
};

struct Device {
  int ordinal = 0;           // as the program counts them, after CUDA_VISIBLE_DEVICES
  int physical_ordinal = 0;  // before
  CUuuid uuid = {};
  int pci_domain = 0;
  int pci_bus = 0;
  int pci_device = 0;
  int cc_major = 12;
  int cc_minor = 0;
  size_t memory_bytes = 0;
  Limits limits;
  bool gpu_direct = false;            // memory can be exported as what stands for a dma-buf
  int writes_ordering = 0;            // of a NIC's writes: a CUGPUDirectRDMAWritesOrdering
  std::atomic<size_t> used_bytes{0};  // by this process
  MemoryLedger* ledger = nullptr;     // if the memory is shared; outlives the device

  // The handle is fixed; the context behind it exists while somebody retains it.
  CUcontext primary_handle = nullptr;
  std::mutex primary_mutex;
  int primary_retains = 0;                   // guarded by primary_mutex
  unsigned primary_flags = 0;                // guarded by primary_mutex
  std::shared_ptr<Context> primary_context;  // guarded by primary_mutex

  std::mutex pool_mutex;
  std::shared_ptr<MemoryPool> default_pool;  // guarded by pool_mutex
  std::shared_ptr<MemoryPool> current_pool;  // guarded by pool_mutex

  // Takes bytes out of the device's memory; false if there are not enough.
  bool Charge(size_t bytes);
  void Refund(size_t bytes);
  size_t FreeBytes() const;
};

constexpr int kMultiprocessors = 4;  // few, so that grids sized by it stay small
constexpr int kMaxThreadsPerBlock = 1024;
constexpr int kRegistersPerSm = 65536;
constexpr int kSharedPerBlock = 48 * 1024;
constexpr int kMaxBlockDim[3] = {1024, 1024, 64};
constexpr int64_t kMaxGridDim[3] = {2147483647, 65535, 65535};

// Reads SIMGPU_DEVICES, SIMGPU_MEMORY, SIMGPU_CC, SIMGPU_GPUDIRECT and CUDA_VISIBLE_DEVICES.
std::vector<std::unique_ptr<Device>> MakeDevices();
// False for a number that names no attribute.
bool DeviceAttribute(const Device& device, CUdevice_attribute attribute, int* value);

}  // namespace simgpu
