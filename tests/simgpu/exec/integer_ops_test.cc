// Integer, logic and bit instructions against host arithmetic in wider types.
#include "tests/simgpu/exec/op_runner.h"

using namespace simgpu::test;

namespace {

using i128 = __int128;

struct Width {
  const char* letter;
  int bits;
  const Values* values;
};
const Width kWidths[] = {{"s", 16, &kShorts}, {"i", 32, &kInts}, {"l", 64, &kLongs}};

uint64_t Cut(i128 v, int bits) {
  return static_cast<uint64_t>(v) & (bits == 64 ? ~uint64_t{0} : (uint64_t{1} << bits) - 1);
}
i128 Extend(uint64_t v, int bits, bool sign) {
  v = Cut(v, bits);
  if (sign && (v >> (bits - 1) & 1)) return static_cast<i128>(v) - (static_cast<i128>(1) << bits);
  return v;
}
std::string ShapeOf(const char* letter, size_t sources) {
  return std::string(1, static_cast<char>(letter[0] - 'a' + 'A')) + std::string(sources, letter[0]);
}

}  // namespace

TEST_CASE("two-operand integer arithmetic", "[simgpu][integer]") {
  struct Op {
    const char* name;
    std::function<i128(i128, i128, int, bool)> f;
  };
  const Op ops[] = {
      {"add", [](i128 a, i128 b, int, bool) { return a + b; }},
      {"sub", [](i128 a, i128 b, int, bool) { return a - b; }},
      {"mul.lo",
       [](i128 a, i128 b, int, bool) {
         return static_cast<i128>(static_cast<unsigned __int128>(a) *
                                  static_cast<unsigned __int128>(b));
       }},
      {"mul.hi",
       [](i128 a, i128 b, int bits, bool sign) {
         return sign || bits < 64 ? a * b >> bits
                                  : static_cast<i128>(static_cast<unsigned __int128>(a) *
                                                          static_cast<unsigned __int128>(b) >>
                                                      64);
       }},
      {"min", [](i128 a, i128 b, int, bool) { return a < b ? a : b; }},
      {"max", [](i128 a, i128 b, int, bool) { return a > b ? a : b; }},
      // By zero: all ones and the dividend.
      {"div", [](i128 a, i128 b, int, bool) { return b == 0 ? -1 : a / b; }},
      {"rem", [](i128 a, i128 b, int, bool) { return b == 0 ? a : a % b; }},
  };
  for (const Op& op : ops)
    for (const Width& w : kWidths)
      for (bool sign : {true, false})
        CheckOp(
            std::string(op.name) + (sign ? ".s" : ".u") + std::to_string(w.bits) + " {0}, {1}, {2}",
            ShapeOf(w.letter, 2), Rows2(*w.values, *w.values),
            [&](uint64_t a, uint64_t b, uint64_t) {
              return Cut(op.f(Extend(a, w.bits, sign), Extend(b, w.bits, sign), w.bits, sign),
                         w.bits);
            });
}

