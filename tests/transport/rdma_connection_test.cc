// The rdma connection over the fake fabric: packing, credits, failover of the control queue pair,
// and every way in which it can end.
#include <unistd.h>

#include <atomic>
#include <catch2/catch.hpp>
#include <random>
#include <thread>

#include "tests/transport/rdma_pair.h"

using namespace penstock;
using namespace penstock::transport;

namespace {

// For a thread of a test: Catch's assertions belong to one thread.
void ReceiveFrames(Connection& at, Collector& collector, size_t count) {
  const Deadline deadline = Deadline::After(10'000);
  while (collector.frames.size() < count && !deadline.expired()) {
    if (at.Wait(64, collector, Deadline::After(100)) < 0) break;
  }
}

}  // namespace

TEST_CASE("frames of all sizes arrive in order, both ways", "[rdma]") {
  RdmaPair pair = MakeRdmaPair();
  Collector near, far;
  std::mt19937 random(3);
  std::vector<uint32_t> sizes;
  for (const uint32_t size : {8u, 9u, 48u, 4031u, 4032u, 4033u, 4040u, 16384u, 65536u, 65535u}) {
    sizes.push_back(size);
  }
  for (int i = 0; i < 300; ++i) sizes.push_back(8 + random() % 6000);
  std::thread back([&] {
    for (size_t i = 0; i < sizes.size(); ++i)
      Send(*pair.far, sizes[i], 1000 + i, i % 3 == 0 ? kFlush : kNone);
    pair.far->Flush();
  });
  std::thread receive([&] { ReceiveFrames(*pair.far, far, sizes.size()); });
  std::thread receive_near([&] { ReceiveFrames(*pair.near, near, sizes.size()); });
  for (size_t i = 0; i < sizes.size(); ++i)
    Send(*pair.near, sizes[i], i, i % 5 == 0 ? kFlush : kNone);
  pair.near->Flush();
  back.join();
  receive.join();
  receive_near.join();
  REQUIRE(far.frames.size() == sizes.size());
  REQUIRE(near.frames.size() == sizes.size());
  for (size_t i = 0; i < sizes.size(); ++i) {
    CHECK(IsFrame(far.frames[i], sizes[i], i));
    CHECK(IsFrame(near.frames[i], sizes[i], 1000 + i));
  }
  CHECK(pair.fabric->receiver_not_ready() == 0);
  CheckClean(pair);
}

TEST_CASE("an idle frame leaves at once and alone", "[rdma]") {
  RdmaPair pair = MakeRdmaPair();
  Collector far;
  const uint64_t before = pair.near->counters().packets_sent;
  for (uint32_t i = 0; i < 20; ++i) {
    REQUIRE(TrySend(*pair.near, 100, i, 0) == Outcome::kOk);  // nobody asks to hurry
    ReceiveUntil(*pair.far, far, [&] { return far.frames.size() == i + 1; });
    CHECK(pair.near->counters().packets_sent == before + i + 1);
    usleep(2000);  // for its completion
  }
  CheckClean(pair);
}

TEST_CASE("a storm of frames shares packets", "[rdma]") {
  RdmaPair pair = MakeRdmaPair();
  Collector far;
  constexpr uint32_t kFrames = 4000;
  std::thread receive([&] { ReceiveFrames(*pair.far, far, kFrames); });
  for (uint32_t i = 0; i < kFrames; ++i) Send(*pair.near, 160, i, 0);
  receive.join();
  const Counters counters = pair.near->counters();
  CHECK(counters.frames_sent == kFrames);
  CHECK(counters.packets_sent * 8 <= kFrames);
  for (uint32_t i = 0; i < kFrames; ++i) CHECK(IsFrame(far.frames[i], 160, i));
  CHECK(pair.fabric->receiver_not_ready() == 0);
  CheckClean(pair);
}

TEST_CASE("a sender that nobody listens to is told to wait, then goes on", "[rdma]") {
  RdmaPair pair = MakeRdmaPair();
  uint32_t sent = 0;
  while (TrySend(*pair.near, 4000, sent, 0) == Outcome::kOk) REQUIRE(++sent < 10'000);
  usleep(20'000);
  CHECK(TrySend(*pair.near, 4000, sent, 0) == Outcome::kAgain);
  CHECK(pair.fabric->receiver_not_ready() == 0);
  Collector far;
  ReceiveUntil(*pair.far, far, [&] { return far.frames.size() == sent; });
  Collector near;
  bool more = false;
  ReceiveUntil(*pair.near, near, [&] {
    more = more || TrySend(*pair.near, 4000, sent, kFlush) == Outcome::kOk;
    return more;
  });
  ReceiveUntil(*pair.far, far, [&] { return far.frames.size() == sent + 1; });
  for (uint32_t i = 0; i <= sent; ++i) CHECK(IsFrame(far.frames[i], 4000, i));
  CheckClean(pair);
}

TEST_CASE("the end of one side ends the other, after what was sent", "[rdma]") {
  RdmaPair pair = MakeRdmaPair();
  for (uint32_t i = 0; i < 50; ++i) Send(*pair.near, 500, i, 0);
  pair.near->Close(1000);
  Collector far;
  ReceiveToEnd(*pair.far, far);
  REQUIRE(far.frames.size() == 50);
  for (uint32_t i = 0; i < 50; ++i) CHECK(IsFrame(far.frames[i], 500, i));
  CHECK(pair.far->close_reason() == "The peer closed the connection.");
  std::byte* slot;
  CHECK(pair.far->Reserve(100, &slot) == Outcome::kClosed);
  CheckClean(pair);
}

namespace {

// Short times, so that a test of an outage does not take one.
RdmaPairOptions Impatient(uint32_t rails) {
  RdmaPairOptions options;
  options.rails = rails;
  options.rdma.timeout = 8;
  options.rdma.retry_count = 2;
  options.rdma.keepalive_ms = 50;
  options.rdma.peer_timeout_ms = 1'500;
  return options;
}

std::unique_ptr<MemoryRegion> Registered(Connection& connection, std::vector<std::byte>& memory) {
  auto region = connection.Register(memory.data(), memory.size(), Access::kPeerReadsAndWrites);
  REQUIRE(region);
  return std::move(*region);
}

}  // namespace

TEST_CASE("a control queue pair that dies loses and repeats nothing", "[rdma]") {
  for (int round = 0; round < 6; ++round) {
    RdmaPair pair = MakeRdmaPair(Impatient(round % 2 == 0 ? 1 : 2));
    std::mt19937 random(static_cast<unsigned>(round));
    for (int i = 0; i < 3; ++i) {
      rdma::fake::RequestFault fault;
      fault.opcode = IBV_WR_SEND;
      fault.nth = 5 + static_cast<int>(random() % 60);
      fault.arrives = random() % 2 == 0;  // carried out, and yet an error
      pair.fabric->Fail(fault);
    }
    constexpr uint32_t kFrames = 1500;
    Collector near, far;
    std::thread back([&] {
      for (uint32_t i = 0; i < kFrames; ++i) Send(*pair.far, 300, i, kNone);
    });
    std::thread receive([&] { ReceiveFrames(*pair.far, far, kFrames); });
    std::thread receive_near([&] { ReceiveFrames(*pair.near, near, kFrames); });
    for (uint32_t i = 0; i < kFrames; ++i) Send(*pair.near, 3000, i, kNone);
    back.join();
    receive.join();
    receive_near.join();
    REQUIRE(far.frames.size() == kFrames);
    REQUIRE(near.frames.size() == kFrames);
    for (uint32_t i = 0; i < kFrames; ++i) {
      REQUIRE(IsFrame(far.frames[i], 3000, i));
      REQUIRE(IsFrame(near.frames[i], 300, i));
    }
    CheckClean(pair);
  }
}

TEST_CASE("a rail that dies in the middle of moves loses and spoils nothing", "[rdma]") {
  for (uint32_t round = 0; round < 4; ++round) {
    RdmaPair pair = MakeRdmaPair(Impatient(2));
    constexpr size_t kSize = 4 << 20;
    std::vector<std::byte> source = Noise(kSize, round), target(kSize), back(kSize);
    auto local = Registered(*pair.near, source), again = Registered(*pair.near, back);
    auto remote = Registered(*pair.far, target);
    Collector near;
    uint64_t cookie = 0;
    for (int i = 0; i < 6; ++i) {
      REQUIRE(pair.near->Put(*local, 0, remote->key(), 0, kSize, ++cookie) == Outcome::kOk);
    }
    usleep(1000 * round);
    pair.fabric->SetLink(ServerAddress(1), ClientAddress(1), false);
    Collector far;
    std::thread receive([&] { ReceiveFrames(*pair.far, far, 2); });
    ReceiveUntil(*pair.near, near, [&] { return near.done.size() == cookie; });
    for (const Done& done : near.done) CHECK(done.status == BulkStatus::kOk);
    Send(*pair.near, 16, 1);
    REQUIRE(pair.near->Get(*again, 0, remote->key(), 0, kSize, ++cookie) == Outcome::kOk);
    ReceiveUntil(*pair.near, near, [&] { return near.done.size() == cookie; });
    CHECK(near.done.back().status == BulkStatus::kOk);
    CHECK(Same(source, back));
    pair.fabric->SetLink(ServerAddress(1), ClientAddress(1), true);
    REQUIRE(pair.near->Put(*local, 0, remote->key(), 0, kSize, ++cookie) == Outcome::kOk);
    ReceiveUntil(*pair.near, near, [&] { return near.done.size() == cookie; });
    CHECK(near.done.back().status == BulkStatus::kOk);
    Send(*pair.near, 16, 2);
    receive.join();
    CHECK(Same(source, target));
    for (auto* region : {&local, &again, &remote}) region->reset();
    CheckClean(pair);
  }
}

TEST_CASE("a peer out of reach is reported within the configured time", "[rdma]") {
  RdmaPair pair = MakeRdmaPair(Impatient(1));
  pair.fabric->SetLink(ServerAddress(0), ClientAddress(0), false);
  const int64_t begin = NowNanoseconds();
  Collector near, far;
  std::thread other([&] { ReceiveToEnd(*pair.far, far); });
  ReceiveToEnd(*pair.near, near);
  other.join();
  CHECK(NowNanoseconds() - begin < 8'000'000'000);
  CHECK(pair.near->close_reason().find("out of reach") != std::string::npos);
  CHECK(pair.far->close_reason().find("out of reach") != std::string::npos);
  CheckClean(pair);
}

TEST_CASE("a peer that is killed without a word is reported", "[rdma]") {
  RdmaPair pair = MakeRdmaPair(Impatient(1));
  pair.fabric->Kill(*pair.client, false);
  Collector near;
  ReceiveToEnd(*pair.near, near);
  CHECK(pair.near->close_reason().find("out of reach") != std::string::npos);
}
