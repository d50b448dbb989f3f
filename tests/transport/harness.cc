#include "harness.h"

#include <sched.h>

#include "transport/tcp/tcp.h"

namespace penstock::transport {

Pair MakeTcpPair(const PairOptions& options) {
  tcp::TcpOptions tcp;
  tcp.ring_bytes = options.ring_bytes;
  tcp.max_frame = options.max_frame;
  tcp.bulk_chunk = options.bulk_chunk;
  tcp.bulk_window = options.bulk_window;
  auto listener = tcp::Listener::Bind("127.0.0.1", 0);
  REQUIRE(listener);
  UniqueFd near[2], far[2];
  for (int i = 0; i < 2; ++i) {
    auto dialled = tcp::Dial("127.0.0.1", listener->port(), Deadline::After(2000));
    REQUIRE(dialled);
    auto accepted = listener->Accept(Deadline::After(2000));
    REQUIRE(accepted);
    near[i] = std::move(*dialled);
    far[i] = std::move(*accepted);
  }
  return {tcp::Adopt(std::move(near[0]), std::move(near[1]), tcp),
          tcp::Adopt(std::move(far[0]), std::move(far[1]), tcp)};
}

std::vector<Backend> Backends() {
  return {{"tcp", [](const PairOptions& options) { return MakeTcpPair(options); }}};
}

void FillFrame(std::byte* slot, uint32_t size, uint32_t serial) {
  std::memcpy(slot, &size, sizeof size);
  std::memcpy(slot + 4, &serial, sizeof serial);
  for (uint32_t i = 8; i < size; ++i) slot[i] = static_cast<std::byte>(serial * 31 + i);
}

bool IsFrame(std::span<const std::byte> frame, uint32_t size, uint32_t serial) {
  if (frame.size() != size) return false;
  std::vector<std::byte> expected(size);
  FillFrame(expected.data(), size, serial);
  return std::memcmp(expected.data(), frame.data(), size) == 0;
}

Outcome TrySend(Connection& from, uint32_t size, uint32_t serial, uint32_t flags) {
  std::byte* slot = nullptr;
  const Outcome outcome = from.Reserve(size, &slot);
  if (outcome != Outcome::kOk) return outcome;
  FillFrame(slot, size, serial);
  from.Commit(size, flags);
  return Outcome::kOk;
}

void Send(Connection& from, uint32_t size, uint32_t serial, uint32_t flags) {
  const Deadline deadline = Deadline::After(10'000);
  Outcome outcome;
  while ((outcome = TrySend(from, size, serial, flags)) == Outcome::kAgain && !deadline.expired()) {
    sched_yield();
  }
  if (outcome != Outcome::kOk) FAIL("A frame cannot be sent.");
}

void ReceiveToEnd(Connection& at, Collector& collector) {
  const Deadline deadline = Deadline::After(10'000);
  while (at.Wait(64, collector, Deadline::After(100)) >= 0) {
    if (deadline.expired()) FAIL("The connection does not end.");
  }
}

std::vector<std::byte> Noise(size_t bytes, uint64_t seed) {
  std::vector<std::byte> noise(bytes);
  uint64_t state = seed * 0x9e3779b97f4a7c15 + 1;
  for (std::byte& byte : noise) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    byte = static_cast<std::byte>(state);
  }
  return noise;
}

}  // namespace penstock::transport
