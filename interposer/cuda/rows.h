// The shape of a copy: what its two sides share, and how either side lies in memory.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace penstock::interposer {

// `depth` slices of `height` rows of `width` bytes. A plain copy is one row.
struct Shape {
  uint64_t width = 0, height = 1, depth = 1;
  bool empty() const { return width == 0 || height == 0 || depth == 0; }
  uint64_t rows() const { return height * depth; }
};

// Rows begin `pitch` bytes apart, slices `slice_rows` rows.
struct HostRows {
  std::byte* first = nullptr;
  uint64_t pitch = 0;
  uint64_t slice_rows = 0;

  // Rows are numbered through all slices.
  std::byte* row(const Shape& shape, uint64_t index) const {
    return first + (index / shape.height * slice_rows + index % shape.height) * pitch;
  }
};
struct DeviceRows {
  CUdeviceptr first = 0;
  uint64_t pitch = 0;
  uint64_t slice_rows = 0;
};

// From the first byte of the first row to the last of the last, and all bytes in between that are
// copied; false if that is no number, or rows would overlap.
inline bool Extent(const Shape& shape, uint64_t pitch, uint64_t slice_rows, uint64_t* bytes,
                   uint64_t* total) {
  uint64_t slices = 0, rows = 0;
  if (shape.depth > 1 && (slice_rows < shape.height || pitch < shape.width)) return false;
  return (shape.height == 1 || pitch >= shape.width) &&
         !__builtin_mul_overflow(shape.height, shape.depth, &rows) &&
         !__builtin_mul_overflow(rows, shape.width, total) &&
         !__builtin_mul_overflow(shape.depth - 1, slice_rows, &slices) &&
         !__builtin_add_overflow(slices, shape.height - 1, &rows) &&
         !__builtin_mul_overflow(rows, pitch, bytes) &&
         !__builtin_add_overflow(*bytes, shape.width, bytes);
}

// The pitch of a single row says nothing, whatever the program put there. The frames say its width.
inline uint64_t PitchOf(const Shape& shape, uint64_t pitch) {
  return shape.height == 1 && shape.depth == 1 ? shape.width : pitch;
}

inline void Pack(std::byte* target, const HostRows& source, const Shape& shape) {
  for (uint64_t row = 0; row < shape.rows(); ++row) {
    memcpy(target + row * shape.width, source.row(shape, row), shape.width);
  }
}

inline void Unpack(const HostRows& target, const std::byte* source, const Shape& shape) {
  for (uint64_t row = 0; row < shape.rows(); ++row) {
    memcpy(target.row(shape, row), source + row * shape.width, shape.width);
  }
}

}  // namespace penstock::interposer
