// Text that is no PTX, or PTX that the simulator lacks, is refused by name and never crashes.
#include <catch2/catch.hpp>
#include <random>

#include "tests/simgpu/exec/kernel_runner.h"

using namespace simgpu;
using namespace simgpu::test;

namespace {

const std::string kHead = ".version 8.0\n.target sm_80\n.address_size 64\n";
std::string Body(const std::string& body) {
  return kHead +
         ".visible .entry k(.param .u64 a)\n{\n.reg .pred %p<4>;.reg .b16 %h<4>;.reg .b32 "
         "%r<4>;.reg .b64 %d<4>;\n" +
         body + "\n}\n";
}

}  // namespace

TEST_CASE("malformed modules are refused with a line", "[simgpu][parser]") {
  struct Case {
    std::string text;
    const char* message;
  };
  const Case cases[] = {
      {"", "version"},
      {"hello", "version"},
      {".version", "ends where"},
      {kHead + ".entry", "ends where"},
      {kHead + ".visible .entry k(.param .u64 a", "ends where"},
      {kHead + ".visible .entry k() { ret;", "no end"},
      {kHead + ".global .align 3 .u32 x;", "alignment"},
      {kHead + ".global .u32 x[99999999999999999999];", "integer"},
      {kHead + ".global .u32 x[9999999999999];", "too large"},
      {kHead + ".global .u32 x[2] = {1, 2, 3};", "larger"},
      {kHead + ".global .u64 x = y;", "not declared"},
      {kHead + ".global .u32 x; .global .u32 x;", "twice"},
      {kHead + ".nonsense", "nonsense"},
      {".version 8.0\n.target sm_80\n.address_size 32\n", "address size"},
      {Body("bra NOWHERE;"), "NOWHERE"},
      {Body("L: L: ret;"), "twice"},
      {Body("add.s32 %r1, %r2, %r3"), "expected"},
      {Body("add.s32 %r1, %r9, %r3;"), "not declared"},
      {Body("@%q bra L; L: ret;"), "predicate"},
      {Body("@%r1 ret;"), "predicate"},
      {Body("{ ret;"), "no end"},
      {Body("ld.global.u32 %r1, [%d1;"), "expected"},
      {Body("mov.u32 %r1, 12xyz;"), "12"},
      {Body(".reg .b32 %x<99999999>;"), "too many"},
      {Body(".reg .q32 %x;"), "type"},
      {kHead + ".extern .func g();\n.visible .entry k() { call.uni g; ret; }", "not defined"},
      {kHead + ".extern .global .u32 x;\n.visible .entry k() { ret; }", "not defined"},
      {std::string(1000, '{'), "version"},
      {Body(std::string(1000, '{') + std::string(1000, '}')), "deeply"},
      {Body("mov.u32 %r1, " + std::string(1000, '(') + ";"), "deeply"},
  };
  for (const Case& c : cases) {
    INFO(c.text.substr(0, 200));
    TestMemory memory;
    LoadError error;
    auto program = Program::Load(c.text, memory, &error);
    REQUIRE(program == nullptr);
    INFO(error.message);
    REQUIRE(error.message.find(c.message) != std::string::npos);
    REQUIRE(error.message.find("PTX line (") == 0);
    REQUIRE(memory.count() == 0);
  }
}

TEST_CASE("instructions that are not supported are named at launch", "[simgpu][parser]") {
  const char* cases[] = {
      "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%d1}, {%d1}, {%d1}, {%d1};",
      "frobnicate.s32 %r1, %r2;",
      "add.s33 %r1, %r2, %r3;",
      "add.s32 %r1, %r2;",
      "add.s32 %r1, %r2, %r3, %r1;",
      "add.s32 %r1, %d2, %r3;",
      "add.s64 %d1, %r2, %d3;",
      "add.s16 %r1, %r2, %r3;",
      "add.f32 %r1, %r2, 5;",
      "setp.eq.s32 %r1, %r2, %r3;",
      "selp.b32 %r1, %r2, %r3, %r1;",
      "ld.global.evil.u32 %r1, [%d1];",
      "ld.global.u64 %r1, [%d1];",
      "ld.global.v2.u32 %r1, [%d1];",
      "ld.global.v2.u32 {%r1, %r2, %r3}, [%d1];",
      "ld.param.u64 %d1, [a+4];",
      "ld.param.u32 %r1, [a+-4];",
      "st.param.u32 [a], %r1;",
      "cvt.s32.f32 %r1, %r2;",
      "cvt.f32.s32 %r1, %r2;",
      "cvt.rn.s32.u32 %r1, %r2;",
      "mov.u32 %r1, undeclared;",
      "mov.u32 %r1, %nosuchreg;",
      "mov.b64 {%r1, %r2, %r3}, %d1;",
      "atom.global.frob.u32 %r1, [%d1], 1;",
      "shfl.sync.around.b32 %r1, %r2, 1, 31, -1;",
      "bar.sync;",
      "bar.red.popc.u32 %r1, 0;",
      "call.uni undeclared;",
      "membar.proxy.alias;",
  };
  for (const char* text : cases) {
    INFO(text);
    Module m(Body(std::string(text) + "\nret;"));
    INFO(m.error.message);
    REQUIRE(m.program != nullptr);
    LaunchResult result = m.Run("k", Blocks(1, 32), Arguments(uint64_t{0}));
    INFO(result.message);
    REQUIRE(result.fault == Fault::kIllegalInstruction);
    REQUIRE(result.message.find("Kernel (k), PTX line (7): ") == 0);
  }
}

TEST_CASE("a kernel that is refused does not hinder its neighbours", "[simgpu][parser]") {
  Module m(kHead + ".visible .entry bad() { frobnicate; ret; }\n.visible .entry good() { ret; }\n");
  REQUIRE(m.program != nullptr);
  REQUIRE(m.Run("bad", Blocks(1, 32), Arguments()).fault == Fault::kIllegalInstruction);
  REQUIRE(m.Run("good", Blocks(1, 32), Arguments()).fault == Fault::kNone);
}

TEST_CASE("cut and garbled text never crashes", "[simgpu][parser]") {
  std::string text = ReadFile(PENSTOCK_KERNELS "/basic.ptx");
  REQUIRE(text.size() > 1000);
  TestMemory memory;
  LoadError error;
  REQUIRE(Program::Load(text, memory, &error) != nullptr);
  REQUIRE(Program::Load(text + std::string(1, '\0'), memory, &error) != nullptr);
  for (size_t size = 0; size < text.size(); size += text.size() / 150 + 1)
    Program::Load(std::string_view(text).substr(0, size), memory, &error);
  std::mt19937 random(7);
  const char kAlphabet[] = "{}()[];:,.@%$=+-!|<>\"/*0 9aZ\n12345678";
  size_t loaded = 0;
  for (int round = 0; round < 150; ++round) {
    std::string garbled = text;
    for (int k = 0; k < 1 + round % 2; ++k)
      garbled[random() % garbled.size()] = kAlphabet[random() % (sizeof(kAlphabet) - 1)];
    auto program = Program::Load(garbled, memory, &error);
    if (!program) continue;
    ++loaded;
    // Decode all of it; a grid of no blocks runs nothing.
    for (Kernel* kernel : program->kernels()) {
      LaunchRequest request;
      request.grid[0] = 0;
      std::vector<std::byte> parameters(kernel->info().parameter_bytes + 1);
      request.parameters = parameters.data();
      kernel->Launch(request);
    }
  }
  REQUIRE(loaded > 0);
}
