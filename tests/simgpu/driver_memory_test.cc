#include <cstring>
#include <numeric>
#include <vector>

#include "tests/simgpu/driver_fixture.h"

using namespace simgpu_test;

namespace {

std::vector<unsigned char> Pattern(size_t bytes, unsigned seed = 1) {
  std::vector<unsigned char> data(bytes);
  for (size_t i = 0; i < bytes; ++i) data[i] = static_cast<unsigned char>(i * 7 + seed);
  return data;
}

}  // namespace

TEST_CASE("what is copied up comes back, through every kind of copy", "[simgpu][memory]") {
  ScopedContext context;
  const size_t bytes = 300'000;
  const auto source = Pattern(bytes);
  CUdeviceptr first = 0;
  CUdeviceptr second = 0;
  REQUIRE_CUDA(cuMemAlloc(&first, bytes));
  REQUIRE_CUDA(cuMemAlloc(&second, bytes));
  std::vector<unsigned char> result(bytes);

  CHECK_CUDA(cuMemcpyHtoD(first, source.data(), bytes));
  CHECK_CUDA(cuMemcpyDtoD(second, first, bytes));
  CHECK_CUDA(cuMemcpyDtoH(result.data(), second, bytes));
  CHECK(result == source);

  CUstream stream = nullptr;
  REQUIRE_CUDA(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  const auto other = Pattern(bytes, 9);
  CHECK_CUDA(cuMemcpyHtoDAsync(first, other.data(), bytes, stream));
  CHECK_CUDA(cuMemcpyDtoDAsync(second, first, bytes, stream));
  CHECK_CUDA(cuMemcpyDtoHAsync(result.data(), second, bytes, stream));
  CHECK_CUDA(cuStreamSynchronize(stream));
  CHECK(result == other);

  CHECK_CUDA(cuMemcpy(first, reinterpret_cast<CUdeviceptr>(source.data()), bytes));
  CHECK_CUDA(cuMemcpyAsync(second, first, bytes, stream));
  CHECK_CUDA(cuMemcpyAsync(reinterpret_cast<CUdeviceptr>(result.data()), second, bytes, stream));
  CHECK(result == source);
  CHECK_CUDA(cuStreamDestroy(stream));
  CHECK_CUDA(cuMemFree(first));
  CHECK_CUDA(cuMemFree(second));
}

TEST_CASE("an asynchronous copy reads a small pageable source before it returns",
          "[simgpu][memory]") {
  ScopedContext context;
  PinnedWord gate;
  CUstream stream = nullptr;
  REQUIRE_CUDA(cuStreamCreate(&stream, 0));
  CUdeviceptr memory = 0;
  REQUIRE_CUDA(cuMemAlloc(&memory, 4096));
  auto source = Pattern(4096);
  const auto original = source;
  CHECK_CUDA(cuStreamWaitValue32(stream, gate.device(), 1, CU_STREAM_WAIT_VALUE_EQ));
  CHECK_CUDA(cuMemcpyHtoDAsync(memory, source.data(), 4096, stream));
  std::fill(source.begin(), source.end(), 0);
  gate.Write(1);
  CHECK_CUDA(cuMemcpyDtoHAsync(source.data(), memory, 4096, stream));
  CHECK(source == original);
  CHECK_CUDA(cuStreamDestroy(stream));
}

TEST_CASE("an asynchronous copy from pinned memory reads it when the stream gets there",
          "[simgpu][memory]") {
  ScopedContext context;
  PinnedWord gate;
  PinnedWord source;
  CUstream stream = nullptr;
  REQUIRE_CUDA(cuStreamCreate(&stream, 0));
  CUdeviceptr memory = 0;
  REQUIRE_CUDA(cuMemAlloc(&memory, 4));
  source.Write(1);
  CHECK_CUDA(cuStreamWaitValue32(stream, gate.device(), 1, CU_STREAM_WAIT_VALUE_EQ));
  CHECK_CUDA(cuMemcpyHtoDAsync(memory, reinterpret_cast<void*>(source.device()), 4, stream));
  source.Write(2);
  gate.Write(1);
  CHECK_CUDA(cuStreamSynchronize(stream));
  uint32_t value = 0;
  CHECK_CUDA(cuMemcpyDtoH(&value, memory, 4));
  CHECK(value == 2);
  CHECK_CUDA(cuStreamDestroy(stream));
}

TEST_CASE("two- and three-dimensional copies move the box and nothing else", "[simgpu][memory]") {
  ScopedContext context;
  CUdeviceptr memory = 0;
  size_t pitch = 0;
  REQUIRE_CUDA(cuMemAllocPitch(&memory, &pitch, 100, 40, 4));
  CHECK(pitch >= 100);
  CHECK(pitch % 512 == 0);
  CHECK_CUDA(cuMemsetD8(memory, 0xee, pitch * 40));
  const auto source = Pattern(60 * 30);

  CUDA_MEMCPY2D copy = {};
  copy.srcMemoryType = CU_MEMORYTYPE_HOST;
  copy.srcHost = source.data();
  copy.srcPitch = 60;
  copy.dstMemoryType = CU_MEMORYTYPE_DEVICE;
  copy.dstDevice = memory;
  copy.dstPitch = pitch;
  copy.dstXInBytes = 10;
  copy.dstY = 5;
  copy.WidthInBytes = 60;
  copy.Height = 30;
  CHECK_CUDA(cuMemcpy2D(&copy));
  std::vector<unsigned char> all(pitch * 40);
  CHECK_CUDA(cuMemcpyDtoH(all.data(), memory, all.size()));
  size_t wrong = 0;
  for (size_t y = 0; y < 40; ++y) {
    for (size_t x = 0; x < pitch; ++x) {
      const bool inside = x >= 10 && x < 70 && y >= 5 && y < 35;
      const unsigned char expected = inside ? source[(y - 5) * 60 + x - 10] : 0xee;
      if (all[y * pitch + x] != expected) ++wrong;
    }
  }
  CHECK(wrong == 0);

  CUDA_MEMCPY3D box = {};
  box.srcMemoryType = CU_MEMORYTYPE_DEVICE;
  box.srcDevice = memory;
  box.srcPitch = pitch;
  box.srcHeight = 20;  // two slices of twenty rows
  box.srcXInBytes = 10;
  box.srcY = 5;
  std::vector<unsigned char> slices(2 * 10 * 60);
  box.dstMemoryType = CU_MEMORYTYPE_HOST;
  box.dstHost = slices.data();
  box.dstPitch = 60;
  box.dstHeight = 10;
  box.WidthInBytes = 60;
  box.Height = 10;
  box.Depth = 2;
  CHECK_CUDA(cuMemcpy3D(&box));
  CHECK(std::equal(slices.begin(), slices.begin() + 600, source.begin()));
  CHECK(std::equal(slices.begin() + 600, slices.end(), source.begin() + 20 * 60));

  copy.dstY = 20;  // rows 20 to 49 of 40
  CHECK(cuMemcpy2D(&copy) == CUDA_ERROR_INVALID_VALUE);
  copy.dstY = 0;
  copy.srcPitch = 59;
  CHECK(cuMemcpy2D(&copy) == CUDA_ERROR_INVALID_VALUE);
}

TEST_CASE("memsets write their pattern and respect the pitch", "[simgpu][memory]") {
  ScopedContext context;
  CUdeviceptr memory = 0;
  REQUIRE_CUDA(cuMemAlloc(&memory, 4096));
  std::vector<uint32_t> words(1024);
  CHECK_CUDA(cuMemsetD32(memory, 0x01020304, 1024));
  CHECK_CUDA(cuMemsetD16(memory, 0xabcd, 3));
  CHECK_CUDA(cuMemsetD8(memory + 8, 0x55, 1));
  CHECK_CUDA(cuMemsetD2D32(memory + 1024, 512, 7, 2, 3));
  CHECK_CUDA(cuMemcpyDtoH(words.data(), memory, 4096));
  CHECK(words[0] == 0xabcdabcd);
  CHECK(words[1] == 0x0102abcd);
  CHECK(words[2] == 0x01020355);
  CHECK(words[3] == 0x01020304);
  for (size_t row = 0; row < 3; ++row) {
    CHECK(words[256 + row * 128] == 7);
    CHECK(words[257 + row * 128] == 7);
    CHECK(words[258 + row * 128] == 0x01020304);
  }
  CHECK(words[256 + 3 * 128] == 0x01020304);
  CHECK(cuMemsetD32(memory + 2, 0, 1) == CUDA_ERROR_INVALID_VALUE);
  CHECK(cuMemsetD8(memory, 0, 4097) == CUDA_ERROR_INVALID_VALUE);
}

TEST_CASE("a device pointer outside every live allocation is refused", "[simgpu][memory]") {
  ScopedContext context;
  CUdeviceptr memory = 0;
  CUdeviceptr neighbour = 0;
  REQUIRE_CUDA(cuMemAlloc(&memory, 1000));
  REQUIRE_CUDA(cuMemAlloc(&neighbour, 1000));
  unsigned char byte = 0;
  CHECK_CUDA(cuMemcpyDtoH(&byte, memory + 999, 1));
  CHECK(cuMemcpyDtoH(&byte, memory + 1000, 1) == CUDA_ERROR_INVALID_VALUE);
  CHECK(cuMemcpyDtoH(&byte, memory - 1, 1) == CUDA_ERROR_INVALID_VALUE);
  CHECK(cuMemcpyDtoH(&byte, 4096, 1) == CUDA_ERROR_INVALID_VALUE);
  CHECK(cuMemcpyDtoH(nullptr, memory, 1) == CUDA_ERROR_INVALID_VALUE);
  CHECK(cuMemcpyDtoD(memory, neighbour, 1001) == CUDA_ERROR_INVALID_VALUE);
  CHECK(cuMemFree(memory + 4) == CUDA_ERROR_INVALID_VALUE);
  CHECK_CUDA(cuMemFree(memory));
  CHECK(cuMemFree(memory) == CUDA_ERROR_INVALID_VALUE);
  CHECK(cuMemcpyDtoH(&byte, memory, 1) == CUDA_ERROR_INVALID_VALUE);
  CHECK_CUDA(cuMemcpyDtoH(&byte, neighbour, 1));
  CHECK_CUDA(cuMemFree(0));
}

TEST_CASE("the memory limit is exact and a failed allocation changes nothing", "[simgpu][memory]") {
  ScopedContext context;
  size_t free_bytes = 0;
  size_t total = 0;
  REQUIRE_CUDA(cuMemGetInfo(&free_bytes, &total));
  CHECK(total == kMemoryBytes);
  CHECK(free_bytes == kMemoryBytes);
  CUdeviceptr half = 0;
  CUdeviceptr rest = 0;
  CUdeviceptr more = 0;
  REQUIRE_CUDA(cuMemAlloc(&half, kMemoryBytes / 2));
  CHECK(cuMemAlloc(&more, kMemoryBytes / 2 + 1) == CUDA_ERROR_OUT_OF_MEMORY);
  REQUIRE_CUDA(cuMemGetInfo(&free_bytes, &total));
  CHECK(free_bytes == kMemoryBytes / 2);
  CHECK_CUDA(cuMemAlloc(&rest, kMemoryBytes / 2));
  CHECK(cuMemAlloc(&more, 1) == CUDA_ERROR_OUT_OF_MEMORY);
  CHECK_CUDA(cuMemFree(half));
  CHECK_CUDA(cuMemAlloc(&more, 1));
  CHECK(cuMemAlloc(&more, 0) == CUDA_ERROR_INVALID_VALUE);
  REQUIRE_CUDA(cuMemGetInfo(&free_bytes, &total));
  CHECK(free_bytes == kMemoryBytes / 2 - 512);
}

TEST_CASE("the numbers add up after ten thousand allocations and frees", "[simgpu][memory]") {
  ScopedContext context;
  struct Block {
    CUdeviceptr address;
    size_t bytes;
    unsigned char mark;
  };
  std::vector<Block> blocks;
  uint32_t random = 1;
  auto next = [&](uint32_t below) {
    random = random * 1664525u + 1013904223u;
    return (random >> 8) % below;
  };
  size_t expected = 0;
  size_t wrong = 0;
  for (int step = 0; step < 10'000; ++step) {
    if (blocks.size() < 200 && next(2) == 0) {
      Block block = {0, 1 + next(1u << next(18)), static_cast<unsigned char>(step)};
      if (cuMemAlloc(&block.address, block.bytes) != CUDA_SUCCESS) ++wrong;
      if (cuMemsetD8(block.address + block.bytes - 1, block.mark, 1) != CUDA_SUCCESS) ++wrong;
      expected += (block.bytes + 511) / 512 * 512;
      blocks.push_back(block);
    } else if (!blocks.empty()) {
      const size_t index = next(static_cast<uint32_t>(blocks.size()));
      const Block block = blocks[index];
      unsigned char last = 0;
      if (cuMemcpyDtoH(&last, block.address + block.bytes - 1, 1) != CUDA_SUCCESS) ++wrong;
      if (last != block.mark) ++wrong;
      if (cuMemFree(block.address) != CUDA_SUCCESS) ++wrong;
      expected -= (block.bytes + 511) / 512 * 512;
      blocks[index] = blocks.back();
      blocks.pop_back();
    }
    size_t free_bytes = 0;
    size_t total = 0;
    if (cuMemGetInfo(&free_bytes, &total) != CUDA_SUCCESS) ++wrong;
    if (total - free_bytes != expected) ++wrong;
  }
  CHECK(wrong == 0);
}

TEST_CASE("a destroyed context gives its memory back", "[simgpu][memory]") {
  {
    ScopedContext context;
    CUdeviceptr memory = 0;
    REQUIRE_CUDA(cuMemAlloc(&memory, kMemoryBytes));
  }
  ScopedContext context;
  CUdeviceptr memory = 0;
  CHECK_CUDA(cuMemAlloc(&memory, kMemoryBytes));
}

TEST_CASE("stream-ordered memory is freed when the stream reaches it", "[simgpu][memory]") {
  ScopedContext context;
  PinnedWord gate;
  CUstream stream = nullptr;
  REQUIRE_CUDA(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  CUdeviceptr memory = 0;
  REQUIRE_CUDA(cuMemAllocAsync(&memory, 1 << 20, stream));
  CHECK_CUDA(cuStreamWaitValue32(stream, gate.device(), 1, CU_STREAM_WAIT_VALUE_EQ));
  CHECK_CUDA(cuMemFreeAsync(memory, stream));
  CHECK(cuMemFreeAsync(memory, stream) == CUDA_ERROR_INVALID_VALUE);
  size_t free_bytes = 0;
  size_t total = 0;
  CHECK_CUDA(cuMemGetInfo(&free_bytes, &total));
  CHECK(free_bytes == kMemoryBytes - (1 << 20));
  gate.Write(1);
  CHECK_CUDA(cuStreamSynchronize(stream));
  CHECK_CUDA(cuMemGetInfo(&free_bytes, &total));
  CHECK(free_bytes == kMemoryBytes);
  CUmemoryPool pool = nullptr;
  CHECK_CUDA(cuDeviceGetDefaultMemPool(&pool, 0));
  uint64_t used = 1;
  CHECK_CUDA(cuMemPoolGetAttribute(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, &used));
  CHECK(used == 0);
  CHECK_CUDA(cuStreamDestroy(stream));
}

TEST_CASE("host memory is known by its address", "[simgpu][memory]") {
  ScopedContext context;
  void* pinned = nullptr;
  REQUIRE_CUDA(cuMemHostAlloc(&pinned, 10'000, CU_MEMHOSTALLOC_PORTABLE));
  CUdeviceptr device = 0;
  CHECK_CUDA(cuMemHostGetDevicePointer(&device, static_cast<char*>(pinned) + 5, 0));
  CHECK(device == reinterpret_cast<CUdeviceptr>(pinned) + 5);
  unsigned flags = 0;
  CHECK_CUDA(cuMemHostGetFlags(&flags, pinned));
  CHECK((flags & CU_MEMHOSTALLOC_PORTABLE) != 0);

  std::vector<char> mine(8192);
  CHECK_CUDA(cuMemHostRegister(mine.data(), mine.size(), 0));
  CHECK(cuMemHostRegister(mine.data(), 100, 0) == CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
  CHECK_CUDA(cuMemHostGetDevicePointer(&device, mine.data(), 0));
  CHECK_CUDA(cuMemHostUnregister(mine.data()));
  CHECK(cuMemHostUnregister(mine.data()) == CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
  CHECK(cuMemHostGetDevicePointer(&device, mine.data(), 0) == CUDA_ERROR_INVALID_VALUE);
  CHECK(cuMemFreeHost(mine.data()) == CUDA_ERROR_INVALID_VALUE);
  CHECK(cuMemHostRegister(reinterpret_cast<void*>(4096), 4096, 0) == CUDA_ERROR_INVALID_VALUE);
  CHECK_CUDA(cuMemFreeHost(pinned));
}

TEST_CASE("pointer attributes tell what a pointer is", "[simgpu][memory]") {
  ScopedContext context(1);
  CUdeviceptr memory = 0;
  REQUIRE_CUDA(cuMemAlloc(&memory, 5000));
  unsigned type = 0;
  CHECK_CUDA(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, memory + 10));
  CHECK(type == CU_MEMORYTYPE_DEVICE);
  int ordinal = -1;
  CHECK_CUDA(cuPointerGetAttribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, memory));
  CHECK(ordinal == 1);
  CUcontext owner = nullptr;
  CHECK_CUDA(cuPointerGetAttribute(&owner, CU_POINTER_ATTRIBUTE_CONTEXT, memory));
  CHECK(owner == context.get());
  CUdeviceptr base = 0;
  size_t bytes = 0;
  CHECK_CUDA(cuMemGetAddressRange(&base, &bytes, memory + 4999));
  CHECK(base == memory);
  CHECK(bytes == 5000);
  unsigned long long first_id = 0;
  unsigned long long second_id = 0;
  CHECK_CUDA(cuPointerGetAttribute(&first_id, CU_POINTER_ATTRIBUTE_BUFFER_ID, memory));
  CHECK_CUDA(cuMemFree(memory));
  REQUIRE_CUDA(cuMemAlloc(&memory, 5000));
  CHECK_CUDA(cuPointerGetAttribute(&second_id, CU_POINTER_ATTRIBUTE_BUFFER_ID, memory));
  CHECK(first_id != second_id);

  int local = 0;
  const auto unknown = reinterpret_cast<CUdeviceptr>(&local);
  CHECK(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, unknown) ==
        CUDA_ERROR_INVALID_VALUE);
  CUpointer_attribute wanted[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
                                  CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL};
  void* data[] = {&type, &ordinal};
  CHECK_CUDA(cuPointerGetAttributes(2, wanted, data, unknown));
  CHECK(type == 0);
  CHECK(ordinal == -2);
}
