#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <set>
#include <string>
#include <thread>

#include "tests/simgpu/driver_fixture.h"

using namespace simgpu_test;

// Runs first: Catch2 keeps the order of a file.
TEST_CASE("nothing works before cuInit", "[simgpu][context]") {
  int count = 0;
  CHECK(cuDeviceGetCount(&count) == CUDA_ERROR_NOT_INITIALIZED);
  CUdeviceptr memory = 0;
  CHECK(cuMemAlloc(&memory, 1) == CUDA_ERROR_NOT_INITIALIZED);
  CUcontext context = nullptr;
  CHECK(cuCtxGetCurrent(&context) == CUDA_ERROR_NOT_INITIALIZED);
  CHECK(cuInit(1) == CUDA_ERROR_INVALID_VALUE);
  int version = 0;
  CHECK_CUDA(cuDriverGetVersion(&version));
  CHECK(version == 13000);
  const char* name = nullptr;
  CHECK_CUDA(cuGetErrorName(CUDA_ERROR_NOT_INITIALIZED, &name));
  CHECK(std::string(name) == "CUDA_ERROR_NOT_INITIALIZED");
  CHECK(cuGetErrorName(static_cast<CUresult>(12345), &name) == CUDA_ERROR_INVALID_VALUE);
}

TEST_CASE("devices are told apart and consistent", "[simgpu][device]") {
  Initialise();
  int count = 0;
  REQUIRE_CUDA(cuDeviceGetCount(&count));
  REQUIRE(count == 2);
  CUuuid uuids[2];
  for (int i = 0; i < 2; ++i) {
    CHECK_CUDA(cuDeviceGetUuid(&uuids[i], i));
    char text[32];
    CHECK_CUDA(cuDeviceGetPCIBusId(text, sizeof(text), i));
    CUdevice found = -1;
    CHECK_CUDA(cuDeviceGetByPCIBusId(&found, text));
    CHECK(found == i);
    size_t bytes = 0;
    CHECK_CUDA(cuDeviceTotalMem(&bytes, i));
    CHECK(bytes == kMemoryBytes);
    int value = 0;
    CHECK_CUDA(cuDeviceGetAttribute(&value, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, i));
    CHECK(value == 12);
    CHECK_CUDA(cuDeviceGetAttribute(&value, CU_DEVICE_ATTRIBUTE_WARP_SIZE, i));
    CHECK(value == 32);
  }
  CHECK(std::memcmp(&uuids[0], &uuids[1], sizeof(CUuuid)) != 0);
  CUdevice device = 0;
  CHECK(cuDeviceGet(&device, 2) == CUDA_ERROR_INVALID_DEVICE);
  int value = 0;
  CHECK(cuDeviceGetAttribute(&value, static_cast<CUdevice_attribute>(9999), 0) ==
        CUDA_ERROR_INVALID_VALUE);
}

TEST_CASE("each thread has its own stack of contexts", "[simgpu][context]") {
  Initialise();
  CUcontext current = nullptr;
  CHECK_CUDA(cuCtxGetCurrent(&current));
  CHECK(current == nullptr);
  CUdeviceptr memory = 0;
  CHECK(cuMemAlloc(&memory, 1) == CUDA_ERROR_INVALID_CONTEXT);
  CHECK(cuCtxPopCurrent(&current) == CUDA_ERROR_INVALID_CONTEXT);
  ScopedContext first(0);
  CHECK_CUDA(cuCtxGetCurrent(&current));
  CHECK(current == first.get());
  {
    ScopedContext second(1);
    CUdevice device = -1;
    CHECK_CUDA(cuCtxGetDevice(&device));
    CHECK(device == 1);
    CHECK_CUDA(cuCtxPushCurrent(first.get()));
    CHECK_CUDA(cuCtxGetDevice(&device));
    CHECK(device == 0);
    CHECK_CUDA(cuCtxPopCurrent(&current));
    CHECK(current == first.get());
    CHECK_CUDA(cuCtxGetCurrent(&current));
    CHECK(current == second.get());
    CUcontext elsewhere = first.get();
    std::thread([&] { cuCtxGetCurrent(&elsewhere); }).join();
    CHECK(elsewhere == nullptr);
  }
  CHECK_CUDA(cuCtxGetCurrent(&current));
  CHECK(current == first.get());
}

TEST_CASE("a destroyed context is refused where it is still current", "[simgpu][context]") {
  Initialise();
  CUcontext context = nullptr;
  REQUIRE_CUDA(cuCtxCreate_v4(&context, nullptr, 0, 0));
  CUresult result = CUDA_SUCCESS;
  CUstream stream = nullptr;
  REQUIRE_CUDA(cuStreamCreate(&stream, 0));
  REQUIRE_CUDA(cuCtxDestroy(context));
  std::thread([&] {
    CUdeviceptr memory = 0;
    result = cuCtxSetCurrent(context);
    if (result == CUDA_SUCCESS) result = cuMemAlloc(&memory, 1);
  }).join();
  CHECK(result == CUDA_ERROR_INVALID_CONTEXT);
  CHECK(cuStreamQuery(stream) == CUDA_ERROR_CONTEXT_IS_DESTROYED);
  CHECK(cuCtxDestroy(context) == CUDA_ERROR_INVALID_CONTEXT);
}

