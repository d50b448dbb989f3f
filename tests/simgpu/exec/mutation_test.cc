// Damaged PTX: each of a few thousand mutations of what nvcc wrote is refused with a reason or
// loads; what loads is decoded and run. Nothing may crash, hang or take much memory; the
// AddressSanitizer build sees what the plain one survives by luck.
#include <sys/resource.h>

#include <catch2/catch.hpp>
#include <chrono>

#include "tests/simgpu/exec/kernel_runner.h"
#include "tests/simgpu/mutations.h"

using namespace simgpu;
using namespace simgpu::test;

namespace {

// A device of 64 MiB.
class SmallMemory : public TestMemory {
 public:
  uint64_t AllocateVariable(uint64_t bytes, uint64_t alignment, bool read_only) override {
    if (bytes > (64u << 20) - std::min<uint64_t>(taken_, 64u << 20)) return 0;
    taken_ += bytes;
    return TestMemory::AllocateVariable(bytes, alignment, read_only);
  }

 private:
  uint64_t taken_ = 0;
};

// The head of a module, and its functions one by one: small texts make mutations that matter.
struct Pieces {
  std::string head;
  std::vector<std::string> functions;
};

Pieces Split(const std::string& text) {
  Pieces pieces;
  size_t at = 0;
  while (at < text.size()) {
    const size_t open = text.find("\n{", at);
    if (open == std::string::npos) break;
    size_t end = text.find("\n}", open);
    if (end == std::string::npos) break;
    end += 3;
    // What stands before the first function, prototypes and variables, is the head.
    size_t begin = at;
    if (pieces.functions.empty()) {
      begin = text.find("// .globl", at);
      if (begin == std::string::npos || begin > open) begin = text.rfind("\n.", open - 1);
      if (const size_t entry = text.rfind(".entry", open); entry != std::string::npos) {
        begin = std::min(begin, text.rfind('\n', entry));
      }
      pieces.head = text.substr(0, begin);
    }
    pieces.functions.push_back(text.substr(begin, end - begin));
    at = end;
  }
  return pieces;
}

struct Outcome {
  int refused = 0, refused_at_launch = 0, faulted = 0, ran = 0;
};

void Try(const std::string& text, Outcome* outcome) {
  SmallMemory memory;
  LoadError error{};
  const auto program = Program::Load(text, memory, &error);
  if (program == nullptr) {
    REQUIRE(error.message.size() > 10);
    ++outcome->refused;
    return;
  }
  // Every pointer parameter leads to one buffer. The launch is stopped at the end of its first
  // slice, so that an endless loop ends.
  Buffer<uint64_t> buffer(memory, 8192);
  const std::atomic<bool> stop{true};
  for (Kernel* kernel : program->kernels()) {
    std::vector<uint64_t> parameters(kernel->info().parameter_bytes / 8 + 1, buffer.address());
    LaunchRequest request;
    request.block[0] = std::min<uint32_t>(64, kernel->info().max_threads);
    request.parameters = reinterpret_cast<const std::byte*>(parameters.data());
    request.dynamic_shared_bytes = 1024;
    request.stop = &stop;
    const LaunchResult result = kernel->Launch(request);
    if (result.fault == Fault::kNone || result.fault == Fault::kStopped) {
      ++outcome->ran;
    } else {
      REQUIRE(result.message.size() > 10);
      ++(result.fault == Fault::kIllegalInstruction ? outcome->refused_at_launch
                                                    : outcome->faulted);
    }
  }
}

}  // namespace

TEST_CASE("mutated PTX is refused with a reason or runs", "[simgpu][mutation]") {
  simgpu_test::Mutator mutator(20);
  Outcome outcome;
  for (const char* name : {"basic", "warp", "warp_sm120", "basic_sm120"}) {
    const Pieces pieces = Split(ReadFile(std::string(PENSTOCK_KERNELS "/") + name + ".ptx"));
    REQUIRE(pieces.functions.size() > 5);
    // Whole, most of them load: damage is what is tested.
    Outcome whole;
    for (const std::string& function : pieces.functions) Try(pieces.head + function, &whole);
    CHECK(whole.refused * 4 < static_cast<int>(pieces.functions.size()));
    const int rounds = simgpu_test::Mutations(PENSTOCK_MUTATIONS) / 4;
    for (int round = 0; round < rounds; ++round) {
      std::string text = pieces.head + pieces.functions[mutator.Below(pieces.functions.size())];
      if (mutator.Below(3) == 0) {
        text += pieces.functions[mutator.Below(pieces.functions.size())];
      }
      mutator.Text(&text);
      INFO(text);
      const auto begin = std::chrono::steady_clock::now();
      Try(text, &outcome);
      REQUIRE(std::chrono::steady_clock::now() - begin < std::chrono::seconds(10));
    }
  }
  INFO("refused " << outcome.refused << ", at launch " << outcome.refused_at_launch << ", faulted "
                  << outcome.faulted << ", ran " << outcome.ran);
  // The mutations reach every stage. How often depends on the text of the kernels, in which nvcc
  // writes names that follow from where the sources lie.
  CHECK(outcome.refused > 0);
  CHECK(outcome.refused_at_launch > 0);
  CHECK(outcome.faulted > 0);
  CHECK(outcome.ran > 0);
#ifndef __SANITIZE_ADDRESS__  // which keeps what was freed
  rusage usage{};
  REQUIRE(getrusage(RUSAGE_SELF, &usage) == 0);
  CHECK(usage.ru_maxrss < 256 * 1024);
#endif
}

TEST_CASE("what a short text asks for in excess is refused", "[simgpu][mutation]") {
  const std::string head = ".version 8.0\n.target sm_80\n.address_size 64\n";
  const std::string cases[] = {
      head +
          ".visible .entry k(.param .align 8 .b8 a[2147483648], .param .align 8 .b8 "
          "b[2147483648]) { ret; }",
      head + ".visible .entry k(.param .b8 a[40000]) { ret; }",
      head + ".visible .entry k() { .reg .b32 %r<1000000>; ret; }",
      head + ".visible .global .b8 huge[1000000000];\n.visible .entry k() { ret; }",
  };
  for (const std::string& text : cases) {
    INFO(text);
    SmallMemory memory;
    LoadError error{};
    CHECK(Program::Load(text, memory, &error) == nullptr);
    CHECK(!error.message.empty());
  }
  for (const char* body : {".shared .b8 s[60000]; .reg .b32 %r<2>; mov.u32 %r1, s; ret;",
                           ".local .b8 l[20000000]; .reg .b64 %d<2>; mov.u64 %d1, l; ret;"}) {
    Module m(head + ".visible .entry k() {" + body + "}");
    REQUIRE(m.program != nullptr);
    const LaunchResult result = m.Run("k", Blocks(1, 32), Arguments());
    CHECK(result.fault == Fault::kIllegalInstruction);
    CHECK(result.message.find("too large") != std::string::npos);
  }
}
