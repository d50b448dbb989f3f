// Arithmetic of f16 and bf16 against exact sums and products (in 113 bits), rounded by searching
// the format for the nearest value.
#include <quadmath.h>

#include <algorithm>

#include "tests/simgpu/exec/op_runner.h"

using namespace simgpu::test;

namespace {

using Exact = __float128;

struct Format {
  const char* name;
  int exponent_bits, fraction_bits;
  uint32_t one;

  Exact Value(uint64_t h) const {
    int e = int(h >> fraction_bits) & ((1 << exponent_bits) - 1),
        f = int(h) & ((1 << fraction_bits) - 1);
    int bias = (1 << (exponent_bits - 1)) - 1;
    Exact m = e == 0 ? scalbnq(f, 1 - bias - fraction_bits)
                     : scalbnq(f + (1 << fraction_bits), e - bias - fraction_bits);
    if (e == (1 << exponent_bits) - 1) m = f ? nanq("") : HUGE_VALQ;
    return h & 0x8000 ? -m : m;
  }
  uint64_t Nearest(Exact x) const {
    if (isnanq(x)) return 0x7fff;
    uint64_t sign = signbitq(x) ? 0x8000 : 0, infinity = ((1u << exponent_bits) - 1)
                                                         << fraction_bits;
    x = fabsq(x);
    // The largest that is not above x; infinity stands for the next power of two here.
    uint64_t low = 0, high = infinity;
    while (high - low > 1) {
      uint64_t middle = (low + high) / 2;
      (Value(middle) <= x ? low : high) = middle;
    }
    Exact top = high == infinity ? scalbnq(1, 1 << (exponent_bits - 1)) : Value(high);
    Exact down = x - Value(low), up = top - x;
    uint64_t best = down < up || (down == up && !(low & 1)) ? low : high;
    return sign | best;
  }
};
const Format kFormats[] = {{"f16", 5, 10, 0x3c00}, {"bf16", 8, 7, 0x3f80}};

const Values kHalves = {0x0000, 0x8000, 0x0001, 0x8001, 0x03ff, 0x0400, 0x3c00, 0xbc00, 0x3c01,
                        0x3555, 0x4248, 0x7bff, 0xfbff, 0x7c00, 0xfc00, 0x7e00, 0x3f80, 0x3f81,
                        0xbf80, 0x7f7f, 0xff7f, 0x7f80, 0x0080, 0x1234, 0xb456, 0x5a5a};

uint64_t Both(uint64_t low, uint64_t high) {
  return low | high << 16;
}

}  // namespace