TEST_CASE("multiply-add, wide products, saturation", "[simgpu][integer]") {
  Values few = {0, 1, 3, 0x7fffffff, 0x80000000, 0xffffffff, 0x12345678, 65535};
  for (bool sign : {true, false}) {
    std::string t = sign ? "s32" : "u32";
    CheckOp("mad.lo." + t + " {0}, {1}, {2}, {3}", "Iiii", Rows3(few, few, few),
            [](uint64_t a, uint64_t b, uint64_t c) { return Cut(i128(a) * b + c, 32); });
    CheckOp("mad.hi." + t + " {0}, {1}, {2}, {3}", "Iiii", Rows3(few, few, few),
            [&](uint64_t a, uint64_t b, uint64_t c) {
              return Cut((Extend(a, 32, sign) * Extend(b, 32, sign) >> 32) + c, 32);
            });
    CheckOp("mul.wide." + t + " {0}, {1}, {2}", "Lii", Rows2(kInts, kInts),
            [&](uint64_t a, uint64_t b, uint64_t) {
              return Cut(Extend(a, 32, sign) * Extend(b, 32, sign), 64);
            });
    CheckOp("mad.wide." + t + " {0}, {1}, {2}, {3}", "Liil", Rows3(few, few, kLongs),
            [&](uint64_t a, uint64_t b, uint64_t c) {
              return Cut(Extend(a, 32, sign) * Extend(b, 32, sign) + i128(c), 64);
            });
    std::string t16 = sign ? "s16" : "u16";
    CheckOp("mul.wide." + t16 + " {0}, {1}, {2}", "Iss", Rows2(kShorts, kShorts),
            [&](uint64_t a, uint64_t b, uint64_t) {
              return Cut(Extend(a, 16, sign) * Extend(b, 16, sign), 32);
            });
    CheckOp("sad." + t + " {0}, {1}, {2}, {3}", "Iiii", Rows3(few, few, few),
            [&](uint64_t a, uint64_t b, uint64_t c) {
              i128 x = Extend(a, 32, sign), y = Extend(b, 32, sign);
              return Cut((x < y ? y - x : x - y) + c, 32);
            });
    CheckOp("mul24.lo." + t + " {0}, {1}, {2}", "Iii", Rows2(kInts, kInts),
            [&](uint64_t a, uint64_t b, uint64_t) {
              return Cut(Extend(a, 24, sign) * Extend(b, 24, sign), 32);
            });
    CheckOp("mul24.hi." + t + " {0}, {1}, {2}", "Iii", Rows2(kInts, kInts),
            [&](uint64_t a, uint64_t b, uint64_t) {
              return Cut(Extend(a, 24, sign) * Extend(b, 24, sign) >> 16, 32);
            });
  }
  auto clamp = [](i128 v) {
    return Cut(v < INT32_MIN ? INT32_MIN : v > INT32_MAX ? INT32_MAX : v, 32);
  };
  CheckOp("add.sat.s32 {0}, {1}, {2}", "Iii", Rows2(kInts, kInts),
          [&](uint64_t a, uint64_t b, uint64_t) {
            return clamp(Extend(a, 32, true) + Extend(b, 32, true));
          });
  CheckOp("sub.sat.s32 {0}, {1}, {2}", "Iii", Rows2(kInts, kInts),
          [&](uint64_t a, uint64_t b, uint64_t) {
            return clamp(Extend(a, 32, true) - Extend(b, 32, true));
          });
  CheckOp("mad.hi.sat.s32 {0}, {1}, {2}, {3}", "Iiii", Rows3(few, few, few),
          [&](uint64_t a, uint64_t b, uint64_t c) {
            return clamp((Extend(a, 32, true) * Extend(b, 32, true) >> 32) + Extend(c, 32, true));
          });
  CheckOp("mad.lo.s64 {0}, {1}, {2}, {3}", "Llll", Sparse(Rows3(kLongs, kLongs, kLongs), 5),
          [](uint64_t a, uint64_t b, uint64_t c) { return a * b + c; });
}

TEST_CASE("logic, negation and shifts", "[simgpu][integer]") {
  for (const Width& w : kWidths) {
    std::string b = ".b" + std::to_string(w.bits), s = ".s" + std::to_string(w.bits),
                u = ".u" + std::to_string(w.bits);
    auto rows = Rows2(*w.values, *w.values);
    CheckOp("and" + b + " {0}, {1}, {2}", ShapeOf(w.letter, 2), rows,
            [](uint64_t x, uint64_t y, uint64_t) { return x & y; });
    CheckOp("or" + b + " {0}, {1}, {2}", ShapeOf(w.letter, 2), rows,
            [](uint64_t x, uint64_t y, uint64_t) { return x | y; });
    CheckOp("xor" + b + " {0}, {1}, {2}", ShapeOf(w.letter, 2), rows,
            [](uint64_t x, uint64_t y, uint64_t) { return x ^ y; });
    auto ones = Rows1(*w.values);
    CheckOp("not" + b + " {0}, {1}", ShapeOf(w.letter, 1), ones,
            [&](uint64_t x, uint64_t, uint64_t) { return Cut(~x, w.bits); });
    CheckOp("cnot" + b + " {0}, {1}", ShapeOf(w.letter, 1), ones,
            [&](uint64_t x, uint64_t, uint64_t) { return uint64_t{x == 0}; });
    CheckOp("neg" + s + " {0}, {1}", ShapeOf(w.letter, 1), ones,
            [&](uint64_t x, uint64_t, uint64_t) { return Cut(0 - x, w.bits); });
    CheckOp("abs" + s + " {0}, {1}", ShapeOf(w.letter, 1), ones,
            [&](uint64_t x, uint64_t, uint64_t) {
              i128 v = Extend(x, w.bits, true);
              return Cut(v < 0 ? -v : v, w.bits);
            });
    std::string shape = ShapeOf(w.letter, 1) + "i";
    auto shifts = Rows2(*w.values, kAmounts);
    CheckOp("shl" + b + " {0}, {1}, {2}", shape, shifts, [&](uint64_t x, uint64_t n, uint64_t) {
      return n >= uint64_t(w.bits) ? 0 : Cut(x << n, w.bits);
    });
    CheckOp("shr" + u + " {0}, {1}, {2}", shape, shifts,
            [&](uint64_t x, uint64_t n, uint64_t) { return n >= uint64_t(w.bits) ? 0 : x >> n; });
    CheckOp("shr" + s + " {0}, {1}, {2}", shape, shifts, [&](uint64_t x, uint64_t n, uint64_t) {
      return Cut(Extend(x, w.bits, true) >> std::min<uint64_t>(n, 100), w.bits);
    });
  }
}

