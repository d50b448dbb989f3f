// Writes a frame into memory of fixed size. Sticky like Reader: after the first write that does not
// fit, ok() is false and nothing more is written.
#pragma once

#include <cstring>
#include <span>
#include <string_view>
#include <type_traits>

#include "protocol/frame.h"

namespace penstock {

class Writer {
 public:
  explicit Writer(std::span<std::byte> bytes) : bytes_(bytes) {}

  template <typename T>
  void Put(const T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    PutSection(&value, sizeof(T));
  }
  void PutString(std::string_view text) { PutSection(text.data(), text.size()); }

  // Copies the bytes and pads with zeros to 8.
  void PutSection(const void* data, size_t bytes) {
    std::byte* target = Claim(bytes);
    if (target != nullptr && bytes != 0) memcpy(target, data, bytes);
  }

  // Room for a section that the caller fills; null when it does not fit. The padding is zeroed.
  std::byte* Claim(size_t bytes) {
    const size_t padding = -bytes & 7;
    if (failed_ || bytes > left() || bytes + padding > left()) {
      failed_ = true;
      return nullptr;
    }
    std::byte* target = bytes_.data() + used_;
    memset(target + bytes, 0, padding);
    used_ += bytes + padding;
    return target;
  }

  bool ok() const { return !failed_; }
  size_t used() const { return used_; }
  size_t left() const { return bytes_.size() - used_; }

 private:
  std::span<std::byte> bytes_;
  size_t used_ = 0;
  bool failed_ = false;
};

}  // namespace penstock
