// Memsets: 8, 16 and 32 bit patterns over one or two dimensions. Synchronous ones too return before
// the device is done, except on pinned host memory.
#include <algorithm>
#include <cstring>

#include "simgpu/driver/entry.h"

namespace simgpu {
namespace {

template <typename T>
void Fill(uint64_t address, size_t pitch, T value, size_t width, size_t height) {
  for (size_t row = 0; row < height; ++row) {
    T* const begin = reinterpret_cast<T*>(address + row * pitch);
    std::fill(begin, begin + width, value);
  }
}

template <typename T>
CUresult Set(CUstream handle, bool asynchronous, CUdeviceptr address, size_t pitch, T value,
             size_t width, size_t height) {
  std::shared_ptr<Stream> stream;
  std::shared_ptr<Context> context;
  SIMGPU_RETURN_IF_ERROR(ResolveStream(handle, &stream, &context));
  if (width == 0 || height == 0) return CUDA_SUCCESS;
  size_t row = 0;
  size_t span = 0;
  if (address % sizeof(T) != 0 || __builtin_mul_overflow(width, sizeof(T), &row) ||
      (height > 1 && (pitch < row || pitch % sizeof(T) != 0)) ||
      __builtin_mul_overflow(pitch, height - 1, &span) ||
      __builtin_add_overflow(span, row, &span)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const auto found = state()->memory.FindRange(address, span);
  if (found == nullptr) return CUDA_ERROR_INVALID_VALUE;
  Context* const owner = context.get();
  const Point point = context->Enqueue(stream, [=] {
    if (state()->memory.FindRange(address, span) != nullptr) {
      Fill<T>(address, pitch, value, width, height);
    } else {
      owner->Poison(CUDA_ERROR_ILLEGAL_ADDRESS);
    }
  });
  const bool wait = !asynchronous && found->host_accessible();
  return wait ? context->WaitFor({point}) : CUDA_SUCCESS;
}

}  // namespace
}  // namespace simgpu

using namespace simgpu;

SIMGPU_EXPORT cuMemsetD8_v2(CUdeviceptr address, unsigned char value, size_t count) {
  return Set<uint8_t>(nullptr, false, address, 0, value, count, 1);
}
SIMGPU_EXPORT cuMemsetD16_v2(CUdeviceptr address, unsigned short value, size_t count) {
  return Set<uint16_t>(nullptr, false, address, 0, value, count, 1);
}
SIMGPU_EXPORT cuMemsetD32_v2(CUdeviceptr address, unsigned int value, size_t count) {
  return Set<uint32_t>(nullptr, false, address, 0, value, count, 1);
}
SIMGPU_EXPORT cuMemsetD8Async(CUdeviceptr address, unsigned char value, size_t count,
                              CUstream stream) {
  return Set<uint8_t>(stream, true, address, 0, value, count, 1);
}
SIMGPU_EXPORT cuMemsetD16Async(CUdeviceptr address, unsigned short value, size_t count,
                               CUstream stream) {
  return Set<uint16_t>(stream, true, address, 0, value, count, 1);
}
SIMGPU_EXPORT cuMemsetD32Async(CUdeviceptr address, unsigned int value, size_t count,
                               CUstream stream) {
  return Set<uint32_t>(stream, true, address, 0, value, count, 1);
}
SIMGPU_EXPORT cuMemsetD2D8_v2(CUdeviceptr address, size_t pitch, unsigned char value, size_t width,
                              size_t height) {
  return Set<uint8_t>(nullptr, false, address, pitch, value, width, height);
}
SIMGPU_EXPORT cuMemsetD2D16_v2(CUdeviceptr address, size_t pitch, unsigned short value,
                               size_t width, size_t height) {
  return Set<uint16_t>(nullptr, false, address, pitch, value, width, height);
}
SIMGPU_EXPORT cuMemsetD2D32_v2(CUdeviceptr address, size_t pitch, unsigned int value, size_t width,
                               size_t height) {
  return Set<uint32_t>(nullptr, false, address, pitch, value, width, height);
}
SIMGPU_EXPORT cuMemsetD2D8Async(CUdeviceptr address, size_t pitch, unsigned char value,
                                size_t width, size_t height, CUstream stream) {
  return Set<uint8_t>(stream, true, address, pitch, value, width, height);
}
SIMGPU_EXPORT cuMemsetD2D16Async(CUdeviceptr address, size_t pitch, unsigned short value,
                                 size_t width, size_t height, CUstream stream) {
  return Set<uint16_t>(stream, true, address, pitch, value, width, height);
}
SIMGPU_EXPORT cuMemsetD2D32Async(CUdeviceptr address, size_t pitch, unsigned int value,
                                 size_t width, size_t height, CUstream stream) {
  return Set<uint32_t>(stream, true, address, pitch, value, width, height);
}