TEST_CASE("carries chain", "[simgpu][integer]") {
  // A sum of 64 bits in two halves, then with a third half to see the carry out of addc.
  CheckOp(
      "{ .reg .b32 a, b, c, d, e, f; mov.b64 {a, b}, {1}; mov.b64 {c, d}, {2}; add.cc.u32 e, a, c; "
      "addc.u32 f, b, d; mov.b64 {0}, {e, f}; }",
      "Lll", Rows2(kLongs, kLongs), [](uint64_t a, uint64_t b, uint64_t) { return a + b; });
}

TEST_CASE("bit fields and counts", "[simgpu][integer]") {
  Values positions = {0, 1, 5, 31, 32, 40, 63, 64, 255, 256, 261};
  for (bool wide : {false, true}) {
    int bits = wide ? 64 : 32;
    const Values& values = wide ? kLongs : kInts;
    std::string n = std::to_string(bits), l = wide ? "l" : "i", u = wide ? "L" : "I";
    for (bool sign : {true, false})
      CheckOp("bfe." + std::string(sign ? "s" : "u") + n + " {0}, {1}, {2}, {3}", u + l + "ii",
              Rows3(values, positions, positions), [&](uint64_t a, uint64_t p, uint64_t len) {
                // The definition, bit by bit.
                p &= 255, len &= 255;
                uint64_t top = std::min<uint64_t>(p + len - 1, uint64_t(bits) - 1);
                bool fill = sign && len != 0 && (a >> top & 1);
                uint64_t r = 0;
                for (uint64_t i = 0; i < uint64_t(bits); ++i) {
                  bool bit = i < len && p + i < uint64_t(bits) ? a >> (p + i) & 1 : fill;
                  r |= uint64_t{bit} << i;
                }
                return r;
              });
    CheckOp("popc.b" + n + " {0}, {1}", "I" + l, Rows1(values), [](uint64_t a, uint64_t, uint64_t) {
      uint64_t c = 0;
      for (; a; a &= a - 1) ++c;
      return c;
    });
    CheckOp("clz.b" + n + " {0}, {1}", "I" + l, Rows1(values), [&](uint64_t a, uint64_t, uint64_t) {
      uint64_t c = 0;
      while (c < uint64_t(bits) && !(a >> (bits - 1 - int(c)) & 1)) ++c;
      return c;
    });
    CheckOp("brev.b" + n + " {0}, {1}", u + l, Rows1(values), [&](uint64_t a, uint64_t, uint64_t) {
      uint64_t r = 0;
      for (int i = 0; i < bits; ++i) r |= (a >> i & 1) << (bits - 1 - i);
      return r;
    });
    for (bool sign : {true, false})
      for (bool amount : {true, false})
        CheckOp("bfind" + std::string(amount ? ".shiftamt" : "") + (sign ? ".s" : ".u") + n +
                    " {0}, {1}",
                "I" + l, Rows1(values), [&](uint64_t a, uint64_t, uint64_t) -> uint64_t {
                  bool negative = sign && (a >> (bits - 1) & 1);
                  for (int i = bits - 1; i >= 0; --i)
                    if ((a >> i & 1) != uint64_t{negative})
                      return uint64_t(amount ? bits - 1 - i : i);
                  return 0xffffffff;
                });
  }
  // bfi: position and length as immediates, as compilers write it.
  for (int p : {0, 4, 31, 32, 300})
    for (int len : {0, 1, 8, 32, 40})
      CheckOp("bfi.b32 {0}, {1}, {2}, " + std::to_string(p) + ", " + std::to_string(len), "Iii",
              Rows2(kInts, kInts), [&](uint64_t a, uint64_t b, uint64_t) {
                uint64_t r = b;
                unsigned q = unsigned(p) & 255;
                for (unsigned i = 0; i < unsigned(len) && q + i < 32; ++i)
                  r = (r & ~(1ull << (q + i))) | (a >> i & 1) << (q + i);
                return r;
              });
  CheckOp("bfi.b64 {0}, {1}, {2}, 32, 16", "Lll", Rows2(kLongs, kLongs),
          [](uint64_t a, uint64_t b, uint64_t) {
            return (b & ~0xffff00000000ull) | (a & 0xffff) << 32;
          });
}

