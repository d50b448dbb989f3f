// What the driver calls of a program cost, through whatever libcuda.so.1 the loader gives this
// process: NVIDIA's, the simulated GPU's, or Penstock's in front of either. Run it once each way
// and compare.
#pragma once

#include <vector>

#include "common/result.h"
#include "tools/penstock-perf/rows.h"

namespace penstock::perf {

struct DeviceOptions {
  uint64_t least_bytes = 4, most_bytes = 256ull << 20;  // of a copy
  std::vector<std::string> only;                        // rows.h; none: every row
  double seconds = 0.3;                                 // of each row, at least
};

// Rows: cuMemGetInfo (us), posted launch (ns, of 1,000 at a time), launch + synchronize (us), and
// host to device, device to host x pinned, pageable (us up to 64 KiB, GB/s above) for 4 B, 4 KiB,
// 64 KiB, 1 MiB, 16 MiB, 256 MiB and most_bytes. Every copy's bytes are compared at the end.
Result<std::vector<Row>> MeasureDevice(const DeviceOptions& options);

}  // namespace penstock::perf
