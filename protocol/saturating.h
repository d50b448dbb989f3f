// Arithmetic on lengths that a program or a peer gave: an overflow becomes the largest number,
// which no bounds check lets pass, instead of a small one that slips through.
#pragma once

#include <cstdint>

namespace penstock {

constexpr uint64_t SaturatingAdd(uint64_t a, uint64_t b) {
  uint64_t sum = 0;
  return __builtin_add_overflow(a, b, &sum) ? UINT64_MAX : sum;
}

constexpr uint64_t SaturatingMultiply(uint64_t a, uint64_t b) {
  uint64_t product = 0;
  return __builtin_mul_overflow(a, b, &product) ? UINT64_MAX : product;
}

}  // namespace penstock
