// f64 arithmetic. NaN payloads are the host's, which are the device's too.
#include "simgpu/exec/float_ops.h"

namespace simgpu::exec::SIMGPU_ISA {
namespace {

template <typename Op>
void Two(Context& c, const Inst& i, uint32_t mask) {
  Binary<double, double, double>(c, i, mask, [](double a, double b) { return Op::Do(a, b); });
}
template <typename Op>
void Three(Context& c, const Inst& i, uint32_t mask) {
  Ternary<double, double, double, double>(
      c, i, mask, [](double a, double b, double e) { return Op::Do(a, b, e); });
}
template <typename Op>
void One(Context& c, const Inst& i, uint32_t mask) {
  Unary<double, double>(c, i, mask, [](double a) { return Op::Do(a); });
}
template <typename Op>
void TwoRounded(Context& c, const Inst& i, uint32_t mask) {
  Rounding scope(i.flags);
  Two<Op>(c, i, mask);
}
template <typename Op>
void ThreeRounded(Context& c, const Inst& i, uint32_t mask) {
  Rounding scope(i.flags);
  Three<Op>(c, i, mask);
}
template <typename Op>
void OneRounded(Context& c, const Inst& i, uint32_t mask) {
  Rounding scope(i.flags);
  One<Op>(c, i, mask);
}

// The .ftz approximations compute only the upper word; libdevice refines from there.
double UpperWord(double x) {
  if (x != x) return BitsToF64(0x7fffffff00000000ull);
  uint64_t bits = F64ToBits(x);
  if ((bits & 0x7ff0000000000000ull) == 0) bits &= uint64_t{1} << 63;
  return BitsToF64(bits & 0xffffffff00000000ull);
}
double FlushF64(double x) {
  uint64_t bits = F64ToBits(x);
  return (bits & 0x7ff0000000000000ull) == 0 ? BitsToF64(bits & (uint64_t{1} << 63)) : x;
}
struct RcpApprox {
  static double Do(double a) { return UpperWord(1.0 / FlushF64(a)); }
};
struct RsqrtApproxFtz {
  static double Do(double a) { return UpperWord(1.0 / __builtin_sqrt(FlushF64(a))); }
};
struct RsqrtApprox {
  static double Do(double a) { return 1.0 / __builtin_sqrt(a); }
};

constexpr Row kRows[] = {
    {"add[.rn].f64", "Ddd", Two<FAdd>},
    {"add(.rz|.rm|.rp).f64", "Ddd", TwoRounded<FAdd>},
    {"sub[.rn].f64", "Ddd", Two<FSub>},
    {"sub(.rz|.rm|.rp).f64", "Ddd", TwoRounded<FSub>},
    {"mul[.rn].f64", "Ddd", Two<FMul>},
    {"mul(.rz|.rm|.rp).f64", "Ddd", TwoRounded<FMul>},
    {"div.rn.f64", "Ddd", Two<FDiv>},
    {"div(.rz|.rm|.rp).f64", "Ddd", TwoRounded<FDiv>},
    {"fma.rn.f64", "Dddd", Three<FFma>},
    {"fma(.rz|.rm|.rp).f64", "Dddd", ThreeRounded<FFma>},
    {"mad[.rn].f64", "Dddd", Three<FFma>},
    {"mad(.rz|.rm|.rp).f64", "Dddd", ThreeRounded<FFma>},
    {"rcp.rn.f64", "Dd", One<FRcp>},
    {"rcp(.rz|.rm|.rp).f64", "Dd", OneRounded<FRcp>},
    {"sqrt.rn.f64", "Dd", One<FSqrt>},
    {"sqrt(.rz|.rm|.rp).f64", "Dd", OneRounded<FSqrt>},
    {"min.f64", "Ddd", Two<FMin>},
    {"max.f64", "Ddd", Two<FMax>},
    {"abs.f64", "Dd", One<FAbs>},
    {"neg.f64", "Dd", One<FNeg>},
    {"copysign.f64", "Ddd", Two<FCopysign>},
    {"rcp.approx.ftz.f64", "Dd", One<RcpApprox>},
    {"rsqrt.approx.ftz.f64", "Dd", One<RsqrtApproxFtz>},
    {"rsqrt.approx.f64", "Dd", One<RsqrtApprox>},
};

}  // namespace

extern const Rows kF64Rows;
const Rows kF64Rows = {kRows, sizeof(kRows) / sizeof(kRows[0])};

}  // namespace simgpu::exec::SIMGPU_ISA
