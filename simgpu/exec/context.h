// What a handler sees of the thread that runs it: the current leaf of the current warp, and the
// memory that it may touch. The scheduler (warp.h) fills it in when it enters a leaf.
#pragma once

#include <cstddef>
#include <cstdint>

#include "simgpu/exec/executor.h"
#include "simgpu/exec/inst.h"

namespace simgpu::exec {

struct Warp;
struct Block;
struct Frame;
class LaunchEngine;

enum class Event : uint32_t {
  kNone,
  kLeafDone,  // the leaf has no lanes left, or waits: choose another
  kYield,     // the budget is spent
  kFault,
};

struct CachedRange {
  uint64_t begin = 1, end = 0;
  bool read_only = false;
};
constexpr uint32_t kCachedRanges = 32;

struct Context {
  // Of the leaf.
  std::byte* registers = nullptr;
  const Inst* pc = nullptr;   // of the next instruction
  const Inst* rpc = nullptr;  // where the leaf joins its siblings
  uint32_t mask = 0;
  uint32_t live = 0;  // lanes of the warp that have not exited
  int32_t budget = 0;
  Event event = Event::kNone;
  bool gathered = false;  // a warp-wide instruction runs for all who waited at it

  // Memory.
  std::byte* shared = nullptr;
  uint64_t shared_bytes = 0;
  std::byte* local = nullptr;  // of the warp: lane l has local_stride bytes at l * local_stride
  uint64_t local_stride = 0;
  uint64_t local_base = 0;  // of the frame, inside a lane's bytes
  const std::byte* parameters = nullptr;
  uint64_t parameter_bytes = 0;
  CachedRange ranges[kCachedRanges];

  const Inst* code = nullptr;  // of the frame's function
  Frame* frame = nullptr;
  Warp* warp = nullptr;
  Block* block = nullptr;
  LaunchEngine* engine = nullptr;

  template <typename T>
  T* At(uint32_t offset) const {
    return reinterpret_cast<T*>(registers + offset);
  }
};

// Slow paths of memory access; implemented in memory.cc. Each returns false after it has recorded a
// fault. The first asks that [low, high) lies in one live range and remembers it in slot `hint`.
bool CheckGlobal(Context& c, const Inst& i, uint64_t low, uint64_t high, bool write);
// Asks the same of each lane alone, when they do not share a range.
bool CheckLanes(Context& c, const Inst& i, uint32_t mask, const uint64_t* addresses, uint32_t bytes,
                bool write);
// Turns generic addresses into host addresses that are safe to touch: global, this block's
// shared memory, a lane's local memory or the parameters.
bool CheckGeneric(Context& c, const Inst& i, uint32_t mask, const uint64_t* addresses,
                  uint32_t bytes, bool write);
void FaultAt(Context& c, const Inst& i, Fault fault, uint32_t lane, uint64_t address,
             const char* space, uint32_t bytes, bool write);

}  // namespace simgpu::exec
