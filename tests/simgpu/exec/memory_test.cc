// Loads, stores and addresses in every space, and what becomes of wrong ones.
#include <catch2/catch.hpp>

#include "tests/simgpu/exec/kernel_runner.h"

using namespace simgpu;
using namespace simgpu::test;

namespace {

const std::string kHead = ".version 8.0\n.target sm_80\n.address_size 64\n";
std::string Entry(const std::string& parameters, const std::string& body,
                  const std::string& before = "") {
  return kHead + before + ".visible .entry k(" + parameters + ")\n{\n" +
         ".reg .pred %p<8>; .reg .b16 %h<16>; .reg .b32 %r<32>; .reg .b64 %d<16>; .reg .f32 %f<8>; "
         ".reg .f64 %fd<8>;\n" +
         body + "\nret;\n}\n";
}
struct Text : Module {
  explicit Text(const std::string& text) : Module(text) {
    INFO(error.message);
    REQUIRE(program != nullptr);
  }
};
void RequireNoFault(const LaunchResult& result) {
  INFO(result.message);
  REQUIRE(result.fault == Fault::kNone);
}

// Each thread's part of a buffer: %d1 = out + 64 * tid, %d2 = in + 64 * tid.
const std::string kPointers =
    "ld.param.u64 %d1, [out]; ld.param.u64 %d2, [in]; mov.u32 %r0, %tid.x; mul.wide.u32 %d3, %r0, "
    "64;\n"
    "add.u64 %d1, %d1, %d3; add.u64 %d2, %d2, %d3;\n";
const std::string kInOut = ".param .u64 out, .param .u64 in";

}  // namespace

TEST_CASE("narrow loads extend and narrow stores cut", "[simgpu][memory]") {
  Text m(Entry(kInOut, kPointers + "ld.global.u8 %r1, [%d2]; st.global.u32 [%d1], %r1;\n"
                                   "ld.global.s8 %r2, [%d2+1]; st.global.u32 [%d1+4], %r2;\n"
                                   "ld.global.u16 %r3, [%d2+2]; st.global.u32 [%d1+8], %r3;\n"
                                   "ld.global.s16 %r4, [%d2+2]; st.global.u32 [%d1+12], %r4;\n"
                                   "ld.global.s8 %d4, [%d2+1]; st.global.u64 [%d1+16], %d4;\n"
                                   "ld.global.s32 %d5, [%d2+4]; st.global.u64 [%d1+24], %d5;\n"
                                   "ld.global.u32 %d6, [%d2+4]; st.global.u64 [%d1+32], %d6;\n"
                                   "ld.global.u8 %h1, [%d2+1]; st.global.u8 [%d1+40], %h1;\n"
                                   "st.global.u16 [%d1+42], %r2; st.global.u8 [%d1+44], %d5; "
                                   "st.global.b32 [%d1+48], %d5;\n"));
  Buffer<uint8_t> in(m.memory, 64 * 32), out(m.memory, 64 * 32);
  for (size_t i = 0; i < in.size(); ++i) in[i] = static_cast<uint8_t>(i * 37 + 128);
  RequireNoFault(m.Run("k", Blocks(1, 32), Arguments(out, in)));
  for (int t = 0; t < 32; ++t) {
    const uint8_t* p = in.data() + 64 * t;
    uint8_t* q = out.data() + 64 * t;
    auto at32 = [&](int o) {
      int32_t v;
      memcpy(&v, q + o, 4);
      return v;
    };
    auto at64 = [&](int o) {
      int64_t v;
      memcpy(&v, q + o, 8);
      return v;
    };
    int16_t s16;
    memcpy(&s16, p + 2, 2);
    int32_t s32;
    memcpy(&s32, p + 4, 4);
    REQUIRE(at32(0) == p[0]);
    REQUIRE(at32(4) == int8_t(p[1]));
    REQUIRE(at32(8) == uint16_t(s16));
    REQUIRE(at32(12) == s16);
    REQUIRE(at64(16) == int8_t(p[1]));
    REQUIRE(at64(24) == s32);
    REQUIRE(at64(32) == int64_t(uint32_t(s32)));
    REQUIRE(q[40] == p[1]);
    REQUIRE((q[42] | q[43] << 8) == uint16_t(int8_t(p[1])));
    REQUIRE(q[44] == p[4]);
    REQUIRE(at32(48) == s32);
  }
}

