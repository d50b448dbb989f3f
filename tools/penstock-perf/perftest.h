// The yardstick: perftest's programs, run between the same two ends over the same device.
#pragma once

#include <cstdint>
#include <string>

#include "common/result.h"
#include "tools/penstock-perf/link.h"

namespace penstock::perf {

struct PerftestRun {
  std::string program;  // ib_send_lat, ib_read_bw, ib_write_bw
  uint64_t bytes = 0;   // of one message
  uint64_t iterations = 0;
  bool sleeps = false;  // on events; else it looks all the time
};

bool HavePerftest(const std::string& program);  // is on PATH

// Of the dialling end: has the other end start its half, runs its own and returns what perftest
// calls typical (latencies: microseconds, one way) or average (bandwidths: GB/s).
Result<double> RunPerftest(Link& link, const PerftestRun& run);

// Of the serving end: waits for requests until the dialling end hangs up.
void ServePerftest(int arranging);

}  // namespace penstock::perf
