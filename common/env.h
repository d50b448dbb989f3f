// Reading environment variables, with one behaviour for "unset" and "not a number".
#pragma once

#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

namespace penstock {

inline std::string EnvString(const char* name, std::string_view fallback = "") {
  const char* value = getenv(name);
  return value == nullptr ? std::string(fallback) : std::string(value);
}

// A decimal or 0x-hexadecimal number; the fallback if unset, empty or not wholly a number.
inline int64_t EnvInteger(const char* name, int64_t fallback) {
  const char* value = getenv(name);
  if (value == nullptr || *value == '\0') return fallback;
  char* end = nullptr;
  const int64_t number = strtoll(value, &end, 0);
  return *end == '\0' ? number : fallback;
}

// True for anything but unset, empty and "0".
inline bool EnvFlag(const char* name) {
  const char* value = getenv(name);
  return value != nullptr && *value != '\0' && std::string_view(value) != "0";
}

// True if a comma-separated list variable contains the word: PENSTOCK_DISABLE=prefetch,inline.
inline bool EnvListContains(const char* name, std::string_view word) {
  const char* value = getenv(name);
  if (value == nullptr) return false;
  std::string_view rest(value);
  while (!rest.empty()) {
    const size_t comma = rest.find(',');
    if (rest.substr(0, comma) == word) return true;
    if (comma == std::string_view::npos) return false;
    rest.remove_prefix(comma + 1);
  }
  return false;
}

}  // namespace penstock
