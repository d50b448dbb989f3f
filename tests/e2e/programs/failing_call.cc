// A call of thread A that fails is reported to A, once, and never to thread B, which works in the
// same context all the while. A driver reports it at the call itself; who sends calls one way may
// learn of it later, and must then say so at A's next synchronisation.
#include "tests/e2e/programs/rounds.h"

namespace {

struct Failure {
  const char* name;
  CUresult (*call)(const Gpu& gpu, CUstream stream, CUevent foreign_event);
};

CUresult LaunchShape(const Gpu& gpu, CUstream stream, unsigned grid, unsigned block,
                     unsigned shared, bool cooperative) {
  return cooperative ? cuLaunchCooperativeKernel(gpu.kernels.nothing, grid, 1, 1, block, 1, 1,
                                                 shared, stream, nullptr)
                     : cuLaunchKernel(gpu.kernels.nothing, grid, 1, 1, block, 1, 1, shared, stream,
                                      nullptr, nullptr);
}

const Failure kFailures[] = {
    {"too many threads in a block",
     [](const Gpu& gpu, CUstream stream, CUevent) {
       return LaunchShape(gpu, stream, 1, 4096, 0, false);
     }},
    {"no blocks", [](const Gpu& gpu, CUstream stream,
                     CUevent) { return LaunchShape(gpu, stream, 0, 32, 0, false); }},
    {"too much shared memory",
     [](const Gpu& gpu, CUstream stream, CUevent) {
       return LaunchShape(gpu, stream, 1, 32, 64 << 20, false);
     }},
    {"a cooperative grid that does not fit",
     [](const Gpu& gpu, CUstream stream, CUevent) {
       return LaunchShape(gpu, stream, 1 << 24, 1024, 0, true);
     }},
    {"clusters",  // of blocks: refused by a device that has none, or for their shape
     [](const Gpu& gpu, CUstream stream, CUevent) {
       CUlaunchAttribute attribute = {};
       attribute.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
       attribute.value.clusterDim.x = attribute.value.clusterDim.y = 3;
       attribute.value.clusterDim.z = 1;
       CUlaunchConfig config = {};
       config.gridDimX = config.gridDimY = config.gridDimZ = 1;
       config.blockDimX = config.blockDimY = config.blockDimZ = 1;
       config.hStream = stream;
       config.attrs = &attribute;
       config.numAttrs = 1;
       return cuLaunchKernelEx(&config, gpu.kernels.nothing, nullptr, nullptr);
     }},
    {"an event of another context",
     [](const Gpu&, CUstream stream, CUevent foreign_event) {
       return cuEventRecord(foreign_event, stream);
     }},
};

}  // namespace

int main() {
  StartWatchdog();
  constexpr int kTimes = 40;
  Gpu gpu;
  CUcontext other_context;
  CUevent foreign_event;
  CHECK(cuCtxCreate(&other_context, nullptr, 0, gpu.device));
  CHECK(cuEventCreate(&foreign_event, CU_EVENT_DEFAULT));
  CHECK(cuCtxPopCurrent(nullptr));
  gpu.MakeCurrent();

  std::atomic<bool> done = false;
  Rounds rounds(gpu.kernels);
  std::atomic<int> rounds_done = 0;
  std::thread b([&] {
    gpu.MakeCurrent();
    while (!done || rounds_done == 0) {
      rounds.Run(1, rounds_done++);  // fails at any error whatever
      CHECK(cuCtxSynchronize());
    }
  });

  CUstream stream;
  CUdeviceptr counter;
  CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  CHECK(cuMemAlloc(&counter, sizeof(int)));
  CHECK(cuMemsetD32Async(counter, 0, 1, stream));
  int launches = 0;
  for (const Failure& failure : kFailures) {
    CUresult first = CUDA_SUCCESS;
    for (int time = 0; time < kTimes; ++time) {
      CHECK(Launch(gpu.kernels.increment, 1, 1, stream, {&counter}));
      ++launches;
      CUresult result = failure.call(gpu, stream, foreign_event);
      if (result == CUDA_SUCCESS && time < 3) {  // now would be B's chance to get what is A's
        for (const int before = rounds_done; rounds_done < before + 2;) SleepMs(1);
      }
      const CUresult at_sync = cuStreamSynchronize(stream);
      EXPECT(result == CUDA_SUCCESS || at_sync == CUDA_SUCCESS,
             "The failure (%s) is reported twice: %s, then %s.", failure.name, ErrorName(result),
             ErrorName(at_sync));
      if (result == CUDA_SUCCESS) result = at_sync;
      EXPECT(result != CUDA_SUCCESS, "The failure (%s) is not reported.", failure.name);
      if (first == CUDA_SUCCESS) first = result;
      EXPECT(result == first, "The failure (%s) gives %s, then %s.", failure.name, ErrorName(first),
             ErrorName(result));
      CHECK(cuStreamSynchronize(stream));  // reported once
    }
    printf("%s: %s\n", failure.name, ErrorName(first));
  }
  done = true;
  b.join();
  int value = -1;
  CHECK(cuMemcpyDtoH(&value, counter, sizeof value));
  EXPECT(value == launches, "(%d) of (%d) launches are counted.", value, launches);
  rounds.Finish();
  printf("failing_call: reported to its thread alone, ok\n");
}
