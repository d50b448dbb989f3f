// Runs one instruction over a table of operand values and compares with a host function.
//
// The instruction runs twice: by all lanes, and by those lanes only whose number is no multiple of
// three, so that both the in-place and the blended form of each handler are seen; the others must
// keep what their destination held.
#pragma once

#include <bit>
#include <catch2/catch.hpp>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "tests/simgpu/exec/kernel_runner.h"

namespace simgpu::test {

using Values = std::vector<uint64_t>;

inline uint32_t Bits(float x) {
  return std::bit_cast<uint32_t>(x);
}
inline uint64_t Bits(double x) {
  return std::bit_cast<uint64_t>(x);
}
inline float F(uint64_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits));
}
inline double D(uint64_t bits) {
  return std::bit_cast<double>(bits);
}
constexpr uint32_t kNanF32 = 0x7fffffffu;
// What every f32 operation returns: all NaNs are one.
inline uint64_t Result(float x) {
  return std::isnan(x) ? kNanF32 : Bits(x);
}
inline float Ftz(float x) {
  return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x;
}

const Values kInts = {0,          1,          2,          3,          7,          31,
                      32,         33,         63,         64,         65,         127,
                      128,        255,        256,        32767,      32768,      65535,
                      65536,      0x7fffffff, 0x80000000, 0x80000001, 0xffffffff, 0xfffffffe,
                      0xdeadbeef, 0x12345678, 0x00ff00ff};
const Values kLongs = {0,
                       1,
                       2,
                       3,
                       63,
                       64,
                       65,
                       0x7fffffff,
                       0x80000000,
                       0xffffffff,
                       0x100000000,
                       0x123456789abcdef0,
                       0x7fffffffffffffff,
                       0x8000000000000000,
                       0x8000000000000001,
                       0xffffffffffffffff,
                       0xfffffffffffffffe,
                       0xffffffff00000000};
const Values kShorts = {0,   1,   2,      3,      15,     16,     17,     127,   128,
                        255, 256, 0x7fff, 0x8000, 0x8001, 0xffff, 0xfffe, 0x1234};
const Values kAmounts = {0,  1,  5,  15, 16,  17,  31,         32,
                         33, 63, 64, 65, 200, 256, 0x80000000, 0xffffffff};

inline Values FloatValues() {
  Values v;
  for (float x : {0.0f,
                  1.0f,
                  0.5f,
                  1.5f,
                  2.5f,
                  3.0f,
                  1.0f / 3,
                  0.1f,
                  1e-20f,
                  1e20f,
                  16777217.0f,
                  2147483520.0f,
                  2147483648.0f,
                  4294967040.0f,
                  4294967296.0f,
                  9.2233720e18f,
                  1.8446744e19f,
                  255.5f,
                  65535.5f,
                  127.4999f,
                  std::numeric_limits<float>::min(),
                  std::numeric_limits<float>::max(),
                  std::numeric_limits<float>::denorm_min(),
                  std::numeric_limits<float>::min() / 2,
                  0x1.fffffcp-127f,
                  0x1p127f,
                  std::numeric_limits<float>::infinity()}) {
    v.push_back(Bits(x));
    v.push_back(Bits(-x));
  }
  v.push_back(0x7fc00000u);
  v.push_back(0xffc12345u);
  return v;
}
inline Values DoubleValues() {
  Values v;
  for (double x : {0.0,
                   1.0,
                   0.5,
                   1.5,
                   2.5,
                   3.0,
                   1.0 / 3,
                   0.1,
                   1e-20,
                   1e20,
                   1e-310,
                   1e300,
                   2147483647.5,
                   2147483648.0,
                   4294967295.5,
                   4294967296.0,
                   9223372036854774784.0,
                   9223372036854775808.0,
                   18446744073709549568.0,
                   18446744073709551616.0,
                   1e-40,
                   1e-46,
                   3.4028235677973366e38,
                   3.5e38,
                   65504.0,
                   65520.0,
                   1e-8,
                   255.5,
                   std::numeric_limits<double>::min(),
                   std::numeric_limits<double>::max(),
                   std::numeric_limits<double>::denorm_min(),
                   0x1.0000010000001p0,
                   0x1.000001p0,
                   std::numeric_limits<double>::infinity()}) {
    v.push_back(Bits(x));
    v.push_back(Bits(-x));
  }
  v.push_back(0x7ff8000000000000ull);
  v.push_back(0xfff8000000001234ull);
  return v;
}

