// cvt between all pairs of types, roundings and saturation.
#include <cfenv>

#include "tests/simgpu/exec/op_runner.h"

using namespace simgpu::test;

namespace {

using i128 = __int128;

struct Integer {
  const char* name;
  int bits;
  bool sign;
  i128 Low() const { return sign ? -(static_cast<i128>(1) << (bits - 1)) : 0; }
  i128 High() const { return (static_cast<i128>(1) << (bits - sign)) - 1; }
  // The type's value in the low bits of a register.
  i128 Get(uint64_t v) const {
    i128 whole = static_cast<i128>(v) & ((static_cast<i128>(1) << bits) - 1);
    return sign && whole > High() ? whole - (static_cast<i128>(1) << bits) : whole;
  }
};
const Integer kIntegers[] = {{"u8", 8, false},   {"s8", 8, true},    {"u16", 16, false},
                             {"s16", 16, true},  {"u32", 32, false}, {"s32", 32, true},
                             {"u64", 64, false}, {"s64", 64, true}};

// Registers: the narrowest that PTX allows is 16 bits wide.
char Letter(int bits) {
  return bits <= 16 ? 's' : bits == 32 ? 'i' : 'l';
}
char Upper(char c) {
  return static_cast<char>(c - 'a' + 'A');
}
uint64_t Cell(i128 v, char letter) {
  return static_cast<uint64_t>(v) & (letter == 's'   ? 0xffffull
                                     : letter == 'i' ? 0xffffffffull
                                                     : ~0ull);
}
const Values& IntegerValues(char letter) {
  return letter == 's' ? kShorts : letter == 'i' ? kInts : kLongs;
}

// float to integer: round, clamp, and what a NaN becomes.
uint64_t ToInteger(double x, const Integer& to, int source_bits, char rounding) {
  if (std::isnan(x))
    return source_bits == 64 || to.bits == 64
               ? Cell(to.sign ? to.Low() : static_cast<i128>(1) << (to.bits - 1), Letter(to.bits))
               : 0;
  double r = rounding == 'n'   ? std::nearbyint(x)
             : rounding == 'z' ? std::trunc(x)
             : rounding == 'm' ? std::floor(x)
                               : std::ceil(x);
  i128 v = r >= 0x1p100    ? static_cast<i128>(1) << 100
           : r <= -0x1p100 ? -(static_cast<i128>(1) << 100)
                           : static_cast<i128>(r);
  v = v < to.Low() ? to.Low() : v > to.High() ? to.High() : v;
  return Cell(v, Letter(to.bits));
}

}  // namespace

TEST_CASE("integers convert to integers", "[simgpu][convert]") {
  for (const Integer& to : kIntegers)
    for (const Integer& from : kIntegers)
      for (bool sat : {false, true}) {
        char source = Letter(from.bits), target = Letter(to.bits);
        CheckOp("cvt" + std::string(sat ? ".sat." : ".") + to.name + "." + from.name + " {0}, {1}",
                {Upper(target), source}, Rows1(IntegerValues(source)),
                [&](uint64_t a, uint64_t, uint64_t) {
                  i128 v = from.Get(a);
                  if (sat)
                    v = v < to.Low() ? to.Low() : v > to.High() ? to.High() : v;
                  else
                    v = to.Get(static_cast<uint64_t>(v));
                  return Cell(v, target);
                });
      }
}

TEST_CASE("registers may be wider than the types", "[simgpu][convert]") {
  CheckOp("cvt.s32.s8 {0}, {1}", "Ii", Rows1(kInts),
          [](uint64_t a, uint64_t, uint64_t) { return Cell(int8_t(a), 'i'); });
  CheckOp("cvt.u32.u8 {0}, {1}", "Il", Rows1(kLongs),
          [](uint64_t a, uint64_t, uint64_t) { return a & 255; });
  CheckOp("cvt.s16.s8 {0}, {1}", "Li", Rows1(kInts),
          [](uint64_t a, uint64_t, uint64_t) { return Cell(int8_t(a), 'l'); });
  CheckOp("cvt.u8.u32 {0}, {1}", "Li", Rows1(kInts),
          [](uint64_t a, uint64_t, uint64_t) { return a & 255; });
  CheckOp("cvt.s16.s32 {0}, {1}", "Ii", Rows1(kInts),
          [](uint64_t a, uint64_t, uint64_t) { return Cell(int16_t(a), 'i'); });
}

