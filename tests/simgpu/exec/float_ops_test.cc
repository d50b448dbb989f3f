// Floating-point instructions against the host's, with the device's rules for NaN, subnormals and
// rounding applied by hand.
#include <cfenv>

#include "tests/simgpu/exec/op_runner.h"

using namespace simgpu::test;

namespace {

struct Mode {
  const char* name;
  int host;
};
const Mode kModes[] = {
    {".rn", FE_TONEAREST}, {".rz", FE_TOWARDZERO}, {".rm", FE_DOWNWARD}, {".rp", FE_UPWARD}};

template <typename F>
auto In(int mode, F f) {
  fesetround(mode);
  auto r = f();
  fesetround(FE_TONEAREST);
  return r;
}
float Sat(float x) {
  return std::isnan(x) ? 0.0f : x > 1 ? 1.0f : x > 0 ? x : 0.0f;
}

}  // namespace

TEST_CASE("f32 arithmetic in all roundings", "[simgpu][float]") {
  const Values v = FloatValues();
  for (const Mode& mode : kModes)
    for (bool ftz : {false, true})
      for (bool sat : {false, true}) {
        std::string tail = std::string(mode.name) + (ftz ? ".ftz" : "") + (sat ? ".sat" : "") +
                           ".f32 {0}, {1}, {2}";
        auto wrap = [=](auto f) {
          return [=](uint64_t a, uint64_t b, uint64_t) {
            volatile float x = ftz ? Ftz(F(a)) : F(a), y = ftz ? Ftz(F(b)) : F(b);
            float r = In(mode.host, [&] {
              volatile float t = f(x, y);
              return t;
            });
            if (ftz) r = Ftz(r);
            return Result(sat ? Sat(r) : r);
          };
        };
        auto rows = Rows2(v, v);
        CheckOp("add" + tail, "Fff", rows, wrap([](float x, float y) { return x + y; }));
        CheckOp("sub" + tail, "Fff", rows, wrap([](float x, float y) { return x - y; }));
        CheckOp("mul" + tail, "Fff", rows, wrap([](float x, float y) { return x * y; }));
        if (!sat) CheckOp("div" + tail, "Fff", rows, wrap([](float x, float y) { return x / y; }));
      }
  auto rows = Rows2(v, v);
  CheckOp("add.f32 {0}, {1}, {2}", "Fff", rows,
          [](uint64_t a, uint64_t b, uint64_t) { return Result(F(a) + F(b)); });
  CheckOp("mul.ftz.f32 {0}, {1}, {2}", "Fff", rows,
          [](uint64_t a, uint64_t b, uint64_t) { return Result(Ftz(Ftz(F(a)) * Ftz(F(b)))); });
}

TEST_CASE("f32 fused multiply-add, reciprocal, square root", "[simgpu][float]") {
  const Values v = FloatValues();
  auto rows = Sparse(Rows3(v, v, v), 37);
  for (const Mode& mode : kModes) {
    CheckOp("fma" + std::string(mode.name) + ".f32 {0}, {1}, {2}, {3}", "Ffff", rows,
            [=](uint64_t a, uint64_t b, uint64_t c) {
              volatile float x = F(a), y = F(b), z = F(c);
              return Result(In(mode.host, [&] {
                volatile float t = std::fmaf(x, y, z);
                return t;
              }));
            });
    CheckOp("rcp" + std::string(mode.name) + ".f32 {0}, {1}", "Ff", Rows1(v),
            [=](uint64_t a, uint64_t, uint64_t) {
              volatile float x = F(a);
              return Result(In(mode.host, [&] {
                volatile float t = 1.0f / x;
                return t;
              }));
            });
    CheckOp("sqrt" + std::string(mode.name) + ".f32 {0}, {1}", "Ff", Rows1(v),
            [=](uint64_t a, uint64_t, uint64_t) {
              volatile float x = F(a);
              return Result(In(mode.host, [&] {
                volatile float t = std::sqrt(x);
                return t;
              }));
            });
  }
  CheckOp("fma.rn.ftz.f32 {0}, {1}, {2}, {3}", "Ffff", rows,
          [=](uint64_t a, uint64_t b, uint64_t c) {
            return Result(Ftz(std::fmaf(Ftz(F(a)), Ftz(F(b)), Ftz(F(c)))));
          });
}

