// What was measured: one row per quantity, beside the thing that it is compared with.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/result.h"

namespace penstock::perf {

struct Row {
  std::string name;     // "round trip"
  uint64_t bytes = 0;   // of one message or copy; 0: no size
  double value = 0;     // the median
  std::string unit;     // "us", "GB/s": bytes per nanosecond
  double baseline = 0;  // of the same unit; 0: nothing to compare with
  std::string against;  // what the baseline is: "ib_send_lat, twice"
  double ratio() const { return baseline > 0 ? value / baseline : 0; }
};

double Median(std::vector<double> values);

// "4 B", "64 KiB", "1 GiB".
std::string BytesAsText(uint64_t bytes);

// Whether someone who asked for `only` (parts of names; none: everything) wants this row.
bool IsWanted(const std::string& name, const std::vector<std::string>& only);

std::string AsTable(const std::vector<Row>& rows);
std::string AsJson(const std::vector<Row>& rows);
Result<std::vector<Row>> ReadRows(const std::string& file);  // what AsJson wrote

// The rows of `measured`, each with the row of the same name and size of `baseline` as its
// baseline.
std::vector<Row> Against(const std::vector<Row>& measured, const std::vector<Row>& baseline,
                         const std::string& name_of_baseline);

}  // namespace penstock::perf
