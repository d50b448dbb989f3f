// Reads a received frame. Bounded and sticky: the first read beyond the end makes every later one
// fail, so a decoder may read everything and ask ok() once. The bytes must be private to this
// process (transports guarantee that), so what was checked stays what it was.
#pragma once

#include <cstring>
#include <span>
#include <string_view>
#include <type_traits>

#include "protocol/frame.h"

namespace penstock {

class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : bytes_(bytes) {}

  // Copies a flat struct out, then skips its padding to 8 bytes. False, and zeroes, when too short.
  template <typename T>
  bool Take(T* value) {
    static_assert(std::is_trivially_copyable_v<T>);
    std::span<const std::byte> section;
    if (!TakeSection(sizeof(T), &section)) {
      memset(static_cast<void*>(value), 0, sizeof(T));
      return false;
    }
    memcpy(static_cast<void*>(value), section.data(), sizeof(T));
    return true;
  }

  // A section of this many bytes plus padding. The view lives as long as the frame does.
  bool TakeSection(uint64_t bytes, std::span<const std::byte>* section) {
    *section = {};
    const uint64_t padded = bytes + (-bytes & 7);
    if (failed_ || bytes > bytes_.size() || padded > bytes_.size()) {
      failed_ = true;
      return false;
    }
    *section = bytes_.first(bytes);
    bytes_ = bytes_.subspan(padded);
    return true;
  }

  bool TakeString(uint64_t bytes, std::string_view* text) {
    std::span<const std::byte> section;
    const bool ok = TakeSection(bytes, &section);
    *text = {reinterpret_cast<const char*>(section.data()), section.size()};
    return ok;
  }

  template <typename T>
  bool TakeArray(uint64_t count, uint64_t max_count, std::span<const T>* values) {
    static_assert(std::is_trivially_copyable_v<T> && alignof(T) <= 8);
    *values = {};
    if (count > max_count) failed_ = true;
    std::span<const std::byte> section;
    if (failed_ || count > bytes_.size() / sizeof(T)) {
      failed_ = true;
      return false;
    }
    if (!TakeSection(count * sizeof(T), &section)) return false;
    *values = {reinterpret_cast<const T*>(section.data()), count};
    return true;
  }

  bool ok() const { return !failed_; }
  bool AtEnd() const { return !failed_ && bytes_.empty(); }
  size_t left() const { return bytes_.size(); }

 private:
  std::span<const std::byte> bytes_;
  bool failed_ = false;
};

}  // namespace penstock
