// Floating-point operations of one lane, shared by the f32 and f64 handlers. Internal linkage, see
// lanes.h.
#pragma once

#include <cmath>

#include "simgpu/exec/lanes.h"

namespace simgpu::exec {
namespace {

template <typename T>
struct Float;
template <>
struct Float<float> {
  using Bits = uint32_t;
  static constexpr uint32_t kSign = 0x80000000u;
  static inline uint32_t ToBits(float x) { return F32ToBits(x); }
  static inline float FromBits(uint32_t b) { return BitsToF32(b); }
  static inline float CanonicalNan() { return BitsToF32(0x7fffffffu); }
};
template <>
struct Float<double> {
  using Bits = uint64_t;
  static constexpr uint64_t kSign = uint64_t{1} << 63;
  static inline uint64_t ToBits(double x) { return F64ToBits(x); }
  static inline double FromBits(uint64_t b) { return BitsToF64(b); }
  static inline double CanonicalNan() { return BitsToF64(0x7fffffffffffffffull); }
};

struct FAdd {
  template <typename T>
  static T Do(T a, T b) {
    return a + b;
  }
};
struct FSub {
  template <typename T>
  static T Do(T a, T b) {
    return a - b;
  }
};
struct FMul {
  template <typename T>
  static T Do(T a, T b) {
    return a * b;
  }
};
struct FDiv {
  template <typename T>
  static T Do(T a, T b) {
    return a / b;
  }
};
struct FFma {
  static float Do(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
  static double Do(double a, double b, double c) { return __builtin_fma(a, b, c); }
};
struct FRcp {
  template <typename T>
  static T Do(T a) {
    return T(1) / a;
  }
};
struct FSqrt {
  static float Do(float a) { return __builtin_sqrtf(a); }
  static double Do(double a) { return __builtin_sqrt(a); }
};
// One NaN gives the other operand; -0 is below +0.
struct FMin {
  template <typename T>
  static T Do(T a, T b) {
    using F = Float<T>;
    T lesser = a < b ? a : b;
    T equal = F::FromBits(F::ToBits(a) | F::ToBits(b));
    T ordered = a == b ? equal : lesser;
    return a != a ? (b != b ? F::CanonicalNan() : b) : b != b ? a : ordered;
  }
};
struct FMax {
  template <typename T>
  static T Do(T a, T b) {
    using F = Float<T>;
    T greater = a > b ? a : b;
    T equal = F::FromBits(F::ToBits(a) & F::ToBits(b));
    T ordered = a == b ? equal : greater;
    return a != a ? (b != b ? F::CanonicalNan() : b) : b != b ? a : ordered;
  }
};
struct FAbs {
  template <typename T>
  static T Do(T a) {
    using F = Float<T>;
    return F::FromBits(F::ToBits(a) & ~F::kSign);
  }
};
struct FNeg {
  template <typename T>
  static T Do(T a) {
    using F = Float<T>;
    return F::FromBits(F::ToBits(a) ^ F::kSign);
  }
};
// copysign d, a, b: the sign of a on the magnitude of b.
struct FCopysign {
  template <typename T>
  static T Do(T a, T b) {
    using F = Float<T>;
    return F::FromBits((F::ToBits(a) & F::kSign) | (F::ToBits(b) & ~F::kSign));
  }
};
template <typename T>
inline T Saturate(T x) {
  // NaN fails the first comparison and becomes +0, as does -0.
  return x > T(0) ? (x < T(1) ? x : T(1)) : T(0);
}

}  // namespace
}  // namespace simgpu::exec