TEST_CASE("vectors of all widths keep their order in all spaces", "[simgpu][memory]") {
  struct Space {
    const char* name;
    const char* declare;
    const char* address;
  };
  const Space spaces[] = {{"global", "", "%d2"},
                          {"shared", ".shared .align 16 .b8 s[4096];", "%d5"},
                          {"local", ".local .align 16 .b8 s[64];", "%d5"},
                          {"", ".shared .align 16 .b8 s[4096];", "%d5"}};
  for (const Space& space : spaces) {
    std::string dot = space.name[0] ? "." + std::string(space.name) : "";
    std::string body = std::string(space.declare) + kPointers;
    if (dot == ".shared") body += "mov.u64 %d4, s; add.u64 %d5, %d4, %d3;\n";
    if (dot == ".local") body += "mov.u64 %d5, s;\n";
    if (dot == "") body += "mov.u64 %d4, s; cvta.shared.u64 %d4, %d4; add.u64 %d5, %d4, %d3;\n";
    if (dot != ".global") {
      // Copy in, as v4 words.
      for (int o = 0; o < 64; o += 16)
        body += "ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%d2+" + std::to_string(o) + "]; st" + dot +
                ".v4.u32 [%d5+" + std::to_string(o) + "], {%r1, %r2, %r3, %r4};\n";
    }
    std::string a = space.address;
    body += "ld" + dot + ".v2.u64 {%d6, %d7}, [" + a + "]; st.global.v2.u64 [%d1], {%d7, %d6};\n";
    body += "ld" + dot + ".v4.u16 {%h1, %h2, %h3, %h4}, [" + a +
            "+16]; st.global.v4.u16 [%d1+16], {%h4, %h3, %h2, %h1};\n";
    body += "ld" + dot + ".v4.u8 {%h1, %h2, %h3, %h4}, [" + a +
            "+24]; st.global.v4.u8 [%d1+24], {%h4, %h3, %h2, %h1};\n";
    body +=
        "ld" + dot + ".v2.f32 {%f1, %f2}, [" + a + "+32]; st.global.v2.f32 [%d1+32], {%f2, %f1};\n";
    body +=
        "ld" + dot + ".v2.u8 {%r5, %r6}, [" + a + "+40]; st.global.v2.u8 [%d1+40], {%r6, %r5};\n";
    body += "ld" + dot + ".f64 %fd1, [" + a + "+48]; st.global.f64 [%d1+48], %fd1;\n";
    INFO(dot);
    Text m(Entry(kInOut, body));
    Buffer<uint8_t> in(m.memory, 64 * 64), out(m.memory, 64 * 64);
    for (size_t i = 0; i < in.size(); ++i) in[i] = static_cast<uint8_t>(i * 73 + i / 256);
    RequireNoFault(m.Run("k", Blocks(1, 64), Arguments(out, in)));
    for (int t = 0; t < 64; ++t) {
      const uint8_t* p = in.data() + 64 * t;
      const uint8_t* q = out.data() + 64 * t;
      auto swapped = [&](int o, int size, int count) {
        for (int k = 0; k < count; ++k)
          if (memcmp(q + o + k * size, p + o + (count - 1 - k) * size, static_cast<size_t>(size)))
            return false;
        return true;
      };
      REQUIRE(swapped(0, 8, 2));
      REQUIRE(swapped(16, 2, 4));
      REQUIRE(swapped(24, 1, 4));
      REQUIRE(swapped(32, 4, 2));
      REQUIRE(swapped(40, 1, 2));
      REQUIRE(swapped(48, 8, 1));
    }
  }
}

TEST_CASE("consecutive, uniform and scattered addresses load alike", "[simgpu][memory]") {
  // in[(tid * a + b) & 1023] for several strides, by all lanes and by some.
  std::string body =
      "ld.param.u64 %d1, [out]; ld.param.u64 %d2, [in]; ld.param.u32 %r1, [a]; ld.param.u32 %r2, "
      "[b];\n"
      "mov.u32 %r0, %tid.x; mad.lo.u32 %r3, %r0, %r1, %r2; and.b32 %r3, %r3, 1023;\n"
      "mul.wide.u32 %d3, %r3, 4; add.u64 %d3, %d2, %d3; mul.wide.u32 %d4, %r0, 4; add.u64 %d4, "
      "%d1, %d4;\n"
      "mov.u32 %r5, 7; ld.param.u32 %r6, [mod]; rem.u32 %r7, %r0, %r6; setp.eq.u32 %p1, %r7, 0;\n"
      "@%p1 ld.global.u32 %r5, [%d3]; st.global.u32 [%d4], %r5;\n";
  Text m(Entry(".param .u64 out, .param .u64 in, .param .u32 a, .param .u32 b, .param .u32 mod",
               body));
  Buffer<uint32_t> in(m.memory, 1024), out(m.memory, 96);
  for (uint32_t i = 0; i < 1024; ++i) in[i] = i * 2654435761u;
  for (uint32_t a : {0u, 1u, 2u, 33u, 1023u})
    for (uint32_t mod : {1u, 2u, 5u, 31u}) {
      uint32_t b = 17;
      RequireNoFault(m.Run("k", Blocks(1, 96), Arguments(out, in, a, b, mod)));
      for (uint32_t t = 0; t < 96; ++t)
        REQUIRE(out[t] == (t % mod == 0 ? in[(t * a + b) & 1023] : 7));
    }
}

