// Both ends of a connection in one process: for tests, and for a client and a worker that share
// one.
//
// Each direction is a FrameRing that the receiving end reads in place; a bulk move is one memcpy on
// the thread that asks for it, through the same registrations and checks as tcp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "transport/transport.h"

namespace penstock::transport::inproc {

struct InprocOptions {
  size_t ring_bytes = 1 << 20;
  uint32_t max_frame = 64 << 10;
  bool registration_is_dear = false;  // as over RDMA, for tests
};

// Each end is independent: they may be used and destroyed on different threads, in any order.
std::pair<std::unique_ptr<Connection>, std::unique_ptr<Connection>> MakePair(
    const InprocOptions& options = {});

}  // namespace penstock::transport::inproc