TEST_CASE("minimum, maximum and signs", "[simgpu][float]") {
  const Values v = FloatValues();
  auto lesser = [](float a, float b) {
    if (std::isnan(a)) return b;
    if (std::isnan(b)) return a;
    if (a == b) return std::signbit(a) ? a : b;
    return a < b ? a : b;
  };
  auto greater = [](float a, float b) {
    if (std::isnan(a)) return b;
    if (std::isnan(b)) return a;
    if (a == b) return std::signbit(a) ? b : a;
    return a > b ? a : b;
  };
  auto rows = Rows2(v, v);
  CheckOp("min.f32 {0}, {1}, {2}", "Fff", rows,
          [&](uint64_t a, uint64_t b, uint64_t) { return Result(lesser(F(a), F(b))); });
  CheckOp("max.f32 {0}, {1}, {2}", "Fff", rows,
          [&](uint64_t a, uint64_t b, uint64_t) { return Result(greater(F(a), F(b))); });
  CheckOp("max.ftz.f32 {0}, {1}, {2}", "Fff", rows,
          [&](uint64_t a, uint64_t b, uint64_t) { return Result(greater(Ftz(F(a)), Ftz(F(b)))); });
  CheckOp("min.NaN.f32 {0}, {1}, {2}", "Fff", rows, [&](uint64_t a, uint64_t b, uint64_t) {
    return std::isnan(F(a)) || std::isnan(F(b)) ? uint64_t{kNanF32} : Result(lesser(F(a), F(b)));
  });
  CheckOp("abs.f32 {0}, {1}", "Ff", Rows1(v),
          [](uint64_t a, uint64_t, uint64_t) { return a & 0x7fffffff; });
  CheckOp("neg.f32 {0}, {1}", "Ff", Rows1(v),
          [](uint64_t a, uint64_t, uint64_t) { return a ^ 0x80000000; });
  CheckOp("copysign.f32 {0}, {1}, {2}", "Fff", rows,
          [](uint64_t a, uint64_t b, uint64_t) { return (a & 0x80000000) | (b & 0x7fffffff); });
  const Values d = DoubleValues();
  CheckOp(
      "min.f64 {0}, {1}, {2}", "Ddd", Rows2(d, d),
      [](uint64_t a, uint64_t b, uint64_t) {
        double x = D(a), y = D(b);
        if (std::isnan(x)) return b;
        if (std::isnan(y)) return a;
        if (x == y) return std::signbit(x) ? a : b;
        return x < y ? a : b;
      },
      Compare::kF64);
  CheckOp("abs.f64 {0}, {1}", "Dd", Rows1(d),
          [](uint64_t a, uint64_t, uint64_t) { return a & ~(1ull << 63); });
  CheckOp("neg.f64 {0}, {1}", "Dd", Rows1(d),
          [](uint64_t a, uint64_t, uint64_t) { return a ^ 1ull << 63; });
}

TEST_CASE("f64 arithmetic in all roundings", "[simgpu][float]") {
  const Values v = DoubleValues();
  auto rows = Rows2(v, v);
  for (const Mode& mode : kModes) {
    std::string tail = std::string(mode.name) + ".f64 {0}, {1}, {2}";
    auto wrap = [=](auto f) {
      return [=](uint64_t a, uint64_t b, uint64_t) {
        volatile double x = D(a), y = D(b);
        return Bits(In(mode.host, [&] {
          volatile double t = f(x, y);
          return double(t);
        }));
      };
    };
    CheckOp("add" + tail, "Ddd", rows, wrap([](double x, double y) { return x + y; }),
            Compare::kF64);
    CheckOp("sub" + tail, "Ddd", rows, wrap([](double x, double y) { return x - y; }),
            Compare::kF64);
    CheckOp("mul" + tail, "Ddd", rows, wrap([](double x, double y) { return x * y; }),
            Compare::kF64);
    CheckOp("div" + tail, "Ddd", rows, wrap([](double x, double y) { return x / y; }),
            Compare::kF64);
    CheckOp("fma" + std::string(mode.name) + ".f64 {0}, {1}, {2}, {1}", "Ddd", rows,
            wrap([](double x, double y) { return std::fma(x, y, x); }), Compare::kF64);
    CheckOp("rcp" + std::string(mode.name) + ".f64 {0}, {1}", "Dd", Rows1(v),
            wrap([](double x, double) { return 1.0 / x; }), Compare::kF64);
    CheckOp("sqrt" + std::string(mode.name) + ".f64 {0}, {1}", "Dd", Rows1(v),
            wrap([](double x, double) { return std::sqrt(x); }), Compare::kF64);
  }
}