TEST_CASE("variables are initialised", "[simgpu][memory]") {
  Text m(kHead +
         ".global .align 4 .f32 fs[3] = {0f3F800000, 2.5, 0fC0000000};\n"
         ".global .align 8 .f64 ds[2] = {0d4000000000000000, -1.5};\n"
         ".global .align 2 .u16 hs[4] = {1, 0xffff, -2};\n"
         ".const .align 4 .u32 cs[4] = {7, 8, 9};\n"
         ".global .align 1 .b8 bytes[5] = {1, 2, 3, 255};\n"
         ".global .align 8 .u64 table[4] = {bytes, generic(bytes)+2, f, cs};\n"
         ".global .s32 single = -5;\n"
         ".func f() { ret; }\n.visible .entry k() { ret; }\n");
  auto find = [&](const char* name) {
    const Variable* v = m.program->FindVariable(name);
    REQUIRE(v != nullptr);
    return v;
  };
  auto* fs = reinterpret_cast<float*>(find("fs")->address);
  REQUIRE((fs[0] == 1.0f && fs[1] == 2.5f && fs[2] == -2.0f));
  auto* ds = reinterpret_cast<double*>(find("ds")->address);
  REQUIRE((ds[0] == 2.0 && ds[1] == -1.5));
  auto* hs = reinterpret_cast<uint16_t*>(find("hs")->address);
  REQUIRE((hs[0] == 1 && hs[1] == 0xffff && hs[2] == 0xfffe && hs[3] == 0));
  REQUIRE(find("cs")->constant);
  REQUIRE(reinterpret_cast<uint32_t*>(find("cs")->address)[2] == 9);
  auto* table = reinterpret_cast<uint64_t*>(find("table")->address);
  REQUIRE(table[0] == find("bytes")->address);
  REQUIRE(table[1] == find("bytes")->address + 2);
  REQUIRE(table[2] != 0);
  REQUIRE(table[3] == find("cs")->address);
  REQUIRE(*reinterpret_cast<int32_t*>(find("single")->address) == -5);
  REQUIRE(find("bytes")->bytes == 5);
}

TEST_CASE("variables are freed with the program", "[simgpu][memory]") {
  TestMemory memory;
  LoadError error;
  {
    auto program =
        Program::Load(kHead + ".global .u32 a; .const .u32 b[9];\n.visible .entry k() { ret; }\n",
                      memory, &error);
    REQUIRE(program != nullptr);
    REQUIRE(memory.count() == 2);
  }
  REQUIRE(memory.count() == 0);
}

TEST_CASE("dynamic shared memory begins after static, aligned", "[simgpu][memory]") {
  Text m(Entry(
      ".param .u64 out",
      "ld.param.u64 %d1, [out]; .shared .align 4 .b8 s[20];\n"
      "mov.u32 %r1, s; mov.u32 %r2, dyn; st.global.u32 [%d1], %r1; st.global.u32 [%d1+4], %r2;\n"
      "mov.u32 %r3, %dynamic_smem_size; st.global.u32 [%d1+8], %r3;\n"
      "st.shared.u32 [dyn+28], %r2; ld.shared.u32 %r4, [dyn+28]; st.global.u32 [%d1+12], %r4;\n",
      ".extern .shared .align 16 .b8 dyn[];\n"));
  REQUIRE(m.program->kernels()[0]->info().static_shared_bytes == 20);
  Buffer<uint32_t> out(m.memory, 4);
  RequireNoFault(m.Run("k", Blocks(1, 1, 32), Arguments(out)));
  REQUIRE(out[0] == 0);
  REQUIRE(out[1] == 32);
  REQUIRE(out[2] == 32);
  REQUIRE(out[3] == 32);
  // One word past the end.
  REQUIRE(m.Run("k", Blocks(1, 1, 28), Arguments(out)).fault == Fault::kIllegalAddress);
  REQUIRE(m.Run("k", Blocks(1, 1, 0), Arguments(out)).fault == Fault::kIllegalAddress);
}

