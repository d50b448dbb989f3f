// What a fuzzer reads its input with. Reading beyond the end gives zeroes, so every input means
// something.
#pragma once

#include <fcntl.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <span>
#include <vector>

#include "common/log.h"

namespace penstock::fuzz {

class Input {
 public:
  Input(const uint8_t* data, size_t size)
      : bytes_(reinterpret_cast<const std::byte*>(data), size) {}

  bool empty() const { return bytes_.empty(); }
  size_t left() const { return bytes_.size(); }

  template <typename T>
  T Take() {
    T value{};
    const size_t bytes = std::min(sizeof value, bytes_.size());
    std::memcpy(static_cast<void*>(&value), bytes_.data(), bytes);
    bytes_ = bytes_.subspan(bytes);
    return value;
  }
  // A copy of exactly the bytes that are there, so that AddressSanitizer sees whoever reads on.
  std::vector<std::byte> TakeBytes(size_t most) {
    const size_t bytes = std::min(most, bytes_.size());
    std::vector<std::byte> copy(bytes_.begin(), bytes_.begin() + bytes);
    copy.shrink_to_fit();
    bytes_ = bytes_.subspan(bytes);
    return copy;
  }

 private:
  std::span<const std::byte> bytes_;
};

// What the code under test logs by the million says nothing here. Returns true, for a static.
inline bool Silence() {
  SetLogDescriptor(open("/dev/null", O_WRONLY | O_CLOEXEC));
  return true;
}

// A property that no input may break.
inline void Require(bool holds, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  if (holds) return;
  fprintf(stderr, "%s:%d: a property does not hold.\n", file, line);
  __builtin_trap();
}

}  // namespace penstock::fuzz
