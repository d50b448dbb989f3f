// Copies between the device and pinned memory that is made, used a few times and freed again, in
// one row and in many: every byte arrives, none beside them is touched, and freeing right after a
// posted copy is safe. Then answers lines from stdin with "here", so that a test can look at what
// is left.
#include <cstdint>
#include <cstring>
#include <vector>

#include "tests/e2e/programs/driver_program.h"

namespace {

void Compare(bool same, const char* what) {
  if (same) return;
  printf("%s brings other bytes\n", what);
  exit(1);
}

void Fill(uint8_t* memory, size_t bytes, uint32_t seed) {
  for (size_t i = 0; i < bytes; ++i)
    memory[i] = static_cast<uint8_t>((i * 2654435761u + seed) >> 7);
}

uint8_t* Pinned(size_t bytes) {
  void* memory;
  CHECK(cuMemHostAlloc(&memory, bytes, 0));
  return static_cast<uint8_t*>(memory);
}

// Several times in the same memory, for what is done only once is not all there is to see.
void OneRow(CUstream stream, size_t bytes, size_t offset) {
  uint8_t* const source = Pinned(bytes + offset);
  uint8_t* const target = Pinned(bytes + offset + 1);
  CUdeviceptr device;
  CHECK(cuMemAlloc(&device, bytes));
  for (uint32_t turn = 0; turn < 4; ++turn) {
    Fill(source, bytes + offset, turn);
    memset(target, 0xee, bytes + offset + 1);
    CHECK(cuMemcpyHtoDAsync(device, source + offset, bytes, stream));
    CHECK(cuMemcpyDtoHAsync(target + offset, device, bytes, stream));
    CHECK(cuStreamSynchronize(stream));
    Compare(memcmp(source + offset, target + offset, bytes) == 0, "A row");
    Compare(target[bytes + offset] == 0xee && (offset == 0 || target[offset - 1] == 0xee),
            "A row's surroundings");
  }
  // The source goes while its copy may still be under way.
  Fill(source, bytes + offset, 77);
  CHECK(cuMemcpyHtoDAsync(device, source + offset, bytes, stream));
  CHECK(cuMemFreeHost(source));
  CHECK(cuMemcpyDtoH(target, device, bytes));
  std::vector<uint8_t> expected(bytes + offset);
  Fill(expected.data(), bytes + offset, 77);
  Compare(memcmp(target, expected.data() + offset, bytes) == 0, "A source that was freed");
  CHECK(cuMemFreeHost(target));
  CHECK(cuMemFree(device));
}

void Rows(CUstream stream, size_t width, size_t height, size_t host_pitch) {
  uint8_t* const source = Pinned(host_pitch * height);
  uint8_t* const target = Pinned(host_pitch * height);
  CUdeviceptr device;
  size_t pitch;
  CHECK(cuMemAllocPitch(&device, &pitch, width, height, 4));
  for (uint32_t turn = 0; turn < 3; ++turn) {
    Fill(source, host_pitch * height, turn);
    memset(target, 0xee, host_pitch * height);
    CUDA_MEMCPY2D copy = {};
    copy.srcMemoryType = CU_MEMORYTYPE_HOST;
    copy.srcHost = source;
    copy.srcPitch = host_pitch;
    copy.dstMemoryType = CU_MEMORYTYPE_DEVICE;
    copy.dstDevice = device;
    copy.dstPitch = pitch;
    copy.WidthInBytes = width;
    copy.Height = height;
    CHECK(cuMemcpy2DAsync(&copy, stream));
    copy = {};
    copy.srcMemoryType = CU_MEMORYTYPE_DEVICE;
    copy.srcDevice = device;
    copy.srcPitch = pitch;
    copy.dstMemoryType = CU_MEMORYTYPE_HOST;
    copy.dstHost = target;
    copy.dstPitch = host_pitch;
    copy.WidthInBytes = width;
    copy.Height = height;
    CHECK(cuMemcpy2DAsync(&copy, stream));
    CHECK(cuStreamSynchronize(stream));
    for (size_t row = 0; row < height; ++row) {
      const uint8_t* const at = target + row * host_pitch;
      Compare(memcmp(at, source + row * host_pitch, width) == 0, "Rows");
      for (size_t i = width; i < host_pitch; ++i) Compare(at[i] == 0xee, "What lies between rows");
    }
  }
  CHECK(cuMemFreeHost(source));
  CHECK(cuMemFreeHost(target));
  CHECK(cuMemFree(device));
}

}  // namespace

int main() {
  AddProgram program;
  CUstream stream;
  CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  for (const size_t bytes : {20'000, 65'536, 1'000'003, 9'000'001}) {
    OneRow(stream, bytes, 0);
    OneRow(stream, bytes, 4099);
  }
  for (int i = 0; i < 40; ++i) OneRow(stream, 30'000 + static_cast<size_t>(i), 1);
  Rows(stream, 1000, 300, 1000);
  Rows(stream, 1000, 300, 1501);
  Rows(stream, 70'001, 40, 200'000);
  puts("pinned_copies: ok");
  fflush(stdout);
  char line[64];
  while (fgets(line, sizeof line, stdin) != nullptr) {
    CHECK(cuCtxSynchronize());
    puts("here");
    fflush(stdout);
  }
  return 0;
}
