// What a server has to offer, found out by a process of its own: the supervisor must never open the
// driver, because a process that has done so cannot fork workers, and a driver that crashes or
// hangs would take the daemon along.
#pragma once

#include <string>
#include <vector>

#include "common/result.h"
#include "protocol/hello.h"

namespace penstock::server {

struct Inventory {
  int32_t driver_version = 0;
  std::vector<DeviceInfo> devices;
  std::vector<uint64_t> reserved_memory;  // bytes of each that are taken with one context made
};

// Runs `penstockd --probe` and waits for its answer.
Result<Inventory> ProbeDriver(const std::string& library, int timeout_ms);

// The body of that process: descriptor 3 is the library's path in a sealed file, 4 the pipe for the
// answer. Returns the exit status.
int ProbeMain();

}  // namespace penstock::server
