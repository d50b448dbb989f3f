#include "harness.h"

#include <sched.h>

#include <algorithm>
#include <cstdlib>
#include <thread>

#include "tests/transport/rdma_pair.h"
#include "transport/fault/fault.h"
#include "transport/inproc/inproc.h"
#include "transport/shm/shm.h"
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
  return {nullptr, tcp::Adopt(std::move(near[0]), std::move(near[1]), tcp),
          tcp::Adopt(std::move(far[0]), std::move(far[1]), tcp)};
}

Pair MakeInprocPair(const PairOptions& options) {
  auto [near, far] = inproc::MakePair({options.ring_bytes, options.max_frame});
  return {nullptr, std::move(near), std::move(far)};
}

// `near` is the server, which starts bulk moves.
Pair MakeShmPair(const PairOptions& options) {
  shm::ShmOptions shm;
  shm.ring_bytes = options.ring_bytes;
  shm.max_frame = options.max_frame;
  shm.slot_bytes = static_cast<uint32_t>(std::min<uint64_t>(options.bulk_chunk, shm.slot_bytes));
  const shm::Token token = {1, 2, 3};
  auto listener = shm::Listener::Open(shm);
  REQUIRE(listener);
  Pair pair;
  std::thread client([&] {
    auto dialled = shm::Dial(shm, (*listener)->name(), token, Deadline::After(5000));
    if (dialled) pair.far = std::move(*dialled);
  });
  auto accepted = (*listener)->Accept(token, Deadline::After(5000));
  client.join();
  REQUIRE(accepted);
  REQUIRE(pair.far != nullptr);
  pair.near = std::move(*accepted);
  return pair;
}

namespace {

// What a correct user of a connection does not notice.
Pair AddBenignFaults(Pair pair) {
  fault::FaultPlan plan;
  plan.reserve_pattern = "..a.aa....";
  plan.reorder_completions = true;
  plan.delay_us = 200;
  pair.near = fault::FaultConnection(std::move(pair.near), plan);
  plan.seed = 2;
  pair.far = fault::FaultConnection(std::move(pair.far), plan);
  return pair;
}

}  // namespace

// Over this machine's own devices, where PENSTOCK_TEST_RDMA names the server's and the client's
// address on each rail: "10.8.0.2<10.8.0.1,10.8.1.2<10.8.1.1"; alone, an address is both.
Pair MakeDevicePair(const PairOptions& options) {
  rdma::RdmaOptions rdma;
  rdma.ring_bytes = options.ring_bytes;
  rdma.max_frame = options.max_frame;
  rdma.bulk_chunk = std::min(options.bulk_chunk, rdma.bulk_chunk);
  std::vector<std::string> servers;
  std::string rest = getenv("PENSTOCK_TEST_RDMA");
  while (!rest.empty()) {
    const size_t comma = std::min(rest.find(','), rest.size());
    const std::string rail = rest.substr(0, comma);
    rest.erase(0, comma + 1);
    const size_t from = rail.find('<');
    servers.push_back(rail.substr(0, from));
    rdma.local_addresses.push_back(from == std::string::npos ? "" : rail.substr(from + 1));
  }
  return ConnectRdmaPair(rdma, servers);
}

// With devices of its own a machine is asked about nothing else.
std::vector<Backend> Backends() {
  if (getenv("PENSTOCK_TEST_RDMA") != nullptr) {
    return {{"rdma", [](const PairOptions& options) { return MakeDevicePair(options); }, false},
            {"rdma with benign faults",
             [](const PairOptions& options) { return AddBenignFaults(MakeDevicePair(options)); },
             false}};
  }
  return {
      {"tcp", [](const PairOptions& options) { return MakeTcpPair(options); }},
      {"inproc", [](const PairOptions& options) { return MakeInprocPair(options); }},
      {"shm", [](const PairOptions& options) { return MakeShmPair(options); }, false},
      {"rdma over fake verbs",
       [](const PairOptions& options) { return MakeRdmaConformancePair(options, 1); }, false},
      {"rdma over fake verbs, two rails",
       [](const PairOptions& options) { return MakeRdmaConformancePair(options, 2); }, false},
      {"rdma over fake verbs with benign faults",
       [](const PairOptions& options) {
         return AddBenignFaults(MakeRdmaConformancePair(options, 2));
       },
       false},
      {"tcp with benign faults",
       [](const PairOptions& options) { return AddBenignFaults(MakeTcpPair(options)); }},
      {"shm with benign faults",
       [](const PairOptions& options) { return AddBenignFaults(MakeShmPair(options)); }, false},
      {"inproc with benign faults",
       [](const PairOptions& options) { return AddBenignFaults(MakeInprocPair(options)); }},
  };
}

std::byte* ReserveSoon(Connection& from, uint32_t bytes) {
  const Deadline deadline = Deadline::After(10'000);
  std::byte* slot = nullptr;
  Outcome outcome;
  while ((outcome = from.Reserve(bytes, &slot)) == Outcome::kAgain && !deadline.expired()) {
    sched_yield();
  }
  REQUIRE(outcome == Outcome::kOk);
  return slot;
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

bool Same(const std::vector<std::byte>& a, const std::vector<std::byte>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size()) == 0;
}

bool AllAre(const std::vector<std::byte>& memory, std::byte value) {
  // The first byte is right, and each byte equals the next.
  return memory[0] == value &&
         std::memcmp(memory.data(), memory.data() + 1, memory.size() - 1) == 0;
}

void Settle(Connection& from, Connection& to) {
  Send(from, 8, 0);
  Collector collector;
  ReceiveUntil(to, collector, [&] { return collector.frames.size() == 1; });
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
  for (size_t at = 0; at < bytes; at += sizeof state) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    std::memcpy(noise.data() + at, &state, std::min(sizeof state, bytes - at));
  }
  return noise;
}

}  // namespace penstock::transport
