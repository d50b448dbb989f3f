// Integer arithmetic and logic of 16, 32 and 64 bits. All of it wraps, so it is done unsigned.
#include "simgpu/exec/lanes.h"

namespace simgpu::exec::SIMGPU_ISA {
namespace {

template <typename T>
struct UnsignedOf;
template <>
struct UnsignedOf<int16_t> {
  using Type = uint16_t;
};
template <>
struct UnsignedOf<uint16_t> {
  using Type = uint16_t;
};
template <>
struct UnsignedOf<int32_t> {
  using Type = uint32_t;
};
template <>
struct UnsignedOf<uint32_t> {
  using Type = uint32_t;
};
template <>
struct UnsignedOf<int64_t> {
  using Type = uint64_t;
};
template <>
struct UnsignedOf<uint64_t> {
  using Type = uint64_t;
};
template <typename T>
using U = typename UnsignedOf<T>::Type;
template <typename T>
constexpr int kBits = 8 * sizeof(T);
template <typename T>
constexpr bool kSigned = static_cast<T>(-1) < static_cast<T>(0);

template <typename T>
struct Add {
  static T Do(T a, T b) { return static_cast<T>(U<T>(a) + U<T>(b)); }
};
template <typename T>
struct Sub {
  static T Do(T a, T b) { return static_cast<T>(U<T>(a) - U<T>(b)); }
};
template <typename T>
struct MulLo {
  // Widened first: a 16-bit product is computed in int, which could overflow.
  static T Do(T a, T b) { return static_cast<T>(uint64_t(U<T>(a)) * uint64_t(U<T>(b))); }
};
template <>
struct MulLo<int32_t> {
  static int32_t Do(int32_t a, int32_t b) {
    return static_cast<int32_t>(uint32_t(a) * uint32_t(b));
  }
};
template <>
struct MulLo<uint32_t> {
  static uint32_t Do(uint32_t a, uint32_t b) { return a * b; }
};
template <typename T>
struct MulHi {
  static T Do(T a, T b) {
    if constexpr (sizeof(T) == 8) {
      if constexpr (kSigned<T>)
        return static_cast<T>((static_cast<__int128>(a) * b) >> 64);
      else
        return static_cast<T>((static_cast<unsigned __int128>(a) * b) >> 64);
    } else if constexpr (kSigned<T>) {
      return static_cast<T>((int64_t(a) * int64_t(b)) >> kBits<T>);
    } else {
      return static_cast<T>((uint64_t(a) * uint64_t(b)) >> kBits<T>);
    }
  }
};
template <typename T>
struct Min {
  static T Do(T a, T b) { return a < b ? a : b; }
};
template <typename T>
struct Max {
  static T Do(T a, T b) { return a > b ? a : b; }
};
template <typename T>
struct And {
  static T Do(T a, T b) { return a & b; }
};
template <typename T>
struct Or {
  static T Do(T a, T b) { return a | b; }
};
template <typename T>
struct Xor {
  static T Do(T a, T b) { return a ^ b; }
};
// Division by zero is unspecified but must not trap, also for lanes that are not active: hardware
// is seen to give all ones and the dividend. INT_MIN / -1 wraps.
template <typename T>
struct Div {
  static T Do(T a, T b) {
    if (b == 0) return static_cast<T>(-1);
    if constexpr (kSigned<T>)
      if (b == -1) return static_cast<T>(0 - U<T>(a));
    return static_cast<T>(a / b);
  }
};
template <typename T>
struct Rem {
  static T Do(T a, T b) {
    if (b == 0) return a;
    if constexpr (kSigned<T>)
      if (b == -1) return 0;
    return static_cast<T>(a % b);
  }
};
template <typename T>
struct AbsDiff {  // part of sad
  static U<T> Do(T a, T b) { return a < b ? U<T>(U<T>(b) - U<T>(a)) : U<T>(U<T>(a) - U<T>(b)); }
};

template <template <typename> class Op, typename T>
void BinaryOp(Context& c, const Inst& i, uint32_t mask) {
  Binary<T, T, T>(c, i, mask, [](T a, T b) { return Op<T>::Do(a, b); });
}
// Shifts: the amount is always u32, and one past the width shifts everything out.
template <typename T>
void Shl(Context& c, const Inst& i, uint32_t mask) {
  Binary<T, T, uint32_t>(c, i, mask, [](T a, uint32_t n) {
    return static_cast<T>(n >= kBits<T> ? 0 : U<T>(a) << (n & (kBits<T> - 1)));
  });
}
template <typename T>
void Shr(Context& c, const Inst& i, uint32_t mask) {
  Binary<T, T, uint32_t>(c, i, mask, [](T a, uint32_t n) {
    uint32_t m = n >= kBits<T> ? kBits<T> - 1 : n;
    T shifted = static_cast<T>(a >> m);
    if constexpr (kSigned<T>)
      return shifted;
    else
      return static_cast<T>(n >= kBits<T> ? 0 : shifted);
  });
}
template <typename T>
void Neg(Context& c, const Inst& i, uint32_t mask) {
  Unary<T, T>(c, i, mask, [](T a) { return static_cast<T>(0 - U<T>(a)); });
}
template <typename T>
void Abs(Context& c, const Inst& i, uint32_t mask) {
  Unary<T, T>(c, i, mask, [](T a) { return static_cast<T>(a < 0 ? 0 - U<T>(a) : U<T>(a)); });
}
template <typename T>
void Not(Context& c, const Inst& i, uint32_t mask) {
  Unary<T, T>(c, i, mask, [](T a) { return static_cast<T>(~a); });
}
template <typename T>
void Cnot(Context& c, const Inst& i, uint32_t mask) {
  Unary<T, T>(c, i, mask, [](T a) { return static_cast<T>(a == 0 ? 1 : 0); });
}
template <typename T>
void MadLo(Context& c, const Inst& i, uint32_t mask) {
  Ternary<T, T, T, T>(c, i, mask, [](T a, T b, T e) { return Add<T>::Do(MulLo<T>::Do(a, b), e); });
}
template <typename T>
void MadHi(Context& c, const Inst& i, uint32_t mask) {
  Ternary<T, T, T, T>(c, i, mask, [](T a, T b, T e) { return Add<T>::Do(MulHi<T>::Do(a, b), e); });
}
template <typename D, typename T>
void MulWide(Context& c, const Inst& i, uint32_t mask) {
  Binary<D, T, T>(c, i, mask, [](T a, T b) { return MulLo<D>::Do(D(a), D(b)); });
}
template <typename D, typename T>
void MadWide(Context& c, const Inst& i, uint32_t mask) {
  Ternary<D, T, T, D>(c, i, mask,
                      [](T a, T b, D e) { return Add<D>::Do(MulLo<D>::Do(D(a), D(b)), e); });
}
int32_t Clamp32(int64_t v) {
  return v < INT32_MIN ? INT32_MIN : v > INT32_MAX ? INT32_MAX : static_cast<int32_t>(v);
}
void AddSat(Context& c, const Inst& i, uint32_t mask) {
  Binary<int32_t, int32_t, int32_t>(c, i, mask,
                                    [](int32_t a, int32_t b) { return Clamp32(int64_t(a) + b); });
}
void SubSat(Context& c, const Inst& i, uint32_t mask) {
  Binary<int32_t, int32_t, int32_t>(c, i, mask,
                                    [](int32_t a, int32_t b) { return Clamp32(int64_t(a) - b); });
}
void MadHiSat(Context& c, const Inst& i, uint32_t mask) {
  Ternary<int32_t, int32_t, int32_t, int32_t>(c, i, mask, [](int32_t a, int32_t b, int32_t e) {
    return Clamp32(int64_t(MulHi<int32_t>::Do(a, b)) + e);
  });
}
template <typename T>
void Sad(Context& c, const Inst& i, uint32_t mask) {
  Ternary<T, T, T, T>(c, i, mask,
                      [](T a, T b, T e) { return static_cast<T>(U<T>(e) + AbsDiff<T>::Do(a, b)); });
}
template <typename T>
T Low24(T a) {
  return static_cast<T>(U<T>(a) << 8) >> 8;
}
template <typename T, bool kHigh, bool kAdd>
void Mul24(Context& c, const Inst& i, uint32_t mask) {
  Ternary<T, T, T, T>(c, i, mask, [](T a, T b, T e) {
    int64_t product = int64_t(Low24(a)) * int64_t(Low24(b));
    U<T> part = static_cast<U<T>>(kHigh ? uint64_t(product) >> 16 : uint64_t(product));
    return static_cast<T>(kAdd ? part + U<T>(e) : part);
  });
}

// The carry flag is one bit per lane; Inst::e is its hidden predicate, which the decoder names.
template <typename T, bool kSubtract, bool kUse>
void AddCarry(Context& c, const Inst& i, uint32_t mask) {
  const T* a = c.At<const T>(i.a);
  const T* b = c.At<const T>(i.b);
  uint32_t in = kUse ? *c.At<const uint32_t>(i.e) : 0, out = 0;
  T* d = c.At<T>(i.d);
  for (uint32_t l = 0; l < kLanes; ++l) {
    if (!(mask >> l & 1)) continue;
    T carry = in >> l & 1, sum;
    bool first, second;
    if constexpr (kSubtract) {
      first = __builtin_sub_overflow(a[l], b[l], &sum);
      second = __builtin_sub_overflow(sum, carry, &sum);
    } else {
      first = __builtin_add_overflow(a[l], b[l], &sum);
      second = __builtin_add_overflow(sum, carry, &sum);
    }
    d[l] = sum;
    out |= uint32_t(first | second) << l;
  }
  if (i.flags & kCarryOut) SetPredicate(c, i.e, mask, out);
}
template <typename T, bool kHigh, bool kUse>
void MadCarry(Context& c, const Inst& i, uint32_t mask) {
  const T* a = c.At<const T>(i.a);
  const T* b = c.At<const T>(i.b);
  const T* e = c.At<const T>(i.c);
  uint32_t in = kUse ? *c.At<const uint32_t>(i.e) : 0, out = 0;
  T* d = c.At<T>(i.d);
  for (uint32_t l = 0; l < kLanes; ++l) {
    if (!(mask >> l & 1)) continue;
    T part = kHigh ? MulHi<T>::Do(a[l], b[l]) : MulLo<T>::Do(a[l], b[l]);
    U<T> sum;
    bool first = __builtin_add_overflow(U<T>(part), U<T>(e[l]), &sum);
    bool second = __builtin_add_overflow(sum, U<T>(in >> l & 1), &sum);
    d[l] = static_cast<T>(sum);
    out |= uint32_t(first | second) << l;
  }
  if (i.flags & kCarryOut) SetPredicate(c, i.e, mask, out);
}

enum Logic { kLogicAnd, kLogicOr, kLogicXor, kLogicNot, kLogicCnot };
template <Logic kLogic>
void Predicates(Context& c, const Inst& i, uint32_t mask) {
  uint32_t a = *c.At<const uint32_t>(i.a);
  uint32_t b = kLogic == kLogicNot ? 0 : *c.At<const uint32_t>(i.b);
  SetPredicate(c, i.d, mask,
               kLogic == kLogicAnd   ? a & b
               : kLogic == kLogicOr  ? a | b
               : kLogic == kLogicXor ? a ^ b
                                     : ~a);
}

#define BOTH(name, op)                                                                           \
  {name ".s16", "Sss", BinaryOp<op, int16_t>}, {name ".u16", "Sss", BinaryOp<op, uint16_t>},     \
      {name ".s32", "Iii", BinaryOp<op, int32_t>}, {name ".u32", "Iii", BinaryOp<op, uint32_t>}, \
      {name ".s64", "Lll", BinaryOp<op, int64_t>}, {                                             \
    name ".u64", "Lll", BinaryOp<op, uint64_t>                                                   \
  }
#define BITWISE(name, op)                                                                       \
  {name ".b16", "Sss", BinaryOp<op, uint16_t>}, {name ".b32", "Iii", BinaryOp<op, uint32_t>}, { \
    name ".b64", "Lll", BinaryOp<op, uint64_t>                                                  \
  }
#define WIDE(name, shape16, shape32, op)                                                        \
  {name ".s16", shape16, op<int32_t, int16_t>}, {name ".u16", shape16, op<uint32_t, uint16_t>}, \
      {name ".s32", shape32, op<int64_t, int32_t>}, {                                           \
    name ".u32", shape32, op<uint64_t, uint32_t>                                                \
  }

constexpr Row kRows[] = {
    BOTH("add", Add),
    BOTH("sub", Sub),
    BOTH("mul.lo", MulLo),
    BOTH("mul.hi", MulHi),
    BOTH("min", Min),
    BOTH("max", Max),
    BOTH("div", Div),
    BOTH("rem", Rem),
    BITWISE("and", And),
    BITWISE("or", Or),
    BITWISE("xor", Xor),
    {"add.sat.s32", "Iii", AddSat},
    {"sub.sat.s32", "Iii", SubSat},
    {"mad.hi.sat.s32", "Iiii", MadHiSat},
    WIDE("mul.wide", "Iss", "Lii", MulWide),
    WIDE("mad.wide", "Issi", "Liil", MadWide),
    {"mad.lo.s16", "Ssss", MadLo<int16_t>},
    {"mad.lo.u16", "Ssss", MadLo<uint16_t>},
    {"mad.lo.s32", "Iiii", MadLo<int32_t>},
    {"mad.lo.u32", "Iiii", MadLo<uint32_t>},
    {"mad.lo.s64", "Llll", MadLo<int64_t>},
    {"mad.lo.u64", "Llll", MadLo<uint64_t>},
    {"mad.hi.s16", "Ssss", MadHi<int16_t>},
    {"mad.hi.u16", "Ssss", MadHi<uint16_t>},
    {"mad.hi.s32", "Iiii", MadHi<int32_t>},
    {"mad.hi.u32", "Iiii", MadHi<uint32_t>},
    {"mad.hi.s64", "Llll", MadHi<int64_t>},
    {"mad.hi.u64", "Llll", MadHi<uint64_t>},
    {"shl.b16", "Ssi", Shl<uint16_t>},
    {"shl.b32", "Iii", Shl<uint32_t>},
    {"shl.b64", "Lli", Shl<uint64_t>},
    {"shr.(b16|u16)", "Ssi", Shr<uint16_t>},
    {"shr.s16", "Ssi", Shr<int16_t>},
    {"shr.(b32|u32)", "Iii", Shr<uint32_t>},
    {"shr.s32", "Iii", Shr<int32_t>},
    {"shr.(b64|u64)", "Lli", Shr<uint64_t>},
    {"shr.s64", "Lli", Shr<int64_t>},
    {"neg.s16", "Ss", Neg<int16_t>},
    {"neg.s32", "Ii", Neg<int32_t>},
    {"neg.s64", "Ll", Neg<int64_t>},
    {"abs.s16", "Ss", Abs<int16_t>},
    {"abs.s32", "Ii", Abs<int32_t>},
    {"abs.s64", "Ll", Abs<int64_t>},
    {"not.b16", "Ss", Not<uint16_t>},
    {"not.b32", "Ii", Not<uint32_t>},
    {"not.b64", "Ll", Not<uint64_t>},
    {"cnot.b16", "Ss", Cnot<uint16_t>},
    {"cnot.b32", "Ii", Cnot<uint32_t>},
    {"cnot.b64", "Ll", Cnot<uint64_t>},
    {"sad.s16", "Ssss", Sad<int16_t>},
    {"sad.u16", "Ssss", Sad<uint16_t>},
    {"sad.s32", "Iiii", Sad<int32_t>},
    {"sad.u32", "Iiii", Sad<uint32_t>},
    {"sad.s64", "Llll", Sad<int64_t>},
    {"sad.u64", "Llll", Sad<uint64_t>},
    {"mul24.lo.s32", "Iii", Mul24<int32_t, false, false>},
    {"mul24.lo.u32", "Iii", Mul24<uint32_t, false, false>},
    {"mul24.hi.s32", "Iii", Mul24<int32_t, true, false>},
    {"mul24.hi.u32", "Iii", Mul24<uint32_t, true, false>},
    {"mad24.lo.s32", "Iiii", Mul24<int32_t, false, true>},
    {"mad24.lo.u32", "Iiii", Mul24<uint32_t, false, true>},
    {"mad24.hi.s32", "Iiii", Mul24<int32_t, true, true>},
    {"mad24.hi.u32", "Iiii", Mul24<uint32_t, true, true>},
    {"add.cc.(s32|u32)", "Iii", AddCarry<uint32_t, false, false>},
    {"add.cc.(s64|u64)", "Lll", AddCarry<uint64_t, false, false>},
    {"addc[.cc].(s32|u32)", "Iii", AddCarry<uint32_t, false, true>},
    {"addc[.cc].(s64|u64)", "Lll", AddCarry<uint64_t, false, true>},
    {"sub.cc.(s32|u32)", "Iii", AddCarry<uint32_t, true, false>},
    {"sub.cc.(s64|u64)", "Lll", AddCarry<uint64_t, true, false>},
    {"subc[.cc].(s32|u32)", "Iii", AddCarry<uint32_t, true, true>},
    {"subc[.cc].(s64|u64)", "Lll", AddCarry<uint64_t, true, true>},
    {"mad.lo.cc.(s32|u32)", "Iiii", MadCarry<uint32_t, false, false>},
    {"mad.hi.cc.u32", "Iiii", MadCarry<uint32_t, true, false>},
    {"mad.hi.cc.s32", "Iiii", MadCarry<int32_t, true, false>},
    {"madc.lo[.cc].(s32|u32)", "Iiii", MadCarry<uint32_t, false, true>},
    {"madc.hi[.cc].u32", "Iiii", MadCarry<uint32_t, true, true>},
    {"madc.hi[.cc].s32", "Iiii", MadCarry<int32_t, true, true>},
    {"mad.lo.cc.(s64|u64)", "Llll", MadCarry<uint64_t, false, false>},
    {"mad.hi.cc.u64", "Llll", MadCarry<uint64_t, true, false>},
    {"mad.hi.cc.s64", "Llll", MadCarry<int64_t, true, false>},
    {"madc.lo[.cc].(s64|u64)", "Llll", MadCarry<uint64_t, false, true>},
    {"madc.hi[.cc].u64", "Llll", MadCarry<uint64_t, true, true>},
    {"madc.hi[.cc].s64", "Llll", MadCarry<int64_t, true, true>},
    {"and.pred", "Ppp", Predicates<kLogicAnd>},
    {"or.pred", "Ppp", Predicates<kLogicOr>},
    {"xor.pred", "Ppp", Predicates<kLogicXor>},
    {"not.pred", "Pp", Predicates<kLogicNot>},
};

}  // namespace

extern const Rows kIntegerRows;
const Rows kIntegerRows = {kRows, sizeof(kRows) / sizeof(kRows[0])};

}  // namespace simgpu::exec::SIMGPU_ISA