inline const char* RegisterType(char letter) {
  switch (letter) {
    case 's':
    case 'h':
      return ".b16";
    case 'l':
    case 'd':
      return ".b64";
    case 'p':
      return ".pred";
    default:
      return ".b32";
  }
}

// A kernel that loads operands of the shape's kinds (see Row in simgpu/exec/inst.h: destination
// first), runs the instruction and stores the result. `text` has {0} for the destination and {1}
// and so on for the sources: "add.s32 {0}, {1}, {2}".
inline std::string OpKernel(const std::string& text, const std::string& shape, bool guarded) {
  std::string ptx =
      ".version 9.0\n.target sm_90\n.address_size 64\n.visible .entry k(.param .u64 out, .param "
      ".u64 in, "
      ".param .u32 n)\n{\n.reg .pred %p<8>; .reg .b16 %h<8>; .reg .b32 %r<16>; .reg .b64 %d<16>;\n"
      ".reg .b16 s<6>; .reg .b32 i<6>; .reg .b64 l<6>; .reg .pred q<6>;\n"
      "mov.u32 %r0, %tid.x; mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ntid.x; mad.lo.u32 %r3, %r1, %r2, "
      "%r0;\n"
      "ld.param.u32 %r4, [n]; setp.ge.u32 %p0, %r3, %r4; @%p0 ret;\n"
      "ld.param.u64 %d0, [out]; ld.param.u64 %d1, [in];\n"
      "mul.wide.u32 %d2, %r3, 8; add.u64 %d0, %d0, %d2; mul.wide.u32 %d3, %r3, 32; add.u64 %d1, "
      "%d1, %d3;\n";
  auto name = [](char letter, size_t k) {
    char kind = letter == 's' || letter == 'h'   ? 's'
                : letter == 'l' || letter == 'd' ? 'l'
                : letter == 'p'                  ? 'q'
                                                 : 'i';
    return std::string(1, kind) + std::to_string(k);
  };
  for (size_t k = 1; k < shape.size(); ++k) {
    std::string at = "[%d1+" + std::to_string(8 * (k - 1)) + "]";
    std::string reg = name(shape[k], k);
    switch (reg[0]) {
      case 's':
        ptx += "ld.global.u16 " + reg + ", " + at + ";\n";
        break;
      case 'l':
        ptx += "ld.global.u64 " + reg + ", " + at + ";\n";
        break;
      case 'q':
        ptx += "ld.global.u32 %r8, " + at + "; setp.ne.u32 " + reg + ", %r8, 0;\n";
        break;
      default:
        ptx += "ld.global.u32 " + reg + ", " + at + ";\n";
    }
  }
  char target = static_cast<char>(shape[0] - 'A' + 'a');
  std::string d = name(target, 0);
  switch (d[0]) {
    case 's':
      ptx += "mov.u16 " + d + ", 0x5a5a;\n";
      break;
    case 'l':
      ptx += "mov.u64 " + d + ", 0x5a5a5a5a5a5a5a5a;\n";
      break;
    case 'q':
      ptx += "mov.pred " + d + ", 1;\n";
      break;
    default:
      ptx += "mov.u32 " + d + ", 0x5a5a5a5a;\n";
  }
  std::string op;
  for (size_t k = 0; k < text.size(); ++k) {
    if (text[k] == '{' && k + 2 < text.size() && text[k + 2] == '}') {
      size_t n = static_cast<size_t>(text[k + 1] - '0');
      op += name(n == 0 ? target : shape[n], n);
      k += 2;
    } else {
      op += text[k];
    }
  }
  // A block cannot be guarded, only branched around.
  bool block = op[0] == '{';
  if (guarded) ptx += "rem.u32 %r9, %r0, 3; setp.ne.u32 %p1, %r9, 0;\n";
  if (guarded) ptx += block ? "@!%p1 bra SKIP;\n" : "@%p1 ";
  ptx += op + (block ? "\nSKIP:\n" : ";\n");
  switch (d[0]) {
    case 's':
      ptx += "cvt.u64.u16 %d4, " + d + ";\n";
      break;
    case 'l':
      ptx += "mov.u64 %d4, " + d + ";\n";
      break;
    case 'q':
      ptx += "selp.u64 %d4, 1, 0, " + d + ";\n";
      break;
    default:
      ptx += "cvt.u64.u32 %d4, " + d + ";\n";
  }
  return ptx + "st.global.u64 [%d0], %d4;\nret;\n}\n";
}