TEST_CASE("generic addresses reach every space and isspacep tells which", "[simgpu][memory]") {
  Text m(Entry(
      ".param .u64 out, .param .align 8 .b8 block[16]",
      ".shared .align 8 .b8 s[512]; .local .align 8 .b8 l[16];\n"
      "ld.param.u64 %d1, [out]; mov.u32 %r0, %tid.x; mul.wide.u32 %d2, %r0, 64; add.u64 %d1, %d1, "
      "%d2;\n"
      "mov.u64 %d3, s; cvta.shared.u64 %d3, %d3; mul.wide.u32 %d4, %r0, 8; add.u64 %d3, %d3, %d4;\n"
      "mov.u64 %d5, l; cvta.local.u64 %d6, %d5; st.u32 [%d3], %r0; st.u32 [%d6+4], %r0;\n"
      "bar.sync 0; ld.local.u32 %r1, [%d5+4]; cvta.to.shared.u64 %d7, %d3; ld.shared.u32 %r2, "
      "[%d7];\n"
      "st.u32 [%d1], %r1; st.u32 [%d1+4], %r2; mov.b64 %d8, block; cvta.param.u64 %d8, %d8;\n"
      "ld.u32 %r3, [%d8+12]; st.u32 [%d1+8], %r3; ld.u32 %r4, [c+4]; st.u32 [%d1+12], %r4;\n"
      "isspacep.shared %p1, %d3; selp.u32 %r5, 1, 0, %p1; isspacep.local %p1, %d3; selp.u32 %r6, "
      "2, 0, %p1;\n"
      "isspacep.local %p2, %d6; selp.u32 %r7, 4, 0, %p2; isspacep.global %p3, %d1; selp.u32 %r8, "
      "8, 0, %p3;\n"
      "or.b32 %r5, %r5, %r6; or.b32 %r5, %r5, %r7; or.b32 %r5, %r5, %r8; st.u32 [%d1+16], %r5;\n"
      "cvta.to.local.u64 %d9, %d6; sub.u64 %d9, %d9, %d5; st.u64 [%d1+24], %d9;\n",
      ".const .u32 c[2] = {5, 77};\n"));
  Buffer<uint32_t> out(m.memory, 16 * 40);
  struct {
    uint32_t w[4];
  } block = {{1, 2, 3, 4444}};
  Arguments arguments(out);
  arguments.Add(uint64_t{uint64_t{2} << 32 | 1});
  arguments.Add(uint64_t{uint64_t{block.w[3]} << 32 | 3});
  RequireNoFault(m.Run("k", Blocks(1, 40), arguments));
  for (uint32_t t = 0; t < 40; ++t) {
    const uint32_t* q = out.data() + 16 * t;
    REQUIRE(q[0] == t);
    REQUIRE(q[1] == t);
    REQUIRE(q[2] == 4444);
    REQUIRE(q[3] == 77);
    REQUIRE(q[4] == 13);
    REQUIRE((q[6] == 0 && q[7] == 0));
  }
}

