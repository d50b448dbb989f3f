// Bit fields, counts, permutations.
#include "simgpu/exec/lanes.h"

namespace simgpu::exec::SIMGPU_ISA {
namespace {

template <typename T>
constexpr uint32_t kBits = 8 * sizeof(T);

// Only the low 8 bits of position and length count.
template <typename T>
T Bfi(T field, T base, uint32_t position, uint32_t length) {
  position &= 255, length &= 255;
  if (length == 0 || position >= kBits<T>) return base;
  T ones = length >= kBits<T> ? static_cast<T>(~T{0}) : static_cast<T>((T{1} << length) - 1);
  T mask = static_cast<T>(ones << position);
  return (base & ~mask) | (static_cast<T>(field << position) & mask);
}
template <typename T>
void BfiOp(Context& c, const Inst& i, uint32_t mask) {
  const uint32_t* length = c.At<const uint32_t>(i.e);
  const T* a = c.At<const T>(i.a);
  const T* b = c.At<const T>(i.b);
  const uint32_t* position = c.At<const uint32_t>(i.c);
  Fill<T>(c, i, mask, [=](uint32_t l) { return Bfi<T>(a[l], b[l], position[l], length[l]); });
}
// A field that runs past the end is filled with its sign, which is the register's top bit then.
template <typename T, bool kSigned>
T Bfe(T a, uint32_t position, uint32_t length) {
  position &= 255, length &= 255;
  if (length == 0) return 0;
  uint32_t top = position + length - 1 < kBits<T> - 1 ? position + length - 1 : kBits<T> - 1;
  T sign = kSigned && (a >> top & 1) ? static_cast<T>(~T{0}) : T{0};
  if (position >= kBits<T>) return sign;
  T value = a >> position;
  if (length < kBits<T>) {
    T ones = static_cast<T>((T{1} << length) - 1);
    uint32_t have = kBits<T> - position;
    if (length > have) ones = static_cast<T>(have >= kBits<T> ? ~T{0} : (T{1} << have) - 1);
    value = (value & ones) | (sign & ~ones);
  } else if (position) {
    T ones = static_cast<T>((T{1} << (kBits<T> - position)) - 1);
    value = (value & ones) | (sign & ~ones);
  }
  return value;
}
template <typename T, bool kSigned>
void BfeOp(Context& c, const Inst& i, uint32_t mask) {
  Ternary<T, T, uint32_t, uint32_t>(
      c, i, mask, [](T a, uint32_t p, uint32_t n) { return Bfe<T, kSigned>(a, p, n); });
}
template <typename T>
uint32_t Clz(T a) {
  if constexpr (sizeof(T) == 8)
    return a ? static_cast<uint32_t>(__builtin_clzll(a)) : 64;
  else
    return a ? static_cast<uint32_t>(__builtin_clz(a)) : 32;
}
template <typename T>
void ClzOp(Context& c, const Inst& i, uint32_t mask) {
  Unary<uint32_t, T>(c, i, mask, [](T a) { return Clz<T>(a); });
}
template <typename T>
void PopcOp(Context& c, const Inst& i, uint32_t mask) {
  Unary<uint32_t, T>(c, i, mask, [](T a) {
    return static_cast<uint32_t>(__builtin_popcountll(static_cast<uint64_t>(a)));
  });
}
template <typename T>
T Reverse(T a) {
  if constexpr (sizeof(T) == 8) {
    a = (a >> 1 & 0x5555555555555555ull) | (a & 0x5555555555555555ull) << 1;
    a = (a >> 2 & 0x3333333333333333ull) | (a & 0x3333333333333333ull) << 2;
    a = (a >> 4 & 0x0f0f0f0f0f0f0f0full) | (a & 0x0f0f0f0f0f0f0f0full) << 4;
    return __builtin_bswap64(a);
  } else {
    a = (a >> 1 & 0x55555555u) | (a & 0x55555555u) << 1;
    a = (a >> 2 & 0x33333333u) | (a & 0x33333333u) << 2;
    a = (a >> 4 & 0x0f0f0f0fu) | (a & 0x0f0f0f0fu) << 4;
    return __builtin_bswap32(a);
  }
}
template <typename T>
void BrevOp(Context& c, const Inst& i, uint32_t mask) {
  Unary<T, T>(c, i, mask, [](T a) { return Reverse<T>(a); });
}
// The position of the highest bit that is not sign; with .shiftamt how far it is from the top.
template <typename T, bool kSigned>
void BfindOp(Context& c, const Inst& i, uint32_t mask) {
  bool amount = i.flags & kShiftAmount;
  Unary<uint32_t, T>(c, i, mask, [amount](T a) {
    if (kSigned && (a >> (kBits<T> - 1) & 1)) a = ~a;
    uint32_t zeros = Clz<T>(a);
    if (zeros == kBits<T>) return ~0u;
    return amount ? zeros : kBits<T> - 1 - zeros;
  });
}
// fns: the n-th set bit from a base; n may be negative or zero.
void FnsOp(Context& c, const Inst& i, uint32_t mask) {
  Ternary<uint32_t, uint32_t, uint32_t, int32_t>(
      c, i, mask, [](uint32_t bits, uint32_t base, int32_t n) -> uint32_t {
        base &= 31;
        if (n == 0) return bits >> base & 1 ? base : ~0u;
        int32_t step = n > 0 ? 1 : -1;
        uint32_t left = n > 0 ? static_cast<uint32_t>(n) : 0u - static_cast<uint32_t>(n);
        for (int32_t at = static_cast<int32_t>(base); at >= 0 && at < 32; at += step)
          if ((bits >> at & 1) && --left == 0) return static_cast<uint32_t>(at);
        return ~0u;
      });
}
template <bool kClamp>
void BmskOp(Context& c, const Inst& i, uint32_t mask) {
  Binary<uint32_t, uint32_t, uint32_t>(c, i, mask, [](uint32_t a, uint32_t b) -> uint32_t {
    if (kClamp) {
      if (a >= 32 || b == 0) return 0;
      uint32_t ones = b >= 32 ? ~0u : (1u << b) - 1;
      return ones << a;
    }
    a &= 31, b &= 31;
    return ((1u << b) - 1) << a;
  });
}
enum PermuteMode { kIndex, kF4e, kB4e, kRc8, kEcl, kEcr, kRc16 };
template <PermuteMode kMode>
void PrmtOp(Context& c, const Inst& i, uint32_t mask) {
  Ternary<uint32_t, uint32_t, uint32_t, uint32_t>(
      c, i, mask, [](uint32_t a, uint32_t b, uint32_t s) -> uint32_t {
        uint64_t bytes = uint64_t{b} << 32 | a;
        uint32_t result = 0;
        for (uint32_t k = 0; k < 4; ++k) {
          uint32_t n = s & 3, pick = 0;
          bool sign = false;
          switch (kMode) {
            case kIndex:
              pick = s >> (4 * k) & 7;
              sign = s >> (4 * k) & 8;
              break;
            case kF4e:
              pick = n + k;
              break;
            case kB4e:
              pick = (n - k) & 7;
              break;
            case kRc8:
              pick = n;
              break;
            case kEcl:
              pick = k > n ? k : n;
              break;
            case kEcr:
              pick = k < n ? k : n;
              break;
            case kRc16:
              pick = (n & 1) * 2 + (k & 1);
              break;
          }
          uint32_t byte = static_cast<uint32_t>(bytes >> (8 * pick)) & 255;
          if (sign) byte = byte & 128 ? 255 : 0;
          result |= byte << (8 * k);
        }
        return result;
      });
}
template <bool kLeft, bool kWrapMode>
void ShfOp(Context& c, const Inst& i, uint32_t mask) {
  Ternary<uint32_t, uint32_t, uint32_t, uint32_t>(
      c, i, mask, [](uint32_t low, uint32_t high, uint32_t n) {
        n = kWrapMode ? n & 31 : n > 32 ? 32 : n;
        uint64_t pair = uint64_t{high} << 32 | low;
        return static_cast<uint32_t>(kLeft ? (pair << n) >> 32 : pair >> n);
      });
}
void Lop3Op(Context& c, const Inst& i, uint32_t mask) {
  const uint32_t* a = c.At<const uint32_t>(i.a);
  const uint32_t* b = c.At<const uint32_t>(i.b);
  const uint32_t* e = c.At<const uint32_t>(i.c);
  uint32_t table = *c.At<const uint32_t>(i.e);  // an immediate
  uint32_t t[8];
  for (uint32_t k = 0; k < 8; ++k) t[k] = table >> k & 1 ? ~0u : 0u;
  Fill<uint32_t>(c, i, mask, [&](uint32_t l) {
    uint32_t x = a[l], y = b[l], z = e[l];
    return (t[0] & ~x & ~y & ~z) | (t[1] & ~x & ~y & z) | (t[2] & ~x & y & ~z) |
           (t[3] & ~x & y & z) | (t[4] & x & ~y & ~z) | (t[5] & x & ~y & z) | (t[6] & x & y & ~z) |
           (t[7] & x & y & z);
  });
}
template <typename A, typename B>
uint32_t Dot4(uint32_t a, uint32_t b, uint32_t sum) {
  for (int k = 0; k < 4; ++k)
    sum += static_cast<uint32_t>(static_cast<int32_t>(static_cast<A>(a >> (8 * k))) *
                                 static_cast<int32_t>(static_cast<B>(b >> (8 * k))));
  return sum;
}
template <typename A, typename B>
void Dp4aOp(Context& c, const Inst& i, uint32_t mask) {
  Ternary<uint32_t, uint32_t, uint32_t, uint32_t>(
      c, i, mask, [](uint32_t a, uint32_t b, uint32_t e) { return Dot4<A, B>(a, b, e); });
}
template <typename A, typename B, bool kHigh>
void Dp2aOp(Context& c, const Inst& i, uint32_t mask) {
  Ternary<uint32_t, uint32_t, uint32_t, uint32_t>(
      c, i, mask, [](uint32_t a, uint32_t b, uint32_t e) {
        for (int k = 0; k < 2; ++k)
          e += static_cast<uint32_t>(
              static_cast<int32_t>(static_cast<A>(a >> (16 * k))) *
              static_cast<int32_t>(static_cast<B>(b >> (8 * (k + (kHigh ? 2 : 0))))));
        return e;
      });
}

constexpr Row kRows[] = {
    {"bfi.b32", "Iiiii", BfiOp<uint32_t>},
    {"bfi.b64", "Lllii", BfiOp<uint64_t>},
    {"bfe.u32", "Iiii", BfeOp<uint32_t, false>},
    {"bfe.s32", "Iiii", BfeOp<uint32_t, true>},
    {"bfe.u64", "Llii", BfeOp<uint64_t, false>},
    {"bfe.s64", "Llii", BfeOp<uint64_t, true>},
    {"clz.b32", "Ii", ClzOp<uint32_t>},
    {"clz.b64", "Il", ClzOp<uint64_t>},
    {"popc.b32", "Ii", PopcOp<uint32_t>},
    {"popc.b64", "Il", PopcOp<uint64_t>},
    {"brev.b32", "Ii", BrevOp<uint32_t>},
    {"brev.b64", "Ll", BrevOp<uint64_t>},
    {"bfind[.shiftamt].u32", "Ii", BfindOp<uint32_t, false>},
    {"bfind[.shiftamt].s32", "Ii", BfindOp<uint32_t, true>},
    {"bfind[.shiftamt].u64", "Il", BfindOp<uint64_t, false>},
    {"bfind[.shiftamt].s64", "Il", BfindOp<uint64_t, true>},
    {"fns.b32", "Iiii", FnsOp},
    {"bmsk.clamp.b32", "Iii", BmskOp<true>},
    {"bmsk.wrap.b32", "Iii", BmskOp<false>},
    {"prmt.b32", "Iiii", PrmtOp<kIndex>},
    {"prmt.b32.f4e", "Iiii", PrmtOp<kF4e>},
    {"prmt.b32.b4e", "Iiii", PrmtOp<kB4e>},
    {"prmt.b32.rc8", "Iiii", PrmtOp<kRc8>},
    {"prmt.b32.ecl", "Iiii", PrmtOp<kEcl>},
    {"prmt.b32.ecr", "Iiii", PrmtOp<kEcr>},
    {"prmt.b32.rc16", "Iiii", PrmtOp<kRc16>},
    {"shf.l.clamp.b32", "Iiii", ShfOp<true, false>},
    {"shf.l.wrap.b32", "Iiii", ShfOp<true, true>},
    {"shf.r.clamp.b32", "Iiii", ShfOp<false, false>},
    {"shf.r.wrap.b32", "Iiii", ShfOp<false, true>},
    {"lop3.b32", "Iiiii", Lop3Op},
    {"dp4a.s32.s32", "Iiii", Dp4aOp<int8_t, int8_t>},
    {"dp4a.u32.u32", "Iiii", Dp4aOp<uint8_t, uint8_t>},
    {"dp4a.s32.u32", "Iiii", Dp4aOp<int8_t, uint8_t>},
    {"dp4a.u32.s32", "Iiii", Dp4aOp<uint8_t, int8_t>},
    {"dp2a.lo.s32.s32", "Iiii", Dp2aOp<int16_t, int8_t, false>},
    {"dp2a.lo.u32.u32", "Iiii", Dp2aOp<uint16_t, uint8_t, false>},
    {"dp2a.lo.s32.u32", "Iiii", Dp2aOp<int16_t, uint8_t, false>},
    {"dp2a.lo.u32.s32", "Iiii", Dp2aOp<uint16_t, int8_t, false>},
    {"dp2a.hi.s32.s32", "Iiii", Dp2aOp<int16_t, int8_t, true>},
    {"dp2a.hi.u32.u32", "Iiii", Dp2aOp<uint16_t, uint8_t, true>},
    {"dp2a.hi.s32.u32", "Iiii", Dp2aOp<int16_t, uint8_t, true>},
    {"dp2a.hi.u32.s32", "Iiii", Dp2aOp<uint16_t, int8_t, true>},
};

}  // namespace

extern const Rows kBitRows;
const Rows kBitRows = {kRows, sizeof(kRows) / sizeof(kRows[0])};

}  // namespace simgpu::exec::SIMGPU_ISA