using Reference = std::function<uint64_t(uint64_t, uint64_t, uint64_t)>;
enum class Compare { kBits, kF64, kF32Ulp2 };

inline bool Same(uint64_t got, uint64_t wanted, Compare how) {
  if (got == wanted) return true;
  if (how == Compare::kF64) return std::isnan(D(got)) && std::isnan(D(wanted));
  if (how == Compare::kF32Ulp2) {
    float a = F(got), b = F(wanted);
    if (std::isnan(b)) return got == kNanF32;
    if (a == b || std::isinf(b)) return a == b;
    return std::fabs(a - b) <= 2 * std::fabs(std::nextafter(b, INFINITY) - b);
  }
  return false;
}

// Each row of `operands` is one set of source values.
inline void CheckOp(const std::string& text, const std::string& shape,
                    const std::vector<std::vector<uint64_t>>& operands, const Reference& reference,
                    Compare how = Compare::kBits) {
  for (bool guarded : {false, true}) {
    INFO(text);
    Module m(OpKernel(text, shape, guarded));
    INFO(m.error.message);
    REQUIRE(m.program != nullptr);
    // Whole warps, so that the form for all lanes is run too.
    size_t n = (operands.size() + 31) / 32 * 32;
    Buffer<uint64_t> in(m.memory, 4 * n), out(m.memory, n);
    for (size_t k = 0; k < n; ++k)
      for (size_t j = 0; j < operands[k % operands.size()].size(); ++j)
        in[4 * k + j] = operands[k % operands.size()][j];
    uint32_t count = static_cast<uint32_t>(n), block = 128;
    LaunchResult result =
        m.Run("k", Blocks((count + block - 1) / block, block), Arguments(out, in, count));
    INFO(result.message);
    REQUIRE(result.fault == Fault::kNone);
    char target = static_cast<char>(shape[0] - 'A' + 'a');
    uint64_t kept = target == 'p'                    ? 1
                    : target == 's' || target == 'h' ? 0x5a5a
                    : target == 'l' || target == 'd' ? 0x5a5a5a5a5a5a5a5a
                                                     : 0x5a5a5a5a;
    for (size_t k = 0; k < n; ++k) {
      uint64_t v[3] = {in[4 * k], in[4 * k + 1], in[4 * k + 2]};
      bool skipped = guarded && k % block % 3 == 0;
      uint64_t wanted = skipped ? kept : reference(v[0], v[1], v[2]);
      if (!Same(out[k], wanted, skipped ? Compare::kBits : how)) {
        INFO("operands " << std::hex << v[0] << " " << v[1] << " " << v[2]);
        INFO("guarded " << guarded << " row " << k);
        REQUIRE(out[k] == wanted);
      }
    }
    SUCCEED();
  }
}

inline std::vector<std::vector<uint64_t>> Rows1(const Values& a) {
  std::vector<std::vector<uint64_t>> rows;
  for (uint64_t x : a) rows.push_back({x});
  return rows;
}
inline std::vector<std::vector<uint64_t>> Rows2(const Values& a, const Values& b) {
  std::vector<std::vector<uint64_t>> rows;
  for (uint64_t x : a)
    for (uint64_t y : b) rows.push_back({x, y});
  return rows;
}
inline std::vector<std::vector<uint64_t>> Rows3(const Values& a, const Values& b, const Values& c) {
  std::vector<std::vector<uint64_t>> rows;
  for (uint64_t x : a)
    for (uint64_t y : b)
      for (uint64_t z : c) rows.push_back({x, y, z});
  return rows;
}
// Every n-th row, to keep products of three small.
inline std::vector<std::vector<uint64_t>> Sparse(std::vector<std::vector<uint64_t>> rows,
                                                 size_t n) {
  std::vector<std::vector<uint64_t>> out;
  for (size_t k = 0; k < rows.size(); k += n) out.push_back(rows[k]);
  return out;
}

}  // namespace simgpu::test
