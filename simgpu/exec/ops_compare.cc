// Comparisons (setp, set, testp) and selections.
#include "simgpu/exec/float_ops.h"

namespace simgpu::exec::SIMGPU_ISA {
namespace {

// Ordered forms are false for a NaN, "u" forms are true. C's != is neu, not ne.
struct Eq {
  template <typename T>
  static bool Do(T a, T b) {
    return a == b;
  }
};
struct Ne {
  template <typename T>
  static bool Do(T a, T b) {
    return (a < b) | (a > b);
  }
};
struct Lt {
  template <typename T>
  static bool Do(T a, T b) {
    return a < b;
  }
};
struct Le {
  template <typename T>
  static bool Do(T a, T b) {
    return a <= b;
  }
};
struct Gt {
  template <typename T>
  static bool Do(T a, T b) {
    return a > b;
  }
};
struct Ge {
  template <typename T>
  static bool Do(T a, T b) {
    return a >= b;
  }
};
struct Equ {
  template <typename T>
  static bool Do(T a, T b) {
    return !((a < b) | (a > b));
  }
};
struct Neu {
  template <typename T>
  static bool Do(T a, T b) {
    return a != b;
  }
};
struct Ltu {
  template <typename T>
  static bool Do(T a, T b) {
    return !(a >= b);
  }
};
struct Leu {
  template <typename T>
  static bool Do(T a, T b) {
    return !(a > b);
  }
};
struct Gtu {
  template <typename T>
  static bool Do(T a, T b) {
    return !(a <= b);
  }
};
struct Geu {
  template <typename T>
  static bool Do(T a, T b) {
    return !(a < b);
  }
};
struct Num {
  template <typename T>
  static bool Do(T a, T b) {
    return (a == a) & (b == b);
  }
};
struct Nan {
  template <typename T>
  static bool Do(T a, T b) {
    return (a != a) | (b != b);
  }
};

template <typename Op, typename T, bool kFlush>
inline __attribute__((always_inline)) uint32_t Compare(const Context& c, const Inst& i) {
  const auto* a = c.At<const typename Cell<T>::Type>(i.a);
  const auto* b = c.At<const typename Cell<T>::Type>(i.b);
  auto body = [=](uint32_t l) {
    T x = Cell<T>::Get(a[l]), y = Cell<T>::Get(b[l]);
    if constexpr (kFlush) x = Flush(x), y = Flush(y);
    return Op::Do(x, y);
  };
  if constexpr (sizeof(T) == 8)
    return TestLanes64(body);
  else
    return TestLanes(body);
}
inline uint32_t Combine(const Context& c, const Inst& i, uint32_t result) {
  uint32_t other = *c.At<const uint32_t>(i.c);
  return i.flags & kAnd ? result & other : i.flags & kOr ? result | other : result ^ other;
}
template <typename Op, typename T, bool kFlush = false>
void Setp(Context& c, const Inst& i, uint32_t mask) {
  uint32_t result = Compare<Op, T, kFlush>(c, i);
  if (i.flags & (kAnd | kOr | kXor)) {
    if (i.e) SetPredicate(c, i.e, mask, Combine(c, i, ~result));
    result = Combine(c, i, result);
  } else if (i.e) {
    SetPredicate(c, i.e, mask, ~result);
  }
  SetPredicate(c, i.d, mask, result);
}
template <typename Op, typename T, bool kFlush, uint32_t kOne>
void Set(Context& c, const Inst& i, uint32_t mask) {
  uint32_t result = Compare<Op, T, kFlush>(c, i);
  if (i.flags & (kAnd | kOr | kXor)) result = Combine(c, i, result);
  Fill<uint32_t>(c, i, mask, [=](uint32_t l) { return result & kLaneBit[l] ? kOne : 0u; });
}

enum Class { kFinite, kInfinite, kNumber, kNotANumber, kNormal, kSubnormal };
template <typename T, Class kClass>
void Testp(Context& c, const Inst& i, uint32_t mask) {
  const T* a = c.At<const T>(i.a);
  uint32_t result = TestLanes([=](uint32_t l) {
    switch (__builtin_fpclassify(0, 1, 2, 3, 4, a[l])) {
      case 0:
        return kClass == kNotANumber;
      case 1:
        return kClass == kInfinite || kClass == kNumber;
      case 2:
        return kClass == kFinite || kClass == kNumber || kClass == kNormal;
      case 3:
        return kClass == kFinite || kClass == kNumber || kClass == kSubnormal;
      default:
        return kClass == kFinite || kClass == kNumber || kClass == kNormal;
    }
  });
  SetPredicate(c, i.d, mask, result);
}

template <typename T>
void Selp(Context& c, const Inst& i, uint32_t mask) {
  T* d = c.At<T>(i.d);
  const T* a = c.At<const T>(i.a);
  const T* b = c.At<const T>(i.b);
  uint32_t p = *c.At<const uint32_t>(i.c);
  if (mask == c.live) {
    Blend(d, a, b, p);
  } else {
    alignas(64) T t[kLanes];
    Blend(t, a, b, p);
    BlendCells(d, t, mask);
  }
}
template <typename T, typename S>
void Slct(Context& c, const Inst& i, uint32_t mask) {
  bool flush = i.flags & kFtz;
  Ternary<T, T, T, S>(c, i, mask, [flush](T a, T b, S s) {
    if constexpr (static_cast<S>(0.5f) != S(0)) s = flush ? Flush(s) : s;
    return s >= S(0) ? a : b;
  });
}

#define CMP(name, op, types, type, operands) \
  { "setp." name "[.and|.or|.xor]." types, "P" operands "c", Setp<op, type> }
#define SIGNED(name, op)                                                    \
  CMP(name, op, "s16", int16_t, "ss"), CMP(name, op, "s32", int32_t, "ii"), \
      CMP(name, op, "s64", int64_t, "ll")
#define UNSIGNED(name, op)                                                    \
  CMP(name, op, "u16", uint16_t, "ss"), CMP(name, op, "u32", uint32_t, "ii"), \
      CMP(name, op, "u64", uint64_t, "ll")
#define BITS(name, op)                                                        \
  CMP(name, op, "b16", uint16_t, "ss"), CMP(name, op, "b32", uint32_t, "ii"), \
      CMP(name, op, "b64", uint64_t, "ll")
#define FLOAT(name, op)                                                    \
  CMP(name, op, "f32", float, "ff"), CMP(name, op, "f64", double, "dd"), { \
    "setp." name "[.and|.or|.xor].ftz.f32", "Pffc", Setp<op, float, true>  \
  }
#define SETS(name, op, types, type, operands)                                                      \
  {"set." name "[.and|.or|.xor].(u32|s32)." types, "I" operands "c", Set<op, type, false, ~0u>}, { \
    "set." name "[.and|.or|.xor].f32." types, "I" operands "c", Set<op, type, false, 0x3f800000u>  \
  }
#define SETFLOAT(name, op)                                                                    \
  SETS(name, op, "f32", float, "ff"), SETS(name, op, "f64", double, "dd"),                    \
      {"set." name "[.and|.or|.xor].ftz.(u32|s32).f32", "Iffc", Set<op, float, true, ~0u>}, { \
    "set." name "[.and|.or|.xor].ftz.f32.f32", "Iffc", Set<op, float, true, 0x3f800000u>      \
  }

constexpr Row kRows[] = {
    SIGNED("eq", Eq),
    SIGNED("ne", Ne),
    SIGNED("lt", Lt),
    SIGNED("le", Le),
    SIGNED("gt", Gt),
    SIGNED("ge", Ge),
    UNSIGNED("eq", Eq),
    UNSIGNED("ne", Ne),
    UNSIGNED("(lt|lo)", Lt),
    UNSIGNED("(le|ls)", Le),
    UNSIGNED("(gt|hi)", Gt),
    UNSIGNED("(ge|hs)", Ge),
    BITS("eq", Eq),
    BITS("ne", Ne),
    FLOAT("eq", Eq),
    FLOAT("ne", Ne),
    FLOAT("lt", Lt),
    FLOAT("le", Le),
    FLOAT("gt", Gt),
    FLOAT("ge", Ge),
    FLOAT("equ", Equ),
    FLOAT("neu", Neu),
    FLOAT("ltu", Ltu),
    FLOAT("leu", Leu),
    FLOAT("gtu", Gtu),
    FLOAT("geu", Geu),
    FLOAT("num", Num),
    FLOAT("nan", Nan),
    SETS("eq", Eq, "(s32|u32|b32)", uint32_t, "ii"),
    SETS("ne", Ne, "(s32|u32|b32)", uint32_t, "ii"),
    SETS("lt", Lt, "s32", int32_t, "ii"),
    SETS("le", Le, "s32", int32_t, "ii"),
    SETS("gt", Gt, "s32", int32_t, "ii"),
    SETS("ge", Ge, "s32", int32_t, "ii"),
    SETS("(lt|lo)", Lt, "u32", uint32_t, "ii"),
    SETS("(le|ls)", Le, "u32", uint32_t, "ii"),
    SETS("(gt|hi)", Gt, "u32", uint32_t, "ii"),
    SETS("(ge|hs)", Ge, "u32", uint32_t, "ii"),
    SETFLOAT("eq", Eq),
    SETFLOAT("ne", Ne),
    SETFLOAT("lt", Lt),
    SETFLOAT("le", Le),
    SETFLOAT("gt", Gt),
    SETFLOAT("ge", Ge),
    SETFLOAT("equ", Equ),
    SETFLOAT("neu", Neu),
    SETFLOAT("ltu", Ltu),
    SETFLOAT("leu", Leu),
    SETFLOAT("gtu", Gtu),
    SETFLOAT("geu", Geu),
    SETFLOAT("num", Num),
    SETFLOAT("nan", Nan),
    {"testp.finite.f32", "Pf", Testp<float, kFinite>},
    {"testp.finite.f64", "Pd", Testp<double, kFinite>},
    {"testp.infinite.f32", "Pf", Testp<float, kInfinite>},
    {"testp.infinite.f64", "Pd", Testp<double, kInfinite>},
    {"testp.number.f32", "Pf", Testp<float, kNumber>},
    {"testp.number.f64", "Pd", Testp<double, kNumber>},
    {"testp.notanumber.f32", "Pf", Testp<float, kNotANumber>},
    {"testp.notanumber.f64", "Pd", Testp<double, kNotANumber>},
    {"testp.normal.f32", "Pf", Testp<float, kNormal>},
    {"testp.normal.f64", "Pd", Testp<double, kNormal>},
    {"testp.subnormal.f32", "Pf", Testp<float, kSubnormal>},
    {"testp.subnormal.f64", "Pd", Testp<double, kSubnormal>},
    {"selp.(b16|u16|s16)", "Sssp", Selp<uint32_t>},
    {"selp.(b32|u32|s32)", "Iiip", Selp<uint32_t>},
    {"selp.f32", "Fffp", Selp<uint32_t>},
    {"selp.(b64|u64|s64)", "Lllp", Selp<uint64_t>},
    {"selp.f64", "Dddp", Selp<uint64_t>},
    {"slct.(b16|u16|s16).s32", "Sssi", Slct<uint32_t, int32_t>},
    {"slct.(b32|u32|s32).s32", "Iiii", Slct<uint32_t, int32_t>},
    {"slct.f32.s32", "Fffi", Slct<uint32_t, int32_t>},
    {"slct.(b64|u64|s64).s32", "Llli", Slct<uint64_t, int32_t>},
    {"slct.f64.s32", "Dddi", Slct<uint64_t, int32_t>},
    {"slct[.ftz].(b16|u16|s16).f32", "Sssf", Slct<uint32_t, float>},
    {"slct[.ftz].(b32|u32|s32).f32", "Iiif", Slct<uint32_t, float>},
    {"slct[.ftz].f32.f32", "Ffff", Slct<uint32_t, float>},
    {"slct[.ftz].(b64|u64|s64).f32", "Lllf", Slct<uint64_t, float>},
    {"slct[.ftz].f64.f32", "Dddf", Slct<uint64_t, float>},
};

}  // namespace

extern const Rows kCompareRows;
const Rows kCompareRows = {kRows, sizeof(kRows) / sizeof(kRows[0])};

}  // namespace simgpu::exec::SIMGPU_ISA
