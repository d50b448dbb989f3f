// A kernel that touches memory outside every allocation ends its context: all threads of it get
// CUDA_ERROR_ILLEGAL_ADDRESS, from whatever they call next, for good. (Another program is
// undisturbed: the runner has one beside this one.)
#include "tests/e2e/programs/rounds.h"

int main() {
  StartWatchdog();
  constexpr int kThreads = 4;
  Gpu gpu;
  CUdeviceptr memory;
  CHECK(cuMemAlloc(&memory, 4096));
  std::atomic<int> working = 0, reported = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&] {
      gpu.MakeCurrent();
      CUstream stream;
      CUdeviceptr counter;
      CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
      CHECK(cuMemAlloc(&counter, sizeof(int)));
      bool counted = false;
      for (;;) {
        CUresult result = Launch(gpu.kernels.increment, 1, 1, stream, {&counter});
        if (result == CUDA_SUCCESS) result = cuStreamSynchronize(stream);
        if (result == CUDA_SUCCESS) {
          if (!counted) ++working;
          counted = true;
          continue;
        }
        EXPECT(result == CUDA_ERROR_ILLEGAL_ADDRESS, "A thread gets %s.", ErrorName(result));
        break;
      }
      EXPECT_CODE(CUDA_ERROR_ILLEGAL_ADDRESS, cuCtxSynchronize());
      EXPECT_CODE(CUDA_ERROR_ILLEGAL_ADDRESS, cuMemAlloc(&counter, 16));
      ++reported;
    });
  }
  while (working < kThreads) SleepMs(1);

  CUstream stream;
  CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  const CUdeviceptr nowhere = 0x10;
  const int value = 1;
  CHECK(Launch(gpu.kernels.write, 1, 1, stream, {&nowhere, &value}));
  EXPECT_CODE(CUDA_ERROR_ILLEGAL_ADDRESS, cuStreamSynchronize(stream));
  for (std::thread& thread : threads) thread.join();
  EXPECT_CODE(CUDA_ERROR_ILLEGAL_ADDRESS, cuStreamSynchronize(stream));
  EXPECT_CODE(CUDA_ERROR_ILLEGAL_ADDRESS, cuMemcpyHtoD(memory, &value, sizeof value));
  EXPECT_CODE(CUDA_ERROR_ILLEGAL_ADDRESS, Launch(gpu.kernels.nothing, 1, 1, stream, {}));
  int device_count = 0;
  CHECK(cuDeviceGetCount(&device_count));  // needs no context
  printf("sticky_fault: all %d threads were told, ok\n", reported.load());
}
