// Garbage, freed and foreign handles, in every function that takes one: each gives an error of the
// documented kind, and the very next call is right. The list of results is printed, so that the
// routes can be compared: the same error everywhere.
//
// (NVIDIA's driver dereferences some handles unseen and may end the program: this test is for
// drivers that check.)
#include <string>
#include <string_view>

#include "tests/e2e/programs/program.h"

namespace {

enum Allowed { kHandle, kContextError, kValue, kDevice, kPinned };

int calls = 0;

void Judge(const char* text, const char* kind, Allowed allowed, CUresult result) {
  const std::string_view whole(text);
  const std::string name(whole.substr(0, whole.find('(')));
  printf("%s, %s: %s\n", name.c_str(), kind, ErrorName(result));
  bool right = false;
  switch (allowed) {
    case kHandle:
      right = result == CUDA_ERROR_INVALID_HANDLE || result == CUDA_ERROR_INVALID_VALUE;
      break;
    case kContextError:
      right = result == CUDA_ERROR_INVALID_CONTEXT || result == CUDA_ERROR_CONTEXT_IS_DESTROYED ||
              result == CUDA_ERROR_INVALID_VALUE;
      break;
    case kDevice:
      right = result == CUDA_ERROR_INVALID_DEVICE;
      break;
    case kPinned:
      right = result == CUDA_ERROR_INVALID_VALUE || result == CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
      break;
    case kValue:
      right = result == CUDA_ERROR_INVALID_VALUE || result == CUDA_ERROR_INVALID_HANDLE;
      break;
  }
  if (!right)
    fprintf(stderr, "bad_handles: %s with a %s handle gives %s.\n", text, kind, ErrorName(result));
  EXPECT(result != CUDA_SUCCESS, "%s with a %s handle succeeds.", text, kind);
  EXPECT(right, "%s with a %s handle gives an undocumented error.", text, kind);
  size_t free_bytes = 0, total = 0;
  CHECK(cuMemGetInfo(&free_bytes, &total));  // the session goes on
  ++calls;
}
#define TRY(allowed, call) Judge(#call, kind, allowed, (call))

template <typename Handle>
struct Bad {
  const char* kind;
  Handle handle;
};

// What no driver has ever given out, in some shapes.
template <typename Handle>
std::vector<Bad<Handle>> Garbage() {
  static uint64_t readable_memory[64];
  return {{"garbage (small)", reinterpret_cast<Handle>(0x1234)},
          {"garbage (large)", reinterpret_cast<Handle>(0xDEADBEEF0000'1230)},
          {"garbage (host memory)", reinterpret_cast<Handle>(readable_memory)}};
}

void Streams(const Gpu& gpu, CUdeviceptr memory, CUevent event) {
  CUstream freed;
  CHECK(cuStreamCreate(&freed, CU_STREAM_DEFAULT));
  CHECK(cuStreamDestroy(freed));
  std::vector<Bad<CUstream>> bad = Garbage<CUstream>();
  bad.push_back({"freed", freed});
  bad.push_back({"foreign (an event)", reinterpret_cast<CUstream>(event)});
  CUmemoryPool pool;
  CUdeviceptr stream_ordered;
  CHECK(cuDeviceGetDefaultMemPool(&pool, gpu.device));
  CHECK(cuMemAllocAsync(&stream_ordered, 64, nullptr));
  CHECK(cuCtxSynchronize());
  for (const auto& [kind, stream] : bad) {
    char host[64] = {};
    int number = 0;
    unsigned flags = 0;
    unsigned long long id = 0;
    CUcontext context;
    CUdeviceptr allocated = 0;
    TRY(kHandle, cuStreamSynchronize(stream));
    TRY(kHandle, cuStreamQuery(stream));
    TRY(kHandle, cuStreamDestroy(stream));
    TRY(kHandle, cuStreamWaitEvent(stream, event, 0));
    TRY(kHandle, cuStreamGetFlags(stream, &flags));
    TRY(kHandle, cuStreamGetPriority(stream, &number));
    TRY(kHandle, cuStreamGetId(stream, &id));
    TRY(kHandle, cuStreamGetCtx(stream, &context));
    TRY(kHandle, cuEventRecord(event, stream));
    TRY(kHandle, cuEventRecordWithFlags(event, stream, 0));
    TRY(kHandle, cuMemcpyHtoDAsync(memory, host, sizeof host, stream));
    TRY(kHandle, cuMemcpyDtoHAsync(host, memory, sizeof host, stream));
    TRY(kHandle, cuMemcpyDtoDAsync(memory, memory + 128, 64, stream));
    TRY(kHandle, cuMemcpyAsync(memory, memory + 128, 64, stream));
    TRY(kHandle, cuMemsetD8Async(memory, 0, 64, stream));
    TRY(kHandle, cuMemsetD16Async(memory, 0, 64, stream));
    TRY(kHandle, cuMemsetD32Async(memory, 0, 64, stream));
    TRY(kHandle, cuMemsetD2D8Async(memory, 64, 0, 16, 4, stream));
    TRY(kHandle, cuMemAllocAsync(&allocated, 64, stream));
    TRY(kHandle, cuMemsetD2D16Async(memory, 64, 0, 16, 4, stream));
    TRY(kHandle, cuMemsetD2D32Async(memory, 64, 0, 16, 4, stream));
    CUDA_MEMCPY2D copy = {};
    copy.srcMemoryType = copy.dstMemoryType = CU_MEMORYTYPE_DEVICE;
    copy.srcDevice = memory;
    copy.dstDevice = memory + 1024;
    copy.WidthInBytes = copy.srcPitch = copy.dstPitch = 64;
    copy.Height = 4;
    TRY(kHandle, cuMemcpy2DAsync(&copy, stream));
    TRY(kHandle, cuMemAllocFromPoolAsync(&allocated, 64, pool, stream));
    TRY(kHandle, cuMemFreeAsync(stream_ordered, stream));
    CUstreamCaptureStatus capture;
    CUdevice device;
    TRY(kHandle, cuStreamIsCapturing(stream, &capture));
    TRY(kHandle, cuStreamGetDevice(stream, &device));
    CUlaunchConfig config = {};
    config.gridDimX = config.gridDimY = config.gridDimZ = 1;
    config.blockDimX = config.blockDimY = config.blockDimZ = 1;
    config.hStream = stream;
    TRY(kHandle, cuLaunchKernelEx(&config, gpu.kernels.nothing, nullptr, nullptr));
    TRY(kHandle,
        cuLaunchCooperativeKernel(gpu.kernels.nothing, 1, 1, 1, 1, 1, 1, 0, stream, nullptr));
    TRY(kHandle, Launch(gpu.kernels.nothing, 1, 1, stream, {}));
  }
  CHECK(cuMemFreeAsync(stream_ordered, nullptr));
  CHECK(cuCtxSynchronize());
}

void Events(CUstream stream) {
  CUevent freed, good;
  CHECK(cuEventCreate(&freed, CU_EVENT_DEFAULT));
  CHECK(cuEventCreate(&good, CU_EVENT_DEFAULT));
  CHECK(cuEventRecord(good, stream));
  CHECK(cuEventSynchronize(good));
  CHECK(cuEventDestroy(freed));
  std::vector<Bad<CUevent>> bad = Garbage<CUevent>();
  bad.push_back({"null", nullptr});
  bad.push_back({"freed", freed});
  bad.push_back({"foreign (a stream)", reinterpret_cast<CUevent>(stream)});
  for (const auto& [kind, event] : bad) {
    float ms = 0;
    TRY(kHandle, cuEventRecord(event, stream));
    TRY(kHandle, cuEventRecordWithFlags(event, stream, 0));
    TRY(kHandle, cuEventQuery(event));
    TRY(kHandle, cuEventSynchronize(event));
    TRY(kHandle, cuEventElapsedTime(&ms, event, good));
    TRY(kHandle, cuEventElapsedTime(&ms, good, event));
    TRY(kHandle, cuStreamWaitEvent(stream, event, 0));
    TRY(kHandle, cuEventDestroy(event));
  }
  CHECK(cuEventDestroy(good));
}

void ModulesAndFunctions(CUstream stream) {
  CUmodule freed;
  CUfunction stale;
  CHECK(cuModuleLoadData(&freed, kernels_ptx));
  CHECK(cuModuleGetFunction(&stale, freed, "Nothing"));
  CHECK(cuModuleUnload(freed));
  std::vector<Bad<CUmodule>> modules = Garbage<CUmodule>();
  modules.push_back({"null", nullptr});
  modules.push_back({"freed", freed});
  modules.push_back({"foreign (a stream)", reinterpret_cast<CUmodule>(stream)});
  for (const auto& [kind, module] : modules) {
    CUfunction function;
    CUdeviceptr address;
    size_t bytes = 0;
    TRY(kHandle, cuModuleGetFunction(&function, module, "Nothing"));
    TRY(kHandle, cuModuleGetGlobal(&address, &bytes, module, "nothing"));
    unsigned count = 0;
    TRY(kHandle, cuModuleGetFunctionCount(&count, module));
    TRY(kHandle, cuModuleUnload(module));
  }
  std::vector<Bad<CUfunction>> functions = Garbage<CUfunction>();
  functions.push_back({"null", nullptr});
  functions.push_back({"freed", stale});
  functions.push_back({"foreign (a stream)", reinterpret_cast<CUfunction>(stream)});
  for (const auto& [kind, function] : functions) {
    int number = 0;
    size_t offset = 0, size = 0;
    CUmodule module;
    const char* name = nullptr;
    TRY(kHandle, Launch(function, 1, 1, stream, {}));
    TRY(kHandle, cuLaunchCooperativeKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, nullptr));
    TRY(kHandle, cuFuncGetAttribute(&number, CU_FUNC_ATTRIBUTE_NUM_REGS, function));
    TRY(kHandle,
        cuFuncSetAttribute(function, CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 50));
    TRY(kHandle, cuFuncSetCacheConfig(function, CU_FUNC_CACHE_PREFER_L1));
    TRY(kHandle, cuFuncGetModule(&module, function));
    TRY(kHandle, cuFuncGetName(&name, function));
    TRY(kHandle, cuFuncGetParamInfo(function, 0, &offset, &size));
    CUfunctionLoadingState state;
    size_t bytes = 0;
    int other = 0;
    CUlaunchConfig config = {};
    config.gridDimX = config.gridDimY = config.gridDimZ = 1;
    config.blockDimX = config.blockDimY = config.blockDimZ = 1;
    TRY(kHandle, cuLaunchKernelEx(&config, function, nullptr, nullptr));
    TRY(kHandle, cuFuncIsLoaded(&state, function));
    TRY(kHandle, cuFuncLoad(function));
    TRY(kHandle, cuOccupancyMaxActiveBlocksPerMultiprocessor(&number, function, 128, 0));
    TRY(kHandle,
        cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(&number, function, 128, 0, 0));
    TRY(kHandle, cuOccupancyMaxPotentialBlockSize(&number, &other, function, nullptr, 0, 0));
    TRY(kHandle, cuOccupancyAvailableDynamicSMemPerBlock(&bytes, function, 1, 128));
  }
}

void LibrariesAndKernels(CUdevice device, CUstream stream) {
  CUlibrary freed;
  CUkernel stale;
  CHECK(cuLibraryLoadData(&freed, kernels_ptx, nullptr, nullptr, 0, nullptr, nullptr, 0));
  CHECK(cuLibraryGetKernel(&stale, freed, "Nothing"));
  CHECK(cuLibraryUnload(freed));
  std::vector<Bad<CUlibrary>> libraries = Garbage<CUlibrary>();
  libraries.push_back({"null", nullptr});
  libraries.push_back({"freed", freed});
  libraries.push_back({"foreign (a stream)", reinterpret_cast<CUlibrary>(stream)});
  for (const auto& [kind, library] : libraries) {
    CUkernel kernel;
    CUdeviceptr address;
    size_t bytes = 0;
    TRY(kHandle, cuLibraryGetKernel(&kernel, library, "Nothing"));
    TRY(kHandle, cuLibraryGetGlobal(&address, &bytes, library, "nothing"));
    unsigned count = 0;
    TRY(kHandle, cuLibraryGetKernelCount(&count, library));
    TRY(kHandle, cuLibraryUnload(library));
  }
  std::vector<Bad<CUkernel>> kernels = Garbage<CUkernel>();
  kernels.push_back({"null", nullptr});
  kernels.push_back({"freed", stale});
  kernels.push_back({"foreign (a stream)", reinterpret_cast<CUkernel>(stream)});
  for (const auto& [kind, kernel] : kernels) {
    CUfunction function;
    CUlibrary library;
    int number = 0;
    size_t offset = 0, size = 0;
    const char* name = nullptr;
    TRY(kHandle, cuKernelGetFunction(&function, kernel));
    TRY(kHandle, cuKernelGetAttribute(&number, CU_FUNC_ATTRIBUTE_NUM_REGS, kernel, device));
    TRY(kHandle, cuKernelSetAttribute(CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 50,
                                      kernel, device));
    TRY(kHandle, cuKernelGetLibrary(&library, kernel));
    TRY(kHandle, cuKernelGetName(&name, kernel));
    TRY(kHandle, cuKernelGetParamInfo(kernel, 0, &offset, &size));
    TRY(kHandle, cuKernelSetCacheConfig(kernel, CU_FUNC_CACHE_PREFER_L1, device));
    TRY(kHandle, Launch(reinterpret_cast<CUfunction>(kernel), 1, 1, stream, {}));
  }
}

void Contexts(const Gpu& gpu, CUstream stream) {
  CUcontext freed, popped;
  CHECK(cuCtxCreate(&freed, nullptr, 0, gpu.device));
  CHECK(cuCtxPopCurrent(&popped));
  CHECK(cuCtxDestroy(freed));
  gpu.MakeCurrent();
  std::vector<Bad<CUcontext>> bad = Garbage<CUcontext>();
  bad.push_back({"freed", freed});
  bad.push_back({"foreign (a stream)", reinterpret_cast<CUcontext>(stream)});
  for (const auto& [kind, context] : bad) {
    unsigned version = 0;
    unsigned long long id = 0;
    TRY(kContextError, cuCtxSetCurrent(context));
    TRY(kContextError, cuCtxPushCurrent(context));
    TRY(kContextError, cuCtxDestroy(context));
    TRY(kContextError, cuCtxGetApiVersion(context, &version));
    TRY(kContextError, cuCtxGetId(context, &id));
    CUdevice device;
    TRY(kContextError, cuCtxSynchronize_v2(context));
    TRY(kContextError, cuCtxGetDevice_v2(&device, context));
    CUcontext current = nullptr;
    CHECK(cuCtxGetCurrent(&current));
    EXPECT(current == gpu.context, "A bad context changes which one is current.");
  }
  const char* kind = "null";
  TRY(kContextError, cuCtxPushCurrent(nullptr));
  TRY(kContextError, cuCtxDestroy(nullptr));
}

void Pools(const Gpu& gpu, CUstream stream) {
  std::vector<Bad<CUmemoryPool>> bad = Garbage<CUmemoryPool>();
  bad.push_back({"null", nullptr});
  bad.push_back({"foreign (a stream)", reinterpret_cast<CUmemoryPool>(stream)});
  for (const auto& [kind, pool] : bad) {
    CUdeviceptr address;
    uint64_t threshold = 0;
    TRY(kValue, cuMemPoolTrimTo(pool, 0));
    TRY(kValue, cuMemPoolGetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &threshold));
    TRY(kValue, cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &threshold));
    TRY(kValue, cuMemAllocFromPoolAsync(&address, 64, pool, stream));
    TRY(kValue, cuDeviceSetMemPool(gpu.device, pool));
  }
}

