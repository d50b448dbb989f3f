// Large copies between device and pageable memory, in one row and in many, with odd sizes: every
// byte comes back, and none beside them is touched.
#include <cuda.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

namespace {

void Check(CUresult result, const char* what) {
  if (result == CUDA_SUCCESS) return;
  printf("%s fails (%d)\n", what, static_cast<int>(result));
  _Exit(1);
}

void Compare(bool same, const char* what) {
  if (same) return;
  printf("%s brings other bytes\n", what);
  _Exit(1);
}

std::vector<uint8_t> Pattern(size_t bytes) {
  std::vector<uint8_t> pattern(bytes);
  uint32_t state = 12345;
  for (uint8_t& byte : pattern) byte = static_cast<uint8_t>((state = state * 1664525 + 7) >> 24);
  return pattern;
}

void OneRow(size_t bytes) {
  const std::vector<uint8_t> sent = Pattern(bytes);
  std::vector<uint8_t> got(bytes + 2, 0xee);
  CUdeviceptr device = 0;
  Check(cuMemAlloc(&device, bytes), "cuMemAlloc");
  Check(cuMemcpyHtoD(device, sent.data(), bytes), "cuMemcpyHtoD");
  Check(cuMemcpyDtoH(got.data() + 1, device, bytes), "cuMemcpyDtoH");
  Compare(memcmp(sent.data(), got.data() + 1, bytes) == 0, "A row");
  Compare(got.front() == 0xee && got.back() == 0xee, "A row's surroundings");
  Check(cuMemFree(device), "cuMemFree");
}

void Rows(size_t width, size_t height, size_t host_pitch) {
  const std::vector<uint8_t> sent = Pattern(host_pitch * height);
  std::vector<uint8_t> got(sent.size(), 0xee);
  CUdeviceptr device = 0;
  size_t pitch = 0;
  Check(cuMemAllocPitch(&device, &pitch, width, height, 4), "cuMemAllocPitch");
  CUDA_MEMCPY2D copy = {};
  copy.srcMemoryType = CU_MEMORYTYPE_HOST;
  copy.srcHost = sent.data();
  copy.srcPitch = host_pitch;
  copy.dstMemoryType = CU_MEMORYTYPE_DEVICE;
  copy.dstDevice = device;
  copy.dstPitch = pitch;
  copy.WidthInBytes = width;
  copy.Height = height;
  Check(cuMemcpy2D(&copy), "cuMemcpy2D");
  copy = {};
  copy.srcMemoryType = CU_MEMORYTYPE_DEVICE;
  copy.srcDevice = device;
  copy.srcPitch = pitch;
  copy.dstMemoryType = CU_MEMORYTYPE_HOST;
  copy.dstHost = got.data();
  copy.dstPitch = host_pitch;
  copy.WidthInBytes = width;
  copy.Height = height;
  Check(cuMemcpy2D(&copy), "cuMemcpy2D");
  for (size_t row = 0; row < height; ++row) {
    const size_t at = row * host_pitch;
    Compare(memcmp(&sent[at], &got[at], width) == 0, "A copy of rows");
    for (size_t i = at + width; i < at + host_pitch; ++i) Compare(got[i] == 0xee, "The gap");
  }
  Check(cuMemFree(device), "cuMemFree");
}

}  // namespace

int main() {
  CUdevice gpu = 0;
  CUcontext context = nullptr;
  Check(cuInit(0), "cuInit");
  Check(cuDeviceGet(&gpu, 0), "cuDeviceGet");
  Check(cuDevicePrimaryCtxRetain(&context, gpu), "cuDevicePrimaryCtxRetain");
  Check(cuCtxSetCurrent(context), "cuCtxSetCurrent");
  OneRow(9'000'001);
  Rows(3000, 1500, 3001);         // several rows to a piece
  Rows(4'500'003, 2, 4'500'010);  // several pieces to a row
  printf("large_copies: ok\n");
  return 0;
}
