// Contexts wander between threads. Eight threads first share the primary context, each pushing and
// popping it; then eight contexts of their own go round, so that in every turn every thread works
// in a context that another thread has just used; then two contexts lie on each thread's stack.
#include <pthread.h>

#include "tests/e2e/programs/rounds.h"

namespace {

constexpr int kThreads = 8, kTurns = 12;

CUcontext Current() {
  CUcontext current = nullptr;
  CHECK(cuCtxGetCurrent(&current));
  return current;
}

void SharedPrimary(CUdevice device, CUcontext primary, const Kernels& kernels, int t) {
  EXPECT(Current() == nullptr, "A new thread has a current context.");
  EXPECT_CODE(CUDA_ERROR_INVALID_CONTEXT, cuCtxSynchronize());
  CHECK(cuCtxPushCurrent(primary));
  EXPECT(Current() == primary, "The pushed context is not current.");
  CUdevice of_context = -1;
  CHECK(cuCtxGetDevice(&of_context));
  EXPECT(of_context == device, "The context is of device (%d).", of_context);
  Rounds rounds(kernels);
  rounds.Run(5, t * 100);
  CHECK(cuCtxSynchronize());
  CUcontext popped = nullptr;
  CHECK(cuCtxPopCurrent(&popped));
  EXPECT(popped == primary, "Another context is popped.");
  EXPECT(Current() == nullptr, "A context is left after the pop.");
  EXPECT_CODE(CUDA_ERROR_INVALID_CONTEXT, cuCtxPopCurrent(&popped));
  CHECK(cuCtxSetCurrent(primary));
  rounds.Run(5, t * 100 + 50);
  CHECK(cuCtxSetCurrent(nullptr));
  EXPECT(Current() == nullptr, "A context is left after setting none.");
}

struct Own {
  CUcontext context;
  Kernels kernels;
  CUdeviceptr counter;
  CUstream stream;
};

}  // namespace

int main() {
  StartWatchdog();
  CUdevice device;
  CUcontext primary;
  CHECK(cuInit(0));
  CHECK(cuDeviceGet(&device, 0));
  CHECK(cuDevicePrimaryCtxRetain(&primary, device));
  CHECK(cuCtxSetCurrent(primary));
  Kernels kernels;
  kernels.Load();
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] { SharedPrimary(device, primary, kernels, t); });
  }
  for (std::thread& thread : threads) thread.join();
  threads.clear();
  CHECK(cuCtxSetCurrent(nullptr));

  std::vector<Own> own(kThreads);
  for (Own& each : own) {
    CHECK(cuCtxCreate(&each.context, nullptr, 0, device));
    each.kernels.Load();
    CHECK(cuMemAlloc(&each.counter, sizeof(int)));
    CHECK(cuMemsetD32(each.counter, 0, 1));
    CHECK(cuStreamCreate(&each.stream, CU_STREAM_DEFAULT));
    CHECK(cuCtxSynchronize());
    CUcontext popped;
    CHECK(cuCtxPopCurrent(&popped));
    EXPECT(popped == each.context, "Another context is popped than the one just made.");
  }
  pthread_barrier_t barrier;
  pthread_barrier_init(&barrier, nullptr, kThreads);
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int turn = 0; turn < kTurns; ++turn) {
        Own& each = own[(t + turn) % kThreads];
        CHECK(cuCtxPushCurrent(each.context));
        CHECK(Launch(each.kernels.increment, 1, 1, each.stream, {&each.counter}));
        if (turn % 3 == 0) CHECK(cuStreamSynchronize(each.stream));
        int value = -1;
        CHECK(cuMemcpyDtoHAsync(&value, each.counter, sizeof value, each.stream));
        EXPECT(value == turn + 1, "The counter is (%d) instead of (%d).", value, turn + 1);
        CUcontext popped;
        CHECK(cuCtxPopCurrent(&popped));
        EXPECT(popped == each.context, "Another context is popped.");
        pthread_barrier_wait(&barrier);
      }
      // Two on the stack, the upper one replaced in place.
      Own &lower = own[t], &upper = own[(t + 1) % kThreads], &third = own[(t + 2) % kThreads];
      CHECK(cuCtxPushCurrent(lower.context));
      CHECK(cuCtxPushCurrent(upper.context));
      CHECK(cuCtxSetCurrent(third.context));
      CUcontext popped;
      CHECK(cuCtxPopCurrent(&popped));
      EXPECT(popped == third.context, "SetCurrent does not replace the top of the stack.");
      EXPECT(Current() == lower.context, "The lower context is lost.");
      CHECK(cuCtxPopCurrent(&popped));
      pthread_barrier_wait(&barrier);
    });
  }
  for (std::thread& thread : threads) thread.join();

  for (Own& each : own) {  // destroyed by a thread in which it is not current
    CHECK(cuCtxDestroy(each.context));
    EXPECT_CODE(CUDA_ERROR_INVALID_CONTEXT, cuCtxSetCurrent(each.context));
  }
  CHECK(cuCtxSetCurrent(primary));
  int value = 5;
  CUdeviceptr memory;
  CHECK(cuMemAlloc(&memory, sizeof value));
  CHECK(cuMemcpyHtoD(memory, &value, sizeof value));
  CHECK(Launch(kernels.increment, 1, 1, nullptr, {&memory}));
  CHECK(cuMemcpyDtoH(&value, memory, sizeof value));
  EXPECT(value == 6, "The primary context computes (%d) instead of (6).", value);
  CHECK(cuDevicePrimaryCtxRelease(device));
  printf("context_migration: %d threads, %d turns, ok\n", kThreads, kTurns);
}
