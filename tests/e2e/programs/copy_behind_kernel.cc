// A copy that is posted behind a kernel does not overtake it: the kernel still reads the old
// content of the target. And what the program may change after the call (pageable memory) may be
// changed, what it must leave alone (pinned memory) is read when the stream gets there.
//
// copy_behind_kernel pageable|alloc|register|device|memset [sync]: where the new content comes
// from; sync: by a synchronous call, which stands behind the kernel through the legacy default
// stream.
#include "tests/e2e/programs/program.h"

namespace {

constexpr unsigned kOld = 1, kNew = 2, kLater = 3;

// A blocking stream, so that the synchronous calls (legacy default stream) come after it.
void Try(Gpu& gpu, Door& door, const char* kind, bool sync, size_t bytes) {
  const int count = static_cast<int>(bytes / sizeof(int));
  CUstream stream;
  CUdeviceptr target, seen, wrong, device_source = 0;
  CHECK(cuStreamCreate(&stream, CU_STREAM_DEFAULT));
  CHECK(cuMemAlloc(&target, bytes));
  CHECK(cuMemAlloc(&seen, bytes));
  CHECK(cuMemAlloc(&wrong, 2 * sizeof(int)));
  const bool pageable = strcmp(kind, "pageable") == 0, device = strcmp(kind, "device") == 0;
  const bool memset_only = strcmp(kind, "memset") == 0, alloc = strcmp(kind, "alloc") == 0;
  void* host = nullptr;
  if (alloc) {
    CHECK(cuMemHostAlloc(&host, bytes, 0));
  } else if (posix_memalign(&host, 4096, bytes) != 0) {
    Fail("There is no memory.");
  }
  if (!alloc && !pageable && !device && !memset_only) CHECK(cuMemHostRegister(host, bytes, 0));
  FillHost(host, count, kOld);
  CHECK(cuMemcpyHtoD(target, host, bytes));
  FillHost(host, count, kNew);
  if (device) {
    CHECK(cuMemAlloc(&device_source, bytes));
    CHECK(cuMemcpyHtoD(device_source, host, bytes));
  }
  CHECK(cuMemsetD32(wrong, 0, 2));
  CHECK(cuCtxSynchronize());
  door.Close();

  const CUdeviceptr door_words = door.words();
  CHECK(Launch(gpu.kernels.hold_then_copy, BlocksFor(count), kBlock, stream,
               {&door_words, &kKernelLimit, &target, &seen, &count}));
  // The door opens by itself: a synchronous call may rightly wait for the kernel.
  std::atomic<bool> opened = false;
  std::thread doorkeeper([&] {
    gpu.MakeCurrent();
    SleepMs(300);
    opened = true;
    door.Open();
  });
  if (memset_only) {
    CHECK(sync ? cuMemsetD8(target, 0x5A, bytes) : cuMemsetD8Async(target, 0x5A, bytes, stream));
  } else if (device) {
    CHECK(sync ? cuMemcpyDtoD(target, device_source, bytes)
               : cuMemcpyDtoDAsync(target, device_source, bytes, stream));
  } else {
    CHECK(sync ? cuMemcpyHtoD(target, host, bytes)
               : cuMemcpyHtoDAsync(target, host, bytes, stream));
    if (sync || pageable) FillHost(host, count, kLater);  // the call has taken what it needs
    if (sync && !pageable) {
      EXPECT(opened, "A synchronous copy from pinned memory returns before its turn.");
    }
  }
  doorkeeper.join();

  int seen_wrong = 0;
  const unsigned old_seed = kOld, new_seed = kNew;
  const CUdeviceptr wrong_target = wrong + sizeof(int);
  CHECK(Launch(gpu.kernels.count_wrong, BlocksFor(count), kBlock, stream,
               {&seen, &count, &old_seed, &wrong}));
  if (!memset_only) {
    CHECK(Launch(gpu.kernels.count_wrong, BlocksFor(count), kBlock, stream,
                 {&target, &count, &new_seed, &wrong_target}));
  }
  int counts[2] = {-1, -1};
  CHECK(cuMemcpyDtoHAsync(counts, wrong, sizeof counts, stream));
  CHECK(cuStreamSynchronize(stream));
  door.CheckPatience();
  seen_wrong = counts[0];
  EXPECT(seen_wrong == 0, "The copy of (%zu) bytes overtakes the kernel: (%d) elements are new.",
         bytes, seen_wrong);
  EXPECT(counts[1] == 0, "(%d) elements of (%zu) bytes are not what was copied.", counts[1], bytes);
  if (memset_only) {
    std::vector<unsigned char> content(bytes);
    CHECK(cuMemcpyDtoH(content.data(), target, bytes));
    for (const unsigned char byte : content) EXPECT(byte == 0x5A, "The memset writes (%u).", byte);
  }

  if (alloc) {
    CHECK(cuMemFreeHost(host));
  } else {
    if (!pageable && !device && !memset_only) CHECK(cuMemHostUnregister(host));
    free(host);
  }
  CHECK(cuMemFree(target));
  CHECK(cuMemFree(seen));
  CHECK(cuMemFree(wrong));
  if (device) CHECK(cuMemFree(device_source));
  CHECK(cuStreamDestroy(stream));
}

}  // namespace

int main(int argc, char** argv) {
  StartWatchdog();
  const char* kind = argc > 1 ? argv[1] : "pageable";
  const bool sync = argc > 2 && strcmp(argv[2], "sync") == 0;
  Gpu gpu;
  Door door;
  for (const size_t bytes : {256, 8 << 10, 60 << 10, 1 << 20, 5 << 20}) {
    Try(gpu, door, kind, sync, bytes);
  }
  printf("copy_behind_kernel %s%s: 5 sizes in order, ok\n", kind, sync ? " sync" : "");
}
