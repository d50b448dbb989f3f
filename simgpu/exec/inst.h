// A decoded instruction, what it runs on, and the table of rows that says how to decode one.
//
// A warp's registers are a structure of arrays: each register is a slot of 32 cells, one per lane,
// of 4 bytes (8 for 64-bit registers; narrower registers use the low bits of a 4-byte cell and
// their upper bits mean nothing). A predicate is one 32-bit mask. Immediates and addresses of
// variables are slots too, filled once per frame, so that a handler never asks what kind its
// operands are: an operand is a byte offset from the frame. One handler runs one instruction for
// all lanes of its mask; a lane outside the mask must not change and must not touch memory.
#pragma once

#include <cstddef>
#include <cstdint>

namespace simgpu::exec {

struct Context;
struct Inst;

constexpr uint32_t kLanes = 32;
using Handler = void (*)(Context&, const Inst&, uint32_t mask);

struct alignas(64) Inst {
  Handler fn = nullptr;
  uint32_t d = 0, a = 0, b = 0, c = 0;  // operands: offsets from the frame
  int64_t imm = 0;
  uint32_t guard = 0;  // predicate's offset, with kGuardNegated; 0 is none
  uint32_t flags = 0;  // Flag bits from the modifiers
  uint32_t e = 0, g = 0;
  uint32_t x = 0;  // index into a side table (calls, vector operands), or a branch's distance
  uint32_t line = 0;
  // Of a branch: instruction indices; join -1 is the function's exit. A memory access keeps in
  // `target` which cached range it tries first.
  int32_t target = 0, join = -1;

  uint32_t hint() const { return static_cast<uint32_t>(target); }
};

constexpr uint32_t kGuardNegated = 1;  // offsets are multiples of 4

enum Flag : uint32_t {
  kRz = 1 << 0,
  kRm = 1 << 1,
  kRp = 1 << 2,
  kFtz = 1 << 3,
  kSat = 1 << 4,
  kRni = 1 << 5,
  kRzi = 1 << 6,
  kRmi = 1 << 7,
  kRpi = 1 << 8,
  kAnd = 1 << 9,
  kOr = 1 << 10,
  kXor = 1 << 11,
  kNan = 1 << 12,
  kCarryOut = 1 << 13,
  kXorSign = 1 << 14,
  kAbs = 1 << 15,
  kRn = 1 << 16,
  kShiftAmount = 1 << 17,
  kApprox = 1 << 18,
  kWrap = 1 << 19,
  kRelu = 1 << 20,
  kFull = 1 << 21,
  // What a loop contains that may be waiting for another thread: surely polling, or perhaps.
  kPolls = 1 << 23,
  kMayPoll = 1 << 24,
  kForceable = 1 << 22,  // a warp-wide instruction that may run with fewer lanes than it names
};
constexpr uint32_t kRoundingFlags = kRz | kRm | kRp;

// One line of the instruction table. The pattern is the mnemonic: "[.a|.b]" may be absent,
// "(a|b)" is a choice. The shape has one letter per operand, destination first:
//   s 16-bit   i 32-bit   l 64-bit   h f16   f f32   d f64   p predicate
//   c predicate that is there only with .and, .or or .xor
// An upper-case letter is a destination. 'P' alone takes "p|q" too: q goes to Inst::e.
struct Row {
  const char* pattern;
  const char* shape;
  Handler fn;
};
struct Rows {
  const Row* rows;
  size_t count;
};

enum class MemorySpace : uint8_t { kGlobal, kShared, kLocal, kGeneric };
constexpr int kMemorySpaces = 4;
enum class MemoryType : uint8_t { kU8, kS8, kB16, kS16, kB32, kB64 };
constexpr int kMemoryTypes = 6;
constexpr uint32_t kMemoryBytes[kMemoryTypes] = {1, 1, 2, 2, 4, 8};

// What is compiled once for each instruction set of the host.
struct HandlerSet {
  const char* isa;
  Rows integer, bits, f32, f64, compare;
  // [destination][source] in the order of ConvertType; null where there is none.
  Handler (*convert)(int destination, int source);
  Handler (*load)(MemorySpace, bool address64, MemoryType, int vector);
  Handler (*store)(MemorySpace, bool address64, MemoryType, int vector);
  Handler move32, move64, move_predicate;
};
enum ConvertType {
  kCvtU8,
  kCvtS8,
  kCvtU16,
  kCvtS16,
  kCvtU32,
  kCvtS32,
  kCvtU64,
  kCvtS64,
  kCvtF16,
  kCvtF32,
  kCvtF64,
  kCvtTypes
};

namespace v2 {
const HandlerSet& Handlers();
}
namespace v3 {
const HandlerSet& Handlers();
}
// The best set that this machine can run.
const HandlerSet& BestHandlers();

}  // namespace simgpu::exec
