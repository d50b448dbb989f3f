// cvt between integers and floats of all widths. One handler per pair of types; rounding,
// saturation and .ftz come from the flags, with a fast loop for the pairs and modes that compilers
// emit most.
#include <limits>
#include <type_traits>

#include "simgpu/exec/float_ops.h"

namespace simgpu::exec::SIMGPU_ISA {
namespace {

struct Half {
  uint16_t bits;
};

float HalfToFloat(uint16_t h) {
  uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16;
  uint32_t exponent = h >> 10 & 31, fraction = h & 0x3ff;
  if (exponent == 31) return BitsToF32(fraction ? 0x7fffffffu : sign | 0x7f800000u);
  if (exponent == 0) {
    float value = static_cast<float>(fraction) * 0x1p-24f;
    return BitsToF32(F32ToBits(value) | sign);
  }
  return BitsToF32(sign | (exponent + 112) << 23 | fraction << 13);
}
// Rounds a double to half in one step, in any rounding mode.
uint16_t DoubleToHalf(double x, uint32_t flags) {
  uint64_t bits = F64ToBits(x);
  uint16_t sign = static_cast<uint16_t>(bits >> 48 & 0x8000);
  if (x != x) return 0x7fff;
  double magnitude = FAbs::Do(x);
  if (magnitude > 0x1.fffffffffffffp1023) return sign | 0x7c00;
  if (magnitude == 0) return sign;
  int exponent = static_cast<int>(bits >> 52 & 0x7ff) - 1023;
  if (exponent < -14) exponent = -14;
  // In units of the last place this is exact, so nearbyint rounds once.
  double scaled = magnitude * BitsToF64(static_cast<uint64_t>(1023 + 10 - exponent) << 52);
  double whole = __builtin_trunc(scaled);
  double rest = scaled - whole;
  bool up;
  bool negative = sign != 0;
  if (flags & kRz)
    up = false;
  else if (flags & kRm)
    up = negative && rest > 0;
  else if (flags & kRp)
    up = !negative && rest > 0;
  else
    up = rest > 0.5 || (rest == 0.5 && (static_cast<uint32_t>(whole) & 1));
  uint32_t units = static_cast<uint32_t>(whole) + up;
  // units carries into the exponent by itself: 2^10 of them are the implicit bit.
  uint32_t result = (static_cast<uint32_t>(exponent + 14) << 10) + units;
  if (result >= 0x7c00) {
    bool infinite = !(flags & kRz) && !((flags & kRm) && !negative) && !((flags & kRp) && negative);
    result = infinite ? 0x7c00 : 0x7bff;
  }
  return sign | static_cast<uint16_t>(result);
}

template <typename T>
constexpr bool kIsFloat = std::is_floating_point_v<T> || std::is_same_v<T, Half>;

// ---- integer to integer
template <typename D, typename S>
D ClampInteger(S v) {
  __int128 wide = v;
  constexpr __int128 low = std::numeric_limits<D>::min(), high = std::numeric_limits<D>::max();
  return static_cast<D>(wide < low ? low : wide > high ? high : wide);
}
template <typename D, typename S>
void IntToInt(Context& c, const Inst& i, uint32_t mask) {
  if (i.flags & kSat) {
    Unary<D, S>(c, i, mask, [](S v) { return ClampInteger<D, S>(v); });
  } else {
    Unary<D, S>(c, i, mask, [](S v) { return static_cast<D>(v); });
  }
}

// ---- float to integer: clamps; NaN gives 0, or the top bit if either side has 64 bits
template <typename F>
F RoundToInteger(F x, uint32_t flags) {
  if constexpr (sizeof(F) == 4) {
    if (flags & kRni) return __builtin_rintf(x);
    if (flags & kRmi) return __builtin_floorf(x);
    if (flags & kRpi) return __builtin_ceilf(x);
    return __builtin_truncf(x);
  } else {
    if (flags & kRni) return __builtin_rint(x);
    if (flags & kRmi) return __builtin_floor(x);
    if (flags & kRpi) return __builtin_ceil(x);
    return __builtin_trunc(x);
  }
}
template <typename D, typename F, bool kWideSource>
D FloatToIntLane(F x, uint32_t flags) {
  if constexpr (sizeof(F) == 4) {
    if (flags & kFtz) x = Flush(x);
  }
  if (x != x) {
    if constexpr (kWideSource || sizeof(D) == 8)
      return static_cast<D>(uint64_t{1} << (8 * sizeof(D) - 1));
    return 0;
  }
  F r = RoundToInteger(x, flags);
  // Both bounds are powers of two and exact: min <= r < 2^bits.
  constexpr F low = static_cast<F>(std::numeric_limits<D>::min());
  constexpr F high = static_cast<F>(std::numeric_limits<D>::max() / 2 + 1) * 2;
  if (r < low) return std::numeric_limits<D>::min();
  if (r >= high) return std::numeric_limits<D>::max();
  return static_cast<D>(r);
}
template <typename D, typename F>
void FloatToInt(Context& c, const Inst& i, uint32_t mask) {
  uint32_t flags = i.flags;
  if constexpr (std::is_same_v<F, Half>) {
    Unary<D, uint16_t>(c, i, mask, [flags](uint16_t h) {
      return FloatToIntLane<D, float, false>(HalfToFloat(h), flags);
    });
  } else if constexpr (std::is_same_v<F, float> && std::is_same_v<D, int32_t>) {
    if ((flags & kRzi) && !(flags & kFtz)) {
      Unary<D, F>(c, i, mask, [](F x) {
        // The conversion gives INT_MIN for all that does not fit.
        int32_t v = _mm_cvttss_si32(_mm_set_ss(x));
        return x != x ? 0 : x >= 0x1p31f ? INT32_MAX : v;
      });
      return;
    }
    Unary<D, F>(c, i, mask, [flags](F x) { return FloatToIntLane<D, F, false>(x, flags); });
  } else {
    Unary<D, F>(c, i, mask,
                [flags](F x) { return FloatToIntLane<D, F, sizeof(F) == 8>(x, flags); });
  }
}

// ---- integer to float
template <typename F, typename S>
void IntToFloat(Context& c, const Inst& i, uint32_t mask) {
  uint32_t flags = i.flags;
  if constexpr (std::is_same_v<F, Half>) {
    // A double holds 53 bits: a 64-bit integer beyond half's range is an infinity or the largest
    // half either way, and below it is exact.
    Unary<uint16_t, S>(c, i, mask,
                       [flags](S v) { return DoubleToHalf(static_cast<double>(v), flags); });
  } else if (flags & kRoundingFlags) {
    Rounding scope(flags);
    Unary<F, S>(c, i, mask, [](S v) { return static_cast<F>(v); });
  } else {
    Unary<F, S>(c, i, mask, [](S v) { return static_cast<F>(v); });
  }
  if constexpr (std::is_same_v<F, float>) {
    if (flags & kSat) {
      float* d = c.At<float>(i.d);
      for (uint32_t l = 0; l < kLanes; ++l)
        if (mask >> l & 1) d[l] = Saturate(d[l]);
    }
  }
}

// ---- float to float
inline float Finish(float x, uint32_t flags) {
  x = Canonical(x);
  if (flags & kFtz) x = Flush(x);
  return flags & kSat ? Saturate(x) : x;
}
void F32ToF32(Context& c, const Inst& i, uint32_t mask) {
  uint32_t flags = i.flags;
  bool round = flags & (kRni | kRzi | kRmi | kRpi);
  Unary<float, float>(c, i, mask, [flags, round](float x) {
    if (flags & kFtz) x = Flush(x);
    if (round) x = RoundToInteger(x, flags);
    return Finish(x, flags);
  });
}
void F64ToF64(Context& c, const Inst& i, uint32_t mask) {
  uint32_t flags = i.flags;
  bool round = flags & (kRni | kRzi | kRmi | kRpi);
  Unary<double, double>(c, i, mask, [flags, round](double x) {
    if (round) x = RoundToInteger(x, flags);
    return flags & kSat ? Saturate(x) : x;
  });
}
void F32ToF64(Context& c, const Inst& i, uint32_t mask) {
  uint32_t flags = i.flags;
  Unary<double, float>(c, i, mask, [flags](float x) {
    double v = flags & kFtz ? Flush(x) : x;
    return flags & kSat ? Saturate(v) : v;
  });
}
void F64ToF32(Context& c, const Inst& i, uint32_t mask) {
  Rounding scope(i.flags);
  uint32_t flags = i.flags;
  Unary<float, double>(c, i, mask,
                       [flags](double x) { return Finish(static_cast<float>(x), flags); });
}
void F16ToF32(Context& c, const Inst& i, uint32_t mask) {
  uint32_t flags = i.flags;
  Unary<float, uint16_t>(c, i, mask, [flags](uint16_t h) {
    float x = HalfToFloat(h);
    if (flags & kFtz) x = Flush(x);
    return flags & kSat ? Saturate(x) : x;
  });
}
void F16ToF64(Context& c, const Inst& i, uint32_t mask) {
  uint32_t flags = i.flags;
  Unary<double, uint16_t>(c, i, mask, [flags](uint16_t h) {
    double x = HalfToFloat(h);
    return flags & kSat ? Saturate(x) : x;
  });
}
template <typename F>
void ToF16(Context& c, const Inst& i, uint32_t mask) {
  uint32_t flags = i.flags;
  Unary<uint16_t, F>(c, i, mask, [flags](F x) {
    if constexpr (sizeof(F) == 4)
      if (flags & kFtz) x = Flush(x);
    double v = x;
    if (flags & kSat) v = Saturate(v);
    return DoubleToHalf(v, flags);
  });
}
void F16ToF16(Context& c, const Inst& i, uint32_t mask) {
  uint32_t flags = i.flags;
  Unary<uint16_t, uint16_t>(c, i, mask, [flags](uint16_t h) {
    float x = HalfToFloat(h);
    if (flags & (kRni | kRzi | kRmi | kRpi)) x = RoundToInteger(x, flags);
    if (flags & kSat) x = Saturate(x);
    return DoubleToHalf(x, kRn);
  });
}

template <typename D, typename S>
Handler Pair() {
  if constexpr (!kIsFloat<D> && !kIsFloat<S>)
    return IntToInt<D, S>;
  else if constexpr (!kIsFloat<D>)
    return FloatToInt<D, S>;
  else if constexpr (!kIsFloat<S>)
    return IntToFloat<D, S>;
  else if constexpr (std::is_same_v<D, Half>) {
    if constexpr (std::is_same_v<S, Half>)
      return F16ToF16;
    else
      return ToF16<S>;
  } else if constexpr (std::is_same_v<D, float>) {
    if constexpr (std::is_same_v<S, Half>)
      return F16ToF32;
    else if constexpr (std::is_same_v<S, float>)
      return F32ToF32;
    else
      return F64ToF32;
  } else {
    if constexpr (std::is_same_v<S, Half>)
      return F16ToF64;
    else if constexpr (std::is_same_v<S, float>)
      return F32ToF64;
    else
      return F64ToF64;
  }
}
template <typename D>
Handler PickSource(int source) {
  switch (source) {
    case kCvtU8:
      return Pair<D, uint8_t>();
    case kCvtS8:
      return Pair<D, int8_t>();
    case kCvtU16:
      return Pair<D, uint16_t>();
    case kCvtS16:
      return Pair<D, int16_t>();
    case kCvtU32:
      return Pair<D, uint32_t>();
    case kCvtS32:
      return Pair<D, int32_t>();
    case kCvtU64:
      return Pair<D, uint64_t>();
    case kCvtS64:
      return Pair<D, int64_t>();
    case kCvtF16:
      return Pair<D, Half>();
    case kCvtF32:
      return Pair<D, float>();
    case kCvtF64:
      return Pair<D, double>();
    default:
      return nullptr;
  }
}

}  // namespace

Handler PickConvert(int target, int source) {
  switch (target) {
    case kCvtU8:
      return PickSource<uint8_t>(source);
    case kCvtS8:
      return PickSource<int8_t>(source);
    case kCvtU16:
      return PickSource<uint16_t>(source);
    case kCvtS16:
      return PickSource<int16_t>(source);
    case kCvtU32:
      return PickSource<uint32_t>(source);
    case kCvtS32:
      return PickSource<int32_t>(source);
    case kCvtU64:
      return PickSource<uint64_t>(source);
    case kCvtS64:
      return PickSource<int64_t>(source);
    case kCvtF16:
      return PickSource<Half>(source);
    case kCvtF32:
      return PickSource<float>(source);
    case kCvtF64:
      return PickSource<double>(source);
    default:
      return nullptr;
  }
}

}  // namespace simgpu::exec::SIMGPU_ISA