TEST_CASE("floats convert to integers", "[simgpu][convert]") {
  for (const Integer& to : kIntegers)
    for (char r : {'n', 'z', 'm', 'p'}) {
      std::string head = std::string("cvt.r") + r + "i.";
      char target = Letter(to.bits);
      CheckOp(head + to.name + ".f32 {0}, {1}", {Upper(target), 'f'}, Rows1(FloatValues()),
              [&](uint64_t a, uint64_t, uint64_t) { return ToInteger(F(a), to, 32, r); });
      CheckOp(head + to.name + ".f64 {0}, {1}", {Upper(target), 'd'}, Rows1(DoubleValues()),
              [&](uint64_t a, uint64_t, uint64_t) { return ToInteger(D(a), to, 64, r); });
    }
  CheckOp(
      "cvt.rzi.ftz.s32.f32 {0}, {1}", "If", Rows1(FloatValues()),
      [&](uint64_t a, uint64_t, uint64_t) { return ToInteger(Ftz(F(a)), kIntegers[5], 32, 'z'); });
  CheckOp(
      "cvt.rpi.ftz.s32.f32 {0}, {1}", "If", Rows1(FloatValues()),
      [&](uint64_t a, uint64_t, uint64_t) { return ToInteger(Ftz(F(a)), kIntegers[5], 32, 'p'); });
}

TEST_CASE("integers convert to floats in all roundings", "[simgpu][convert]") {
  struct Mode {
    const char* name;
    int host;
  };
  const Mode modes[] = {
      {".rn", FE_TONEAREST}, {".rz", FE_TOWARDZERO}, {".rm", FE_DOWNWARD}, {".rp", FE_UPWARD}};
  Values more = {0xffffffffffffff7f, 0x7fffff8000000001, 0x8000008000000000, 0x8000008000000001,
                 16777217,           0xfffffffffffff801, 0x7ffffffffffffdff, 0x1000001,
                 0x20000000000001,   0x7fffffffffffffbf};
  for (const Integer& from : kIntegers)
    for (const Mode& mode : modes) {
      char source = Letter(from.bits);
      Values values = IntegerValues(source);
      for (uint64_t v : more) values.push_back(Cell(static_cast<i128>(v), source));
      auto convert = [&](uint64_t a, auto kind) {
        using T = decltype(kind);
        volatile uint64_t magnitude;
        i128 v = from.Get(a);
        magnitude = static_cast<uint64_t>(v < 0 ? -v : v);
        // Rounding the magnitude down is rounding a negative value up.
        int host = v < 0 && mode.host == FE_DOWNWARD ? FE_UPWARD
                   : v < 0 && mode.host == FE_UPWARD ? FE_DOWNWARD
                                                     : mode.host;
        fesetround(host);
        volatile T high = static_cast<T>(static_cast<int64_t>(magnitude >> 1 | (magnitude & 1)));
        volatile T exact = static_cast<T>(static_cast<int64_t>(magnitude));
        fesetround(FE_TONEAREST);
        T r = magnitude >> 63 ? high * 2 : exact;
        return v < 0 ? -r : r;
      };
      CheckOp(std::string("cvt") + mode.name + ".f32." + from.name + " {0}, {1}", {'F', source},
              Rows1(values),
              [&](uint64_t a, uint64_t, uint64_t) { return uint64_t{Bits(convert(a, 0.0f))}; });
      CheckOp(std::string("cvt") + mode.name + ".f64." + from.name + " {0}, {1}", {'D', source},
              Rows1(values), [&](uint64_t a, uint64_t, uint64_t) { return Bits(convert(a, 0.0)); });
    }
}

