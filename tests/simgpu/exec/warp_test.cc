// Threads that work together: shuffles, votes, barriers, grids, divergence of every shape.
#include <algorithm>
#include <catch2/catch.hpp>
#include <ctime>
#include <map>
#include <set>

#include "tests/simgpu/exec/kernel_runner.h"

using namespace simgpu;
using namespace simgpu::test;

namespace {

const std::string kFiles[] = {PENSTOCK_KERNELS "/warp.ptx", PENSTOCK_KERNELS "/warp_debug.ptx",
                              PENSTOCK_KERNELS "/warp_sm120.ptx"};

void RequireNoFault(const LaunchResult& result) {
  INFO(result.message);
  REQUIRE(result.fault == Fault::kNone);
}
struct Loaded : Module {
  explicit Loaded(const std::string& file) : Module(ReadFile(file)) {
    INFO(file << ": " << error.message);
    REQUIRE(program != nullptr);
  }
};

std::string Entry(const std::string& parameters, const std::string& body) {
  return ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry k(" + parameters +
         ")\n{\n" + ".reg .pred %p<8>; .reg .b32 %r<16>; .reg .b64 %d<16>;\n" + body +
         "\nret;\n}\n";
}
LaunchResult RunText(const std::string& text, uint32_t threads) {
  Module m(text);
  INFO(m.error.message);
  REQUIRE(m.program != nullptr);
  return m.Run("k", Blocks(1, threads), Arguments());
}

}  // namespace

TEST_CASE("shuffles move values in all modes and widths", "[simgpu][warp]") {
  for (const std::string& file : kFiles) {
    Loaded m(file);
    Buffer<int> in(m.memory, 32), out(m.memory, 288);
    for (int i = 0; i < 32; ++i) in[i] = 100 + i * i;
    RequireNoFault(m.Run("shuffles", Blocks(1, 32), Arguments(in, out)));
    for (int t = 0; t < 32; ++t) {
      REQUIRE(out[t] == in[(t * 5 + 3) % 32]);
      REQUIRE(out[32 + t] == in[t < 3 ? t : t - 3]);
      REQUIRE(out[64 + t] == in[t + 5 > 31 ? t : t + 5]);
      REQUIRE(out[96 + t] == in[t ^ 9]);
      REQUIRE(out[128 + t] == in[(t & 24) | ((t + 1) & 7)]);
      REQUIRE(out[160 + t] == in[t % 8 < 2 ? t : t - 2]);
      REQUIRE(out[192 + t] == in[t % 16 > 13 ? t : t + 2]);
      REQUIRE(out[224 + t] == in[t ^ 4]);
      REQUIRE(out[256 + t] == in[t == 31 ? 31 : t + 1]);
    }
  }
}

TEST_CASE("votes and matches see the whole warp", "[simgpu][warp]") {
  for (const std::string& file : kFiles) {
    Loaded m(file);
    Buffer<int> in(m.memory, 32);
    Buffer<unsigned> out(m.memory, 256);
    for (int i = 0; i < 32; ++i) in[i] = i * 37 % 101;
    RequireNoFault(m.Run("votes", Blocks(1, 32), Arguments(in, out)));
    unsigned odd = 0, two = 0;
    for (int i = 0; i < 32; ++i)
      odd |= unsigned(in[i] & 1) << i, two |= unsigned(in[i] >> 1 & 1) << i;
    for (int t = 0; t < 32; ++t) {
      unsigned same = 0;
      for (int i = 0; i < 32; ++i) same |= unsigned(in[i] % 5 == in[t] % 5) << i;
      REQUIRE(out[t] == odd);
      REQUIRE(out[32 + t] == 1);
      REQUIRE(out[64 + t] == 1);
      REQUIRE(out[96 + t] == same);
      REQUIRE(out[128 + t] == ~0u);
      REQUIRE(out[160 + t] == 1);
      REQUIRE((out[192 + t] >> t & 1) == 1);
      if (t % 4 == 1) REQUIRE(out[224 + t] == (two & 0x22222222u));
    }
  }
}

TEST_CASE("tiles and coalesced groups of cooperative groups", "[simgpu][warp]") {
  for (const std::string& file : kFiles) {
    Loaded m(file);
    Buffer<int> in(m.memory, 64), out(m.memory, 128);
    for (int i = 0; i < 64; ++i) in[i] = i * i % 50;
    RequireNoFault(m.Run("tiles", Blocks(1, 64), Arguments(in, out)));
    for (int t = 0; t < 64; ++t) {
      int sum = 0;
      for (int i = 0; i < 8; ++i) sum += in[t / 8 * 8 + i];
      REQUIRE(out[t] == sum + 1000 * (t % 8));
      // A group of coalesced threads may be smaller than it could be, but its ranks are distinct.
      if (t % 3 != 0) REQUIRE(out[64 + t] <= 32);
    }
  }
}

TEST_CASE("a cooperative grid meets at its barrier", "[simgpu][warp]") {
  for (const std::string& file : kFiles) {
    Loaded m(file);
    int blocks = 6, threads = 96, n = blocks * threads, rounds = 4;
    Buffer<int> data(m.memory, n * (rounds + 1));
    for (int i = 0; i < n; ++i) data[i] = i;
    Shape shape = Blocks(blocks, threads);
    shape.cooperative = true;
    size_t ranges = m.memory.count();
    RequireNoFault(m.Run("grid_barrier", shape, Arguments(data, rounds)));
    REQUIRE(m.memory.count() == ranges);
    for (int i = 0; i < n; ++i) REQUIRE(data[rounds * n + i] == (i + rounds) % n + rounds);
  }
}

TEST_CASE("named barriers order a producer and a consumer", "[simgpu][warp]") {
  for (const std::string& file : kFiles) {
    Loaded m(file);
    Buffer<int> out(m.memory, 64);
    int n = 10, sum = 0;
    for (int i = 0; i < n; ++i) sum += i * i;
    RequireNoFault(m.Run("ring", Blocks(1, 64), Arguments(out, n)));
    for (int t = 32; t < 64; ++t) REQUIRE(out[t] == sum);
  }
}

TEST_CASE("threads that have left are not waited for", "[simgpu][warp]") {
  for (const std::string& file : kFiles) {
    Loaded m(file);
    Buffer<int> out(m.memory, 128);
    for (int i = 0; i < 128; ++i) out[i] = -7;
    RequireNoFault(m.Run("early_exit", Blocks(1, 128), Arguments(out)));
    for (int t = 0; t < 128; ++t) {
      int next = (t + 1) % 128;
      REQUIRE(out[t] == (t % 7 == 3 ? -7 : t % 5 == 0 ? -1 : next % 7 == 3 ? 0 : next));
    }
  }
}

TEST_CASE("lanes return from functions at different times", "[simgpu][warp]") {
  for (const std::string& file : kFiles) {
    Loaded m(file);
    Buffer<int> p(m.memory, 40), out(m.memory, 64);
    for (int i = 0; i < 40; ++i) p[i] = i * 7 % 40;
    p[39] = -5;
    RequireNoFault(m.Run("returns", Blocks(1, 64), Arguments(p, 40, out)));
    auto search = [&](int key) {
      for (int i = 0; i < 40; ++i) {
        if (p[i] == key) return i;
        if (p[i] < 0) return -2;
      }
      return -1;
    };
    for (int t = 0; t < 64; ++t) {
      int r = search(t);
      REQUIRE(out[t] == (r >= 0 ? search(r) + 100 * r : r));
    }
  }
}

TEST_CASE("nested loops, breaks, switches and gotos diverge and meet", "[simgpu][warp]") {
  for (const std::string& file : kFiles) {
    Loaded m(file);
    Buffer<int> out(m.memory, 256);
    RequireNoFault(m.Run("nested", Blocks(1, 256), Arguments(out)));
    for (int t = 0; t < 256; ++t) {
      int v = 0;
      for (int i = 0; i <= t % 5; ++i) {
        for (int j = 0; j < (t + i) % 4; ++j) {
          if ((i + j) % 3 == 0) continue;
          if (j == 3) break;
          v += i * 10 + j;
          switch ((t + j) % 6) {
            case 0:
              v ^= 1;
              break;
            case 1:
              v += 7;
              [[fallthrough]];
            case 2:
              v *= 3;
              break;
            case 4:
              goto out;
            default:
              v -= 2;
          }
        }
      }
    out:
      REQUIRE(out[t] == v);
    }
  }
}

TEST_CASE("clocks advance in nanoseconds", "[simgpu][warp]") {
  Loaded m(kFiles[0]);
  Buffer<unsigned long long> out(m.memory, 2);
  unsigned long long before = static_cast<unsigned long long>(time(nullptr)) * 1000000000u;
  RequireNoFault(m.Run("timer", Blocks(1, 1), Arguments(out)));
  REQUIRE(out[0] >= 20000);
  REQUIRE(out[1] >= before);
}

TEST_CASE("every lane takes a lock in shared memory once", "[simgpu][warp]") {
  for (const std::string& file : kFiles) {
    Loaded m(file);
    Buffer<int> lock(m.memory, 1), out(m.memory, 96);
    RequireNoFault(m.Run("heap_order", Blocks(1, 96), Arguments(lock, out)));
    std::set<int> seen(out.data(), out.data() + 96);
    REQUIRE(seen.size() == 96);
    REQUIRE(*seen.begin() == 0);
    REQUIRE(*seen.rbegin() == 95);
  }
}

TEST_CASE("a block in which nobody can go on is a deadlock", "[simgpu][warp]") {
  LaunchResult result = RunText(Entry("",
                                      "mov.u32 %r0, %tid.x; setp.lt.u32 %p0, %r0, 32; @%p0 bra A;\n"
                                      "bar.sync 1; bra B;\nA: bar.sync 0;\nB:"),
                                64);
  REQUIRE(result.fault == Fault::kDeadlock);
  REQUIRE(result.message.find("barrier") != std::string::npos);
  result = RunText(Entry("",
                         "mov.u32 %r0, %laneid; setp.eq.u32 %p0, %r0, 3; @%p0 bra A;\n"
                         "bar.warp.sync -1; bra B;\nA: bar.sync 0;\nB:"),
                   32);
  REQUIRE(result.fault == Fault::kDeadlock);
  // The same with all threads at the same barrier, from two places, is none.
  result = RunText(Entry("",
                         "mov.u32 %r0, %tid.x; setp.lt.u32 %p0, %r0, 17; @%p0 bra A;\n"
                         "bar.sync 0; bra B;\nA: bar.sync 0;\nB:"),
                   64);
  REQUIRE(result.fault == Fault::kNone);
}

TEST_CASE("a predicated barrier waits for those that execute it", "[simgpu][warp]") {
  // 16 threads of each warp arrive; the count is 32.
  LaunchResult result = RunText(
      Entry("", "mov.u32 %r0, %laneid; setp.lt.u32 %p0, %r0, 16; @%p0 bar.sync 3, 32; bar.sync 0;"),
      64);
  INFO(result.message);
  REQUIRE(result.fault == Fault::kNone);
}

TEST_CASE("a trap stops the launch", "[simgpu][warp]") {
  LaunchResult result =
      RunText(Entry("", "mov.u32 %r0, %tid.x; setp.eq.u32 %p0, %r0, 37; @%p0 trap;"), 64);
  REQUIRE(result.fault == Fault::kTrap);
  REQUIRE(result.message.find("thread (37, 0, 0)") != std::string::npos);
}

TEST_CASE("exit in a function ends the thread", "[simgpu][warp]") {
  Module m(
      ".version 8.0\n.target sm_80\n.address_size 64\n"
      ".func leave(.param .b32 a)\n{ .reg .b32 %r<3>; .reg .pred %p<2>; ld.param.u32 %r0, [a];\n"
      "and.b32 %r1, %r0, 1; setp.eq.u32 %p0, %r1, 0; @%p0 exit; ret; }\n"
      ".visible .entry k(.param .u64 out)\n{ .reg .b32 %r<3>; .reg .b64 %d<4>;\n"
      "ld.param.u64 %d0, [out]; mov.u32 %r0, %tid.x; mul.wide.u32 %d1, %r0, 4; add.u64 %d0, %d0, "
      "%d1;\n"
      "{ .param .b32 p; st.param.b32 [p], %r0; call.uni leave, (p); }\n"
      "st.global.u32 [%d0], 1; ret; }\n");
  INFO(m.error.message);
  REQUIRE(m.program != nullptr);
  Buffer<int> out(m.memory, 40);
  RequireNoFault(m.Run("k", Blocks(1, 40), Arguments(out)));
  for (int t = 0; t < 40; ++t) REQUIRE(out[t] == t % 2);
}

TEST_CASE("endless recursion and wild calls fault", "[simgpu][warp]") {
  std::string head = ".version 8.0\n.target sm_80\n.address_size 64\n";
  Module m(head +
           ".func f()\n{ .local .b8 depot[64]; call.uni f; ret; }\n"
           ".visible .entry k()\n{ call.uni f; ret; }\n");
  INFO(m.error.message);
  REQUIRE(m.program != nullptr);
  REQUIRE(m.Run("k", Blocks(1, 32), Arguments()).fault == Fault::kIllegalAddress);
  Module n(head +
           ".visible .entry k()\n{ .reg .b64 %d<2>; mov.u64 %d0, 12345;\n"
           "P: .callprototype _ ();\ncall %d0, (), P; ret; }\n");
  INFO(n.error.message);
  REQUIRE(n.program != nullptr);
  LaunchResult result = n.Run("k", Blocks(1, 32), Arguments());
  INFO(result.message);
  REQUIRE(result.fault == Fault::kIllegalAddress);
}

TEST_CASE("the stop flag ends a loop over a barrier", "[simgpu][warp]") {
  Module m(
      ".version 8.0\n.target sm_80\n.address_size 64\n"
      ".visible .entry k() { L: bar.sync 0; bra L; }\n");
  REQUIRE(m.program != nullptr);
  const std::atomic<bool> stop{true};
  Shape shape = Blocks(1, 64);
  shape.stop = &stop;
  REQUIRE(m.Run("k", shape, Arguments()).fault == Fault::kStopped);
}
