// N calls of one kind, for counting by difference what N more of them cost on the wire.
//
// call_counts KIND N
#include <string_view>

#include "tests/e2e/programs/program.h"

int main(int argc, char** argv) {
  StartWatchdog();
  if (argc != 3) Fail("The arguments are KIND N.");
  const std::string_view kind = argv[1];
  const int count = atoi(argv[2]);
  constexpr size_t kBytes = 1 << 20;
  Gpu gpu;
  CUstream stream, other;
  CUevent event;
  CUdeviceptr memory, target;
  void* pinned = nullptr;
  std::vector<char> pageable(kBytes, 'p');
  CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  CHECK(cuStreamCreate(&other, CU_STREAM_NON_BLOCKING));
  CHECK(cuEventCreate(&event, CU_EVENT_DEFAULT));
  CHECK(cuMemAlloc(&memory, kBytes));
  CHECK(cuMemAlloc(&target, kBytes));
  CHECK(cuMemHostAlloc(&pinned, kBytes, 0));
  memset(pinned, 'q', kBytes);
  for (int i = 0; i < count; ++i) {
    // Often enough that no bounded resource (window of a stream, staging) can make a call wait; the
    // synchronisations are the same in number for all kinds, and counted out by the kind "sync".
    if (i % 50 == 0) {
      CHECK(cuStreamSynchronize(stream));
      CHECK(cuStreamSynchronize(other));
    }
    if (kind == "launch") {
      CHECK(Launch(gpu.kernels.nothing, 1, 1, stream, {}));
    } else if (kind == "memset") {
      CHECK(cuMemsetD32Async(memory, 1, 64, stream));
    } else if (kind == "memset_sync") {
      CHECK(cuMemsetD8(memory, 1, 64));
    } else if (kind == "event_record") {
      CHECK(cuEventRecord(event, stream));
    } else if (kind == "stream_wait") {
      CHECK(cuStreamWaitEvent(other, event, 0));
    } else if (kind == "small_upload") {
      CHECK(cuMemcpyHtoD(memory, pageable.data(), 256));
    } else if (kind == "small_upload_async") {
      CHECK(cuMemcpyHtoDAsync(memory, pageable.data(), 256, stream));
    } else if (kind == "device_copy") {
      CHECK(cuMemcpyDtoDAsync(target, memory, 4096, stream));
    } else if (kind == "create_destroy") {
      CUstream made;
      CUevent made_event;
      CHECK(cuStreamCreate(&made, CU_STREAM_NON_BLOCKING));
      CHECK(cuEventCreate(&made_event, CU_EVENT_DEFAULT));
      CHECK(cuEventDestroy(made_event));
      CHECK(cuStreamDestroy(made));
    } else if (kind == "nothing_copied") {
      CHECK(cuMemcpyHtoD(memory, pageable.data(), 0));
      CHECK(cuMemcpyHtoDAsync(memory, pinned, 0, stream));
      CHECK(cuMemcpyDtoH(pageable.data(), memory, 0));
      CHECK(cuMemcpyDtoHAsync(pinned, memory, 0, stream));
      CHECK(cuMemcpyDtoDAsync(target, memory, 0, stream));
      CHECK(cuMemsetD8Async(memory, 0, 0, stream));
    } else if (kind == "upload_pageable") {
      CHECK(cuMemcpyHtoD(memory, pageable.data(), kBytes));
    } else if (kind == "upload_pinned") {
      CHECK(cuMemcpyHtoDAsync(memory, pinned, kBytes, stream));
    } else if (kind == "download_pageable") {
      CHECK(cuMemcpyDtoH(pageable.data(), memory, kBytes));
    } else if (kind == "download_pinned") {
      CHECK(cuMemcpyDtoHAsync(pinned, memory, kBytes, stream));
    } else if (kind == "questions") {  // each is answered without asking anybody
      int number = 0;
      CUcontext current;
      CUdevice device;
      unsigned flags = 0;
      const char* text = nullptr;
      CHECK(cuDeviceGetAttribute(&number, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, gpu.device));
      CHECK(cuFuncGetAttribute(&number, CU_FUNC_ATTRIBUTE_NUM_REGS, gpu.kernels.add));
      CHECK(cuCtxGetCurrent(&current));
      CHECK(cuCtxGetDevice(&device));
      CHECK(cuStreamGetFlags(stream, &flags));
      CHECK(cuDriverGetVersion(&number));
      CHECK(cuGetErrorString(CUDA_ERROR_UNKNOWN, &text));
    } else if (kind == "memory_info") {
      size_t free_bytes = 0, total = 0;
      CHECK(cuMemGetInfo(&free_bytes, &total));
    } else if (kind != "sync") {
      Fail("The kind (%s) is unknown.", argv[1]);
    }
  }
  CHECK(cuStreamSynchronize(stream));
  CHECK(cuCtxSynchronize());
  printf("call_counts %s: ok\n", argv[1]);
}
