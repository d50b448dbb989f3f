// One stream gets 20,000 launches behind a kernel that does not end, while another thread works.
// The kernel ends only after the other thread's rounds: whoever lets the flood fill the driver's
// launch queue (about 1,024, where the launching call blocks) from a place that others need as well
// never gets any further.
#include "tests/e2e/programs/rounds.h"

int main() {
  StartWatchdog();
  constexpr int kLaunches = 20'000, kRounds = 50;
  Gpu gpu;
  Door door;
  CUdeviceptr counter;
  CHECK(cuMemAlloc(&counter, sizeof(int)));
  CHECK(cuMemsetD32(counter, 0, 1));
  CHECK(cuCtxSynchronize());
  std::atomic<int> posted = 0;

  std::thread flood([&] {
    gpu.MakeCurrent();
    CUstream stream;
    CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    door.HoldStream(gpu.kernels, stream);
    for (int i = 0; i < kLaunches; ++i) {
      CHECK(Launch(gpu.kernels.increment, 1, 1, stream, {&counter}));
      ++posted;
    }
    CHECK(cuStreamSynchronize(stream));
    int value = -1;
    CHECK(cuMemcpyDtoH(&value, counter, sizeof value));
    EXPECT(value == kLaunches, "(%d) of (%d) launches are counted.", value, kLaunches);
  });

  // The flood stands still when the driver, or whoever stands before it, takes no more.
  for (int before = -1; posted != before || before == 0;) {
    before = posted;
    SleepMs(500);
  }
  Rounds rounds(gpu.kernels);
  rounds.Run(kRounds, 1);
  door.Open();
  flood.join();
  door.CheckPatience();
  rounds.Finish();
  printf("launch_flood: %d launches, %d rounds meanwhile, ok\n", kLaunches, kRounds);
}
