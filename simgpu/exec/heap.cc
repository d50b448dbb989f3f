#include "simgpu/exec/heap.h"

#include <iterator>

namespace simgpu {

void DeviceHeap::Release(MemoryMap& memory) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (base_) memory.FreeVariable(base_);
  base_ = 0;
  free_.clear();
  live_.clear();
}

bool DeviceHeap::SetSize(uint64_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (base_) return false;
  bytes_ = bytes;
  return true;
}

uint64_t DeviceHeap::Allocate(MemoryMap& memory, uint64_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (bytes > bytes_) return 0;
  // Zero bytes get a place of their own too.
  bytes = bytes ? (bytes + kAlignment - 1) & ~(kAlignment - 1) : kAlignment;
  if (!base_) {
    base_ = memory.AllocateVariable(bytes_, 4096, false);
    if (!base_) return 0;
    free_[base_] = bytes_ & ~(kAlignment - 1);
  }
  for (auto at = free_.begin(); at != free_.end(); ++at) {
    if (at->second < bytes) continue;
    const uint64_t address = at->first;
    const uint64_t rest = at->second - bytes;
    free_.erase(at);
    if (rest) free_[address + bytes] = rest;
    live_[address] = bytes;
    return address;
  }
  return 0;
}

bool DeviceHeap::Free(uint64_t address) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = live_.find(address);
  if (found == live_.end()) return false;
  uint64_t bytes = found->second;
  live_.erase(found);
  auto next = free_.lower_bound(address);
  if (next != free_.end() && next->first == address + bytes) {
    bytes += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == address) {
      before->second += bytes;
      return true;
    }
  }
  free_[address] = bytes;
  return true;
}

}  // namespace simgpu
