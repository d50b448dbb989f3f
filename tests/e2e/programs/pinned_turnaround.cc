// Device to host into pinned memory P, then host to device from P, on one stream, with no
// synchronisation between: what arrives is what left, never what P held before. Who reads P when
// the call is made, and not when the stream gets there, is caught by the kernel before both copies.
//
// pinned_turnaround MEGABYTES alloc|register
#include <sys/mman.h>

#include "tests/e2e/programs/program.h"

int main(int argc, char** argv) {
  StartWatchdog();
  const size_t megabytes = argc > 1 ? atoi(argv[1]) : 12;
  const char* kind = argc > 2 ? argv[2] : "alloc";
  const size_t bytes = megabytes << 20;
  const int count = static_cast<int>(bytes / sizeof(int));
  Gpu gpu;
  Door door;
  CUdeviceptr source, target, wrong;
  CUstream stream;
  CHECK(cuMemAlloc(&source, bytes));
  CHECK(cuMemAlloc(&target, bytes));
  CHECK(cuMemAlloc(&wrong, sizeof(int)));
  CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  void* pinned = nullptr;
  if (strcmp(kind, "alloc") == 0) {
    CHECK(cuMemHostAlloc(&pinned, bytes, 0));
  } else {
    pinned = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(cuMemHostRegister(pinned, bytes, 0));
  }

  constexpr unsigned kRounds = 4;
  for (unsigned round = 1; round <= kRounds; ++round) {
    const bool held = round <= 2;  // the others run as fast as they can
    memset(pinned, 0xEE, bytes);
    CHECK(cuMemsetD8Async(target, 0x11, bytes, stream));
    CHECK(cuMemsetD32Async(wrong, 0, 1, stream));
    door.Close();
    if (held) door.HoldStream(gpu.kernels, stream);
    CHECK(Launch(gpu.kernels.fill, BlocksFor(count), kBlock, stream, {&source, &count, &round}));
    CHECK(cuMemcpyDtoHAsync(pinned, source, bytes, stream));
    CHECK(cuMemcpyHtoDAsync(target, pinned, bytes, stream));
    CHECK(Launch(gpu.kernels.count_wrong, BlocksFor(count), kBlock, stream,
                 {&target, &count, &round, &wrong}));
    if (held) {
      EXPECT_CODE(CUDA_ERROR_NOT_READY, cuStreamQuery(stream));
      SleepMs(300);  // time in which a copy that does not obey the stream would go wrong
      door.Open();
    }
    int wrong_on_device = -1;
    CHECK(cuMemcpyDtoHAsync(&wrong_on_device, wrong, sizeof(int), stream));
    CHECK(cuStreamSynchronize(stream));
    door.CheckPatience();
    EXPECT(wrong_on_device == 0, "(%d) of (%d) elements are stale on the device in round (%u).",
           wrong_on_device, count, round);
    const size_t wrong_on_host = CountWrongOnHost(pinned, count, round);
    EXPECT(wrong_on_host == 0, "(%zu) of (%d) elements are stale on the host in round (%u).",
           wrong_on_host, count, round);
  }
  if (strcmp(kind, "alloc") == 0) {
    CHECK(cuMemFreeHost(pinned));
  } else {
    CHECK(cuMemHostUnregister(pinned));
  }
  printf("pinned_turnaround %s: %zu MB there and back %u times, ok\n", kind, megabytes, kRounds);
}
