#include "tools/penstock/table.h"

#include <algorithm>
#include <cstdio>

namespace penstock {

std::string FormatTable(const std::vector<std::vector<std::string>>& rows) {
  std::vector<size_t> widths;
  for (const auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string text;
  for (const auto& row : rows) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) {
      line += row[i];
      line.append(widths[i] - row[i].size() + 2, ' ');
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + '\n';
  }
  return text;
}

std::string FormatBytes(uint64_t bytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  if (bytes == 0) return "0";
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  while (value >= 1024 && unit + 1 < std::size(kUnits)) {
    value /= 1024;
    ++unit;
  }
  char text[32];
  const bool whole = value >= 100 || value == static_cast<double>(static_cast<uint64_t>(value));
  snprintf(text, sizeof text, whole ? "%.0f %s" : "%.1f %s", value, kUnits[unit]);
  return text;
}

std::string FormatSeconds(double seconds) {
  const auto whole = static_cast<uint64_t>(seconds);
  const auto number = [](uint64_t value, const char* unit) { return std::to_string(value) + unit; };
  if (whole < 60) return number(whole, " s");
  if (whole < 3600) return number(whole / 60, " min");
  if (whole < 86'400) return number(whole / 3600, " h ") + number(whole / 60 % 60, " min");
  return number(whole / 86'400, " d ") + number(whole / 3600 % 24, " h");
}

}  // namespace penstock
