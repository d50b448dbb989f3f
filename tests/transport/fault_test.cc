// The decorator does what its plan says, at the place the plan says.
#include "transport/fault/fault.h"

#include <set>

#include "harness.h"

namespace penstock::transport::fault {
namespace {

Pair MakeFaulty(const FaultPlan& near, const FaultPlan& far = {}) {
  Pair pair = MakeInprocPair();
  return {pair.world, FaultConnection(std::move(pair.near), near),
          FaultConnection(std::move(pair.far), far)};
}

TEST_CASE("the connection closes in place of the scripted commit", "[fault]") {
  Pair pair = MakeFaulty({.close_at_commit = 3});
  for (uint32_t i = 0; i < 3; ++i) Send(*pair.near, 32, i);
  CHECK(pair.near->closed());
  CHECK(pair.near->close_reason().find("commit (3)") != std::string::npos);
  Collector collector;
  ReceiveToEnd(*pair.far, collector);
  CHECK(collector.frames.size() == 2);
}

TEST_CASE("the connection closes in place of delivering the scripted frame", "[fault]") {
  Pair pair = MakeFaulty({}, {.close_at_frame = 4});
  for (uint32_t i = 0; i < 6; ++i) Send(*pair.near, 32, i);
  Collector collector;
  ReceiveToEnd(*pair.far, collector);
  REQUIRE(collector.frames.size() == 3);
  CHECK(IsFrame(collector.frames[2], 32, 2));
  CHECK(pair.near->closed());
}

TEST_CASE("Reserve follows its pattern", "[fault]") {
  Pair pair = MakeFaulty({.reserve_pattern = ".aa"});
  std::string seen;
  for (uint32_t i = 0; i < 9; ++i) {
    seen += TrySend(*pair.near, 8, i) == Outcome::kAgain ? 'a' : '.';
  }
  CHECK(seen == ".aa.aa.aa");
}

struct Memories {
  std::vector<std::byte> a = Noise(100, 1), b = Noise(100, 2);
  std::unique_ptr<MemoryRegion> near, far;
  explicit Memories(Pair& pair) {
    near = std::move(*pair.near->Register(a.data(), a.size(), Access::kPeerReadsAndWrites));
    far = std::move(*pair.far->Register(b.data(), b.size(), Access::kPeerReadsAndWrites));
  }
};

TEST_CASE("scripted moves are refused and do nothing", "[fault]") {
  Pair pair = MakeFaulty({.refuse_bulk = {1, 3}});
  Memories memories(pair);
  const auto before = memories.b;
  std::vector<BulkStatus> statuses;
  for (uint64_t i = 1; i <= 4; ++i) {
    REQUIRE(pair.near->Put(*memories.near, 0, memories.far->key(), 0, 50, i) == Outcome::kOk);
    if (i == 1) CHECK(memories.b == before);
    Collector collector;
    ReceiveUntil(*pair.near, collector, [&] { return !collector.done.empty(); });
    statuses.push_back(collector.done[0].status);
  }
  using enum BulkStatus;
  CHECK(statuses == std::vector<BulkStatus>{kRefused, kOk, kRefused, kOk});
  CHECK(std::memcmp(memories.a.data(), memories.b.data(), 50) == 0);
}

TEST_CASE("the connection closes in place of the scripted move", "[fault]") {
  Pair pair = MakeFaulty({.close_at_bulk = 2});
  Memories memories(pair);
  CHECK(pair.near->Put(*memories.near, 0, memories.far->key(), 0, 50, 1) == Outcome::kOk);
  CHECK(pair.near->Put(*memories.near, 0, memories.far->key(), 0, 50, 2) == Outcome::kClosed);
  Collector collector;
  ReceiveToEnd(*pair.near, collector);
  CHECK(collector.done.size() == 1);
}

TEST_CASE("completions change order, frames do not", "[fault]") {
  Pair pair = MakeFaulty({.reorder_completions = true}, {.delay_us = 2000});
  Memories memories(pair);
  Collector done, frames;
  const int64_t start = NowNanoseconds();
  for (uint32_t i = 0; i < 40; ++i) {
    REQUIRE(pair.near->Put(*memories.near, 0, memories.far->key(), 0, 10, i) == Outcome::kOk);
    Send(*pair.near, 16, i);
  }
  ReceiveUntil(*pair.near, done, [&] { return done.done.size() == 40; });
  ReceiveUntil(*pair.far, frames, [&] { return frames.frames.size() == 40; });
  CHECK(NowNanoseconds() - start >= 500'000);
  bool in_order = true;
  std::set<uint64_t> cookies;
  for (size_t i = 0; i < 40; ++i) {
    in_order &= done.done[i].cookie == i;
    cookies.insert(done.done[i].cookie);
    CHECK(IsFrame(frames.frames[i], 16, i));
  }
  CHECK_FALSE(in_order);
  CHECK(cookies.size() == 40);
}

}  // namespace
}  // namespace penstock::transport::fault
