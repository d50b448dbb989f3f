// Exact counts of what each driver function did: the first performance measure, the same on any
// machine. PENSTOCK_STATS=FILE writes them as JSON when the program ends; "%p" in the name becomes
// the process id.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "functions.gen.h"
#include "transport/transport.h"

namespace penstock::interposer {

struct FunctionCounters {
  std::atomic<uint64_t> calls{0}, round_trips{0}, posted{0};
};

// Zero-initialised and never destroyed: counting works before cuInit and after exit handlers.
FunctionCounters& CountersOf(Function function);

struct SessionCounters {
  std::atomic<uint64_t> hello_round_trips{0};
  std::atomic<uint64_t> bulk_copies{0};  // bytes of bulk data that this library's CPU copied
  // Bytes of bulk data that copies and images have named, for transports that do not see them move.
  std::atomic<uint64_t> bulk_sent{0}, bulk_received{0};
  std::atomic<uint64_t> window_waits{0}, staging_waits{0}, ring_waits{0};
};

// The sum over a program's sessions.
struct SessionTotals {
  std::string transport;  // "tcp", or "tcp+rdma" where they differ
  uint64_t sessions = 0;
  transport::Counters connection;
  uint64_t hello_round_trips = 0, bulk_copies = 0;
  uint64_t window_waits = 0, staging_waits = 0, ring_waits = 0;

  void Add(transport::Connection& connection, const SessionCounters& session);
};

// False, after a log line, if the file cannot be written.
bool WriteStatistics(const std::string& path, const SessionTotals& totals);
// In the child of a fork.
void ForgetStatistics();

}  // namespace penstock::interposer
