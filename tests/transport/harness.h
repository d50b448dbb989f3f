// Connected pairs of every backend, and the small tools with which the conformance suite looks at
// them. A test case of the suite runs once for each entry of Backends().
#pragma once

#include <catch2/catch.hpp>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "transport/transport.h"

namespace penstock::transport {

struct Pair {
  std::shared_ptr<void> world;  // what both ends live in; goes last
  std::unique_ptr<Connection> near, far;
};

struct PairOptions {
  size_t ring_bytes = 1 << 20;
  uint32_t max_frame = 64 << 10;
  uint64_t bulk_chunk = 1 << 20;
  uint64_t bulk_window = 16 << 20;
};

// `near` can start bulk moves. Over rdma and shm `far`, the client, cannot.
struct Backend {
  std::string name;
  Pair (*make)(const PairOptions& options);
  bool either_starts = true;
};

std::vector<Backend> Backends();
Pair MakeTcpPair(const PairOptions& options = {});
Pair MakeInprocPair(const PairOptions& options = {});
Pair MakeShmPair(const PairOptions& options = {});

struct Done {
  uint64_t cookie;
  BulkStatus status;
  uint64_t bytes;
};

// Keeps what arrives. `accept` is what OnFrame returns.
struct Collector : Handler {
  std::vector<std::vector<std::byte>> frames;
  std::vector<Done> done;
  bool accept = true;
  bool OnFrame(std::span<const std::byte> frame) override {
    frames.emplace_back(frame.begin(), frame.end());
    return accept;
  }
  void OnBulkDone(uint64_t cookie, BulkStatus status, uint64_t bytes) override {
    done.push_back({cookie, status, bytes});
  }
};

// A frame of `size` bytes: length, serial number, then bytes that follow from both.
void FillFrame(std::byte* slot, uint32_t size, uint32_t serial);
bool IsFrame(std::span<const std::byte> frame, uint32_t size, uint32_t serial);

// Reserve until there is space.
std::byte* ReserveSoon(Connection& from, uint32_t bytes);
Outcome TrySend(Connection& from, uint32_t size, uint32_t serial, uint32_t flags = kFlush);
// Waits for space; the peer must be receiving on another thread.
void Send(Connection& from, uint32_t size, uint32_t serial, uint32_t flags = kFlush);
// Receives until the condition holds. Fails the test after ten seconds.
template <typename Condition>
void ReceiveUntil(Connection& at, Collector& collector, Condition condition) {
  const Deadline deadline = Deadline::After(10'000);
  while (!condition()) {
    if (at.Wait(64, collector, Deadline::After(100)) < 0) break;
    if (deadline.expired()) break;
  }
  REQUIRE(condition());
}
// Sends a frame from one end and receives it at the other, which may from then on look at what
// completed Puts have brought.
void Settle(Connection& from, Connection& to);
// Receives until the connection is over.
void ReceiveToEnd(Connection& at, Collector& collector);

// `bytes` bytes that follow from the seed.
std::vector<std::byte> Noise(size_t bytes, uint64_t seed);
// Comparisons that stay fast under a sanitizer.
bool Same(const std::vector<std::byte>& a, const std::vector<std::byte>& b);
bool AllAre(const std::vector<std::byte>& memory, std::byte value);

}  // namespace penstock::transport
