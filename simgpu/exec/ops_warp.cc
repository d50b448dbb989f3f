#include "simgpu/exec/ops_warp.h"

#include "simgpu/exec/engine.h"

namespace simgpu::exec {
namespace {

template <typename F>
void EachLane(uint32_t mask, F f) {
  for (uint32_t m = mask; m; m &= m - 1) f(static_cast<uint32_t>(__builtin_ctz(m)));
}

// All lanes that any of the executing lanes names.
uint32_t MembersNeeded(const Context& c, uint32_t slot, uint32_t mask) {
  const uint32_t* members = c.At<const uint32_t>(slot);
  uint32_t need = 0;
  EachLane(mask, [&](uint32_t l) { need |= members[l]; });
  return need;
}

void SetPredicate(Context& c, uint32_t offset, uint32_t mask, uint32_t value) {
  uint32_t* p = c.At<uint32_t>(offset);
  *p = (*p & ~mask) | (value & mask);
}

enum Mode { kUp, kDown, kBfly, kIdx };

template <Mode kMode>
void Shuffle(Context& c, const Inst& i, uint32_t mask) {
  if (!c.engine->GatherLanes(i, mask, MembersNeeded(c, i.e, mask))) return;
  const uint32_t* a = c.At<const uint32_t>(i.a);
  const uint32_t* b = c.At<const uint32_t>(i.b);
  const uint32_t* control = c.At<const uint32_t>(i.c);
  uint32_t result[kLanes] = {};
  uint32_t valid = 0;
  EachLane(mask, [&](uint32_t lane) {
    int32_t distance = static_cast<int32_t>(b[lane] & 31);
    uint32_t clamp = control[lane] & 31, segment = control[lane] >> 8 & 31;
    int32_t l = static_cast<int32_t>(lane);
    int32_t last = static_cast<int32_t>((lane & segment) | (clamp & ~segment));
    int32_t first = static_cast<int32_t>(lane & segment);
    int32_t from = 0;
    bool in = false;
    switch (kMode) {
      case kUp:
        from = l - distance;
        in = from >= last;
        break;
      case kDown:
        from = l + distance;
        in = from <= last;
        break;
      case kBfly:
        from = l ^ distance;
        in = from <= last;
        break;
      case kIdx:
        from = first | (distance & static_cast<int32_t>(~segment & 31));
        in = from <= last;
        break;
    }
    if (!in) from = l;
    result[lane] = a[from];
    valid |= static_cast<uint32_t>(in) << lane;
  });
  uint32_t* d = c.At<uint32_t>(i.d);
  EachLane(mask, [&](uint32_t l) { d[l] = result[l]; });
  if (i.g) SetPredicate(c, i.g, mask, valid);
}

enum VoteMode { kAny, kAll, kUni, kBallot };

template <VoteMode kMode>
void Vote(Context& c, const Inst& i, uint32_t mask) {
  if (i.e && !c.engine->GatherLanes(i, mask, MembersNeeded(c, i.e, mask))) return;
  uint32_t p = *c.At<const uint32_t>(i.a);
  const uint32_t* members = i.e ? c.At<const uint32_t>(i.e) : nullptr;
  uint32_t result = 0;
  EachLane(mask, [&](uint32_t l) {
    uint32_t group = (members ? members[l] : ~0u) & mask;
    uint32_t yes = p & group;
    if constexpr (kMode == kBallot) {
      c.At<uint32_t>(i.d)[l] = yes;
    } else {
      bool value = kMode == kAny   ? yes != 0
                   : kMode == kAll ? yes == group
                                   : yes == 0 || yes == group;
      result |= static_cast<uint32_t>(value) << l;
    }
  });
  if constexpr (kMode != kBallot) SetPredicate(c, i.d, mask, result);
}

template <bool kAllMode, typename T>
void Match(Context& c, const Inst& i, uint32_t mask) {
  if (!c.engine->GatherLanes(i, mask, MembersNeeded(c, i.e, mask))) return;
  const T* a = c.At<const T>(i.a);
  const uint32_t* members = c.At<const uint32_t>(i.e);
  uint32_t result[kLanes] = {}, same_everywhere = 0;
  EachLane(mask, [&](uint32_t l) {
    uint32_t group = members[l] & mask, same = 0;
    EachLane(group, [&](uint32_t k) { same |= static_cast<uint32_t>(a[k] == a[l]) << k; });
    if (kAllMode) {
      result[l] = same == group ? group : 0;
      same_everywhere |= static_cast<uint32_t>(same == group) << l;
    } else {
      result[l] = same;
    }
  });
  uint32_t* d = c.At<uint32_t>(i.d);
  EachLane(mask, [&](uint32_t l) { d[l] = result[l]; });
  if (kAllMode && i.g) SetPredicate(c, i.g, mask, same_everywhere);
}

struct ReduceAdd {
  static uint32_t Do(uint32_t a, uint32_t b) { return a + b; }
};
struct ReduceAnd {
  static uint32_t Do(uint32_t a, uint32_t b) { return a & b; }
};
struct ReduceOr {
  static uint32_t Do(uint32_t a, uint32_t b) { return a | b; }
};
struct ReduceXor {
  static uint32_t Do(uint32_t a, uint32_t b) { return a ^ b; }
};
template <typename T>
struct ReduceMin {
  static uint32_t Do(uint32_t a, uint32_t b) {
    return static_cast<T>(a) < static_cast<T>(b) ? a : b;
  }
};
template <typename T>
struct ReduceMax {
  static uint32_t Do(uint32_t a, uint32_t b) {
    return static_cast<T>(a) > static_cast<T>(b) ? a : b;
  }
};

template <typename Op>
void Redux(Context& c, const Inst& i, uint32_t mask) {
  if (!c.engine->GatherLanes(i, mask, MembersNeeded(c, i.e, mask))) return;
  const uint32_t* a = c.At<const uint32_t>(i.a);
  const uint32_t* members = c.At<const uint32_t>(i.e);
  uint32_t result[kLanes] = {};
  EachLane(mask, [&](uint32_t l) {
    uint32_t group = (members[l] & mask) | 1u << l;
    uint32_t value = a[__builtin_ctz(group)];
    EachLane(group & (group - 1), [&](uint32_t k) { value = Op::Do(value, a[k]); });
    result[l] = value;
  });
  uint32_t* d = c.At<uint32_t>(i.d);
  EachLane(mask, [&](uint32_t l) { d[l] = result[l]; });
}

}  // namespace

Handler ShuffleHandler(std::string_view mode) {
  if (mode == "up") return Shuffle<kUp>;
  if (mode == "down") return Shuffle<kDown>;
  if (mode == "bfly") return Shuffle<kBfly>;
  if (mode == "idx") return Shuffle<kIdx>;
  return nullptr;
}

Handler VoteHandler(std::string_view mode) {
  if (mode == "any") return Vote<kAny>;
  if (mode == "all") return Vote<kAll>;
  if (mode == "uni") return Vote<kUni>;
  if (mode == "ballot") return Vote<kBallot>;
  return nullptr;
}

Handler MatchHandler(bool all, bool wide) {
  if (all) return wide ? Match<true, uint64_t> : Match<true, uint32_t>;
  return wide ? Match<false, uint64_t> : Match<false, uint32_t>;
}

Handler ReduxHandler(std::string_view operation, std::string_view type) {
  if (type == "b32") {
    if (operation == "and") return Redux<ReduceAnd>;
    if (operation == "or") return Redux<ReduceOr>;
    if (operation == "xor") return Redux<ReduceXor>;
    return nullptr;
  }
  if (type != "s32" && type != "u32") return nullptr;
  bool sign = type == "s32";
  if (operation == "add") return Redux<ReduceAdd>;
  if (operation == "min") return sign ? Redux<ReduceMin<int32_t>> : Redux<ReduceMin<uint32_t>>;
  if (operation == "max") return sign ? Redux<ReduceMax<int32_t>> : Redux<ReduceMax<uint32_t>>;
  return nullptr;
}

void WarpSync(Context& c, const Inst& i, uint32_t mask) {
  c.engine->GatherLanes(i, mask, MembersNeeded(c, i.b, mask));
}

void ActiveMask(Context& c, const Inst& i, uint32_t mask) {
  uint32_t* d = c.At<uint32_t>(i.d);
  EachLane(mask, [&](uint32_t l) { d[l] = mask; });
}

}  // namespace simgpu::exec
