// Arithmetic of f16, bf16 and their pairs, packed 16-bit integers, and SIMD video instructions.
// Compiled once: few programs use them.
#include <cmath>

#include "simgpu/exec/context.h"
#include "simgpu/exec/float16.h"

namespace simgpu::exec {
namespace {

template <typename F>
void EachLane(uint32_t mask, F f) {
  for (uint32_t m = mask; m; m &= m - 1) f(static_cast<uint32_t>(__builtin_ctz(m)));
}

template <typename T>
double In(uint16_t bits, uint32_t flags) {
  // Subnormals are kept unless .ftz asks otherwise.
  if ((flags & kFtz) && (bits & T::kInfinity) == 0) bits &= 0x8000;
  return T::Value(bits);
}
template <typename T>
uint16_t Out(double x, uint32_t flags) {
  if (flags & kSat) x = x > 0 ? (x < 1 ? x : 1) : 0;
  if ((flags & kRelu) && !(x > 0) && x == x) x = 0;
  uint16_t bits = T::Round(x, flags & kRoundingFlags);
  if ((flags & kFtz) && (bits & T::kInfinity) == 0) bits &= 0x8000;
  return bits;
}

struct Add {
  static double Do(double a, double b, double) { return a + b; }
};
struct Sub {
  static double Do(double a, double b, double) { return a - b; }
};
struct Mul {
  static double Do(double a, double b, double) { return a * b; }
};
struct Fma {
  static double Do(double a, double b, double c) { return FmaToOdd(a, b, c); }
};
struct Ex2 {
  static double Do(double a, double, double) { return std::exp2(a); }
};
struct Tanh {
  static double Do(double a, double, double) { return std::tanh(a); }
};

// kHalves: 1, or 2 for the packed forms.
template <typename T, typename Op, int kHalves>
void Arithmetic(Context& c, const Inst& i, uint32_t mask) {
  uint32_t* d = c.At<uint32_t>(i.d);
  const uint32_t* a = c.At<const uint32_t>(i.a);
  const uint32_t* b = c.At<const uint32_t>(i.b);
  const uint32_t* e = c.At<const uint32_t>(i.c);
  EachLane(mask, [&](uint32_t l) {
    uint32_t result = 0;
    for (int h = 0; h < kHalves; ++h) {
      auto part = [&](const uint32_t* p) {
        return In<T>(static_cast<uint16_t>(p[l] >> (16 * h)), i.flags);
      };
      double y = i.b ? part(b) : 0, z = i.c ? part(e) : 0;
      result |= uint32_t{Out<T>(Op::Do(part(a), y, z), i.flags)} << (16 * h);
    }
    d[l] = result;
  });
}

template <typename T, bool kMax, int kHalves>
void MinMax(Context& c, const Inst& i, uint32_t mask) {
  uint32_t* d = c.At<uint32_t>(i.d);
  const uint32_t* a = c.At<const uint32_t>(i.a);
  const uint32_t* b = c.At<const uint32_t>(i.b);
  EachLane(mask, [&](uint32_t l) {
    uint32_t result = 0;
    for (int h = 0; h < kHalves; ++h) {
      uint16_t x = static_cast<uint16_t>(a[l] >> (16 * h)),
               y = static_cast<uint16_t>(b[l] >> (16 * h));
      uint16_t sign = (x ^ y) & 0x8000;
      if (i.flags & kXorSign) x &= 0x7fff, y &= 0x7fff;
      double u = In<T>(x, i.flags), v = In<T>(y, i.flags), r;
      if (u != u || v != v) {
        r = (i.flags & kNan) || (u != u && v != v) ? NAN : u != u ? v : u;
      } else if (u == v) {
        r = std::signbit(u) == kMax ? v : u;
      } else {
        r = (u > v) == kMax ? u : v;
      }
      uint16_t bits = Out<T>(r, i.flags & ~kSat);
      if ((i.flags & kXorSign) && r == r) bits = static_cast<uint16_t>((bits & 0x7fff) | sign);
      result |= uint32_t{bits} << (16 * h);
    }
    d[l] = result;
  });
}

template <typename T, bool kNegate, int kHalves>
void Sign(Context& c, const Inst& i, uint32_t mask) {
  uint32_t* d = c.At<uint32_t>(i.d);
  const uint32_t* a = c.At<const uint32_t>(i.a);
  EachLane(mask, [&](uint32_t l) {
    uint32_t result = 0;
    for (int h = 0; h < kHalves; ++h) {
      uint16_t x = static_cast<uint16_t>(a[l] >> (16 * h));
      if ((i.flags & kFtz) && (x & T::kInfinity) == 0) x &= 0x8000;
      x = kNegate ? x ^ 0x8000 : x & 0x7fff;
      result |= uint32_t{x} << (16 * h);
    }
    d[l] = result;
  });
}

struct Eq {
  static bool Do(double a, double b) { return a == b; }
};
struct Ne {
  static bool Do(double a, double b) { return a < b || a > b; }
};
struct Lt {
  static bool Do(double a, double b) { return a < b; }
};
struct Le {
  static bool Do(double a, double b) { return a <= b; }
};
struct Gt {
  static bool Do(double a, double b) { return a > b; }
};
struct Ge {
  static bool Do(double a, double b) { return a >= b; }
};
struct Equ {
  static bool Do(double a, double b) { return !(a < b || a > b); }
};
struct Neu {
  static bool Do(double a, double b) { return a != b; }
};
struct Ltu {
  static bool Do(double a, double b) { return !(a >= b); }
};
struct Leu {
  static bool Do(double a, double b) { return !(a > b); }
};
struct Gtu {
  static bool Do(double a, double b) { return !(a <= b); }
};
struct Geu {
  static bool Do(double a, double b) { return !(a < b); }
};
struct Num {
  static bool Do(double a, double b) { return a == a && b == b; }
};
struct Nan {
  static bool Do(double a, double b) { return a != a || b != b; }
};

template <typename T, typename Op>
uint32_t Compare(Context& c, const Inst& i, uint32_t mask, int half) {
  const uint32_t* a = c.At<const uint32_t>(i.a);
  const uint32_t* b = c.At<const uint32_t>(i.b);
  uint32_t result = 0;
  EachLane(mask, [&](uint32_t l) {
    bool is = Op::Do(In<T>(static_cast<uint16_t>(a[l] >> (16 * half)), i.flags),
                     In<T>(static_cast<uint16_t>(b[l] >> (16 * half)), i.flags));
    result |= static_cast<uint32_t>(is) << l;
  });
  if (i.flags & (kAnd | kOr | kXor)) {
    uint32_t other = *c.At<const uint32_t>(i.c);
    result = i.flags & kAnd ? result & other : i.flags & kOr ? result | other : result ^ other;
  }
  return result;
}
void SetPredicate(Context& c, uint32_t offset, uint32_t mask, uint32_t value) {
  uint32_t* p = c.At<uint32_t>(offset);
  *p = (*p & ~mask) | (value & mask);
}
// Of a pair, p is the low half's result and q the high half's.
template <typename T, typename Op, int kHalves>
void Setp(Context& c, const Inst& i, uint32_t mask) {
  uint32_t low = Compare<T, Op>(c, i, mask, 0);
  if (kHalves == 2) {
    uint32_t high = Compare<T, Op>(c, i, mask, 1);
    if (i.e) SetPredicate(c, i.e, mask, high);
  } else if (i.e) {
    Inst plain = i;
    plain.flags &= ~(kAnd | kOr | kXor);
    uint32_t complement = ~Compare<T, Op>(c, plain, mask, 0);
    if (i.flags & (kAnd | kOr | kXor)) {
      uint32_t other = *c.At<const uint32_t>(i.c);
      complement = i.flags & kAnd  ? complement & other
                   : i.flags & kOr ? complement | other
                                   : complement ^ other;
    }
    SetPredicate(c, i.e, mask, complement);
  }
  SetPredicate(c, i.d, mask, low);
}
// set: 1.0 of the format, or all ones of the given width.
template <typename T, typename Op, int kHalves, uint32_t kOne>
void Set(Context& c, const Inst& i, uint32_t mask) {
  uint32_t results[2] = {Compare<T, Op>(c, i, mask, 0), 0};
  if (kHalves == 2) results[1] = Compare<T, Op>(c, i, mask, 1);
  uint32_t* d = c.At<uint32_t>(i.d);
  EachLane(mask, [&](uint32_t l) {
    uint32_t value = results[0] >> l & 1 ? kOne : 0;
    if (kHalves == 2) value |= (results[1] >> l & 1 ? kOne : 0) << 16;
    d[l] = value;
  });
}

// ---- conversions that the cvt of plain types does not know
float ToFloat(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}
template <typename T>
void FromF32(Context& c, const Inst& i, uint32_t mask) {
  uint32_t* d = c.At<uint32_t>(i.d);
  const uint32_t* a = c.At<const uint32_t>(i.a);
  EachLane(mask, [&](uint32_t l) { d[l] = Out<T>(ToFloat(a[l]), i.flags & ~kFtz); });
}
// The first source is the upper half.
template <typename T>
void PairFromF32(Context& c, const Inst& i, uint32_t mask) {
  uint32_t* d = c.At<uint32_t>(i.d);
  const uint32_t* a = c.At<const uint32_t>(i.a);
  const uint32_t* b = c.At<const uint32_t>(i.b);
  EachLane(mask, [&](uint32_t l) {
    d[l] = uint32_t{Out<T>(ToFloat(a[l]), i.flags & ~kFtz)} << 16 |
           Out<T>(ToFloat(b[l]), i.flags & ~kFtz);
  });
}
void Bf16ToF32(Context& c, const Inst& i, uint32_t mask) {
  uint32_t* d = c.At<uint32_t>(i.d);
  const uint32_t* a = c.At<const uint32_t>(i.a);
  EachLane(mask, [&](uint32_t l) {
    uint32_t bits = a[l] << 16;
    d[l] = (bits & 0x7fffffff) > 0x7f800000 ? 0x7fffffff : bits;
  });
}
// tf32: 10 bits of fraction in an f32; .rna rounds ties away.
void Tf32FromF32(Context& c, const Inst& i, uint32_t mask) {
  uint32_t* d = c.At<uint32_t>(i.d);
  const uint32_t* a = c.At<const uint32_t>(i.a);
  EachLane(mask, [&](uint32_t l) {
    uint32_t bits = a[l];
    if ((bits & 0x7fffffff) > 0x7f800000) {
      d[l] = 0x7fffffff;
    } else if ((bits & 0x7f800000) == 0x7f800000) {
      d[l] = bits;
    } else if (i.flags & kRn) {
      d[l] = (bits + 0xfff + (bits >> 13 & 1)) & ~0x1fffu;
    } else if (i.flags & kRz) {
      d[l] = bits & ~0x1fffu;
    } else {
      d[l] = (bits + 0x1000) & ~0x1fffu;
    }
  });
}

// ---- packed 16-bit integers
enum Packed { kPackedAdd, kPackedMin, kPackedMax };
template <typename T, Packed kOp>
void PackedOp(Context& c, const Inst& i, uint32_t mask) {
  uint32_t* d = c.At<uint32_t>(i.d);
  const uint32_t* a = c.At<const uint32_t>(i.a);
  const uint32_t* b = c.At<const uint32_t>(i.b);
  EachLane(mask, [&](uint32_t l) {
    uint32_t result = 0;
    for (int h = 0; h < 2; ++h) {
      T x = static_cast<T>(a[l] >> (16 * h)), y = static_cast<T>(b[l] >> (16 * h));
      int32_t r = kOp == kPackedAdd ? x + y : kOp == kPackedMin ? (x < y ? x : y) : (x > y ? x : y);
      if ((i.flags & kRelu) && r < 0) r = 0;
      result |= static_cast<uint32_t>(static_cast<uint16_t>(r)) << (16 * h);
    }
    d[l] = result;
  });
}

// vabsdiff2, vabsdiff4 and their accumulating forms, whole bytes or halves.
template <typename T, int kParts, bool kAccumulate>
void AbsoluteDifference(Context& c, const Inst& i, uint32_t mask) {
  constexpr int kBits = 32 / kParts;
  uint32_t* d = c.At<uint32_t>(i.d);
  const uint32_t* a = c.At<const uint32_t>(i.a);
  const uint32_t* b = c.At<const uint32_t>(i.b);
  const uint32_t* e = c.At<const uint32_t>(i.c);
  EachLane(mask, [&](uint32_t l) {
    uint32_t result = kAccumulate ? e[l] : 0;
    for (int k = 0; k < kParts; ++k) {
      int32_t x = static_cast<T>(a[l] >> (kBits * k)), y = static_cast<T>(b[l] >> (kBits * k));
      uint32_t r = static_cast<uint32_t>(x < y ? y - x : x - y);
      if (kAccumulate)
        result += r;
      else
        result |= r << (kBits * k);
    }
    d[l] = result;
  });
}

#define FORMATS(name, tail, shape1, shape2, op)               \
  {name tail ".f16", shape1, Arithmetic<F16, op, 1>},         \
      {name tail ".f16x2", shape2, Arithmetic<F16, op, 2>},   \
      {name tail ".bf16", shape1, Arithmetic<Bf16, op, 1>}, { \
    name tail ".bf16x2", shape2, Arithmetic<Bf16, op, 2>      \
  }
#define EXTREMES(name, max)                                                  \
  {name "[.ftz][.NaN][.xorsign.abs].f16", "Hhh", MinMax<F16, max, 1>},       \
      {name "[.ftz][.NaN][.xorsign.abs].f16x2", "Iii", MinMax<F16, max, 2>}, \
      {name "[.NaN][.xorsign.abs].bf16", "Hhh", MinMax<Bf16, max, 1>}, {     \
    name "[.NaN][.xorsign.abs].bf16x2", "Iii", MinMax<Bf16, max, 2>          \
  }
#define SIGNS(name, negate)                              \
  {name "[.ftz].f16", "Hh", Sign<F16, negate, 1>},       \
      {name "[.ftz].f16x2", "Ii", Sign<F16, negate, 2>}, \
      {name ".bf16", "Hh", Sign<Bf16, negate, 1>}, {     \
    name ".bf16x2", "Ii", Sign<Bf16, negate, 2>          \
  }
#define COMPARE(name, op)                                                                       \
  {"setp." name "[.and|.or|.xor][.ftz].f16", "Phhc", Setp<F16, op, 1>},                         \
      {"setp." name "[.and|.or|.xor][.ftz].f16x2", "Piic", Setp<F16, op, 2>},                   \
      {"setp." name "[.and|.or|.xor].bf16", "Phhc", Setp<Bf16, op, 1>},                         \
      {"setp." name "[.and|.or|.xor].bf16x2", "Piic", Setp<Bf16, op, 2>},                       \
      {"set." name "[.and|.or|.xor][.ftz].f16.f16", "Hhhc", Set<F16, op, 1, 0x3c00>},           \
      {"set." name "[.and|.or|.xor][.ftz].(u16|s16).f16", "Hhhc", Set<F16, op, 1, 0xffff>},     \
      {"set." name "[.and|.or|.xor][.ftz].(u32|s32).f16", "Ihhc", Set<F16, op, 1, 0xffffffff>}, \
      {"set." name "[.and|.or|.xor][.ftz].f16x2.f16x2", "Iiic", Set<F16, op, 2, 0x3c00>},       \
      {"set." name "[.and|.or|.xor].bf16.bf16", "Hhhc", Set<Bf16, op, 1, 0x3f80>},              \
      {"set." name "[.and|.or|.xor].(u16|s16).bf16", "Hhhc", Set<Bf16, op, 1, 0xffff>}, {       \
    "set." name "[.and|.or|.xor].bf16x2.bf16x2", "Iiic", Set<Bf16, op, 2, 0x3f80>               \
  }

constexpr Row kRows[] = {
    FORMATS("add", "[.rn][.ftz][.sat]", "Hhh", "Iii", Add),
    FORMATS("sub", "[.rn][.ftz][.sat]", "Hhh", "Iii", Sub),
    FORMATS("mul", "[.rn][.ftz][.sat]", "Hhh", "Iii", Mul),
    FORMATS("fma", ".rn[.ftz][.sat|.relu]", "Hhhh", "Iiii", Fma),
    FORMATS("ex2", ".approx[.ftz]", "Hh", "Ii", Ex2),
    FORMATS("tanh", ".approx", "Hh", "Ii", Tanh),
    EXTREMES("min", false),
    EXTREMES("max", true),
    SIGNS("neg", true),
    SIGNS("abs", false),
    COMPARE("eq", Eq),
    COMPARE("ne", Ne),
    COMPARE("lt", Lt),
    COMPARE("le", Le),
    COMPARE("gt", Gt),
    COMPARE("ge", Ge),
    COMPARE("equ", Equ),
    COMPARE("neu", Neu),
    COMPARE("ltu", Ltu),
    COMPARE("leu", Leu),
    COMPARE("gtu", Gtu),
    COMPARE("geu", Geu),
    COMPARE("num", Num),
    COMPARE("nan", Nan),
    {"cvt(.rn|.rz)[.relu].bf16.f32", "Hf", FromF32<Bf16>},
    {"cvt(.rn|.rz).relu.f16.f32", "Hf", FromF32<F16>},
    {"cvt(.rn|.rz)[.relu].bf16x2.f32", "Iff", PairFromF32<Bf16>},
    {"cvt(.rn|.rz)[.relu].f16x2.f32", "Iff", PairFromF32<F16>},
    {"cvt.f32.bf16", "Fh", Bf16ToF32},
    {"cvt(.rna|.rn|.rz).tf32.f32", "If", Tf32FromF32},
    {"add.s16x2", "Iii", PackedOp<int16_t, kPackedAdd>},
    {"add.u16x2", "Iii", PackedOp<uint16_t, kPackedAdd>},
    {"min[.relu].s16x2", "Iii", PackedOp<int16_t, kPackedMin>},
    {"min.u16x2", "Iii", PackedOp<uint16_t, kPackedMin>},
    {"max[.relu].s16x2", "Iii", PackedOp<int16_t, kPackedMax>},
    {"max.u16x2", "Iii", PackedOp<uint16_t, kPackedMax>},
    {"vabsdiff4.u32.u32.u32", "Iiii", AbsoluteDifference<uint8_t, 4, false>},
    {"vabsdiff4.u32.u32.u32.add", "Iiii", AbsoluteDifference<uint8_t, 4, true>},
    {"vabsdiff4.u32.s32.s32.add", "Iiii", AbsoluteDifference<int8_t, 4, true>},
    {"vabsdiff2.u32.u32.u32", "Iiii", AbsoluteDifference<uint16_t, 2, false>},
    {"vabsdiff2.u32.u32.u32.add", "Iiii", AbsoluteDifference<uint16_t, 2, true>},
    {"vabsdiff2.u32.s32.s32.add", "Iiii", AbsoluteDifference<int16_t, 2, true>},
};

}  // namespace

extern const Rows kOnceRows;
const Rows kOnceRows = {kRows, sizeof(kRows) / sizeof(kRows[0])};

}  // namespace simgpu::exec
