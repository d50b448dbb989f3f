// The 16-bit formats, f16 and bf16, for files that are compiled once. An operation is done in
// double, where it is exact or rounded to odd, and rounded once to the format. Internal linkage,
// like float_ops.h.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "simgpu/exec/inst.h"

namespace simgpu::exec {
namespace {

template <int kExponentBits, int kFractionBits>
struct SmallFloat {
  static constexpr int kBias = (1 << (kExponentBits - 1)) - 1;
  static constexpr uint16_t kInfinity = ((1 << kExponentBits) - 1) << kFractionBits;
  static constexpr uint16_t kNan = 0x7fff;

  static double Value(uint16_t bits) {
    int exponent = bits >> kFractionBits & ((1 << kExponentBits) - 1);
    int fraction = bits & ((1 << kFractionBits) - 1);
    double magnitude;
    if (exponent == (1 << kExponentBits) - 1) {
      magnitude = fraction ? NAN : INFINITY;
    } else if (exponent == 0) {
      magnitude = std::ldexp(fraction, 1 - kBias - kFractionBits);
    } else {
      magnitude = std::ldexp(fraction + (1 << kFractionBits), exponent - kBias - kFractionBits);
    }
    return bits & 0x8000 ? -magnitude : magnitude;
  }

  // kRz, kRm, kRp or, with none, to nearest even.
  static uint16_t Round(double x, uint32_t flags) {
    if (x != x) return kNan;
    uint16_t sign = std::signbit(x) ? 0x8000 : 0;
    double magnitude = std::fabs(x);
    if (std::isinf(magnitude)) return sign | kInfinity;
    if (magnitude == 0) return sign;
    int exponent = std::ilogb(magnitude);
    if (exponent < 1 - kBias) exponent = 1 - kBias;
    // In units of the last place.
    double scaled = std::ldexp(magnitude, kFractionBits - exponent);
    bool toward_infinity = false;
    if (scaled > (2 << kFractionBits)) scaled = 2 << kFractionBits;
    double whole = std::trunc(scaled);
    double rest = scaled - whole;
    uint32_t units = static_cast<uint32_t>(whole);
    if (flags & kRz) {
    } else if (flags & kRm) {
      toward_infinity = sign && rest > 0;
    } else if (flags & kRp) {
      toward_infinity = !sign && rest > 0;
    } else {
      toward_infinity = rest > 0.5 || (rest == 0.5 && (units & 1));
    }
    units += toward_infinity;
    int64_t result = (static_cast<int64_t>(exponent + kBias - 1) << kFractionBits) + units;
    if (result >= kInfinity) {
      bool infinite = !(flags & kRz) && !((flags & kRm) && !sign) && !((flags & kRp) && sign);
      return sign | static_cast<uint16_t>(infinite ? kInfinity : kInfinity - 1);
    }
    return sign | static_cast<uint16_t>(result);
  }
};
using F16 = SmallFloat<5, 10>;
using Bf16 = SmallFloat<8, 7>;

// a * b + c, where the product is exact, rounded to odd: rounding that again to fewer bits gives
// what one rounding would.
inline double FmaToOdd(double a, double b, double c) {
  double product = a * b;
  double sum = product + c;
  if (!std::isfinite(sum)) return sum;
  double part = sum - product;
  double error = (product - (sum - part)) + (c - part);
  uint64_t bits;
  memcpy(&bits, &sum, 8);
  if (error != 0 && !(bits & 1)) {
    if (sum == 0) return sum;
    bits += (error > 0) == (sum > 0) ? 1 : static_cast<uint64_t>(-1);
    memcpy(&sum, &bits, 8);
  }
  return sum;
}

}  // namespace
}  // namespace simgpu::exec
