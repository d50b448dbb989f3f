// What a worker lets others know of its session: numbers in a page that the supervisor maps as
// well, so that counting costs the worker a store and telling costs it nothing. They are for people
// to read; a worker that writes nonsense there misleads nobody but them.
#pragma once

#include <atomic>
#include <cstdint>

#include "common/result.h"
#include "common/unique_fd.h"

namespace penstock::server {

struct SessionMeter {
  std::atomic<uint64_t> calls{0};     // frames of calls
  std::atomic<uint64_t> received{0};  // bytes, of calls and of bulk data
  std::atomic<uint64_t> sent{0};
  std::atomic<uint64_t> memory{0};  // bytes allocated on all of its GPUs
  std::atomic<uint32_t> path{0};    // a Path; 0 while it is not decided
};

// The supervisor's side: a file of that size that nobody can resize, and its mapping.
Result<UniqueFd> MakeMeterFile();
// Null, after a log line, if it cannot be mapped.
SessionMeter* MapMeter(int file);
void UnmapMeter(SessionMeter* meter);

}  // namespace penstock::server