TEST_CASE("approximations keep their bounds and special values", "[simgpu][float]") {
  const Values v = FloatValues();
  auto one = [&](const char* op, auto f) {
    CheckOp(
        std::string(op) + ".approx.f32 {0}, {1}", "Ff", Rows1(v),
        [=](uint64_t a, uint64_t, uint64_t) { return Result(static_cast<float>(f(double(F(a))))); },
        Compare::kF32Ulp2);
  };
  one("rcp", [](double x) { return 1 / x; });
  one("sqrt", [](double x) { return std::sqrt(x); });
  one("rsqrt", [](double x) { return 1 / std::sqrt(x); });
  one("ex2", [](double x) { return std::exp2(x); });
  one("lg2", [](double x) { return std::log2(x); });
  one("sin", [](double x) { return std::sin(x); });
  one("cos", [](double x) { return std::cos(x); });
  one("tanh", [](double x) { return std::tanh(x); });
  CheckOp("ex2.approx.ftz.f32 {0}, {1}", "Ff",
          Rows1({Bits(-0.0f), Bits(1e-40f), Bits(-140.0f), Bits(-126.5f)}),
          [](uint64_t a, uint64_t, uint64_t) {
            return uint64_t{std::fabs(F(a)) < 1 ? Bits(1.0f) : Bits(0.0f)};
          });
  CheckOp("rsqrt.approx.ftz.f32 {0}, {1}", "Ff",
          Rows1({Bits(-0.0f), Bits(1e-40f), Bits(-1e-40f), Bits(4.0f)}),
          [](uint64_t a, uint64_t, uint64_t) -> uint64_t {
            return F(a) == 4 ? Bits(0.5f) : std::signbit(F(a)) ? Bits(-INFINITY) : Bits(INFINITY);
          });
  CheckOp(
      "div.approx.f32 {0}, {1}, {2}", "Fff",
      Rows2({Bits(1.0f), Bits(-3e38f), Bits(INFINITY)},
            {Bits(2e38f), Bits(-2e38f), Bits(3.0f), Bits(0.0f)}),
      [](uint64_t a, uint64_t b, uint64_t) {
        float x = F(a), y = F(b);
        if (std::fabs(y) > 0x1p126f)
          return Result(std::isinf(x) ? NAN : std::copysign(0.0f, x * y));
        return Result(x / y);
      },
      Compare::kF32Ulp2);
  CheckOp("rcp.approx.ftz.f64 {0}, {1}", "Dd", Rows1(DoubleValues()),
          [](uint64_t a, uint64_t, uint64_t) -> uint64_t {
            double x = D(a);
            if (std::isnan(x)) return 0x7fffffff00000000ull;
            if (std::fpclassify(x) == FP_SUBNORMAL) x = std::copysign(0.0, x);
            double r = 1 / x;
            if (std::fpclassify(r) == FP_SUBNORMAL) r = std::copysign(0.0, r);
            return Bits(r) & 0xffffffff00000000ull;
          });
}

