// Rounds of ordinary work on a stream of one's own: allocate, copy in, compute, copy out, compare.
// Run beside something that waits, they show that it stands in nobody's way.
//
// Nothing here calls cuMemFree, which waits for all work of the context on every driver: memory of
// cuMemAlloc is handed back at the end, other memory is allocated and freed in stream order.
#pragma once

#include "tests/e2e/programs/program.h"

class Rounds {
 public:
  explicit Rounds(const Kernels& kernels, int count = 4096) : kernels_(kernels), values_(count) {
    CHECK(cuStreamCreate(&stream_, CU_STREAM_NON_BLOCKING));
  }

  void Run(int rounds, int salt) {
    for (int round = 0; round < rounds; ++round) RunOne(salt + round);
  }

  // Only when nothing waits any more.
  void Finish() {
    for (const CUdeviceptr memory : to_free_) CHECK(cuMemFree(memory));
    to_free_.clear();
    CHECK(cuStreamDestroy(stream_));
  }

 private:
  void RunOne(int salt) {
    const int count = static_cast<int>(values_.size());
    const size_t bytes = count * sizeof(int);
    for (int i = 0; i < count; ++i) values_[i] = salt * 1000 + i;
    CUdeviceptr memory, other;
    CHECK(cuMemAlloc(&memory, bytes));
    to_free_.push_back(memory);
    CHECK(cuMemAllocAsync(&other, bytes, stream_));
    CHECK(cuMemcpyHtoDAsync(memory, values_.data(), bytes, stream_));
    const int addend = salt + 7;
    CHECK(Launch(kernels_.add, BlocksFor(count), kBlock, stream_, {&memory, &count, &addend}));
    CHECK(cuMemcpyDtoDAsync(other, memory, bytes, stream_));
    CHECK(Launch(kernels_.add, BlocksFor(count), kBlock, stream_, {&other, &count, &addend}));
    CHECK(cuStreamSynchronize(stream_));
    std::vector<int> result(count);
    CHECK(cuMemcpyDtoHAsync(result.data(), other, bytes, stream_));
    CHECK(cuMemFreeAsync(other, stream_));
    CHECK(cuStreamSynchronize(stream_));
    for (int i = 0; i < count; ++i) {
      EXPECT(result[i] == values_[i] + 2 * addend,
             "Element (%d) of round (%d) is (%d) instead of (%d).", i, salt, result[i],
             values_[i] + 2 * addend);
    }
  }

  const Kernels& kernels_;
  std::vector<int> values_;
  CUstream stream_ = nullptr;
  std::vector<CUdeviceptr> to_free_;
};
