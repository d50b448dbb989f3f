#include "tools/penstock-perf/rows.h"

#include <algorithm>
#include <cstdio>
#include <fstream>

#include <nlohmann/json.hpp>

namespace penstock::perf {

double Median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

std::string BytesAsText(uint64_t bytes) {
  static constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB"};
  size_t unit = 0;
  while (unit < 3 && bytes >= 1024 && bytes % 1024 == 0) {
    bytes /= 1024;
    ++unit;
  }
  return std::to_string(bytes) + " " + kUnits[unit];
}

bool IsWanted(const std::string& name, const std::vector<std::string>& only) {
  return only.empty() || std::any_of(only.begin(), only.end(), [&](const std::string& part) {
           return name.find(part) != std::string::npos;
         });
}

std::string AsTable(const std::vector<Row>& rows) {
  std::string table;
  char line[256];
  snprintf(line, sizeof line, "%-34s %9s %11s %-5s %11s %7s  %s\n", "", "size", "measured", "",
           "baseline", "ratio", "against");
  table += line;
  for (const Row& row : rows) {
    char baseline[32] = "", ratio[32] = "";
    if (row.baseline > 0) {
      snprintf(baseline, sizeof baseline, "%.2f", row.baseline);
      snprintf(ratio, sizeof ratio, "%.2f", row.ratio());
    }
    snprintf(line, sizeof line, "%-34s %9s %11.2f %-5s %11s %7s  %s", row.name.c_str(),
             row.bytes > 0 ? BytesAsText(row.bytes).c_str() : "", row.value, row.unit.c_str(),
             baseline, ratio, row.against.c_str());
    table += line;
    table.erase(table.find_last_not_of(' ') + 1);
    table += '\n';
  }
  return table;
}

std::string AsJson(const std::vector<Row>& rows) {
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  for (const Row& row : rows) {
    nlohmann::ordered_json entry = {
        {"name", row.name}, {"bytes", row.bytes}, {"value", row.value}, {"unit", row.unit}};
    if (row.baseline > 0) {
      entry["baseline"] = row.baseline;
      entry["against"] = row.against;
      entry["ratio"] = row.ratio();
    }
    list.push_back(std::move(entry));
  }
  return list.dump(2) + "\n";
}

Result<std::vector<Row>> ReadRows(const std::string& file) {
  std::ifstream input(file);
  if (!input) return FailErrno("Cannot read (" + file + ")");
  std::vector<Row> rows;
  const auto list = nlohmann::json::parse(input, nullptr, false);
  if (!list.is_array()) return Fail(Code::kInvalidArgument, "(" + file + ") is no list of rows.");
  for (const auto& entry : list) {
    const auto text = [&](const char* key) {
      const auto found = entry.find(key);
      return found != entry.end() && found->is_string() ? found->get<std::string>() : "";
    };
    const auto number = [&](const char* key) {
      const auto found = entry.find(key);
      return found != entry.end() && found->is_number() ? found->get<double>() : 0;
    };
    if (!entry.is_object() || text("name").empty()) {
      return Fail(Code::kInvalidArgument, "(" + file + ") has a row without a name.");
    }
    rows.push_back({text("name"), static_cast<uint64_t>(number("bytes")), number("value"),
                    text("unit"), number("baseline"), text("against")});
  }
  return rows;
}

std::vector<Row> Against(const std::vector<Row>& measured, const std::vector<Row>& baseline,
                         const std::string& name_of_baseline) {
  std::vector<Row> rows = measured;
  for (Row& row : rows) {
    row.baseline = 0;
    for (const Row& other : baseline) {
      if (other.name == row.name && other.bytes == row.bytes && other.unit == row.unit) {
        row.baseline = other.value;
        row.against = name_of_baseline;
      }
    }
  }
  return rows;
}

}  // namespace penstock::perf
