#include "tools/penstock-perf/plot.h"

#include <unistd.h>

#include <cstdio>
#include <map>

namespace penstock::perf {
namespace {

// In the words of gnuplot, which doubles a quote to mean it.
std::string Quoted(const std::string& text) {
  std::string quoted = "'";
  for (const char c : text) quoted += c == '\'' ? std::string("''") : std::string(1, c);
  return quoted + "'";
}

// bytes per nanosecond; 0 for what is no speed.
double Speed(const Row& row, double value) {
  if (value <= 0) return 0;
  if (row.unit == "GB/s") return value;
  return row.unit == "us" ? static_cast<double>(row.bytes) / (value * 1000) : 0;
}

}  // namespace

Status Plot(const std::vector<Row>& rows, const std::string& file) {
  // A line's points, in the order in which the lines first came.
  std::vector<std::string> titles;
  std::map<std::string, std::string> points;
  const auto add = [&](const std::string& title, uint64_t bytes, double speed) {
    if (bytes == 0 || speed <= 0) return;
    if (points.count(title) == 0) titles.push_back(title);
    points[title] += std::to_string(bytes) + " " + std::to_string(speed) + "\n";
  };
  for (const Row& row : rows) add(row.name, row.bytes, Speed(row, row.value));
  const size_t own = titles.size();
  for (const Row& row : rows) {
    add(row.name + ": " + row.against, row.bytes, Speed(row, row.baseline));
  }
  if (titles.empty()) {
    return Fail(Code::kInvalidArgument, "No row has a size, so there is nothing to draw.");
  }
  std::string script = "set terminal pngcairo size 1200,750\nset output " + Quoted(file) +
                       "\nset logscale x 2\nset logscale y\nset format x '%.0b %BB'\n"
                       "set xlabel 'bytes of one move'\nset ylabel 'GB/s'\nset grid\n"
                       "set key left top\n";
  for (size_t i = 0; i < titles.size(); ++i) {
    script += "$line" + std::to_string(i) + " << EOD\n" + points[titles[i]] + "EOD\n";
  }
  script += "plot ";
  for (size_t i = 0; i < titles.size(); ++i) {
    script += (i == 0 ? "" : ", ") + ("$line" + std::to_string(i)) +
              " using 1:2 with linespoints title " + Quoted(titles[i]) + (i < own ? "" : " dt 2");
  }
  script += "\n";
  FILE* const gnuplot = popen("gnuplot", "we");
  if (gnuplot == nullptr) return FailErrno("Cannot start gnuplot");
  const bool told = fwrite(script.data(), 1, script.size(), gnuplot) == script.size();
  if (pclose(gnuplot) != 0 || !told || access(file.c_str(), R_OK) != 0) {
    return Fail(Code::kUnavailable, "gnuplot does not draw (" + file +
                                        "). It comes with Debian's package gnuplot-nox.");
  }
  return {};
}

}  // namespace penstock::perf
