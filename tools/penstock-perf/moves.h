// Bytes over a transport with no CUDA in sight: messages there and back, messages one way, and
// bulk moves that the serving end starts, as a server does.
#pragma once

#include <memory>
#include <vector>

#include "common/result.h"
#include "tools/penstock-perf/link.h"
#include "tools/penstock-perf/rows.h"

namespace penstock::perf {

inline constexpr uint64_t kMostMoveBytes = 1ull << 30;

// The serving end: does what arrives on the connection until it closes.
Status ServeMoves(transport::Connection& connection);

// The dialling end. Each measurement repeats until the median is worth something: for `seconds`,
// and at least three times.
class Mover {
 public:
  static Result<std::unique_ptr<Mover>> Create(transport::Connection& connection,
                                               uint64_t most_bytes, double seconds);
  Result<double> RoundTripMicroseconds(uint32_t bytes);  // the median of a message and its echo
  Result<double> MessagesPerMicrosecond(uint32_t bytes);
  Result<double> GigabytesPerSecond(bool to_server, uint64_t bytes);
  Status MoveOnce(bool to_server, uint64_t bytes);

 private:
  class Ends;
  Mover(transport::Connection& connection, double seconds);
  Status Send(uint32_t kind, uint32_t frame_bytes, uint64_t value);
  Status AwaitAnswer();
  bool Enough(int64_t since_ns, size_t count) const;

  transport::Connection& connection_;
  const double seconds_;
  std::vector<std::byte> memory_;
  std::unique_ptr<transport::MemoryRegion> region_;
  bool answered_ = false;
};

}  // namespace penstock::perf
