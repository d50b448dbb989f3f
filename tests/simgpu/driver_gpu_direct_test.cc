// Device memory that other devices reach: exported as a file, here mapped by the test.
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>

#include "tests/simgpu/driver_fixture.h"

using namespace simgpu_test;

namespace {

// Before cuInit, which reads it once.
struct EnvironmentFirst {
  EnvironmentFirst() { setenv("SIMGPU_GPUDIRECT", "none", 1); }
} environment_first;

int Attribute(CUdevice_attribute attribute) {
  int value = -1;
  REQUIRE_CUDA(cuDeviceGetAttribute(&value, attribute, 0));
  return value;
}

}  // namespace

TEST_CASE("an exported range is the memory itself, from its first byte on", "[simgpu][gpudirect]") {
  ScopedContext context;
  CHECK(Attribute(CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED) == 1);
  CHECK(Attribute(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED) == 1);
  CHECK(Attribute(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING) ==
        CU_GPU_DIRECT_RDMA_WRITES_ORDERING_NONE);
  constexpr size_t kBytes = 100'001, kRounded = 102'400;
  CUdeviceptr memory = 0;
  REQUIRE_CUDA(cuMemAlloc(&memory, kBytes));
  REQUIRE_CUDA(cuMemsetD8(memory, 0x5a, kBytes));
  REQUIRE_CUDA(cuCtxSynchronize());
  int file = -1;
  REQUIRE_CUDA(cuMemGetHandleForAddressRange(&file, memory, kRounded,
                                             CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0));
  void* mapped = mmap(nullptr, kRounded, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  REQUIRE(mapped != MAP_FAILED);
  auto* bytes = static_cast<unsigned char*>(mapped);
  CHECK(bytes[0] == 0x5a);
  CHECK(bytes[kBytes - 1] == 0x5a);
  bytes[70'000] = 7;
  CHECK_CUDA(cuFlushGPUDirectRDMAWrites(CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX,
                                        CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER));
  unsigned char read = 0;
  CHECK_CUDA(cuMemcpyDtoH(&read, memory + 70'000, 1));
  CHECK(read == 7);
  // Freed, the memory stays with who has mapped it, and is nobody else's.
  CHECK_CUDA(cuMemFree(memory));
  CHECK(bytes[70'000] == 7);
  munmap(mapped, kRounded);
  close(file);
}

TEST_CASE("what has no whole pages of its own is not exported", "[simgpu][gpudirect]") {
  ScopedContext context;
  CUdeviceptr large = 0, small = 0;
  REQUIRE_CUDA(cuMemAlloc(&large, 1 << 20));
  REQUIRE_CUDA(cuMemAlloc(&small, 4096));
  int file = -1;
  const auto ask = [&](CUdeviceptr begin, size_t bytes) {
    return cuMemGetHandleForAddressRange(&file, begin, bytes, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD,
                                         0);
  };
  CHECK(ask(large + 512, 4096) == CUDA_ERROR_INVALID_VALUE);
  CHECK(ask(large, 4095) == CUDA_ERROR_INVALID_VALUE);
  CHECK(ask(large, (1 << 20) + 4096) == CUDA_ERROR_INVALID_VALUE);
  CHECK(ask(large, 0) == CUDA_ERROR_INVALID_VALUE);
  CHECK(ask(small / 4096 * 4096, 8192) == CUDA_ERROR_INVALID_VALUE);
  CHECK(file == -1);
  CHECK_CUDA(cuMemFree(large));
  CHECK_CUDA(cuMemFree(small));
}