TEST_CASE("wrong accesses fault and say which", "[simgpu][memory]") {
  struct Case {
    const char* body;
    Fault fault;
    const char* text;
  };
  const Case cases[] = {
      {"ld.global.u32 %r1, [%d1+4096];", Fault::kIllegalAddress,
       "a read of 4 bytes at global address"},
      {"ld.global.u32 %r1, [%d1+-4];", Fault::kIllegalAddress, "out of bounds"},
      {"ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%d1+4088];", Fault::kMisalignedAddress,
       "misaligned"},
      {"ld.global.u64 %d2, [%d1+4092];", Fault::kMisalignedAddress, "misaligned"},
      {"st.global.u8 [%d1+4096], %r1;", Fault::kIllegalAddress, "a write of 1 bytes"},
      {"mov.u64 %d2, 0; ld.u32 %r1, [%d2];", Fault::kIllegalAddress, "(0x0)"},
      {"ld.shared.u32 %r1, [s+64];", Fault::kIllegalAddress, "shared"},
      {"mov.u32 %r1, -4; st.shared.u32 [%r1], %r1;", Fault::kIllegalAddress, "shared"},
      {"ld.shared.u32 %r1, [s+2];", Fault::kMisalignedAddress, "shared"},
      {"mov.u64 %d2, s; cvta.shared.u64 %d2, %d2; ld.u32 %r1, [%d2+4096];", Fault::kIllegalAddress,
       "generic"},
      {"st.global.u32 [c], %r1;", Fault::kIllegalAddress, "a write"},
      {"mov.u64 %d2, c; st.u32 [%d2], %r1;", Fault::kIllegalAddress, "a write"},
      {"atom.global.add.u32 %r1, [%d1+4096], 1;", Fault::kIllegalAddress, "global"},
      {"atom.global.add.u32 %r1, [%d1+2], 1;", Fault::kMisalignedAddress, "misaligned"},
      {"atom.shared.add.u32 %r1, [s+64], 1;", Fault::kIllegalAddress, "shared"},
      {"red.add.u32 [%d1+8192], 1;", Fault::kIllegalAddress, "generic"},
      {"ld.local.u32 %r1, [l+1048576];", Fault::kIllegalAddress, "local"},
  };
  for (const Case& c : cases) {
    INFO(c.body);
    Text m(
        Entry(".param .u64 out",
              "ld.param.u64 %d1, [out]; .shared .align 4 .b8 s[64]; .local .align 4 .b8 l[8];\n" +
                  std::string(c.body),
              ".const .u32 c[4];\n"));
    Buffer<uint32_t> out(m.memory, 1024);
    LaunchResult result = m.Run("k", Blocks(1, 32), Arguments(out));
    INFO(result.message);
    REQUIRE(result.fault == c.fault);
    REQUIRE(result.message.find(c.text) != std::string::npos);
    REQUIRE(result.message.find("Kernel (k), block (0, 0, 0), thread (0, 0, 0), PTX line (") == 0);
  }
}

TEST_CASE("inactive lanes touch no memory", "[simgpu][memory]") {
  // Lane 5's address is wild, but it does not execute.
  Text m(Entry(".param .u64 out",
               "ld.param.u64 %d1, [out]; mov.u32 %r0, %tid.x; mul.wide.u32 %d2, %r0, 4; add.u64 "
               "%d3, %d1, %d2;\n"
               "setp.eq.u32 %p1, %r0, 5; @%p1 mov.u64 %d3, 1; mov.u32 %r1, 9;\n"
               "@!%p1 ld.global.u32 %r1, [%d3]; @!%p1 st.global.u32 [%d3], %r1; @!%p1 "
               "atom.global.add.u32 %r2, [%d3], 1;\n"));
  Buffer<uint32_t> out(m.memory, 32);
  for (uint32_t i = 0; i < 32; ++i) out[i] = i;
  RequireNoFault(m.Run("k", Blocks(1, 32), Arguments(out)));
  for (uint32_t i = 0; i < 32; ++i) REQUIRE(out[i] == (i == 5 ? 5 : i + 1));
}

TEST_CASE("memory freed between launches is not reached through old ranges", "[simgpu][memory]") {
  Text m(Entry(".param .u64 out", "ld.param.u64 %d1, [out]; st.global.u32 [%d1], 5;"));
  uint64_t address;
  {
    Buffer<uint32_t> out(m.memory, 4);
    address = out.address();
    RequireNoFault(m.Run("k", Blocks(1, 1), Arguments(out)));
    REQUIRE(out[0] == 5);
  }
  REQUIRE(m.Run("k", Blocks(1, 1), Arguments(address)).fault == Fault::kIllegalAddress);
}

TEST_CASE("a kernel tells what it needs", "[simgpu][memory]") {
  Text m(
      kHead +
      ".visible .entry k(.param .u8 a, .param .u64 b, .param .align 16 .b8 c[20], .param .u16 d)\n"
      ".maxntid 64, 4, 1\n{ .local .b8 depot[40]; .shared .b8 s[100]; ret; }\n"
      ".visible .entry r() .reqntid 32, 2 { ret; }\n");
  const KernelInfo& info = m.program->kernels()[0]->info();
  REQUIRE(info.name == "k");
  REQUIRE(info.parameters.size() == 4);
  REQUIRE((info.parameters[1].offset == 8 && info.parameters[1].size == 8));
  REQUIRE((info.parameters[2].offset == 16 && info.parameters[2].size == 20));
  REQUIRE(info.parameters[3].offset == 36);
  REQUIRE(info.parameter_bytes == 38);
  REQUIRE(info.max_threads == 256);
  REQUIRE(info.static_shared_bytes == 100);
  REQUIRE(info.local_bytes >= 40);
  REQUIRE((info.ptx_version == 80 && info.target == 80));
  const KernelInfo& r = m.program->kernels()[1]->info();
  REQUIRE(
      (r.required_threads[0] == 32 && r.required_threads[1] == 2 && r.required_threads[2] == 1));
}