// A device is a number; every function that takes one checks it.
void Devices(const Gpu& gpu) {
  const Bad<CUdevice> bad[] = {{"ordinal that does not exist", 1000}, {"negative ordinal", -1}};
  for (const auto& [kind, device] : bad) {
    int number = 0, other = 0;
    size_t bytes = 0;
    unsigned flags = 0;
    char name[64];
    CUuuid uuid;
    CUcontext context;
    CUmemoryPool pool;
    CUdevprop properties;
    TRY(kDevice, cuDeviceGet(&number, device));
    TRY(kDevice, cuDeviceGetName(name, sizeof name, device));
    TRY(kDevice, cuDeviceGetUuid(&uuid, device));
    TRY(kDevice, cuDeviceTotalMem(&bytes, device));
    TRY(kDevice, cuDeviceGetAttribute(&number, CU_DEVICE_ATTRIBUTE_WARP_SIZE, device));
    TRY(kDevice, cuDeviceGetPCIBusId(name, sizeof name, device));
    TRY(kDevice, cuDeviceGetProperties(&properties, device));
    TRY(kDevice, cuDeviceComputeCapability(&number, &other, device));
    TRY(kDevice, cuDeviceCanAccessPeer(&number, gpu.device, device));
    TRY(kDevice, cuDeviceGetDefaultMemPool(&pool, device));
    TRY(kDevice, cuDeviceGetMemPool(&pool, device));
    TRY(kDevice, cuDevicePrimaryCtxRetain(&context, device));
    TRY(kDevice, cuDevicePrimaryCtxRelease(device));
    TRY(kDevice, cuDevicePrimaryCtxReset(device));
    TRY(kDevice, cuDevicePrimaryCtxGetState(device, &flags, &number));
    TRY(kDevice, cuDevicePrimaryCtxSetFlags(device, 0));
    TRY(kDevice, cuCtxCreate(&context, nullptr, 0, device));
  }
}