TEST_CASE("floats convert to floats", "[simgpu][convert]") {
  struct Mode {
    const char* name;
    int host;
  };
  const Mode modes[] = {
      {".rn", FE_TONEAREST}, {".rz", FE_TOWARDZERO}, {".rm", FE_DOWNWARD}, {".rp", FE_UPWARD}};
  for (const Mode& mode : modes)
    CheckOp(std::string("cvt") + mode.name + ".f32.f64 {0}, {1}", "Fd", Rows1(DoubleValues()),
            [&](uint64_t a, uint64_t, uint64_t) {
              volatile double x = D(a);
              fesetround(mode.host);
              volatile float r = static_cast<float>(x);
              fesetround(FE_TONEAREST);
              return Result(r);
            });
  CheckOp(
      "cvt.f64.f32 {0}, {1}", "Df", Rows1(FloatValues()),
      [](uint64_t a, uint64_t, uint64_t) { return Bits(double(F(a))); }, Compare::kF64);
  CheckOp(
      "cvt.ftz.f64.f32 {0}, {1}", "Df", Rows1(FloatValues()),
      [](uint64_t a, uint64_t, uint64_t) { return Bits(double(Ftz(F(a)))); }, Compare::kF64);
  CheckOp("cvt.sat.f32.f32 {0}, {1}", "Ff", Rows1(FloatValues()),
          [](uint64_t a, uint64_t, uint64_t) {
            float x = F(a);
            return uint64_t{Bits(std::isnan(x) || x <= 0 ? 0.0f : x > 1 ? 1.0f : x)};
          });
  for (char r : {'n', 'z', 'm', 'p'}) {
    auto round = [=](double x) {
      return r == 'n'   ? std::nearbyint(x)
             : r == 'z' ? std::trunc(x)
             : r == 'm' ? std::floor(x)
                        : std::ceil(x);
    };
    CheckOp(std::string("cvt.r") + r + "i.f32.f32 {0}, {1}", "Ff", Rows1(FloatValues()),
            [=](uint64_t a, uint64_t, uint64_t) { return Result(float(round(F(a)))); });
    CheckOp(
        std::string("cvt.r") + r + "i.f64.f64 {0}, {1}", "Dd", Rows1(DoubleValues()),
        [=](uint64_t a, uint64_t, uint64_t) { return Bits(round(D(a))); }, Compare::kF64);
  }
}

TEST_CASE("half precision converts exactly", "[simgpu][convert]") {
  // The value of a half from its definition.
  auto value = [](uint64_t h) -> double {
    int exponent = int(h >> 10 & 31), fraction = int(h & 1023);
    double m = exponent == 31  ? (fraction ? NAN : INFINITY)
               : exponent == 0 ? std::ldexp(fraction, -24)
                               : std::ldexp(1024 + fraction, exponent - 25);
    return h & 0x8000 ? -m : m;
  };
  Values halves;
  for (uint64_t h = 0; h < 0x10000; h += 37) halves.push_back(h);
  for (uint64_t h : {0x7c00, 0xfc00, 0x7e00, 0x0001, 0x03ff, 0x0400, 0x7bff, 0x8000})
    halves.push_back(h);
  CheckOp("cvt.f32.f16 {0}, {1}", "Fh", Rows1(halves),
          [&](uint64_t h, uint64_t, uint64_t) { return Result(float(value(h))); });
  // Back again: f16 -> f32 -> f16 changes nothing but NaN.
  CheckOp("{ .reg .b32 t; cvt.f32.f16 t, {1}; cvt.rn.f16.f32 {0}, t; }", "Hh", Rows1(halves),
          [&](uint64_t h, uint64_t, uint64_t) { return std::isnan(value(h)) ? 0x7fff : h; });
  // The nearest of all finite halves, ties to even.
  Values floats;
  for (float x :
       {1.0f,     1.00048828125f, 1.0004883f,        1.0014648f,    65504.0f, 65519.99f, 65520.0f,
        65536.0f, 1e-8f,          2.98023223877e-8f, 2.9802326e-8f, 6e-8f,    8.94e-8f,  6.0975e-5f,
        6.1e-5f,  0.333333f,      3.14159f,          1e30f,         INFINITY, 0.0f})
    floats.push_back(Bits(x)), floats.push_back(Bits(-x));
  CheckOp("cvt.rn.f16.f32 {0}, {1}", "Hf", Rows1(floats),
          [&](uint64_t a, uint64_t, uint64_t) -> uint64_t {
            double x = std::fabs(double(F(a)));
            uint64_t sign = a >> 16 & 0x8000, best = 0;
            if (x >= 65520) return sign | 0x7c00;
            for (uint64_t h = 1; h < 0x7c00; ++h) {
              double d = std::fabs(value(h) - x), e = std::fabs(value(best) - x);
              if (d < e || (d == e && !(h & 1))) best = h;
            }
            return sign | best;
          });
}
