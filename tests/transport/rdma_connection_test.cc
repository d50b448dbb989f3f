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

void CheckClean(RdmaPair& pair) {
  pair.near.reset();
  pair.far.reset();
  for (const std::string& violation : pair.fabric->violations()) FAIL_CHECK(violation);
  for (const std::string& object : pair.fabric->objects()) FAIL_CHECK("Leaked: " << object);
}

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
  std::thread receive(
      [&] { ReceiveUntil(*pair.far, far, [&] { return far.frames.size() == kFrames; }); });
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