TEST_CASE("half arithmetic rounds once", "[simgpu][half]") {
  for (const Format& f : kFormats) {
    std::string t = f.name;
    auto rows = Rows2(kHalves, kHalves);
    auto v = [&](uint64_t h) { return f.Value(h & 0xffff); };
    CheckOp("add." + t + " {0}, {1}, {2}", "Hhh", rows,
            [&](uint64_t a, uint64_t b, uint64_t) { return f.Nearest(v(a) + v(b)); });
    CheckOp("sub." + t + " {0}, {1}, {2}", "Hhh", rows,
            [&](uint64_t a, uint64_t b, uint64_t) { return f.Nearest(v(a) - v(b)); });
    CheckOp("mul." + t + " {0}, {1}, {2}", "Hhh", rows,
            [&](uint64_t a, uint64_t b, uint64_t) { return f.Nearest(v(a) * v(b)); });
    // Products of bf16 span more than 113 bits with their addend, so only f16 is exact here.
    if (f.fraction_bits == 10)
      CheckOp("fma.rn." + t + " {0}, {1}, {2}, {3}", "Hhhh",
              Sparse(Rows3(kHalves, kHalves, kHalves), 3),
              [&](uint64_t a, uint64_t b, uint64_t c) { return f.Nearest(v(a) * v(b) + v(c)); });
    CheckOp("fma.rn.relu." + t + " {0}, {1}, {2}, {1}", "Hhh", rows,
            [&](uint64_t a, uint64_t b, uint64_t) -> uint64_t {
              Exact x = v(a) * v(b) + v(a);
              if (isnanq(x)) return 0x7fff;
              return x > 0 ? f.Nearest(x) : 0;
            });
    CheckOp("neg." + t + " {0}, {1}", "Hh", Rows1(kHalves),
            [](uint64_t a, uint64_t, uint64_t) { return a ^ 0x8000; });
    CheckOp("abs." + t + " {0}, {1}", "Hh", Rows1(kHalves),
            [](uint64_t a, uint64_t, uint64_t) { return a & 0x7fff; });
    CheckOp("max." + t + " {0}, {1}, {2}", "Hhh", rows,
            [&](uint64_t a, uint64_t b, uint64_t) -> uint64_t {
              if (isnanq(v(a)) && isnanq(v(b))) return 0x7fff;
              if (isnanq(v(a))) return b;
              if (isnanq(v(b))) return a;
              if (v(a) == v(b)) return a & b;
              return v(a) > v(b) ? a : b;
            });
    CheckOp("setp.ltu." + t + " {0}, {1}, {2}", "Phh", rows,
            [&](uint64_t a, uint64_t b, uint64_t) { return uint64_t{!(v(a) >= v(b))}; });
    CheckOp("set.gt." + t + "." + t + " {0}, {1}, {2}", "Hhh", rows,
            [&](uint64_t a, uint64_t b, uint64_t) { return uint64_t{v(a) > v(b) ? f.one : 0}; });
    // Pairs: both halves, in order.
    Values pairs;
    for (size_t k = 0; k < kHalves.size(); ++k)
      pairs.push_back(Both(kHalves[k], kHalves[(k * 7 + 3) % kHalves.size()]));
    CheckOp("add." + t + "x2 {0}, {1}, {2}", "Iii", Rows2(pairs, pairs),
            [&](uint64_t a, uint64_t b, uint64_t) {
              return Both(f.Nearest(v(a) + v(b)), f.Nearest(v(a >> 16) + v(b >> 16)));
            });
    CheckOp("fma.rn." + t + "x2 {0}, {1}, {2}, {1}", "Iii", Rows2(pairs, pairs),
            [&](uint64_t a, uint64_t b, uint64_t) {
              return Both(f.Nearest(v(a) * v(b) + v(a)),
                          f.Nearest(v(a >> 16) * v(b >> 16) + v(a >> 16)));
            });
    // The first source becomes the upper half.
    CheckOp(
        "cvt.rn." + t + "x2.f32 {0}, {1}, {2}", "Iff",
        Rows2(FloatValues(), {Bits(1.0f), Bits(-2.5f), Bits(1e-41f)}),
        [&](uint64_t a, uint64_t b, uint64_t) { return Both(f.Nearest(F(b)), f.Nearest(F(a))); });
    CheckOp("cvt.rn." + t + ".f32 {0}, {1}", "Hf", Rows1(FloatValues()),
            [&](uint64_t a, uint64_t, uint64_t) { return f.Nearest(F(a)); });
    CheckOp("cvt.f32." + t + " {0}, {1}", "Fh", Rows1(kHalves),
            [&](uint64_t a, uint64_t, uint64_t) { return Result(static_cast<float>(v(a))); });
  }
}

TEST_CASE("packed integers and video differences", "[simgpu][half]") {
  auto s = [](uint64_t v, int k) { return int16_t(v >> (16 * k)); };
  CheckOp("add.s16x2 {0}, {1}, {2}", "Iii", Rows2(kInts, kInts),
          [&](uint64_t a, uint64_t b, uint64_t) {
            return Both(uint16_t(s(a, 0) + s(b, 0)), uint16_t(s(a, 1) + s(b, 1)));
          });
  CheckOp("max.relu.s16x2 {0}, {1}, {2}", "Iii", Rows2(kInts, kInts),
          [&](uint64_t a, uint64_t b, uint64_t) {
            return Both(uint16_t(std::max({s(a, 0), s(b, 0), int16_t{0}})),
                        uint16_t(std::max({s(a, 1), s(b, 1), int16_t{0}})));
          });
  CheckOp("vabsdiff4.u32.u32.u32.add {0}, {1}, {2}, {3}", "Iiii",
          Rows3(kInts, kInts, {0, 0xfffffff0}), [](uint64_t a, uint64_t b, uint64_t c) {
            for (int k = 0; k < 4; ++k)
              c += uint64_t(std::abs(int(a >> (8 * k) & 255) - int(b >> (8 * k) & 255)));
            return c & 0xffffffff;
          });
}
