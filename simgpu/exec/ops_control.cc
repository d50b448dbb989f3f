#include "simgpu/exec/ops_control.h"

#include <ctime>

#include <algorithm>
#include <cstring>

#include "simgpu/exec/engine.h"
#include "simgpu/exec/syscalls.h"

namespace simgpu::exec {
namespace {

template <typename F>
void EachLane(uint32_t mask, F f) {
  for (uint32_t m = mask; m; m &= m - 1) f(static_cast<uint32_t>(__builtin_ctz(m)));
}

uint64_t Nanoseconds(clockid_t clock) {
  timespec t;
  clock_gettime(clock, &t);
  return static_cast<uint64_t>(t.tv_sec) * 1000000000u + static_cast<uint64_t>(t.tv_nsec);
}

}  // namespace

void Branch(Context& c, const Inst& i, uint32_t mask) {
  uint32_t p = *c.At<const uint32_t>(i.a);
  uint32_t taken = mask & (i.b ? ~p : p);
  if (taken == 0) return;
  if (taken == mask) {
    c.pc = c.code + i.target;
  } else {
    c.engine->Diverge(taken, c.code + i.target, i.join < 0 ? nullptr : c.code + i.join);
  }
  if (i.x) c.engine->SpendBudget(static_cast<int32_t>(i.x));
}

void BranchAlways(Context& c, const Inst& i, uint32_t) {
  c.pc = c.code + i.target;
  if (i.x) c.engine->SpendBudget(static_cast<int32_t>(i.x));
}

void Return(Context& c, const Inst&, uint32_t mask) {
  c.engine->Return(mask);
}
void Exit(Context& c, const Inst&, uint32_t mask) {
  c.engine->Exit(mask);
}
void Trap(Context& c, const Inst& i, uint32_t mask) {
  c.engine->SetFault(Fault::kTrap, &i, static_cast<uint32_t>(__builtin_ctz(mask)),
                     "the thread executed a trap");
}
void Nothing(Context&, const Inst&, uint32_t) {}
void Nanosleep(Context& c, const Inst&, uint32_t) {
  c.engine->SpendBudget(4096);
}
void FenceSc(Context&, const Inst&, uint32_t) {
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

namespace {
bool BarrierOperands(Context& c, const Inst& i, uint32_t mask, uint32_t* id, uint32_t* count) {
  uint32_t lane = static_cast<uint32_t>(__builtin_ctz(mask));
  *id = c.At<const uint32_t>(i.a)[lane];
  *count = i.b ? c.At<const uint32_t>(i.b)[lane] : 0;
  if (*id < kBarriers) return true;
  c.engine->SetFault(Fault::kIllegalInstruction, &i, lane,
                     "the barrier (" + std::to_string(*id) + ") does not exist");
  return false;
}
}  // namespace

void BarrierSync(Context& c, const Inst& i, uint32_t mask) {
  uint32_t id, count;
  if (!BarrierOperands(c, i, mask, &id, &count)) return;
  if (i.flags & (kAnd | kOr | kXor)) {
    uint32_t p = *c.At<const uint32_t>(i.c) & mask;
    Barrier& barrier = c.block->barriers[id];
    if (p != mask) barrier.reduce_and = 0;
    if (p != 0) barrier.reduce_or = ~0u;
    barrier.reduce_popc += static_cast<uint32_t>(__builtin_popcount(p));
  }
  c.engine->ArriveAtBarrier(i, mask, id, count, true);
}
void BarrierArrive(Context& c, const Inst& i, uint32_t mask) {
  uint32_t id, count;
  if (!BarrierOperands(c, i, mask, &id, &count)) return;
  c.engine->ArriveAtBarrier(i, mask, id, count, false);
}

namespace {
uint64_t SpecialValue(Context& c, const Inst& i, uint32_t lane) {
  const LaunchRequest& request = c.engine->request();
  switch (static_cast<Special>(i.x)) {
    case Special::kTid:
      return c.warp->tid[i.e][lane];
    case Special::kNtid:
      return request.block[i.e];
    case Special::kCtaid:
      return c.block->id[i.e];
    case Special::kNctaid:
      return request.grid[i.e];
    case Special::kLaneid:
      return lane;
    case Special::kWarpid:
      return c.warp->index;
    case Special::kNwarpid:
      return (request.block[0] * request.block[1] * request.block[2] + kLanes - 1) / kLanes;
    case Special::kSmid:
      return 0;
    case Special::kNsmid:
      return 1;
    case Special::kGridid:
      return 1;
    case Special::kLanemaskEq:
      return 1u << lane;
    case Special::kLanemaskLe:
      return (2u << lane) - 1;
    case Special::kLanemaskLt:
      return (1u << lane) - 1;
    case Special::kLanemaskGe:
      return ~((1u << lane) - 1);
    case Special::kLanemaskGt:
      return ~((2u << lane) - 1);
    // One clock tick is one nanosecond.
    case Special::kClock:
      return static_cast<uint32_t>(Nanoseconds(CLOCK_MONOTONIC));
    case Special::kClockHi:
      return Nanoseconds(CLOCK_MONOTONIC) >> 32;
    case Special::kClock64:
      return Nanoseconds(CLOCK_MONOTONIC);
    case Special::kGlobaltimer:
      return Nanoseconds(CLOCK_REALTIME);
    case Special::kGlobaltimerLo:
      return static_cast<uint32_t>(Nanoseconds(CLOCK_REALTIME));
    case Special::kGlobaltimerHi:
      return Nanoseconds(CLOCK_REALTIME) >> 32;
    case Special::kDynamicShared:
      return request.dynamic_shared_bytes;
    case Special::kTotalShared:
      return c.shared_bytes;
    // Where cooperative groups keep their grid barrier: the workspace's address, high half first.
    case Special::kEnvreg1:
      return c.engine->workspace() >> 32;
    case Special::kEnvreg2:
      return static_cast<uint32_t>(c.engine->workspace());
    case Special::kZero:
      return 0;
  }
  return 0;
}
bool VariesByLane(Special s) {
  return s == Special::kTid || (s >= Special::kLanemaskEq && s <= Special::kLanemaskGt) ||
         s == Special::kLaneid;
}
template <typename C>
void ReadSpecialCell(Context& c, const Inst& i, uint32_t mask) {
  C* d = c.At<C>(i.d);
  if (VariesByLane(static_cast<Special>(i.x))) {
    EachLane(mask, [&](uint32_t l) { d[l] = static_cast<C>(SpecialValue(c, i, l)); });
  } else {
    C value = static_cast<C>(SpecialValue(c, i, 0));
    EachLane(mask, [&](uint32_t l) { d[l] = value; });
  }
}
}  // namespace

void ReadSpecial(Context& c, const Inst& i, uint32_t mask) {
  ReadSpecialCell<uint32_t>(c, i, mask);
}
void ReadSpecial64(Context& c, const Inst& i, uint32_t mask) {
  ReadSpecialCell<uint64_t>(c, i, mask);
}

void LocalAddress(Context& c, const Inst& i, uint32_t mask) {
  uint64_t* d = c.At<uint64_t>(i.d);
  uint64_t value = c.local_base + static_cast<uint64_t>(i.imm);
  EachLane(mask, [&](uint32_t l) { d[l] = value; });
}
void ParameterAddress(Context& c, const Inst& i, uint32_t mask) {
  uint64_t* d = c.At<uint64_t>(i.d);
  uint64_t value = reinterpret_cast<uint64_t>(c.parameters) + static_cast<uint64_t>(i.imm);
  EachLane(mask, [&](uint32_t l) { d[l] = value; });
}
namespace {
template <typename F>
void MapAddress(Context& c, const Inst& i, uint32_t mask, F f) {
  uint64_t* d = c.At<uint64_t>(i.d);
  const uint64_t* a = c.At<const uint64_t>(i.a);
  EachLane(mask, [&](uint32_t l) { d[l] = f(a[l], l); });
}
}  // namespace
void SharedToGeneric(Context& c, const Inst& i, uint32_t mask) {
  uint64_t base = reinterpret_cast<uint64_t>(c.shared);
  MapAddress(c, i, mask, [=](uint64_t a, uint32_t) { return a + base; });
}
void GenericToShared(Context& c, const Inst& i, uint32_t mask) {
  uint64_t base = reinterpret_cast<uint64_t>(c.shared);
  MapAddress(c, i, mask, [=](uint64_t a, uint32_t) { return a - base; });
}
void LocalToGeneric(Context& c, const Inst& i, uint32_t mask) {
  uint64_t base = reinterpret_cast<uint64_t>(c.local);
  uint64_t stride = c.local_stride;
  MapAddress(c, i, mask, [=](uint64_t a, uint32_t l) { return a + base + stride * l; });
}
void GenericToLocal(Context& c, const Inst& i, uint32_t mask) {
  uint64_t base = reinterpret_cast<uint64_t>(c.local);
  uint64_t stride = c.local_stride;
  MapAddress(c, i, mask, [=](uint64_t a, uint32_t l) { return a - base - stride * l; });
}
void IsSpace(Context& c, const Inst& i, uint32_t mask) {
  const uint64_t* a = c.At<const uint64_t>(i.a);
  uint32_t result = 0;
  EachLane(mask, [&](uint32_t l) {
    uint64_t shared = a[l] - reinterpret_cast<uint64_t>(c.shared);
    uint64_t local = a[l] - reinterpret_cast<uint64_t>(c.local);
    uint64_t parameter = a[l] - reinterpret_cast<uint64_t>(c.parameters);
    bool in_shared = shared < c.shared_bytes;
    bool in_local = c.local && local < c.local_stride * kLanes;
    bool in_parameters = parameter < c.parameter_bytes;
    MemoryMap::Range range;
    bool in_constant = false;
    if (!in_shared && !in_local && !in_parameters)
      in_constant = c.engine->memory().Find(a[l], &range) && range.read_only;
    bool is = false;
    switch (static_cast<ptx::Space>(i.x)) {
      case ptx::Space::kShared:
        is = in_shared;
        break;
      case ptx::Space::kLocal:
        is = in_local;
        break;
      case ptx::Space::kParam:
        is = in_parameters;
        break;
      case ptx::Space::kConst:
        is = in_constant;
        break;
      default:
        is = !in_shared && !in_local && !in_parameters && !in_constant;
        break;
    }
    result |= static_cast<uint32_t>(is) << l;
  });
  uint32_t* d = c.At<uint32_t>(i.d);
  *d = (*d & ~mask) | result;
}

void LoadParameter(Context& c, const Inst& i, uint32_t mask) {
  auto type = static_cast<MemoryType>(i.target);
  uint32_t bytes = kMemoryBytes[i.target];
  uint32_t slots[4] = {i.d, i.e, i.g, i.x};
  for (uint32_t k = 0; k < i.b; ++k) {
    const std::byte* source = c.parameters + i.imm + k * bytes;
    uint64_t value = 0;
    memcpy(&value, source, bytes);
    if (type == MemoryType::kS8) value = static_cast<uint64_t>(int64_t{static_cast<int8_t>(value)});
    if (type == MemoryType::kS16)
      value = static_cast<uint64_t>(int64_t{static_cast<int16_t>(value)});
    if (bytes == 8) {
      uint64_t* d = c.At<uint64_t>(slots[k]);
      if (mask == c.live)
        std::fill(d, d + kLanes, value);
      else
        EachLane(mask, [&](uint32_t l) { d[l] = value; });
    } else {
      uint32_t* d = c.At<uint32_t>(slots[k]);
      if (mask == c.live)
        std::fill(d, d + kLanes, static_cast<uint32_t>(value));
      else
        EachLane(mask, [&](uint32_t l) { d[l] = static_cast<uint32_t>(value); });
    }
  }
}

void Narrow(Context& c, const Inst& i, uint32_t mask) {
  uint32_t* d = c.At<uint32_t>(i.d);
  const uint64_t* a = c.At<const uint64_t>(i.a);
  EachLane(mask, [&](uint32_t l) { d[l] = static_cast<uint32_t>(a[l]); });
}
void ExtendZero(Context& c, const Inst& i, uint32_t mask) {
  uint64_t* d = c.At<uint64_t>(i.d);
  const uint32_t* a = c.At<const uint32_t>(i.a);
  EachLane(mask, [&](uint32_t l) { d[l] = a[l]; });
}
void ExtendSign(Context& c, const Inst& i, uint32_t mask) {
  uint64_t* d = c.At<uint64_t>(i.d);
  const uint32_t* a = c.At<const uint32_t>(i.a);
  EachLane(mask,
           [&](uint32_t l) { d[l] = static_cast<uint64_t>(int64_t{static_cast<int32_t>(a[l])}); });
}
void Pack64(Context& c, const Inst& i, uint32_t mask) {
  uint64_t* d = c.At<uint64_t>(i.d);
  const uint32_t* low = c.At<const uint32_t>(i.a);
  const uint32_t* high = c.At<const uint32_t>(i.b);
  EachLane(mask, [&](uint32_t l) { d[l] = uint64_t{high[l]} << 32 | low[l]; });
}
void Pack32(Context& c, const Inst& i, uint32_t mask) {
  uint32_t* d = c.At<uint32_t>(i.d);
  const uint32_t* low = c.At<const uint32_t>(i.a);
  const uint32_t* high = c.At<const uint32_t>(i.b);
  uint32_t bits = static_cast<uint32_t>(i.imm);  // of a half
  uint32_t keep = (1u << bits) - 1;
  EachLane(mask, [&](uint32_t l) { d[l] = (high[l] & keep) << bits | (low[l] & keep); });
}
void Unpack64(Context& c, const Inst& i, uint32_t mask) {
  uint32_t* d = c.At<uint32_t>(i.d);
  const uint64_t* a = c.At<const uint64_t>(i.a);
  EachLane(mask, [&](uint32_t l) { d[l] = static_cast<uint32_t>(a[l] >> i.imm) & i.b; });
}
void Unpack32(Context& c, const Inst& i, uint32_t mask) {
  uint32_t* d = c.At<uint32_t>(i.d);
  const uint32_t* a = c.At<const uint32_t>(i.a);
  EachLane(mask, [&](uint32_t l) { d[l] = (a[l] >> i.imm) & i.b; });
}

void Call(Context& c, const Inst& i, uint32_t mask) {
  const CallSite& site = c.frame->code->calls[i.x];
  if (site.builtin != Builtin::kNone) {
    RunBuiltin(c, i, mask, site);
    return;
  }
  c.engine->Call(i, mask, site, *c.engine->image().by_function.at(site.callee));
}

void CallIndirect(Context& c, const Inst& i, uint32_t mask) {
  // One target at a time: lanes with another come back to this instruction.
  const uint64_t* handles = c.At<const uint64_t>(i.a);
  uint32_t first = static_cast<uint32_t>(__builtin_ctz(mask));
  const Code* code = c.engine->CodeOfHandle(handles[first]);
  if (!code) {
    char text[80];
    snprintf(text, sizeof(text), "the address (0x%llx) of a call is no function's",
             static_cast<unsigned long long>(handles[first]));
    c.engine->SetFault(Fault::kIllegalAddress, &i, first, text);
    return;
  }
  uint32_t same = 0;
  EachLane(mask,
           [&](uint32_t l) { same |= static_cast<uint32_t>(handles[l] == handles[first]) << l; });
  if (same != mask) {
    // The other lanes become a leaf that starts at this call again.
    c.engine->SplitOff(mask & ~same, &i);
  }
  const CallSite& site = c.frame->code->calls[i.x];
  c.engine->Call(i, same, site, *code);
}

}  // namespace simgpu::exec
