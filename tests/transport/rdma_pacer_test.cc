// The pacer in simulated time: a sender that makes a frame now and then, a post that costs what it
// costs, a device that completes at once, and a keeper that looks when it was told to.
#include "transport/rdma/pacer.h"

#include <catch2/catch.hpp>
#include <cstdint>
#include <random>

using penstock::transport::rdma::Pacer;

namespace {

struct World {
  static constexpr uint32_t kFull = 20;  // frames in a packet
  explicit World(int64_t cost) : cost(cost) {}
  const int64_t cost;
  Pacer pacer{4};
  int64_t now = 1'000'000'000;
  uint32_t gathered = 0;
  uint64_t packets = 0;
  int64_t oldest = 0, longest_wait = 0;

  void Post() {
    longest_wait = std::max(longest_wait, now - oldest);
    const int64_t began = now;
    now += cost;
    pacer.Posted(began, now, 1);
    ++packets;
    gathered = 0;
  }
  void Frame() {
    if (gathered++ == 0) oldest = now;
    if (gathered >= kFull || !pacer.Gather(now)) Post();
  }
  // Until `end`, with the keeper's looks in between.
  void Pass(int64_t ns) {
    const int64_t end = now + ns;
    while (pacer.gathering() && pacer.next_look() <= end) {
      now = std::max(now, pacer.next_look());
      if (pacer.Look(now, gathered > 0)) Post();
    }
    now = std::max(now, end);
  }
};

}  // namespace

TEST_CASE("frames that come slowly leave at once, one a packet", "[rdma][pacer]") {
  for (const int64_t cost : {100, 2'000, 70'000}) {
    World world(cost);
    for (int i = 0; i < 100; ++i) {
      world.Frame();
      CHECK(world.gathered == 0);
      world.Pass(1'000'000);
    }
    CHECK(world.packets == 100);
    CHECK(world.longest_wait == 0);
  }
}

TEST_CASE("a storm fills packets although each would complete at once", "[rdma][pacer]") {
  for (const int64_t cost : {100, 2'000, 70'000}) {
    World world(cost);
    for (int i = 0; i < 2000; ++i) {
      world.Frame();
      world.Pass(cost / 3);
    }
    CHECK(world.packets * 8 <= 2000);
  }
}

TEST_CASE("the tail of a storm leaves, and then frames leave at once again", "[rdma][pacer]") {
  std::mt19937 random(5);
  for (int round = 0; round < 200; ++round) {
    World world(100 + random() % 5000);
    const int storm = 5 + random() % 500;
    for (int i = 0; i < storm; ++i) {
      world.Frame();
      world.Pass(random() % 1000);
    }
    world.Pass(40'000'000);
    CHECK(world.gathered == 0);
    CHECK_FALSE(world.pacer.gathering());
    CHECK(world.longest_wait <= Pacer::kMostPeriods * Pacer::kMostWindowNs + 1'000'000);
    const uint64_t before = world.packets;
    world.Frame();
    CHECK(world.packets == before + 1);
  }
}
