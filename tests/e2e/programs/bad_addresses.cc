// Every function that takes a device pointer, called with addresses that lie in no allocation: host
// addresses as a process has them (also one that runs our kernels elsewhere), addresses just
// outside an allocation, and ranges that begin inside and end outside. CUDA_ERROR_INVALID_VALUE
// each time, nothing is read or written, and the next call is right.
#include <string>
#include <string_view>

#include "tests/e2e/programs/program.h"

namespace {

int calls = 0;

void Judge(const char* text, const char* kind, CUresult result, CUresult allowed_too) {
  EXPECT(result == CUDA_ERROR_INVALID_VALUE || (result == allowed_too && result != CUDA_SUCCESS),
         "%s with %s gives %s.", text, kind, ErrorName(result));
  const std::string_view whole(text);
  printf("%s, %s: %s\n", std::string(whole.substr(0, whole.find('('))).c_str(), kind,
         ErrorName(result));
  size_t free_bytes = 0, total = 0;
  CHECK(cuMemGetInfo(&free_bytes, &total));
  ++calls;
}
#define TRY(call) Judge(#call, kind, (call), CUDA_SUCCESS)
#define TRY_OR(other, call) Judge(#call, kind, (call), other)

CUDA_MEMCPY2D DeviceToDevice(CUdeviceptr target, CUdeviceptr source, size_t pitch, size_t width,
                             size_t height) {
  CUDA_MEMCPY2D copy = {};
  copy.srcMemoryType = copy.dstMemoryType = CU_MEMORYTYPE_DEVICE;
  copy.srcDevice = source;
  copy.dstDevice = target;
  copy.srcPitch = copy.dstPitch = pitch;
  copy.WidthInBytes = width;
  copy.Height = height;
  return copy;
}

// `bytes` from `bad` on are not all in one allocation; `good` has at least 8 KB. A multiple of 64.
void Ranges(const char* kind, CUdeviceptr bad, CUdeviceptr good, size_t bytes, CUstream stream) {
  std::vector<char> host(bytes, 'h');
  TRY(cuMemcpyHtoD(bad, host.data(), bytes));
  TRY(cuMemcpyHtoDAsync(bad, host.data(), bytes, stream));
  TRY(cuMemcpyDtoH(host.data(), bad, bytes));
  TRY(cuMemcpyDtoHAsync(host.data(), bad, bytes, stream));
  for (const char byte : host) EXPECT(byte == 'h', "A refused copy writes to the host.");
  TRY(cuMemcpyDtoD(bad, good, bytes));
  TRY(cuMemcpyDtoD(good, bad, bytes));
  TRY(cuMemcpyDtoDAsync(bad, good, bytes, stream));
  TRY(cuMemcpyDtoDAsync(good, bad, bytes, stream));
  TRY(cuMemsetD8(bad, 1, bytes));
  TRY(cuMemsetD16(bad, 1, bytes / 2));
  TRY(cuMemsetD32(bad, 1, bytes / 4));
  TRY(cuMemsetD8Async(bad, 1, bytes, stream));
  TRY(cuMemsetD16Async(bad, 1, bytes / 2, stream));
  TRY(cuMemsetD32Async(bad, 1, bytes / 4, stream));
  const size_t pitch = bytes / 4;
  TRY(cuMemsetD2D8(bad, pitch, 1, pitch, 4));
  TRY(cuMemsetD2D16(bad, pitch, 1, pitch / 2, 4));
  TRY(cuMemsetD2D32(bad, pitch, 1, pitch / 4, 4));
  TRY(cuMemsetD2D8Async(bad, pitch, 1, pitch, 4, stream));
  TRY(cuMemsetD2D16Async(bad, pitch, 1, pitch / 2, 4, stream));
  TRY(cuMemsetD2D32Async(bad, pitch, 1, pitch / 4, 4, stream));
  const CUDA_MEMCPY2D into = DeviceToDevice(bad, good, pitch, pitch, 4);
  const CUDA_MEMCPY2D from = DeviceToDevice(good, bad, pitch, pitch, 4);
  TRY(cuMemcpy2D(&into));
  TRY(cuMemcpy2D(&from));
  TRY(cuMemcpy2DUnaligned(&into));
  TRY(cuMemcpy2DAsync(&into, stream));
  TRY(cuMemcpy2DAsync(&from, stream));
  CUDA_MEMCPY2D up = into, down = from;
  up.srcMemoryType = CU_MEMORYTYPE_HOST;
  up.srcHost = host.data();
  down.dstMemoryType = CU_MEMORYTYPE_HOST;
  down.dstHost = host.data();
  TRY(cuMemcpy2D(&up));
  TRY(cuMemcpy2D(&down));
  TRY(cuMemcpy2DAsync(&up, stream));
  TRY(cuMemcpy2DAsync(&down, stream));
  CHECK(cuStreamSynchronize(stream));
}

// Addresses that no allocation contains, where a base or any interior address is wanted.
void Points(const char* kind, CUdeviceptr bad, CUstream stream) {
  CUdeviceptr base = 0;
  size_t size = 0;
  TRY(cuMemFree(bad));
  TRY(cuMemFreeAsync(bad, stream));
  TRY_OR(CUDA_ERROR_NOT_FOUND, cuMemGetAddressRange(&base, &size, bad));
  CHECK(cuStreamSynchronize(stream));
}

}  // namespace

