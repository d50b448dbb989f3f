// Thread A waits two seconds for its stream; eight others finish 50 rounds of work meanwhile.
// The kernel that A waits for ends only after the others are done: if A's wait holds them up,
// nobody ever gets any further.
//
// thread_waits stream|event|context|copy: what A waits with.
#include "tests/e2e/programs/rounds.h"

int main(int argc, char** argv) {
  StartWatchdog();
  const char* kind = argc > 1 ? argv[1] : "stream";
  constexpr int kThreads = 8, kRounds = 50;
  constexpr double kSeconds = 2;
  Gpu gpu;
  Door door;
  std::atomic<bool> about_to_wait = false, others_done = false;
  double waited = 0;

  std::thread a([&] {
    gpu.MakeCurrent();
    CUstream stream;
    CUevent event;
    CUdeviceptr memory;
    int value = 0;
    CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    CHECK(cuEventCreate(&event, CU_EVENT_DEFAULT));
    CHECK(cuMemAlloc(&memory, sizeof value));
    CHECK(cuMemsetD32Async(memory, 41, 1, stream));
    Stopwatch watch;
    door.HoldStream(gpu.kernels, stream);
    CHECK(Launch(gpu.kernels.increment, 1, 1, stream, {&memory}));
    CHECK(cuEventRecord(event, stream));
    about_to_wait = true;
    if (strcmp(kind, "event") == 0) {
      CHECK(cuEventSynchronize(event));
    } else if (strcmp(kind, "context") == 0) {
      CHECK(cuCtxSynchronize());
    } else if (strcmp(kind, "copy") == 0) {  // into pageable memory: complete on return
      CHECK(cuMemcpyDtoHAsync(&value, memory, sizeof value, stream));
    } else {
      CHECK(cuStreamSynchronize(stream));
    }
    waited = watch.seconds();
    EXPECT(others_done, "The wait ends before the kernel does.");
    if (strcmp(kind, "copy") != 0) CHECK(cuMemcpyDtoH(&value, memory, sizeof value));
    EXPECT(value == 42, "The kernel behind the wait gives (%d) instead of (42).", value);
  });

  while (!about_to_wait) SleepMs(1);
  SleepMs(200);  // so that A's wait is under way
  Stopwatch watch;
  std::vector<std::thread> others;
  std::vector<Rounds*> rounds;
  for (int t = 0; t < kThreads; ++t) rounds.push_back(new Rounds(gpu.kernels));
  for (int t = 0; t < kThreads; ++t) {
    others.emplace_back([&, t] {
      gpu.MakeCurrent();
      rounds[t]->Run(kRounds, t * 100);
    });
  }
  for (std::thread& other : others) other.join();
  const double left = kSeconds - watch.seconds();
  if (left > 0) SleepMs(static_cast<int>(left * 1000));
  others_done = true;
  door.Open();
  a.join();
  door.CheckPatience();
  EXPECT(waited >= kSeconds, "Thread A waits (%g) seconds instead of (%g).", waited, kSeconds);
  for (Rounds* each : rounds) each->Finish();
  printf("thread_waits %s: %d threads did %d rounds meanwhile, ok\n", kind, kThreads, kRounds);
}
