// f32 arithmetic. Each operation has a fast form for what compilers emit (round to nearest, with or
// without .ftz) and one slow form that takes the rest from the flags. Approximate instructions are
// computed better than the hardware's published bounds; their special cases are the hardware's.
#include "simgpu/exec/float_ops.h"

namespace simgpu::exec::SIMGPU_ISA {
namespace {

template <bool kFlush>
inline float In(float x) {
  return kFlush ? Flush(x) : x;
}
template <bool kFlush>
inline float Out(float x) {
  return kFlush ? Flush(Canonical(x)) : Canonical(x);
}

template <typename Op, bool kFlush>
void Two(Context& c, const Inst& i, uint32_t mask) {
  Binary<float, float, float>(c, i, mask, [](float a, float b) {
    return Out<kFlush>(Op::Do(In<kFlush>(a), In<kFlush>(b)));
  });
}
template <typename Op, bool kFlush>
void Three(Context& c, const Inst& i, uint32_t mask) {
  Ternary<float, float, float, float>(c, i, mask, [](float a, float b, float e) {
    return Out<kFlush>(Op::Do(In<kFlush>(a), In<kFlush>(b), In<kFlush>(e)));
  });
}
template <typename Op, bool kFlush>
void One(Context& c, const Inst& i, uint32_t mask) {
  Unary<float, float>(c, i, mask, [](float a) { return Out<kFlush>(Op::Do(In<kFlush>(a))); });
}
// Sign operations leave a NaN as it is.
template <typename Op, bool kFlush>
void Sign(Context& c, const Inst& i, uint32_t mask) {
  Unary<float, float>(c, i, mask, [](float a) { return Op::Do(In<kFlush>(a)); });
}
void Copysign(Context& c, const Inst& i, uint32_t mask) {
  Binary<float, float, float>(c, i, mask, [](float a, float b) { return FCopysign::Do(a, b); });
}

inline float SlowIn(float x, uint32_t flags) {
  return flags & kFtz ? Flush(x) : x;
}
inline float SlowOut(float x, uint32_t flags) {
  x = Canonical(x);
  if (flags & kFtz) x = Flush(x);
  return flags & kSat ? Saturate(x) : x;
}
template <typename Op>
void SlowTwo(Context& c, const Inst& i, uint32_t mask) {
  Rounding scope(i.flags);
  uint32_t flags = i.flags;
  Binary<float, float, float>(c, i, mask, [flags](float a, float b) {
    return SlowOut(Op::Do(SlowIn(a, flags), SlowIn(b, flags)), flags);
  });
}
template <typename Op>
void SlowThree(Context& c, const Inst& i, uint32_t mask) {
  Rounding scope(i.flags);
  uint32_t flags = i.flags;
  Ternary<float, float, float, float>(c, i, mask, [flags](float a, float b, float e) {
    return SlowOut(Op::Do(SlowIn(a, flags), SlowIn(b, flags), SlowIn(e, flags)), flags);
  });
}
template <typename Op>
void SlowOne(Context& c, const Inst& i, uint32_t mask) {
  Rounding scope(i.flags);
  uint32_t flags = i.flags;
  Unary<float, float>(c, i, mask,
                      [flags](float a) { return SlowOut(Op::Do(SlowIn(a, flags)), flags); });
}
template <typename Op>
void MinMaxSlow(Context& c, const Inst& i, uint32_t mask) {
  uint32_t flags = i.flags;
  Binary<float, float, float>(c, i, mask, [flags](float a, float b) {
    a = SlowIn(a, flags), b = SlowIn(b, flags);
    uint32_t sign = (F32ToBits(a) ^ F32ToBits(b)) & 0x80000000u;
    if (flags & kXorSign) a = FAbs::Do(a), b = FAbs::Do(b);
    float r = (flags & kNan) && (a != a || b != b) ? BitsToF32(0x7fffffffu) : Op::Do(a, b);
    if ((flags & kXorSign) && r == r) r = BitsToF32(F32ToBits(r) | sign);
    return r;
  });
}
// 1/sqrt in double and rounded once is right to the last bit but a hair.
struct ARsqrt {
  static float Do(float a) {
    return static_cast<float>(1.0 / __builtin_sqrt(static_cast<double>(a)));
  }
};
struct AEx2 {
  static float Do(float a) { return exp2f(a); }
};
struct ALg2 {
  static float Do(float a) { return log2f(a); }
};
struct ASin {
  static float Do(float a) { return sinf(a); }
};
struct ACos {
  static float Do(float a) { return cosf(a); }
};
struct ATanh {
  static float Do(float a) { return tanhf(a); }
};
// Beyond 2^126 the reciprocal that the hardware multiplies with is flushed to zero.
struct ADiv {
  static float Do(float a, float b) {
    float magnitude = FAbs::Do(b);
    return magnitude > 0x1p126f && magnitude <= 0x1.fffffep127f ? a * FCopysign::Do(b, 0.0f)
                                                                : a / b;
  }
};

#define PAIR(name, rounding, shape, form, op)       \
  {name rounding ".f32", shape, form<op, false>}, { \
    name rounding ".ftz.f32", shape, form<op, true> \
  }

constexpr Row kRows[] = {
    PAIR("add", "[.rn]", "Fff", Two, FAdd),
    PAIR("sub", "[.rn]", "Fff", Two, FSub),
    PAIR("mul", "[.rn]", "Fff", Two, FMul),
    PAIR("fma", ".rn", "Ffff", Three, FFma),
    PAIR("mad", "[.rn]", "Ffff", Three, FFma),
    PAIR("div", ".rn", "Fff", Two, FDiv),
    PAIR("rcp", ".rn", "Ff", One, FRcp),
    PAIR("sqrt", ".rn", "Ff", One, FSqrt),
    PAIR("min", "", "Fff", Two, FMin),
    PAIR("max", "", "Fff", Two, FMax),
    PAIR("abs", "", "Ff", Sign, FAbs),
    PAIR("neg", "", "Ff", Sign, FNeg),
    {"copysign.f32", "Fff", Copysign},
    {"add[.rn|.rz|.rm|.rp][.ftz][.sat].f32", "Fff", SlowTwo<FAdd>},
    {"sub[.rn|.rz|.rm|.rp][.ftz][.sat].f32", "Fff", SlowTwo<FSub>},
    {"mul[.rn|.rz|.rm|.rp][.ftz][.sat].f32", "Fff", SlowTwo<FMul>},
    {"fma(.rn|.rz|.rm|.rp)[.ftz][.sat].f32", "Ffff", SlowThree<FFma>},
    {"mad[.rn|.rz|.rm|.rp][.ftz][.sat].f32", "Ffff", SlowThree<FFma>},
    {"div(.rz|.rm|.rp)[.ftz].f32", "Fff", SlowTwo<FDiv>},
    {"rcp(.rz|.rm|.rp)[.ftz].f32", "Ff", SlowOne<FRcp>},
    {"sqrt(.rz|.rm|.rp)[.ftz].f32", "Ff", SlowOne<FSqrt>},
    {"min[.ftz][.NaN][.xorsign.abs].f32", "Fff", MinMaxSlow<FMin>},
    {"max[.ftz][.NaN][.xorsign.abs].f32", "Fff", MinMaxSlow<FMax>},
    PAIR("div", ".approx", "Fff", Two, ADiv),
    PAIR("div", ".full", "Fff", Two, FDiv),
    PAIR("rcp", ".approx", "Ff", One, FRcp),
    PAIR("sqrt", ".approx", "Ff", One, FSqrt),
    PAIR("rsqrt", ".approx", "Ff", One, ARsqrt),
    PAIR("ex2", ".approx", "Ff", One, AEx2),
    PAIR("lg2", ".approx", "Ff", One, ALg2),
    PAIR("sin", ".approx", "Ff", One, ASin),
    PAIR("cos", ".approx", "Ff", One, ACos),
    {"tanh.approx.f32", "Ff", One<ATanh, false>},
};

}  // namespace

extern const Rows kF32Rows;
const Rows kF32Rows = {kRows, sizeof(kRows) / sizeof(kRows[0])};

}  // namespace simgpu::exec::SIMGPU_ISA