int main() {
  StartWatchdog();
  constexpr size_t kBytes = 64 << 10;
  Gpu gpu;
  CUstream stream;
  CUdeviceptr memory, good, freed;
  CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  CHECK(cuMemAlloc(&memory, kBytes));
  CHECK(cuMemAlloc(&good, kBytes));
  CHECK(cuMemAlloc(&freed, kBytes));
  CHECK(cuMemFree(freed));
  CHECK(cuMemsetD8(memory, 0x33, kBytes));
  CHECK(cuMemsetD8(good, 0x44, kBytes));
  CHECK(cuCtxSynchronize());

  // Where a process has its stack, heap, libraries and text; this one's and a usual one's. A page
  // is readable at each of the first three.
  int on_stack = 0;
  std::vector<char> on_heap(64 << 10);
  const struct {
    const char* kind;
    CUdeviceptr address;
  } nowhere[] = {
      {"this program's stack", reinterpret_cast<CUdeviceptr>(&on_stack) & ~CUdeviceptr{63}},
      {"this program's heap",
       (reinterpret_cast<CUdeviceptr>(on_heap.data()) + 63) & ~CUdeviceptr{63}},
      {"this program's text", reinterpret_cast<CUdeviceptr>(&printf) & ~CUdeviceptr{63}},
      {"a usual stack", 0x7ffc'1234'5000},
      {"a usual library", 0x7fff'f7dd'0000},
      {"a usual program", 0x5555'5555'4000},
      {"a usual small program", 0x40'0000},
      {"the first page", 0x40},
      {"the kernel's half", 0xffff'8000'0000'0000},
      {"the last bytes of all", ~CUdeviceptr{0} - 63},
      {"the null pointer", 0},
  };
  for (const auto& [kind, address] : nowhere) {
    Ranges(kind, address, good, 1024, stream);
    if (address != 0) Points(kind, address, stream);  // freeing NULL is a matter of its own
  }
  Ranges("just after an allocation", memory + kBytes, good, 1024, stream);
  Ranges("just before an allocation", memory - 1024, good, 1024, stream);
  Ranges("across the end", memory + kBytes - 512, good, 1024, stream);
  Ranges("across the start", memory - 512, good, 1024, stream);
  Ranges("freed memory", freed, good, 1024, stream);
  {
    const char* kind = "freed memory";
    TRY(cuMemFree(freed));
    TRY(cuMemFreeAsync(freed, stream));
    kind = "an interior address";
    TRY(cuMemFree(memory + 256));
    kind = "a size that wraps around";
    char host[64] = {};
    TRY(cuMemcpyDtoDAsync(memory, good, ~size_t{0} - 8, stream));
    TRY(cuMemcpyHtoD(memory, host, ~size_t{0} - 8));
    TRY(cuMemsetD32(memory, 1, (~size_t{0} >> 2) + 5));
    TRY(cuMemsetD2D32(memory, ~size_t{0} / 2 + 64, 1, 16, 3));
  }

  std::vector<unsigned char> content(kBytes);
  CHECK(cuMemcpyDtoH(content.data(), memory, kBytes));
  for (const unsigned char byte : content)
    EXPECT(byte == 0x33, "A refused call writes (%u).", byte);
  CHECK(cuMemcpyDtoH(content.data(), good, kBytes));
  for (const unsigned char byte : content)
    EXPECT(byte == 0x44, "A refused call writes (%u).", byte);
  CHECK(cuMemFree(memory));
  CHECK(cuMemFree(good));
  printf("bad_addresses: %d calls refused, ok\n", calls);
}