TEST_CASE("comparisons of floats", "[simgpu][float]") {
  struct Op {
    const char* name;
    bool (*f)(double, double);
  };
  auto nan = [](double a, double b) { return std::isnan(a) || std::isnan(b); };
  (void)nan;
  const Op ops[] = {{"eq", [](double a, double b) { return a == b; }},
                    {"ne", [](double a, double b) { return a < b || a > b; }},
                    {"lt", [](double a, double b) { return a < b; }},
                    {"le", [](double a, double b) { return a <= b; }},
                    {"gt", [](double a, double b) { return a > b; }},
                    {"ge", [](double a, double b) { return a >= b; }},
                    {"equ", [](double a, double b) { return std::isunordered(a, b) || a == b; }},
                    {"neu", [](double a, double b) { return a != b; }},
                    {"ltu", [](double a, double b) { return std::isunordered(a, b) || a < b; }},
                    {"leu", [](double a, double b) { return std::isunordered(a, b) || a <= b; }},
                    {"gtu", [](double a, double b) { return std::isunordered(a, b) || a > b; }},
                    {"geu", [](double a, double b) { return std::isunordered(a, b) || a >= b; }},
                    {"num", [](double a, double b) { return !std::isunordered(a, b); }},
                    {"nan", [](double a, double b) { return std::isunordered(a, b); }}};
  const Values v = FloatValues(), d = DoubleValues();
  for (const Op& op : ops) {
    std::string name = op.name;
    CheckOp("setp." + name + ".f32 {0}, {1}, {2}", "Pff", Rows2(v, v),
            [&](uint64_t a, uint64_t b, uint64_t) { return uint64_t{op.f(F(a), F(b))}; });
    CheckOp("setp." + name + ".ftz.f32 {0}, {1}, {2}", "Pff", Rows2(v, v),
            [&](uint64_t a, uint64_t b, uint64_t) { return uint64_t{op.f(Ftz(F(a)), Ftz(F(b)))}; });
    CheckOp("setp." + name + ".f64 {0}, {1}, {2}", "Pdd", Rows2(d, d),
            [&](uint64_t a, uint64_t b, uint64_t) { return uint64_t{op.f(D(a), D(b))}; });
    CheckOp(
        "set." + name + ".u32.f32 {0}, {1}, {2}", "Iff", Rows2(v, v),
        [&](uint64_t a, uint64_t b, uint64_t) { return uint64_t{op.f(F(a), F(b)) ? ~0u : 0u}; });
    CheckOp("set." + name + ".f32.f32 {0}, {1}, {2}", "Fff", Rows2(v, v),
            [&](uint64_t a, uint64_t b, uint64_t) {
              return uint64_t{op.f(F(a), F(b)) ? Bits(1.0f) : 0u};
            });
  }
}

