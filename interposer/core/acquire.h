// From the settings to connections: which servers a program may use, and how it comes by its GPUs
// there.
//
// The first of these that is there names the servers: PENSTOCK_SERVER (HOST:PORT, several with
// commas), then a pool file (config/pool_file.h). They are asked in that order, each for what is
// still missing, and a program's devices are numbered in it. Servers that cannot be reached are
// passed over while the others have enough.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/result.h"
#include "interposer/core/connect.h"

namespace penstock::interposer {

struct Pool {
  std::string source;                   // for messages: "PENSTOCK_SERVER=gpu7:14833"
  std::vector<ConnectOptions> servers;  // at least one
  uint32_t gpus = 1;                    // wanted in all; 0: every one that is offered and free
};

Result<Pool> PoolFromEnvironment();

// At least one connection, or: kResourceExhausted if waiting can help, kUnsupported if the pool has
// never so many, else why no server serves.
Result<std::vector<Connected>> Acquire(const Pool& pool);

}  // namespace penstock::interposer
