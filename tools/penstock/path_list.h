// Colon-separated lists in the environment: LD_PRELOAD and LD_LIBRARY_PATH.
#pragma once

#include <string>
#include <string_view>

namespace penstock {

// The list without this entry. The loader also takes spaces in LD_PRELOAD, so both separate.
inline std::string WithoutEntry(std::string_view list, std::string_view entry) {
  std::string result;
  while (!list.empty()) {
    const size_t end = list.find_first_of(": ");
    const std::string_view item = list.substr(0, end);
    if (!item.empty() && item != entry) {
      if (!result.empty()) result += ':';
      result += item;
    }
    list = end == std::string_view::npos ? std::string_view() : list.substr(end + 1);
  }
  return result;
}

// The list with this entry first, and nowhere else.
inline std::string WithEntryFirst(std::string_view list, std::string_view entry) {
  const std::string rest = WithoutEntry(list, entry);
  return rest.empty() ? std::string(entry) : std::string(entry) + ':' + rest;
}

}  // namespace penstock