// Pinned memory is known by its address.
void PinnedMemory() {
  static char memory[8192];
  void* freed = nullptr;
  CHECK(cuMemHostAlloc(&freed, 4096, 0));
  CHECK(cuMemFreeHost(freed));
  const Bad<void*> bad[] = {{"never pinned", memory}, {"null", nullptr}, {"freed", freed}};
  for (const auto& [kind, address] : bad) {
    unsigned flags = 0;
    CUdeviceptr on_device;
    if (address != nullptr) TRY(kPinned, cuMemFreeHost(address));  // NULL is not documented
    TRY(kPinned, cuMemHostUnregister(address));
    TRY(kPinned, cuMemHostGetFlags(&flags, address));
    TRY(kPinned, cuMemHostGetDevicePointer(&on_device, address, 0));
  }
}

// Good handles in the wrong context.
void OtherContext(const Gpu& gpu, CUstream stream) {
  CUcontext other, popped;
  CUevent event;
  CHECK(cuCtxCreate(&other, nullptr, 0, gpu.device));
  CHECK(cuEventCreate(&event, CU_EVENT_DEFAULT));
  Kernels kernels;
  kernels.Load();
  CHECK(cuCtxPopCurrent(&popped));
  gpu.MakeCurrent();
  const char* kind = "foreign (of another context)";
  TRY(kHandle, cuEventRecord(event, stream));
  CHECK(cuStreamSynchronize(stream));
  CHECK(cuCtxDestroy(other));
}

}  // namespace

int main() {
  StartWatchdog();
  Gpu gpu;
  CUstream stream;
  CUevent event;
  CUdeviceptr memory;
  CHECK(cuStreamCreate(&stream, CU_STREAM_DEFAULT));
  CHECK(cuEventCreate(&event, CU_EVENT_DEFAULT));
  CHECK(cuMemAlloc(&memory, 4096));
  CHECK(cuMemsetD32(memory, 7, 1));
  Streams(gpu, memory + 1024, event);
  Events(stream);
  ModulesAndFunctions(stream);
  LibrariesAndKernels(gpu.device, stream);
  Contexts(gpu, stream);
  Pools(gpu, stream);
  OtherContext(gpu, stream);
  Devices(gpu);
  PinnedMemory();

  int value = 0;  // and everything is as it was
  CHECK(Launch(gpu.kernels.increment, 1, 1, stream, {&memory}));
  CHECK(cuMemcpyDtoHAsync(&value, memory, sizeof value, stream));
  CHECK(cuStreamSynchronize(stream));
  EXPECT(value == 8, "The kernel gives (%d) instead of (8).", value);
  printf("bad_handles: %d calls refused, ok\n", calls);
}