TEST_CASE("permutes, funnel shifts, lop3, dot products", "[simgpu][integer]") {
  Values selectors = {0x3210, 0x7654, 0x0123, 0xfedc, 0x8888, 0x4567, 0x5140};
  CheckOp("prmt.b32 {0}, {1}, {2}, {3}", "Iiii",
          Rows3({0x03020180, 0xdeadbeef}, {0x87654321, 0x7f80ff00}, selectors),
          [](uint64_t a, uint64_t b, uint64_t s) {
            uint64_t r = 0;
            for (int i = 0; i < 4; ++i) {
              unsigned n = s >> (4 * i) & 15;
              uint64_t byte = (n & 4 ? b : a) >> (8 * (n & 3)) & 255;
              if (n & 8) byte = byte & 128 ? 255 : 0;
              r |= byte << (8 * i);
            }
            return r;
          });
  for (bool wrap : {true, false}) {
    std::string mode = wrap ? "wrap" : "clamp";
    auto amount = [=](uint64_t n) { return wrap ? n & 31 : std::min<uint64_t>(n, 32); };
    CheckOp("shf.l." + mode + ".b32 {0}, {1}, {2}, {3}", "Iiii",
            Rows3(kInts, {0, 1, 0xdeadbeef}, kAmounts), [=](uint64_t a, uint64_t b, uint64_t n) {
              return Cut(i128(b << 32 | a) << amount(n) >> 32, 32);
            });
    CheckOp("shf.r." + mode + ".b32 {0}, {1}, {2}, {3}", "Iiii",
            Rows3(kInts, {0, 1, 0xdeadbeef}, kAmounts), [=](uint64_t a, uint64_t b, uint64_t n) {
              return Cut((b << 32 | a) >> amount(n), 32);
            });
  }
  for (int table : {0xe8, 0x96, 0xca, 0x01})
    CheckOp("lop3.b32 {0}, {1}, {2}, {3}, " + std::to_string(table), "Iiii",
            Rows3({0xaaaa5555, 0x12345678}, kInts, {0xff00ff00, 0x0f0f0f0f}),
            [=](uint64_t a, uint64_t b, uint64_t c) {
              uint64_t r = 0;
              for (int i = 0; i < 32; ++i) {
                int k = int((a >> i & 1) << 2 | (b >> i & 1) << 1 | (c >> i & 1));
                r |= uint64_t(table >> k & 1) << i;
              }
              return r;
            });
  CheckOp("dp4a.s32.s32 {0}, {1}, {2}, {3}", "Iiii", Rows3(kInts, kInts, {0, 0xfffffff0}),
          [](uint64_t a, uint64_t b, uint64_t c) {
            i128 r = Extend(c, 32, true);
            for (int i = 0; i < 4; ++i)
              r += Extend(a >> (8 * i), 8, true) * Extend(b >> (8 * i), 8, true);
            return Cut(r, 32);
          });
  CheckOp("bmsk.clamp.b32 {0}, {1}, {2}", "Iii", Rows2(kAmounts, kAmounts),
          [](uint64_t a, uint64_t b, uint64_t) {
            uint64_t r = 0;
            for (uint64_t i = a; i < 32 && i - a < b; ++i) r |= 1ull << i;
            return r;
          });
}
