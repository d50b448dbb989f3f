// The rules that are one line each in CUDA's documentation: copies of nothing, results that are not
// wanted, pageable copies that are complete on return, times that are never negative.
#include "tests/e2e/programs/program.h"

namespace {

void CopiesOfNothing(CUdeviceptr memory, CUstream stream) {
  char byte = 'x';
  CUDA_MEMCPY2D flat = {};
  flat.srcMemoryType = flat.dstMemoryType = CU_MEMORYTYPE_DEVICE;
  flat.srcDevice = memory;
  flat.dstDevice = memory + 64;
  flat.srcPitch = flat.dstPitch = 64;
  flat.WidthInBytes = 0;
  flat.Height = 4;
  CHECK(cuMemcpyHtoD(memory, &byte, 0));
  CHECK(cuMemcpyHtoDAsync(memory, &byte, 0, stream));
  CHECK(cuMemcpyDtoH(&byte, memory, 0));
  CHECK(cuMemcpyDtoHAsync(&byte, memory, 0, stream));
  CHECK(cuMemcpyDtoD(memory, memory + 64, 0));
  CHECK(cuMemcpyDtoDAsync(memory, memory + 64, 0, stream));
  CHECK(cuMemsetD8(memory, 1, 0));
  CHECK(cuMemsetD8Async(memory, 1, 0, stream));
  CHECK(cuMemsetD32Async(memory, 1, 0, stream));
  CHECK(cuMemcpy2D(&flat));
  CHECK(cuMemcpy2DAsync(&flat, stream));
  CHECK(cuStreamSynchronize(stream));
  EXPECT(byte == 'x', "A copy of nothing writes.");
  CUdeviceptr none = 1;
  EXPECT_CODE(CUDA_ERROR_INVALID_VALUE, cuMemAlloc(&none, 0));
  CHECK(cuMemFree(0));
}

// NULL where a result or an argument must be: refused, and the next call is right.
void NullPointers(const Gpu& gpu, CUdeviceptr memory, CUstream stream) {
  size_t bytes = 0;
  CUdeviceptr address = 0;
  CUfunction function;
  CUmodule module;
  CUevent event;
  float ms = 0;
  CHECK(cuEventCreate(&event, CU_EVENT_DEFAULT));
#define REFUSED(call)                                    \
  EXPECT_CODE(CUDA_ERROR_INVALID_VALUE, call);           \
  CHECK(cuMemGetAddressRange(&address, &bytes, memory)); \
  EXPECT(address == memory, "The call after a refused one is wrong.")
  REFUSED(cuMemAlloc(nullptr, 64));
  REFUSED(cuMemAllocAsync(nullptr, 64, stream));
  REFUSED(cuMemAllocPitch(nullptr, &bytes, 64, 4, 4));
  REFUSED(cuMemAllocPitch(&address, nullptr, 64, 4, 4));
  REFUSED(cuMemHostAlloc(nullptr, 64, 0));
  REFUSED(cuMemHostRegister(nullptr, 64, 0));
  REFUSED(cuMemHostRegister(&ms, 0, 0));
  REFUSED(cuMemHostRegister(reinterpret_cast<void*>(0x1000), 64, 0));  // nothing is mapped there
  REFUSED(cuMemcpyHtoD(memory, nullptr, 64));
  REFUSED(cuMemcpyHtoDAsync(memory, nullptr, 64, stream));
  REFUSED(cuMemcpyDtoH(nullptr, memory, 64));
  REFUSED(cuMemcpyDtoHAsync(nullptr, memory, 64, stream));
  REFUSED(cuMemcpy2D(nullptr));
  REFUSED(cuMemcpy2DAsync(nullptr, stream));
  REFUSED(cuModuleLoadData(nullptr, kernels_ptx));
  REFUSED(cuModuleLoadData(&module, nullptr));
  REFUSED(cuModuleGetFunction(nullptr, gpu.kernels.module, "Nothing"));
  REFUSED(cuModuleGetFunction(&function, gpu.kernels.module, nullptr));
  REFUSED(cuModuleGetGlobal(&address, &bytes, gpu.kernels.module, nullptr));
  REFUSED(cuStreamCreate(nullptr, CU_STREAM_DEFAULT));
  REFUSED(cuStreamCreateWithPriority(nullptr, CU_STREAM_DEFAULT, 0));
  REFUSED(cuEventCreate(nullptr, CU_EVENT_DEFAULT));
  REFUSED(cuEventElapsedTime(nullptr, event, event));
  REFUSED(cuStreamGetFlags(stream, nullptr));
  REFUSED(cuStreamGetPriority(stream, nullptr));
  REFUSED(cuFuncGetAttribute(nullptr, CU_FUNC_ATTRIBUTE_NUM_REGS, gpu.kernels.add));
  REFUSED(cuDeviceGetAttribute(nullptr, CU_DEVICE_ATTRIBUTE_WARP_SIZE, gpu.device));
  REFUSED(cuDeviceGetCount(nullptr));
  REFUSED(cuDeviceGet(nullptr, 0));
  REFUSED(cuDriverGetVersion(nullptr));
  REFUSED(cuCtxGetCurrent(nullptr));
  REFUSED(cuCtxCreate(nullptr, nullptr, 0, gpu.device));
  REFUSED(cuGetErrorName(CUDA_SUCCESS, nullptr));
  REFUSED(cuStreamCreate(&stream, 0x80));
  REFUSED(cuEventCreate(&event, 0x80));
  EXPECT_CODE(CUDA_ERROR_NOT_FOUND, cuModuleGetFunction(&function, gpu.kernels.module, "nobody"));
  EXPECT_CODE(CUDA_ERROR_NOT_FOUND,
              cuModuleGetGlobal(&address, &bytes, gpu.kernels.module, "nobody"));
  CUdevice device;
  EXPECT_CODE(CUDA_ERROR_INVALID_DEVICE, cuDeviceGet(&device, 1000));
  EXPECT_CODE(CUDA_ERROR_INVALID_DEVICE, cuDeviceGet(&device, -1));
#undef REFUSED
  CHECK(cuEventDestroy(event));
}

// A copy into pageable memory, asynchronous or not, is complete when the call returns.
void PageableIsCompleteOnReturn(const Gpu& gpu, CUstream stream) {
  Door door;
  for (const size_t bytes : {64, 16 << 10, 20 << 10, 1 << 20, 7 << 20}) {
    const int count = static_cast<int>(bytes / sizeof(int));
    CUdeviceptr memory;
    CHECK(cuMemAlloc(&memory, bytes));
    std::vector<unsigned> host(count, 0xEEEEEEEE);
    const unsigned seed = 5 + static_cast<unsigned>(bytes);
    door.Close();
    door.HoldStream(gpu.kernels, stream);
    CHECK(Launch(gpu.kernels.fill, BlocksFor(count), kBlock, stream, {&memory, &count, &seed}));
    std::thread doorkeeper([&] {
      gpu.MakeCurrent();
      SleepMs(50);
      door.Open();
    });
    CHECK(cuMemcpyDtoHAsync(host.data(), memory, bytes, stream));
    const size_t wrong = CountWrongOnHost(host.data(), count, seed);
    EXPECT(wrong == 0, "(%zu) of (%d) elements are not there on return.", wrong, count);
    doorkeeper.join();
    CHECK(cuStreamSynchronize(stream));
    door.CheckPatience();
    CHECK(cuMemFree(memory));
  }
}

// Rows with room between them: the room belongs to the program and is never written.
void RowsLeaveTheRoomBetween(CUstream stream) {
  constexpr size_t kWidth = 1000, kHeight = 300, kHostPitch = 1111;
  CUdeviceptr memory;
  size_t pitch = 0;
  CHECK(cuMemAllocPitch(&memory, &pitch, kWidth, kHeight, 4));
  EXPECT(pitch >= kWidth, "The pitch (%zu) is less than the width.", pitch);
  std::vector<unsigned char> up(kHostPitch * kHeight), down(kHostPitch * kHeight, 0x77);
  for (size_t i = 0; i < up.size(); ++i) up[i] = static_cast<unsigned char>(i * 7 + i / 251);
  CUDA_MEMCPY2D copy = {};
  copy.srcMemoryType = CU_MEMORYTYPE_HOST;
  copy.srcHost = up.data();
  copy.srcPitch = kHostPitch;
  copy.dstMemoryType = CU_MEMORYTYPE_DEVICE;
  copy.dstDevice = memory;
  copy.dstPitch = pitch;
  copy.WidthInBytes = kWidth;
  copy.Height = kHeight;
  CHECK(cuMemcpy2DAsync(&copy, stream));
  CUDA_MEMCPY2D back = {};
  back.srcMemoryType = CU_MEMORYTYPE_DEVICE;
  back.srcDevice = memory;
  back.srcPitch = pitch;
  back.dstMemoryType = CU_MEMORYTYPE_HOST;
  back.dstHost = down.data();
  back.dstPitch = kHostPitch;
  back.WidthInBytes = kWidth;
  back.Height = kHeight;
  CHECK(cuMemcpy2DAsync(&back, stream));
  CHECK(cuStreamSynchronize(stream));
  for (size_t i = 0; i < down.size(); ++i) {
    const unsigned char expected = i % kHostPitch < kWidth ? up[i] : 0x77;
    EXPECT(down[i] == expected, "Byte (%zu) of row (%zu) is (%u) instead of (%u).", i % kHostPitch,
           i / kHostPitch, down[i], expected);
  }
  CHECK(cuMemFree(memory));
}

// Rows so few and short that they travel inside the call, and single rows, whose pitch is noise.
void SmallRows(CUdeviceptr memory, CUstream stream) {
  unsigned char up[40 * 30], down[40 * 30];
  for (size_t i = 0; i < sizeof up; ++i) up[i] = static_cast<unsigned char>(i * 11 + 3);
  for (const size_t width : {1, 7, 40}) {
    for (const size_t height : {1, 2, 30}) {
      const size_t pitch = height == 1 ? ~size_t{0} : 40;
      memset(down, 0x77, sizeof down);
      CUDA_MEMCPY2D copy = {};
      copy.srcMemoryType = CU_MEMORYTYPE_HOST;
      copy.srcHost = up;
      copy.dstMemoryType = CU_MEMORYTYPE_DEVICE;
      copy.dstDevice = memory;
      copy.srcPitch = copy.dstPitch = pitch;
      copy.WidthInBytes = width;
      copy.Height = height;
      CHECK(cuMemcpy2DAsync(&copy, stream));
      CHECK(cuMemcpy2D(&copy));
      CUDA_MEMCPY2D back = {};
      back.srcMemoryType = CU_MEMORYTYPE_UNIFIED;
      back.srcDevice = memory;
      back.dstMemoryType = CU_MEMORYTYPE_HOST;
      back.dstHost = down;
      back.srcPitch = back.dstPitch = pitch;
      back.WidthInBytes = width;
      back.Height = height;
      CHECK(cuMemcpy2DAsync(&back, stream));
      CHECK(cuStreamSynchronize(stream));
      for (size_t i = 0; i < sizeof down; ++i) {
        const bool inside = i / 40 < height && i % 40 < width;
        EXPECT(down[i] == (inside ? up[i] : 0x77), "Byte (%zu) of (%zu x %zu) is (%u).", i, width,
               height, down[i]);
      }
      // The rows of an address on the device are on the device, wherever they are said to start.
      back.srcPitch = back.dstPitch = 40;
      back.srcY = 1 << 20;
      EXPECT_CODE(CUDA_ERROR_INVALID_VALUE, cuMemcpy2D(&back));
    }
  }
}

// Pinned memory goes only when nothing touches it any more, though its stream went before.
void PinnedMemoryOutlivesItsStream(const Gpu& gpu) {
  constexpr size_t kBytes = 3 << 20;
  constexpr int kCount = kBytes / sizeof(unsigned);
  Door door;
  CUdeviceptr memory;
  CHECK(cuMemAlloc(&memory, kBytes));
  for (const unsigned flags : {CU_STREAM_DEFAULT, CU_STREAM_NON_BLOCKING}) {
    for (const bool context_waits : {true, false}) {
      std::vector<unsigned> host(kCount, 0xEEEEEEEE);
      CHECK(cuMemHostRegister(host.data(), kBytes, 0));
      CUstream stream;
      CHECK(cuStreamCreate(&stream, flags));
      const unsigned seed = 17 + flags * 2 + context_waits;
      door.Close();
      door.HoldStream(gpu.kernels, stream);
      CHECK(Launch(gpu.kernels.fill, BlocksFor(kCount), kBlock, stream, {&memory, &kCount, &seed}));
      // Begins before the copy, which waits where posting is switched off.
      std::thread doorkeeper([&] {
        gpu.MakeCurrent();
        SleepMs(100);
        door.Open();
      });
      CHECK(cuMemcpyDtoHAsync(host.data(), memory, kBytes, stream));
      CHECK(cuStreamDestroy(stream));
      if (context_waits) {
        CHECK(cuCtxSynchronize());
      } else {
        CHECK(cuMemHostUnregister(host.data()));
      }
      const size_t wrong = CountWrongOnHost(host.data(), kCount, seed);
      EXPECT(wrong == 0, "(%zu) of (%d) elements miss the end of their stream.", wrong, kCount);
      doorkeeper.join();
      door.CheckPatience();
      if (context_waits) CHECK(cuMemHostUnregister(host.data()));
    }
  }
  // And the other way: what is uploaded was read before the memory went.
  void* pinned;
  CHECK(cuMemHostAlloc(&pinned, kBytes, 0));
  memset(pinned, 0x5A, kBytes);
  CUstream stream;
  CHECK(cuStreamCreate(&stream, CU_STREAM_DEFAULT));
  door.Close();
  door.HoldStream(gpu.kernels, stream);
  std::thread doorkeeper([&] {
    gpu.MakeCurrent();
    SleepMs(100);
    door.Open();
  });
  CHECK(cuMemcpyHtoDAsync(memory, pinned, kBytes, stream));
  CHECK(cuStreamDestroy(stream));
  CHECK(cuMemFreeHost(pinned));
  doorkeeper.join();
  std::vector<unsigned char> back(kBytes);
  CHECK(cuMemcpyDtoH(back.data(), memory, kBytes));
  for (const size_t i : {size_t{0}, kBytes / 2, kBytes - 1}) {
    EXPECT(back[i] == 0x5A, "Byte (%zu) of the upload is (%u).", i, back[i]);
  }
  door.CheckPatience();
  CHECK(cuMemFreeHost(nullptr));
  CHECK(cuMemFree(memory));
}

void TimesArePlausible(const Gpu& gpu, CUstream stream) {
  CUevent first, second, never, untimed;
  CHECK(cuEventCreate(&first, CU_EVENT_DEFAULT));
  CHECK(cuEventCreate(&second, CU_EVENT_DEFAULT));
  CHECK(cuEventCreate(&never, CU_EVENT_DEFAULT));
  CHECK(cuEventCreate(&untimed, CU_EVENT_DISABLE_TIMING));
  Door door;
  float ms = -1;
  for (int i = 0; i < 20; ++i) {
    CHECK(cuEventRecord(first, stream));
    CHECK(Launch(gpu.kernels.nothing, 1, 1, stream, {}));
    CHECK(cuEventRecord(second, stream));
    CHECK(cuEventSynchronize(second));
    CHECK(cuEventElapsedTime(&ms, first, second));
    EXPECT(ms >= 0 && ms < 60'000, "Two events are (%g) ms apart.", ms);
  }
  Stopwatch watch;
  CHECK(cuEventRecord(first, stream));
  door.HoldStream(gpu.kernels, stream);
  // Recorded here, waited for in another thread.
  CHECK(cuEventRecord(second, stream));
  EXPECT_CODE(CUDA_ERROR_NOT_READY, cuEventQuery(second));
  EXPECT_CODE(CUDA_ERROR_NOT_READY, cuEventElapsedTime(&ms, first, second));
  std::thread waiter([&] {
    gpu.MakeCurrent();
    CHECK(cuEventSynchronize(second));
  });
  SleepMs(100);
  door.Open();
  waiter.join();
  CHECK(cuEventElapsedTime(&ms, first, second));
  const double real_ms = watch.seconds() * 1000;
  EXPECT(ms > 50 && ms <= real_ms + 1, "A kernel of (%g) ms is said to take (%g) ms.", real_ms, ms);
  CHECK(cuEventQuery(never));  // an event that was never recorded is complete
  CHECK(cuEventSynchronize(never));
  EXPECT_CODE(CUDA_ERROR_INVALID_HANDLE, cuEventElapsedTime(&ms, never, second));
  CHECK(cuEventRecord(untimed, stream));
  CHECK(cuEventSynchronize(untimed));
  EXPECT_CODE(CUDA_ERROR_INVALID_HANDLE, cuEventElapsedTime(&ms, first, untimed));
  for (const CUevent event : {first, second, never, untimed}) CHECK(cuEventDestroy(event));
}

// One stream waits for an event of another.
void StreamsWaitForEvents(const Gpu& gpu, CUstream first, CUdeviceptr memory) {
  Door door;
  CUstream second;
  CUevent event;
  CHECK(cuStreamCreate(&second, CU_STREAM_NON_BLOCKING));
  CHECK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
  CHECK(cuMemsetD32Async(memory, 10, 1, first));
  CHECK(cuStreamSynchronize(first));
  door.HoldStream(gpu.kernels, first);
  CHECK(cuMemsetD32Async(memory, 20, 1, first));
  CHECK(cuEventRecord(event, first));
  CHECK(cuStreamWaitEvent(second, event, 0));
  CHECK(cuEventDestroy(event));  // allowed at once: what was posted goes on
  CHECK(Launch(gpu.kernels.increment, 1, 1, second, {&memory}));
  EXPECT_CODE(CUDA_ERROR_NOT_READY, cuStreamQuery(second));
  door.Open();
  CHECK(cuStreamSynchronize(second));
  int value = 0;
  CHECK(cuMemcpyDtoH(&value, memory, sizeof value));
  EXPECT(value == 21, "The stream that waits gives (%d) instead of (21).", value);
  CHECK(cuStreamDestroy(second));
}

}  // namespace

int main() {
  StartWatchdog();
  Gpu gpu;
  CUstream stream;
  CUdeviceptr memory;
  CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  CHECK(cuMemAlloc(&memory, 4096));
  CopiesOfNothing(memory, stream);
  NullPointers(gpu, memory, stream);
  PageableIsCompleteOnReturn(gpu, stream);
  RowsLeaveTheRoomBetween(stream);
  SmallRows(memory, stream);
  PinnedMemoryOutlivesItsStream(gpu);
  TimesArePlausible(gpu, stream);
  StreamsWaitForEvents(gpu, stream, memory);
  printf("small_rules: ok\n");
}