TEST_CASE("comparisons of integers, combination, selection", "[simgpu][integer]") {
  struct Op {
    const char* name;
    bool (*s)(int64_t, int64_t);
    bool (*u)(uint64_t, uint64_t);
  };
  const Op ops[] = {{"eq", [](int64_t a, int64_t b) { return a == b; },
                     [](uint64_t a, uint64_t b) { return a == b; }},
                    {"ne", [](int64_t a, int64_t b) { return a != b; },
                     [](uint64_t a, uint64_t b) { return a != b; }},
                    {"lt", [](int64_t a, int64_t b) { return a < b; },
                     [](uint64_t a, uint64_t b) { return a < b; }},
                    {"le", [](int64_t a, int64_t b) { return a <= b; },
                     [](uint64_t a, uint64_t b) { return a <= b; }},
                    {"gt", [](int64_t a, int64_t b) { return a > b; },
                     [](uint64_t a, uint64_t b) { return a > b; }},
                    {"ge", [](int64_t a, int64_t b) { return a >= b; },
                     [](uint64_t a, uint64_t b) { return a >= b; }}};
  for (const Op& op : ops) {
    std::string name = op.name;
    CheckOp(
        "setp." + name + ".s32 {0}, {1}, {2}", "Pii", Rows2(kInts, kInts),
        [&](uint64_t a, uint64_t b, uint64_t) { return uint64_t{op.s(int32_t(a), int32_t(b))}; });
    CheckOp("setp." + name + ".u32 {0}, {1}, {2}", "Pii", Rows2(kInts, kInts),
            [&](uint64_t a, uint64_t b, uint64_t) { return uint64_t{op.u(a, b)}; });
    CheckOp(
        "setp." + name + ".s16 {0}, {1}, {2}", "Pss", Rows2(kShorts, kShorts),
        [&](uint64_t a, uint64_t b, uint64_t) { return uint64_t{op.s(int16_t(a), int16_t(b))}; });
    CheckOp("setp." + name + ".u16 {0}, {1}, {2}", "Pss", Rows2(kShorts, kShorts),
            [&](uint64_t a, uint64_t b, uint64_t) { return uint64_t{op.u(a, b)}; });
    CheckOp(
        "setp." + name + ".s64 {0}, {1}, {2}", "Pll", Rows2(kLongs, kLongs),
        [&](uint64_t a, uint64_t b, uint64_t) { return uint64_t{op.s(int64_t(a), int64_t(b))}; });
    CheckOp("setp." + name + ".u64 {0}, {1}, {2}", "Pll", Rows2(kLongs, kLongs),
            [&](uint64_t a, uint64_t b, uint64_t) { return uint64_t{op.u(a, b)}; });
  }
  for (const char* hi : {"lo", "ls", "hi", "hs"})
    CheckOp(std::string("setp.") + hi + ".u32 {0}, {1}, {2}", "Pii", Rows2(kInts, kInts),
            [&](uint64_t a, uint64_t b, uint64_t) {
              return uint64_t{hi[0] == 'l' ? (hi[1] == 'o' ? a < b : a <= b)
                                           : (hi[1] == 'i' ? a > b : a >= b)};
            });
  Values bit = {0, 1};
  CheckOp(
      "setp.lt.and.s32 {0}, {1}, {2}, {3}", "Piip", Rows3(kInts, kInts, bit),
      [](uint64_t a, uint64_t b, uint64_t p) { return uint64_t{int32_t(a) < int32_t(b) && p}; });
  CheckOp(
      "setp.lt.or.s32 {0}, {1}, {2}, !{3}", "Piip", Rows3(kInts, kInts, bit),
      [](uint64_t a, uint64_t b, uint64_t p) { return uint64_t{int32_t(a) < int32_t(b) || !p}; });
  CheckOp("setp.lt.xor.s32 {0}, {1}, {2}, {3}", "Piip", Rows3(kInts, kInts, bit),
          [](uint64_t a, uint64_t b, uint64_t p) {
            return uint64_t{(int32_t(a) < int32_t(b)) != (p != 0)};
          });
  // The second destination: the complement, combined.
  CheckOp(
      "{ .reg .pred t; setp.lt.and.s32 t|{0}, {1}, {2}, {3}; }", "Piip", Rows3(kInts, kInts, bit),
      [](uint64_t a, uint64_t b, uint64_t p) { return uint64_t{int32_t(a) >= int32_t(b) && p}; });
  CheckOp("selp.b32 {0}, {1}, {2}, {3}", "Iiip", Rows3(kInts, kInts, bit),
          [](uint64_t a, uint64_t b, uint64_t p) { return p ? a : b; });
  CheckOp("selp.f64 {0}, {1}, {2}, !{3}",
          "Ddd"
          "p",
          Rows3(kLongs, kLongs, bit), [](uint64_t a, uint64_t b, uint64_t p) { return p ? b : a; });
  CheckOp("selp.u16 {0}, {1}, {2}, {3}", "Sssp", Rows3(kShorts, kShorts, bit),
          [](uint64_t a, uint64_t b, uint64_t p) { return p ? a : b; });
  CheckOp("and.pred {0}, {1}, {2}", "Ppp", Rows2(bit, bit),
          [](uint64_t a, uint64_t b, uint64_t) { return a & b; });
  CheckOp("or.pred {0}, {1}, !{2}", "Ppp", Rows2(bit, bit),
          [](uint64_t a, uint64_t b, uint64_t) { return a | (b ^ 1); });
  CheckOp("xor.pred {0}, {1}, {2}", "Ppp", Rows2(bit, bit),
          [](uint64_t a, uint64_t b, uint64_t) { return a ^ b; });
  CheckOp("not.pred {0}, {1}", "Pp", Rows1(bit),
          [](uint64_t a, uint64_t, uint64_t) { return a ^ 1; });
}
