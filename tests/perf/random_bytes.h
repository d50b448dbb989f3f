// Bytes that nothing on the way can compress.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace penstock::perf {

inline void FillRandom(std::byte* target, size_t bytes) {
  uint64_t state = 0x9E3779B97F4A7C15u;
  for (size_t i = 0; i + sizeof state <= bytes; i += sizeof state) {
    state ^= state << 13;  // Marsaglia's xorshift64
    state ^= state >> 7;
    state ^= state << 17;
    std::memcpy(target + i, &state, sizeof state);
  }
}

}  // namespace penstock::perf
