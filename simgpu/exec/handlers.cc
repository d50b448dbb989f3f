// Gathers what this instruction set's files define.
#include "simgpu/exec/inst.h"

namespace simgpu::exec::SIMGPU_ISA {

extern const Rows kIntegerRows, kBitRows, kF32Rows, kF64Rows, kCompareRows;
Handler PickConvert(int target, int source);
Handler PickLoad(MemorySpace space, bool address64, MemoryType type, int vector);
Handler PickStore(MemorySpace space, bool address64, MemoryType type, int vector);
Handler PickMove(int bytes);
void MovePredicate(Context& c, const Inst& i, uint32_t mask);

#define SIMGPU_TEXT_(x) #x
#define SIMGPU_TEXT(x) SIMGPU_TEXT_(x)

const HandlerSet& Handlers() {
  static const HandlerSet set = {SIMGPU_TEXT(SIMGPU_ISA),
                                 kIntegerRows,
                                 kBitRows,
                                 kF32Rows,
                                 kF64Rows,
                                 kCompareRows,
                                 PickConvert,
                                 PickLoad,
                                 PickStore,
                                 PickMove(4),
                                 PickMove(8),
                                 MovePredicate};
  return set;
}

}  // namespace simgpu::exec::SIMGPU_ISA
