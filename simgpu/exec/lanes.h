// Loops over the 32 lanes. Included only by the files that are compiled once per instruction set
// (SIMGPU_ISA names the namespace), so everything here has internal linkage: a function compiled
// for AVX2 must never be the copy that the linker keeps for everyone.
//
// The pattern: if all live lanes run, write the results in place (what an exited lane holds no
// longer matters); else compute all 32 into a temporary and blend. The compiler makes vector code
// of both loops.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "simgpu/exec/context.h"

namespace simgpu::exec {
namespace {

// How a value of type T sits in its cell.
template <typename T>
struct Cell {
  using Type = T;
  static inline T Get(T cell) { return cell; }
  static inline T Put(T value) { return value; }
};
template <typename T>
struct NarrowCell {
  using Type = uint32_t;
  static inline T Get(uint32_t cell) { return static_cast<T>(cell); }
};
template <>
struct Cell<uint16_t> : NarrowCell<uint16_t> {
  static inline uint32_t Put(uint16_t value) { return value; }
};
template <>
struct Cell<int16_t> : NarrowCell<int16_t> {
  static inline uint32_t Put(int16_t value) {
    return static_cast<uint32_t>(static_cast<int32_t>(value));
  }
};
template <>
struct Cell<uint8_t> : NarrowCell<uint8_t> {
  static inline uint32_t Put(uint8_t value) { return value; }
};
template <>
struct Cell<int8_t> : NarrowCell<int8_t> {
  static inline uint32_t Put(int8_t value) {
    return static_cast<uint32_t>(static_cast<int32_t>(value));
  }
};

alignas(64) const uint32_t kLaneBit[kLanes] = {
    1u << 0,  1u << 1,  1u << 2,  1u << 3,  1u << 4,  1u << 5,  1u << 6,  1u << 7,
    1u << 8,  1u << 9,  1u << 10, 1u << 11, 1u << 12, 1u << 13, 1u << 14, 1u << 15,
    1u << 16, 1u << 17, 1u << 18, 1u << 19, 1u << 20, 1u << 21, 1u << 22, 1u << 23,
    1u << 24, 1u << 25, 1u << 26, 1u << 27, 1u << 28, 1u << 29, 1u << 30, 1u << 31};

// d = bit of mask ? t : d
inline void Blend(uint32_t* d, const uint32_t* t, const uint32_t* otherwise, uint32_t mask) {
#pragma GCC ivdep
  for (uint32_t l = 0; l < kLanes; ++l) d[l] = (mask & kLaneBit[l]) != 0 ? t[l] : otherwise[l];
}
inline void Blend(uint64_t* d, const uint64_t* t, const uint64_t* otherwise, uint32_t mask) {
#pragma GCC ivdep
  for (uint32_t l = 0; l < kLanes; ++l) d[l] = (mask & kLaneBit[l]) != 0 ? t[l] : otherwise[l];
}
template <typename C>
inline void BlendCells(C* d, const C* t, uint32_t mask) {
  if constexpr (sizeof(C) == 4) {
    Blend(reinterpret_cast<uint32_t*>(d), reinterpret_cast<const uint32_t*>(t),
          reinterpret_cast<const uint32_t*>(d), mask);
  } else {
    Blend(reinterpret_cast<uint64_t*>(d), reinterpret_cast<const uint64_t*>(t),
          reinterpret_cast<const uint64_t*>(d), mask);
  }
}

template <typename D, typename Body>
inline __attribute__((always_inline)) void Fill(const Context& c, const Inst& i, uint32_t mask,
                                                Body body) {
  using C = typename Cell<D>::Type;
  C* d = c.At<C>(i.d);
  if (mask == c.live) {
#pragma GCC ivdep
    for (uint32_t l = 0; l < kLanes; ++l) d[l] = Cell<D>::Put(body(l));
  } else {
    alignas(64) C t[kLanes];
#pragma GCC ivdep
    for (uint32_t l = 0; l < kLanes; ++l) t[l] = Cell<D>::Put(body(l));
    BlendCells(d, t, mask);
  }
}

template <typename D, typename A, typename F>
inline __attribute__((always_inline)) void Unary(const Context& c, const Inst& i, uint32_t mask,
                                                 F f) {
  const auto* a = c.At<const typename Cell<A>::Type>(i.a);
  Fill<D>(c, i, mask, [=](uint32_t l) { return static_cast<D>(f(Cell<A>::Get(a[l]))); });
}
template <typename D, typename A, typename B, typename F>
inline __attribute__((always_inline)) void Binary(const Context& c, const Inst& i, uint32_t mask,
                                                  F f) {
  const auto* a = c.At<const typename Cell<A>::Type>(i.a);
  const auto* b = c.At<const typename Cell<B>::Type>(i.b);
  Fill<D>(c, i, mask,
          [=](uint32_t l) { return static_cast<D>(f(Cell<A>::Get(a[l]), Cell<B>::Get(b[l]))); });
}
template <typename D, typename A, typename B, typename E, typename F>
inline __attribute__((always_inline)) void Ternary(const Context& c, const Inst& i, uint32_t mask,
                                                   F f) {
  const auto* a = c.At<const typename Cell<A>::Type>(i.a);
  const auto* b = c.At<const typename Cell<B>::Type>(i.b);
  const auto* e = c.At<const typename Cell<E>::Type>(i.c);
  Fill<D>(c, i, mask, [=](uint32_t l) {
    return static_cast<D>(f(Cell<A>::Get(a[l]), Cell<B>::Get(b[l]), Cell<E>::Get(e[l])));
  });
}

// 32 lanes of 0 or -1 to a mask.
inline uint32_t PackMask(const int32_t* t) {
  uint32_t mask = 0;
#ifdef __AVX2__
  for (int k = 0; k < 4; ++k)
    mask |= static_cast<uint32_t>(
                _mm256_movemask_ps(_mm256_load_ps(reinterpret_cast<const float*>(t + 8 * k))))
            << (8 * k);
#else
  for (int k = 0; k < 8; ++k)
    mask |= static_cast<uint32_t>(
                _mm_movemask_ps(_mm_load_ps(reinterpret_cast<const float*>(t + 4 * k))))
            << (4 * k);
#endif
  return mask;
}
template <typename Body>
inline __attribute__((always_inline)) uint32_t TestLanes(Body body) {
  alignas(64) int32_t t[kLanes];
#pragma GCC ivdep
  for (uint32_t l = 0; l < kLanes; ++l) t[l] = body(l) ? -1 : 0;
  return PackMask(t);
}
// The same for 64-bit comparisons, whose vector form yields 64-bit lanes.
template <typename Body>
inline __attribute__((always_inline)) uint32_t TestLanes64(Body body) {
  alignas(64) int64_t t[kLanes];
#pragma GCC ivdep
  for (uint32_t l = 0; l < kLanes; ++l) t[l] = body(l) ? -1 : 0;
  uint32_t mask = 0;
#ifdef __AVX2__
  for (int k = 0; k < 8; ++k)
    mask |= static_cast<uint32_t>(
                _mm256_movemask_pd(_mm256_load_pd(reinterpret_cast<const double*>(t + 4 * k))))
            << (4 * k);
#else
  for (int k = 0; k < 16; ++k)
    mask |= static_cast<uint32_t>(
                _mm_movemask_pd(_mm_load_pd(reinterpret_cast<const double*>(t + 2 * k))))
            << (2 * k);
#endif
  return mask;
}

inline void SetPredicate(const Context& c, uint32_t offset, uint32_t mask, uint32_t value) {
  uint32_t* p = c.At<uint32_t>(offset);
  *p = (*p & ~mask) | (value & mask);
}

// Arithmetic in another rounding mode. Operands are read and results written inside the scope,
// through memory that the two barriers pin down, so no operation can leave it.
class Rounding {
 public:
  explicit Rounding(uint32_t flags) : saved_(_mm_getcsr()) {
    uint32_t mode = flags & kRz ? 3u : flags & kRm ? 1u : flags & kRp ? 2u : 0u;
    _mm_setcsr((saved_ & ~0x6000u) | mode << 13);
    asm volatile("" ::: "memory");
  }
  ~Rounding() {
    asm volatile("" ::: "memory");
    _mm_setcsr(saved_);
  }
  Rounding(const Rounding&) = delete;
  Rounding& operator=(const Rounding&) = delete;

 private:
  uint32_t saved_;
};

inline float BitsToF32(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
inline uint32_t F32ToBits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}
inline double BitsToF64(uint64_t bits) {
  double value;
  memcpy(&value, &bits, 8);
  return value;
}
inline uint64_t F64ToBits(double value) {
  uint64_t bits;
  memcpy(&bits, &value, 8);
  return bits;
}
// A subnormal becomes a zero of its sign.
inline float Flush(float x) {
  uint32_t bits = F32ToBits(x);
  return BitsToF32((bits & 0x7f800000u) == 0 ? bits & 0x80000000u : bits);
}
// Every f32 NaN that arithmetic makes is this one.
inline float Canonical(float x) {
  return x != x ? BitsToF32(0x7fffffffu) : x;
}

}  // namespace
}  // namespace simgpu::exec
