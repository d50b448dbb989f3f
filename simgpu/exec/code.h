// What the decoder makes of one kernel: its functions as instruction arrays, and where everything
// lies. An image belongs to one kernel, because the addresses of shared variables depend on which
// kernel reaches them; a device function used by two kernels is decoded twice.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "simgpu/exec/inst.h"
#include "simgpu/ptx/module.h"

namespace simgpu::exec {

struct Code;

struct Constant {
  uint32_t offset = 0;
  uint8_t bytes = 4;  // of a cell
  bool predicate = false;
  uint64_t value = 0;
};

struct LocalSlot {  // a parameter or result in a frame's local memory
  uint32_t offset = 0;
  uint32_t bytes = 0;
};

enum class Builtin : uint8_t { kNone, kPrint, kAssert, kMalloc, kFree };

struct CallSite {
  int32_t callee = -1;  // function index; -1 if indirect or a builtin
  Builtin builtin = Builtin::kNone;
  std::vector<LocalSlot> arguments, results;  // in the caller's frame
};

struct Code {
  const ptx::Function* function = nullptr;
  int32_t index = 0;  // in KernelImage::codes
  std::vector<Inst> insts;
  std::vector<Constant> constants;
  std::vector<CallSite> calls;
  std::vector<LocalSlot> parameters, results;  // of a device function
  uint32_t polls = 0;                          // kPolls and kMayPoll of what it contains and calls
  uint32_t frame_bytes = 0;                    // registers
  uint32_t local_bytes = 0;                    // depot and parameters
  std::vector<uint32_t> variable_offsets;      // in local memory, by ptx::Function::variables
};

struct KernelImage {
  const ptx::Function* entry = nullptr;
  std::deque<Code> codes;  // codes[0] is the kernel
  std::unordered_map<int32_t, Code*> by_function;
  uint32_t static_shared_bytes = 0;
  uint64_t dynamic_shared_offset = 0;
  std::unordered_map<const ptx::Variable*, uint64_t> shared_offsets;
  uint32_t local_bytes = 0;      // what a lane needs, without recursion
  bool calls_unbounded = false;  // recursion or indirect calls
};

// A function's address, as kernels see it: no memory, only a name.
constexpr uint64_t kFunctionHandleBase = 0x5f00'0000'0000'0000;
inline uint64_t FunctionHandle(int32_t index) {
  return kFunctionHandleBase + (static_cast<uint64_t>(index) << 4);
}

}  // namespace simgpu::exec
