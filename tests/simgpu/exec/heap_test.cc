// malloc and free in kernels, and launches for which the host has no memory.
#include <sys/resource.h>

#include <catch2/catch.hpp>
#include <cstdio>

#include "tests/simgpu/exec/kernel_runner.h"

using namespace simgpu;
using namespace simgpu::test;

namespace {

// As nvcc declares and calls them. take: out[i] = malloc(sizes[i]), and writes the thread's number
// into the first word of what it got. give: free(blocks[i]).
constexpr char kHeapKernels[] = R"(.version 8.0
.target sm_80
.address_size 64
.extern .func (.param .b64 func_retval0) malloc(.param .b64 malloc_param_0);
.extern .func free(.param .b64 free_param_0);
.visible .entry take(.param .u64 out, .param .u64 sizes)
{
  .reg .pred %p<2>; .reg .b32 %r<4>; .reg .b64 %d<8>;
  ld.param.u64 %d1, [out];
  ld.param.u64 %d2, [sizes];
  mov.u32 %r1, %tid.x;
  mul.wide.u32 %d3, %r1, 8;
  add.s64 %d1, %d1, %d3;
  add.s64 %d2, %d2, %d3;
  ld.global.u64 %d4, [%d2];
  { .param .b64 param0; .param .b64 retval0;
    st.param.b64 [param0+0], %d4;
    call.uni (retval0), malloc, (param0);
    ld.param.b64 %d5, [retval0+0]; }
  st.global.u64 [%d1], %d5;
  setp.eq.s64 %p1, %d5, 0;
  @%p1 bra DONE;
  st.u32 [%d5], %r1;
DONE:
  ret;
}
.visible .entry give(.param .u64 blocks)
{
  .reg .b32 %r<4>; .reg .b64 %d<8>;
  ld.param.u64 %d1, [blocks];
  mov.u32 %r1, %tid.x;
  mul.wide.u32 %d3, %r1, 8;
  add.s64 %d1, %d1, %d3;
  ld.global.u64 %d4, [%d1];
  { .param .b64 param0;
    st.param.b64 [param0+0], %d4;
    call.uni free, (param0); }
  ret;
}
)";

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
size_t MappedBytes() {
  unsigned long pages = 0;
  std::FILE* const file = std::fopen("/proc/self/statm", "r");
  REQUIRE(file != nullptr);
  REQUIRE(std::fscanf(file, "%lu", &pages) == 1);
  std::fclose(file);
  return pages * 4096;
}
#endif

}  // namespace

TEST_CASE("malloc gives aligned blocks that do not overlap and live on", "[simgpu][heap]") {
  Module m(kHeapKernels);
  REQUIRE(m.program != nullptr);
  std::vector<uint64_t> wanted(64);
  for (size_t k = 0; k < wanted.size(); ++k) wanted[k] = 4 + 7 * k;
  Buffer<uint64_t> sizes(m.memory, wanted);
  Buffer<uint64_t> blocks(m.memory, wanted.size());
  REQUIRE(m.Run("take", Blocks(1, 64), Arguments(blocks, sizes)).fault == Fault::kNone);
  std::map<uint64_t, uint64_t> seen;
  for (size_t k = 0; k < wanted.size(); ++k) {
    REQUIRE(blocks[k] != 0);
    CHECK(blocks[k] % 16 == 0);
    CHECK(*reinterpret_cast<uint32_t*>(blocks[k]) == k);
    seen[blocks[k]] = wanted[k];
  }
  REQUIRE(seen.size() == wanted.size());
  uint64_t end = 0;
  for (const auto& [begin, bytes] : seen) {
    CHECK(begin >= end);
    end = begin + bytes;
  }
  // Freed by another launch; then all of the heap can be had in one piece.
  REQUIRE(m.Run("give", Blocks(1, 64), Arguments(blocks)).fault == Fault::kNone);
  sizes[0] = DeviceHeap::kDefaultBytes;
  REQUIRE(m.Run("take", Blocks(1, 1), Arguments(blocks, sizes)).fault == Fault::kNone);
  CHECK(blocks[0] != 0);
}

TEST_CASE("malloc returns null when the heap is full", "[simgpu][heap]") {
  Module m(kHeapKernels);
  REQUIRE(m.program != nullptr);
  // 32 threads want a mebibyte each of 8.
  Buffer<uint64_t> sizes(m.memory, std::vector<uint64_t>(32, 1 << 20));
  Buffer<uint64_t> blocks(m.memory, 32);
  REQUIRE(m.Run("take", Blocks(1, 32), Arguments(blocks, sizes)).fault == Fault::kNone);
  size_t got = 0;
  for (size_t k = 0; k < 32; ++k) got += blocks[k] != 0;
  CHECK(got == 8);
  // free(NULL) does nothing, as in C.
  REQUIRE(m.Run("give", Blocks(1, 32), Arguments(blocks)).fault == Fault::kNone);
  sizes[0] = ~uint64_t{0};
  REQUIRE(m.Run("take", Blocks(1, 1), Arguments(blocks, sizes)).fault == Fault::kNone);
  CHECK(blocks[0] == 0);
}

TEST_CASE("free of what malloc has not returned is a fault", "[simgpu][heap]") {
  Module m(kHeapKernels);
  REQUIRE(m.program != nullptr);
  Buffer<uint64_t> sizes(m.memory, std::vector<uint64_t>(1, 64));
  Buffer<uint64_t> blocks(m.memory, 1);
  REQUIRE(m.Run("take", Blocks(1, 1), Arguments(blocks, sizes)).fault == Fault::kNone);
  REQUIRE(m.Run("give", Blocks(1, 1), Arguments(blocks)).fault == Fault::kNone);
  const LaunchResult twice = m.Run("give", Blocks(1, 1), Arguments(blocks));
  CHECK(twice.fault == Fault::kTrap);
  CHECK(twice.message.find("which malloc has not returned") != std::string::npos);
}

// The sanitizers' allocators end the program where malloc returns null.
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
TEST_CASE("a block that the host has no memory for ends its launch only", "[simgpu]") {
  // 16 MiB of local memory for each of 1,024 threads.
  Module m(
      ".version 8.0\n.target sm_80\n.address_size 64\n"
      ".visible .entry big() { .local .align 8 .b8 depot[16777216]; .reg .b64 %d<2>;\n"
      "mov.u64 %d1, depot; st.local.u64 [%d1], %d1; ret; }\n"
      ".visible .entry small() { ret; }\n");
  REQUIRE(m.program != nullptr);
  rlimit before{};
  REQUIRE(getrlimit(RLIMIT_AS, &before) == 0);
  rlimit tight = before;
  tight.rlim_cur = MappedBytes() + (size_t{1} << 30);
  REQUIRE(setrlimit(RLIMIT_AS, &tight) == 0);
  const LaunchResult big = m.Run("big", Blocks(1, 1024), Arguments());
  const LaunchResult small = m.Run("small", Blocks(4, 1024), Arguments());
  REQUIRE(setrlimit(RLIMIT_AS, &before) == 0);
  CHECK(big.fault == Fault::kOutOfMemory);
  CHECK(big.message == "Kernel (big): the host has no memory for another block of it.");
  CHECK(small.fault == Fault::kNone);
}
#endif
