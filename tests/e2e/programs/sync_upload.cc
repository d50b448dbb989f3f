// A synchronous copy to the device is a point of synchronisation: when it returns, what stands
// before it in the legacy default stream is done, so that the program may read pinned memory which
// an asynchronous copy before it has filled. (Who sends small copies one way and goes on must know
// of that.) There is no non-blocking stream in this program: they could be treated specially.
#include "tests/e2e/programs/program.h"

namespace {

constexpr long long kDelay = 50'000'000;

void Try(const Gpu& gpu, CUstream stream, const char* name, size_t upload_bytes, unsigned seed) {
  constexpr size_t kBytes = 1 << 20;
  const int count = kBytes / sizeof(int);
  CUdeviceptr source, target;
  void* pinned;
  std::vector<char> upload(upload_bytes, 'u');
  CHECK(cuMemAlloc(&source, kBytes));
  CHECK(cuMemAlloc(&target, upload_bytes));
  CHECK(cuMemHostAlloc(&pinned, kBytes, 0));
  for (int turn = 0; turn < 3; ++turn) {
    const unsigned pattern = seed + turn;
    memset(pinned, 0xEE, kBytes);
    CHECK(Launch(gpu.kernels.delay, 1, 1, stream, {&kDelay}));
    CHECK(Launch(gpu.kernels.fill, BlocksFor(count), kBlock, stream, {&source, &count, &pattern}));
    CHECK(cuMemcpyDtoHAsync(pinned, source, kBytes, stream));
    if (turn == 1) CHECK(cuStreamSynchronize(stream));
    CHECK(cuMemcpyHtoD(target, upload.data(), upload_bytes));
    const size_t wrong = CountWrongOnHost(pinned, count, pattern);
    EXPECT(wrong == 0, "Behind a copy of (%zu) bytes, (%zu) elements from the %s are not there.",
           upload_bytes, wrong, name);
  }
  CHECK(cuMemFreeHost(pinned));
  CHECK(cuMemFree(source));
  CHECK(cuMemFree(target));
}

}  // namespace

int main() {
  StartWatchdog();
  Gpu gpu;
  CUstream stream;
  CHECK(cuStreamCreate(&stream, CU_STREAM_DEFAULT));
  unsigned seed = 1;
  for (const size_t bytes : {16, 16 << 10, 100 << 10, 3 << 20}) {
    Try(gpu, nullptr, "default stream", bytes, seed += 10);
    Try(gpu, stream, "blocking stream", bytes, seed += 10);
  }
  // The stream may be gone by then; its work is not.
  CUdeviceptr source;
  void* pinned;
  const int count = 4096;
  const unsigned pattern = 99;
  char small[64] = {};
  CHECK(cuMemAlloc(&source, count * sizeof(int)));
  CHECK(cuMemHostAlloc(&pinned, count * sizeof(int), 0));
  CHECK(Launch(gpu.kernels.delay, 1, 1, stream, {&kDelay}));
  CHECK(Launch(gpu.kernels.fill, BlocksFor(count), kBlock, stream, {&source, &count, &pattern}));
  CHECK(cuMemcpyDtoHAsync(pinned, source, count * sizeof(int), stream));
  CHECK(cuStreamDestroy(stream));
  CHECK(cuMemcpyHtoD(source, small, sizeof small));
  EXPECT(CountWrongOnHost(pinned, count, pattern) == 0,
         "What a destroyed stream copies is not there after a synchronous copy.");
  CHECK(cuMemFreeHost(pinned));
  printf("sync_upload: ok\n");
}
