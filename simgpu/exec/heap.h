// The heap that kernels reach with malloc and free: one range of device memory for all kernels of a
// context, taken at the first call and never grown, as CUDA's is.
//
// Blocks are found first-fit in an ordered map of what is free; what is handed out is kept on the
// host, so a kernel that writes past its block damages its neighbour's data but not the heap. The
// range is one allocation to the memory check: only an access outside the whole heap is found.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>

#include "simgpu/exec/executor.h"

namespace simgpu {

class DeviceHeap {
 public:
  static constexpr uint64_t kDefaultBytes = 8 << 20;  // CUDA's
  static constexpr uint64_t kAlignment = 16;

  // Gives the range back; nothing of it may be used then.
  void Release(MemoryMap& memory);
  // False once the heap exists: its size is fixed then.
  bool SetSize(uint64_t bytes);

  // 0 if no free part is large enough, or the device has no memory for the heap.
  uint64_t Allocate(MemoryMap& memory, uint64_t bytes);
  // False if the address is not that of a live block.
  bool Free(uint64_t address);

 private:
  std::mutex mutex_;  // guards all of it
  uint64_t base_ = 0;
  uint64_t bytes_ = kDefaultBytes;
  std::map<uint64_t, uint64_t> free_;  // begin: bytes; no two touch
  std::map<uint64_t, uint64_t> live_;  // the same
};

}  // namespace simgpu
