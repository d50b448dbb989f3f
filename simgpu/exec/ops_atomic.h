// atom and red. Operands: a addresses (64-bit), imm offset, b the value, c the second of cas (b is
// what is compared), d the old value.
#pragma once

#include <string_view>

#include "simgpu/exec/inst.h"

namespace simgpu::exec {

struct AtomicRequest {
  MemorySpace space = MemorySpace::kGeneric;
  std::string_view operation;  // add min max and or xor exch cas inc dec
  std::string_view type;       // u32
  bool reduction = false;
};
Handler AtomicHandler(const AtomicRequest& request);  // null if there is none

}  // namespace simgpu::exec
