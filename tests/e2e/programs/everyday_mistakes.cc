// Mistakes that programs make every day, and survive: each gets its error, and the very next call
// is right. Also modules in several contexts, events between threads, and accounts of memory that
// add up.
#include <dlfcn.h>

#include <random>
#include <string>

#include "tests/e2e/programs/program.h"

namespace {

// What follows a mistake works.
void StillRight(Gpu& gpu) {
  unsigned value = 0;
  CUdeviceptr memory;
  CHECK(cuMemAlloc(&memory, 4));
  CHECK(cuMemsetD32(memory, 41, 1));
  CHECK(Launch(gpu.kernels.increment, 1, 1, nullptr, {&memory}));
  CHECK(cuMemcpyDtoH(&value, memory, 4));
  CHECK(cuMemFree(memory));
  EXPECT(value == 42, "After a mistake 41 + 1 is %u.", value);
}

void NullPointers(Gpu& gpu) {
  CUdeviceptr memory;
  CHECK(cuMemAlloc(&memory, 64));
  const auto refused = [&](CUresult result, const char* what) {
    if (result != CUDA_ERROR_INVALID_VALUE) Fail("%s gives %s.", what, ErrorName(result));
    StillRight(gpu);
  };
  refused(cuMemAlloc(nullptr, 4), "cuMemAlloc to nowhere");
  refused(cuDeviceGetCount(nullptr), "cuDeviceGetCount to nowhere");
  refused(cuDeviceGetAttribute(nullptr, CU_DEVICE_ATTRIBUTE_WARP_SIZE, 0),
          "An attribute to nowhere");
  refused(cuModuleGetFunction(nullptr, gpu.kernels.module, "Add"), "A function to nowhere");
  CUfunction function;
  refused(cuModuleGetFunction(&function, gpu.kernels.module, nullptr), "A function without a name");
  refused(cuStreamCreate(nullptr, 0), "A stream to nowhere");
  refused(cuEventCreate(nullptr, 0), "An event to nowhere");
  refused(cuMemcpyHtoD(memory, nullptr, 8), "A copy from nowhere");
  refused(cuMemcpyDtoH(nullptr, memory, 8), "A copy to nowhere");
  refused(cuMemHostAlloc(nullptr, 8, 0), "Pinned memory to nowhere");
  refused(cuLaunchKernel(gpu.kernels.add, 0, 1, 1, 1, 1, 1, 0, nullptr, nullptr, nullptr),
          "A launch of no blocks");
  refused(cuLaunchKernel(gpu.kernels.add, 1, 1, 1, 1, 1, 1, 0, nullptr, nullptr, nullptr),
          "A launch without parameters");
  CHECK(cuMemcpyHtoD(memory, nullptr, 0));  // of no bytes: fine
  CHECK(cuMemcpyDtoH(nullptr, memory, 0));
  CHECK(cuMemFree(memory));
  CHECK(cuMemFree(0));
}

void BrokenCode(Gpu& gpu) {
  char errors[4096] = "";
  CUjit_option names[] = {CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES,
                          CU_JIT_MAX_REGISTERS};
  void* values[] = {errors, reinterpret_cast<void*>(sizeof errors), reinterpret_cast<void*>(64)};
  CUmodule module;
  const char* broken =
      ".version 6.3\n.target sm_70\n.address_size 64\n.visible .entry k(.param .u65 a { ret; }\n";
  const CUresult result = cuModuleLoadDataEx(&module, broken, 3, names, values);
  EXPECT(result != CUDA_SUCCESS, "Broken PTX is loaded.");
  EXPECT(errors[0] != '\0', "Nothing is said about broken PTX.");
  EXPECT(strnlen(errors, sizeof errors) < sizeof errors, "What is said has no end.");
  StillRight(gpu);
  EXPECT(cuModuleLoadData(&module, "this is no code at all, of no kind") != CUDA_SUCCESS,
         "What is no code is loaded.");
  StillRight(gpu);
}

void OneModuleInTwoContexts(Gpu& gpu) {
  CUcontext other, popped;
  CHECK(cuCtxCreate(&other, nullptr, 0, gpu.device));
  Kernels kernels;
  kernels.Load();
  CUdeviceptr memory;
  unsigned value = 0;
  CHECK(cuMemAlloc(&memory, 4));
  CHECK(cuMemsetD32(memory, 6, 1));
  CHECK(Launch(kernels.increment, 1, 1, nullptr, {&memory}));
  CHECK(cuMemcpyDtoH(&value, memory, 4));
  EXPECT(value == 7, "In another context 6 + 1 is %u.", value);
  // The function of one context in the other.
  EXPECT_CODE(CUDA_ERROR_INVALID_HANDLE, Launch(gpu.kernels.nothing, 1, 1, nullptr, {}));
  CHECK(cuCtxPopCurrent(&popped));
  EXPECT(popped == other, "Another context is popped.");
  StillRight(gpu);
  CHECK(cuCtxDestroy(other));
  EXPECT_CODE(CUDA_ERROR_INVALID_CONTEXT, cuCtxDestroy(other));
  StillRight(gpu);
}

void EventsBetweenThreads() {
  CUcontext context;
  CHECK(cuCtxGetCurrent(&context));
  CUstream stream;
  CUevent begin, end;
  CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  CHECK(cuEventCreate(&begin, 0));
  CHECK(cuEventCreate(&end, 0));
  for (int round = 0; round < 20; ++round) {
    std::thread recorder([&] {
      CHECK(cuCtxSetCurrent(context));
      CHECK(cuEventRecord(begin, stream));
      CHECK(cuEventRecord(end, stream));
    });
    recorder.join();
    CHECK(cuEventSynchronize(end));
    float ms = -1;
    CHECK(cuEventElapsedTime(&ms, begin, end));
    EXPECT(ms >= 0 && ms < 60'000, "Between two events there are %f ms.", ms);
  }
  // Asked again and again, as programs that wait by asking do.
  for (int i = 0; i < 20'000; ++i) CHECK(cuEventQuery(end));
  CHECK(cuEventDestroy(begin));
  CHECK(cuEventDestroy(end));
  CHECK(cuStreamDestroy(stream));
}

void AccountsAddUp() {
  std::mt19937 random(11);
  std::vector<std::pair<CUdeviceptr, size_t>> blocks;
  size_t free_before, total;
  CHECK(cuMemGetInfo(&free_before, &total));
  for (int i = 0; i < 10'000; ++i) {
    if (blocks.size() > 100 || (!blocks.empty() && random() % 2 == 0)) {
      const size_t place = random() % blocks.size();
      CHECK(cuMemFree(blocks[place].first));
      blocks[place] = blocks.back();
      blocks.pop_back();
    } else {
      const size_t bytes = 1 + random() % (random() % 8 == 0 ? 1 << 20 : 5000);
      CUdeviceptr memory;
      CHECK(cuMemAlloc(&memory, bytes));
      blocks.emplace_back(memory, bytes);
    }
    if (i % 500 != 0) continue;
    size_t free_now, total_now, mine = 0;
    for (const auto& block : blocks) mine += block.second;
    CHECK(cuMemGetInfo(&free_now, &total_now));
    EXPECT(total_now == total, "The device has %zu bytes instead of %zu.", total_now, total);
    EXPECT(free_now <= total_now, "Of %zu bytes %zu are free.", total_now, free_now);
    EXPECT(total - free_now >= mine, "%zu bytes are in use, and %zu are taken.", mine,
           total - free_now);
  }
  for (const auto& block : blocks) CHECK(cuMemFree(block.first));
  CHECK(cuCtxSynchronize());
  size_t free_after;
  CHECK(cuMemGetInfo(&free_after, &total));
  EXPECT(free_after == free_before, "%zu bytes are free instead of %zu.", free_after, free_before);
}

// Names of earlier versions, asked for as programs do that look for them.
void OldNames() {
  void* const library = dlopen("libcuda.so.1", RTLD_NOW);
  EXPECT(library != nullptr, "libcuda.so.1 is not found: %s.", dlerror());
  for (const char* name :
       {"cuGraphAddKernelNode", "cuIpcOpenMemHandle", "cuCtxCreate", "cuCtxCreate_v4",
        "cuStreamWaitValue32", "cuMemAlloc", "cuCtxPushCurrent", "cuEventDestroy"}) {
    EXPECT(dlsym(library, name) != nullptr, "%s is not there.", name);
  }
  // One that can be tried without a context of its own kind: of version 2.0, with sizes of 32 bits.
  using Count = CUresult (*)(int*);
  const auto count = reinterpret_cast<Count>(dlsym(library, "cuDeviceGetCount"));
  int devices = 0;
  CHECK(count(&devices));
  EXPECT(devices > 0, "There are %d devices.", devices);
  dlclose(library);
}

}  // namespace

int main() {
  StartWatchdog();
  CUdeviceptr none;
  EXPECT_CODE(CUDA_ERROR_NOT_INITIALIZED, cuMemAlloc(&none, 4));
  Gpu gpu;
  NullPointers(gpu);
  BrokenCode(gpu);
  OneModuleInTwoContexts(gpu);
  EventsBetweenThreads();
  AccountsAddUp();
  OldNames();
  printf("everyday_mistakes: ok\n");
}
