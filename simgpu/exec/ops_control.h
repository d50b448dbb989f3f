// Handlers that are compiled once: control flow, barriers, addresses, parameters.
#pragma once

#include "simgpu/exec/inst.h"

namespace simgpu::exec {

// Branch: Inst::a is the predicate (kGuardNegated in flags' place is Inst::b), x its cost if it
// goes backwards.
void Branch(Context& c, const Inst& i, uint32_t mask);
void BranchAlways(Context& c, const Inst& i, uint32_t mask);
void Return(Context& c, const Inst& i, uint32_t mask);
void Exit(Context& c, const Inst& i, uint32_t mask);
void Trap(Context& c, const Inst& i, uint32_t mask);
void Nothing(Context& c, const Inst& i, uint32_t mask);
void Nanosleep(Context& c, const Inst& i, uint32_t mask);
void FenceSc(Context& c, const Inst& i, uint32_t mask);

// bar: a is the slot of the barrier's number, b of the thread count (0 if none), c of the
// predicate of bar.red (kGuardNegated in x).
void BarrierSync(Context& c, const Inst& i, uint32_t mask);
void BarrierArrive(Context& c, const Inst& i, uint32_t mask);

// d = special register number x (SpecialRegister), component in e.
void ReadSpecial(Context& c, const Inst& i, uint32_t mask);
void ReadSpecial64(Context& c, const Inst& i, uint32_t mask);
enum class Special : uint32_t {
  kTid,
  kNtid,
  kCtaid,
  kNctaid,
  kLaneid,
  kWarpid,
  kNwarpid,
  kSmid,
  kNsmid,
  kGridid,
  kLanemaskEq,
  kLanemaskLe,
  kLanemaskLt,
  kLanemaskGe,
  kLanemaskGt,
  kClock,
  kClockHi,
  kClock64,
  kGlobaltimer,
  kGlobaltimerLo,
  kGlobaltimerHi,
  kDynamicShared,
  kTotalShared,
  kEnvreg1,
  kEnvreg2,
  kZero,
};

void LocalAddress(Context& c, const Inst& i, uint32_t mask);      // d64 = frame's base + imm
void ParameterAddress(Context& c, const Inst& i, uint32_t mask);  // d64 = parameters + imm
void SharedToGeneric(Context& c, const Inst& i, uint32_t mask);
void GenericToShared(Context& c, const Inst& i, uint32_t mask);
void LocalToGeneric(Context& c, const Inst& i, uint32_t mask);
void GenericToLocal(Context& c, const Inst& i, uint32_t mask);
// Predicate d: does the generic address lie in this space? x is a ptx::Space.
void IsSpace(Context& c, const Inst& i, uint32_t mask);

// Of the kernel's parameters, at offset imm: d..., flags holds the vector width in e/g/x like ops
// in memory; the type is in target.
void LoadParameter(Context& c, const Inst& i, uint32_t mask);

// Widths: a 64-bit cell's low half, and zero or sign extension of a 4-byte cell.
void Narrow(Context& c, const Inst& i, uint32_t mask);
void ExtendZero(Context& c, const Inst& i, uint32_t mask);
void ExtendSign(Context& c, const Inst& i, uint32_t mask);
// mov.b64 {lo, hi}: d = e:a. And mov.b32 of two halves. Their inverses take imm as the shift.
void Pack64(Context& c, const Inst& i, uint32_t mask);
void Pack32(Context& c, const Inst& i, uint32_t mask);
void Unpack64(Context& c, const Inst& i, uint32_t mask);
void Unpack32(Context& c, const Inst& i, uint32_t mask);

void Call(Context& c, const Inst& i, uint32_t mask);          // x: CallSite index
void CallIndirect(Context& c, const Inst& i, uint32_t mask);  // a: handles

}  // namespace simgpu::exec
