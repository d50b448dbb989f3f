// CU_STREAM_PER_THREAD is a different stream in every thread: kernels of two threads meet. It is a
// stream like any other in every other respect, and ends unseen with its thread.
//
// stream_per_thread [legacy]: with the legacy default stream instead, where they must not meet.
#include "tests/e2e/programs/program.h"

int main(int argc, char** argv) {
  StartWatchdog();
  const CUstream stream =
      argc > 1 && strcmp(argv[1], "legacy") == 0 ? CU_STREAM_LEGACY : CU_STREAM_PER_THREAD;
  const long long limit = stream == CU_STREAM_LEGACY ? 3'000'000'000 : kKernelLimit;
  Gpu gpu;
  constexpr int kTurns = 4;
  for (int turn = 0; turn < kTurns; ++turn) {
    CUdeviceptr words;
    CHECK(cuMemAlloc(&words, 4 * sizeof(int)));
    CHECK(cuMemsetD32(words, 0, 4));
    CHECK(cuCtxSynchronize());
    std::thread threads[2];
    for (int t = 0; t < 2; ++t) {
      threads[t] = std::thread([&, t] {
        gpu.MakeCurrent();
        const CUdeviceptr mine = words + t * 8, other = words + (1 - t) * 8;
        CHECK(Launch(gpu.kernels.meet, 1, 1, stream, {&mine, &other, &limit}));
        CHECK(cuStreamSynchronize(stream));
      });
    }
    for (std::thread& thread : threads) thread.join();
    int content[4] = {-1, -1, -1, -1};
    CHECK(cuMemcpyDtoH(content, words, sizeof content));
    EXPECT(content[1] == 0 && content[3] == 0, "Two kernels of two threads do not meet.");
    EXPECT(content[0] == 1 && content[2] == 1, "A kernel did not run.");
    CHECK(cuMemFree(words));
  }
  printf("stream_per_thread: met %d times, ok\n", kTurns);
}
