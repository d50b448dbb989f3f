// Whatever tells the program that a stream has passed an asynchronous copy into pinned memory, the
// bytes are there before the news: a wait for stream, context or event, a query that says "done",
// a wait for another stream that waits for the event, a synchronous copy, a free, or another
// thread's wait.
#include "tests/e2e/programs/program.h"

namespace {

struct Setting {
  const Gpu& gpu;
  CUstream stream, other;
  CUevent event;
  CUdeviceptr scratch;
};

const struct {
  const char* name;
  void (*wait)(const Setting& setting);
} kWaits[] = {
    {"cuStreamSynchronize", [](const Setting& s) { CHECK(cuStreamSynchronize(s.stream)); }},
    {"cuCtxSynchronize", [](const Setting&) { CHECK(cuCtxSynchronize()); }},
    {"cuEventSynchronize", [](const Setting& s) { CHECK(cuEventSynchronize(s.event)); }},
    {"cuStreamQuery",
     [](const Setting& s) {
       CUresult result;
       while ((result = cuStreamQuery(s.stream)) == CUDA_ERROR_NOT_READY) {
       }
       CHECK(result);
     }},
    {"cuEventQuery",
     [](const Setting& s) {
       CUresult result;
       while ((result = cuEventQuery(s.event)) == CUDA_ERROR_NOT_READY) {
       }
       CHECK(result);
     }},
    {"a stream that waits for the event",
     [](const Setting& s) {
       CHECK(cuStreamWaitEvent(s.other, s.event, 0));
       CHECK(cuStreamSynchronize(s.other));
     }},
    {"a copy behind the event",
     [](const Setting& s) {
       int word;
       CHECK(cuStreamWaitEvent(s.other, s.event, 0));
       CHECK(cuMemcpyDtoHAsync(&word, s.scratch, sizeof word, s.other));
     }},
    {"a synchronous copy",
     [](const Setting& s) {
       int word;
       CHECK(cuMemcpyDtoH(&word, s.scratch, sizeof word));
     }},
    {"a free of something else",
     [](const Setting&) {
       CUdeviceptr other;
       CHECK(cuMemAlloc(&other, 4096));
       CHECK(cuMemFree(other));
     }},
    {"another thread",
     [](const Setting& s) {
       std::thread([&] {
         s.gpu.MakeCurrent();
         CHECK(cuEventSynchronize(s.event));
       }).join();
     }},
};

}  // namespace

int main() {
  StartWatchdog();
  constexpr size_t kMost = 6 << 20;
  Gpu gpu;
  Setting setting{gpu, nullptr, nullptr, nullptr, 0};
  CUdeviceptr source;
  void* pinned;
  // A blocking stream, so that the synchronous copy (legacy stream) comes after it.
  CHECK(cuStreamCreate(&setting.stream, CU_STREAM_DEFAULT));
  CHECK(cuStreamCreate(&setting.other, CU_STREAM_NON_BLOCKING));
  CHECK(cuEventCreate(&setting.event, CU_EVENT_DISABLE_TIMING));
  CHECK(cuMemAlloc(&setting.scratch, 4096));
  CHECK(cuMemAlloc(&source, kMost));
  CHECK(cuMemHostAlloc(&pinned, kMost, 0));
  unsigned seed = 0;
  for (const auto& [name, wait] : kWaits) {
    for (const size_t bytes : {64, 12 << 10, 200 << 10, 6 << 20}) {
      const int count = static_cast<int>(bytes / sizeof(int));
      for (int turn = 0; turn < 5; ++turn) {
        ++seed;
        memset(pinned, 0xEE, bytes);
        CHECK(Launch(gpu.kernels.fill, BlocksFor(count), kBlock, setting.stream,
                     {&source, &count, &seed}));
        CHECK(cuMemcpyDtoHAsync(pinned, source, bytes, setting.stream));
        CHECK(cuEventRecord(setting.event, setting.stream));
        wait(setting);
        const size_t wrong = CountWrongOnHost(pinned, count, seed);
        EXPECT(wrong == 0, "After %s, (%zu) of (%d) elements are not there.", name, wrong, count);
      }
    }
  }
  CHECK(cuMemFreeHost(pinned));
  printf("release_after_data: %zu ways to wait, ok\n", std::size(kWaits));
}