TEST_CASE("the primary context is counted and its handle stays", "[simgpu][context]") {
  Initialise();
  CUcontext first = nullptr;
  CUcontext second = nullptr;
  unsigned flags = 0;
  int active = 1;
  CHECK_CUDA(cuDevicePrimaryCtxGetState(0, &flags, &active));
  CHECK(active == 0);
  CHECK(cuDevicePrimaryCtxRelease(0) == CUDA_ERROR_INVALID_CONTEXT);
  CHECK_CUDA(cuDevicePrimaryCtxRetain(&first, 0));
  CHECK_CUDA(cuDevicePrimaryCtxRetain(&second, 0));
  CHECK(first == second);
  CHECK_CUDA(cuCtxSetCurrent(first));
  CUdeviceptr memory = 0;
  CHECK_CUDA(cuMemAlloc(&memory, 100));
  unsigned long long id = 0;
  CHECK_CUDA(cuCtxGetId(first, &id));
  CHECK_CUDA(cuDevicePrimaryCtxRelease(0));
  CHECK_CUDA(cuDevicePrimaryCtxGetState(0, &flags, &active));
  CHECK(active == 1);
  CHECK_CUDA(cuDevicePrimaryCtxRelease(0));
  CHECK_CUDA(cuDevicePrimaryCtxGetState(0, &flags, &active));
  CHECK(active == 0);
  CHECK(cuMemAlloc(&memory, 100) == CUDA_ERROR_CONTEXT_IS_DESTROYED);
  CHECK_CUDA(cuDevicePrimaryCtxRetain(&second, 0));
  CHECK(first == second);
  unsigned long long new_id = 0;
  CHECK_CUDA(cuCtxGetId(first, &new_id));
  CHECK(id != new_id);
  size_t free_bytes = 0;
  size_t total = 0;
  CHECK_CUDA(cuMemGetInfo(&free_bytes, &total));
  CHECK(free_bytes == total);
  CHECK(cuCtxDestroy(first) == CUDA_ERROR_INVALID_CONTEXT);
  CHECK_CUDA(cuDevicePrimaryCtxReset(0));
  CHECK_CUDA(cuCtxSetCurrent(nullptr));
}

TEST_CASE("memory of another device is copied without peer access", "[simgpu][context]") {
  ScopedContext first(0);
  CUdeviceptr source = 0;
  REQUIRE_CUDA(cuMemAlloc(&source, 100));
  CHECK_CUDA(cuMemsetD8(source, 0x5a, 100));
  CHECK_CUDA(cuCtxSynchronize());
  ScopedContext second(1);
  CUdeviceptr target = 0;
  REQUIRE_CUDA(cuMemAlloc(&target, 100));
  CHECK_CUDA(cuMemcpyPeer(target, second.get(), source, first.get(), 100));
  unsigned char byte = 0;
  CHECK_CUDA(cuMemcpyDtoH(&byte, target + 99, 1));
  CHECK(byte == 0x5a);
  int can = 0;
  CHECK_CUDA(cuDeviceCanAccessPeer(&can, 0, 1));
  CHECK(can == 1);
  CHECK_CUDA(cuCtxEnablePeerAccess(first.get(), 0));
  CHECK(cuCtxEnablePeerAccess(first.get(), 0) == CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED);
  CHECK_CUDA(cuCtxDisablePeerAccess(first.get()));
  CHECK(cuCtxDisablePeerAccess(first.get()) == CUDA_ERROR_PEER_ACCESS_NOT_ENABLED);
}

TEST_CASE("functions are found by name and version", "[simgpu][procaddress]") {
  Initialise();
  void* first = nullptr;
  void* second = nullptr;
  CUdriverProcAddressQueryResult status = CU_GET_PROC_ADDRESS_SUCCESS;
  CHECK_CUDA(cuGetProcAddress("cuMemAlloc", &first, 13000, 0, &status));
  CHECK(first == reinterpret_cast<void*>(&cuMemAlloc_v2));
  CHECK_CUDA(cuGetProcAddress("cuMemAlloc", &second, 2000, 0, &status));
  CHECK(second != nullptr);
  CHECK(first != second);
  CHECK_CUDA(cuGetProcAddress("cuLaunchKernel", &first, 13000, 0, &status));
  CHECK_CUDA(cuGetProcAddress("cuLaunchKernel", &second, 13000,
                              CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM, &status));
  CHECK(first != second);
  CHECK(cuGetProcAddress("cuLaunchKernel", &first, 3000, 0, &status) == CUDA_ERROR_NOT_FOUND);
  CHECK(first == nullptr);
  CHECK(status == CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT);
  CHECK(cuGetProcAddress("cuNoSuchThing", &first, 13000, 0, &status) == CUDA_ERROR_NOT_FOUND);
  CHECK(status == CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND);
}

TEST_CASE("what is not implemented says so", "[simgpu][procaddress]") {
  ScopedContext context;
  CUexternalMemory memory = nullptr;
  CHECK(cuImportExternalMemory(&memory, nullptr) == CUDA_ERROR_NOT_SUPPORTED);
}

TEST_CASE("a forked child is told to initialise anew", "[simgpu][context]") {
  Initialise();
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    int count = 0;
    _exit(cuDeviceGetCount(&count) == CUDA_ERROR_NOT_INITIALIZED ? 0 : 1);
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
}
