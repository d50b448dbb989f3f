// A table for people: columns as wide as their widest cell, two spaces apart.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace penstock {

// The first row is the heading. Ends with a newline.
std::string FormatTable(const std::vector<std::vector<std::string>>& rows);

// "16 GiB", "1.5 MiB", "0".
std::string FormatBytes(uint64_t bytes);
// "5 s", "3 min", "2 h 10 min", "4 d 3 h".
std::string FormatSeconds(double seconds);

}  // namespace penstock
