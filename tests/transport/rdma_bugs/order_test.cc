// Data and the news of it: no frame, no report and no later move may overtake bytes that are still
// on their way. The fabric holds the bytes back; whoever relies on their being placed sees others.
#include <atomic>
#include <catch2/catch.hpp>
#include <map>
#include <mutex>

#include "tests/transport/rdma_bugs/tools.h"

using namespace penstock;
using namespace penstock::transport;

namespace {

constexpr size_t kBytes = 2 << 20;

RdmaPairOptions EarlyCompletion(uint32_t rails) {
  RdmaPairOptions options = Quiet(rails);
  options.fabric.early_completion = 1;  // a WRITE is reported to its sender before it is placed
  return options;
}

// Receives for a while; nothing may come.
void NothingComes(Connection& at, Collector& collector, int milliseconds) {
  const Deadline deadline = Deadline::After(milliseconds);
  const size_t before = collector.frames.size();
  while (!deadline.expired()) at.Wait(64, collector, deadline);
  CHECK(collector.frames.size() == before);
}

}  // namespace

TEST_CASE("a frame never overtakes the bytes that it announces", "[bug][order]") {
  SECTION("while the fabric holds them back") {
    RdmaPair pair = MakeRdmaPair(EarlyCompletion(2));
    AwaitRails(pair);
    Area area(*pair.near, *pair.far, kBytes);
    pair.fabric->HoldWrites(true);
    REQUIRE(pair.near->Put(*area.local, 0, area.remote->key(), 0, kBytes, 1) == Outcome::kOk);
    Collector near, far;
    ReceiveUntil(*pair.near, near, [&] { return near.done.size() == 1; });
    REQUIRE(near.done[0].status == BulkStatus::kOk);
    Send(*pair.near, 100, 1);
    NothingComes(*pair.far, far, 100);
    pair.fabric->HoldWrites(false);
    ReceiveUntil(*pair.far, far, [&] { return far.frames.size() == 1; });
    CHECK(area.Same(0, 0, kBytes));
    area.local.reset();
    area.remote.reset();
    CheckClean(pair);
  }
  SECTION("in whatever order the fabric places them") {
    for (uint64_t seed = 1; seed <= 4; ++seed) {
      RdmaPairOptions options;
      options.rails = 1 + seed % 2;
      options.fabric.seed = seed;
      options.fabric.early_completion = 1;
      RdmaPair pair = MakeRdmaPair(options);
      Area area(*pair.near, *pair.far, kBytes);
      Collector near, far;
      for (uint32_t round = 1; round <= 8; ++round) {
        std::fill(area.here.begin(), area.here.end(), static_cast<std::byte>(round));
        pair.near->Put(*area.local, 0, area.remote->key(), 0, kBytes, round);
        ReceiveUntil(*pair.near, near, [&] { return near.done.size() == round; });
        Send(*pair.near, 100, round);
        ReceiveUntil(*pair.far, far, [&] { return far.frames.size() == round; });
        REQUIRE(AllAre(area.there, static_cast<std::byte>(round)));
      }
      area.local.reset();
      area.remote.reset();
      CheckClean(pair);
    }
  }
}

TEST_CASE("a move waits for a Put to the same place that another rail has reported",
          "[bug][order]") {
  RdmaPair pair = MakeRdmaPair(EarlyCompletion(2));
  AwaitRails(pair);
  Area area(*pair.near, *pair.far, kBytes);
  std::fill_n(area.here.begin(), kBytes / 2, std::byte{1});
  std::fill_n(area.here.begin() + kBytes / 2, kBytes / 2, std::byte{2});
  const MemoryKey first = OnlyRail(area.remote->key(), 0).value();
  const MemoryKey second = OnlyRail(area.remote->key(), 1).value();
  pair.fabric->HoldWritesFrom(ServerAddress(0), true);
  Collector near;
  pair.near->Put(*area.local, 0, first, 0, kBytes / 2, 0);
  ReceiveUntil(*pair.near, near, [&] { return near.done.size() == 1; });
  // The ones are reported and not placed. The twos, by the free rail, must not be there before.
  pair.near->Put(*area.local, kBytes / 2, second, 0, kBytes / 2, 1);
  NothingComes(*pair.near, near, 100);
  CHECK(near.done.size() == 1);
  pair.fabric->HoldWritesFrom(ServerAddress(0), false);
  ReceiveUntil(*pair.near, near, [&] { return near.done.size() == 2; });
  Settle(*pair.near, *pair.far);
  CHECK(area.Same(kBytes / 2, 0, kBytes / 2));
  // A Get likewise reads what the Put before it wrote.
  pair.fabric->HoldWritesFrom(ServerAddress(0), true);
  pair.near->Put(*area.local, 0, first, 0, kBytes / 2, 2);
  ReceiveUntil(*pair.near, near, [&] { return near.done.size() == 3; });
  pair.near->Get(*area.local, kBytes / 2, second, 0, kBytes / 2, 3);
  NothingComes(*pair.near, near, 100);
  pair.fabric->HoldWritesFrom(ServerAddress(0), false);
  ReceiveUntil(*pair.near, near, [&] { return near.done.size() == 4; });
  CHECK(std::memcmp(&area.here[0], &area.here[kBytes / 2], kBytes / 2) == 0);
  area.local.reset();
  area.remote.reset();
  CheckClean(pair);
}

namespace {

// Gives the completions of each device's bulk requests one by one, when it is told to.
class Gate : public rdma::Tap {
 public:
  using Tap::Tap;
  int CreateQp(rdma_cm_id* id, ibv_pd* pd, ibv_qp_init_attr* attributes) override {
    if (attributes->cap.max_send_sge == 1) {  // bulk
      std::lock_guard lock(mutex_);
      devices_[attributes->send_cq] = GetDeviceName(id->verbs->device);
    }
    return Tap::CreateQp(id, pd, attributes);
  }
  int PollCq(ibv_cq* cq, int entries, ibv_wc* completions) override {
    std::lock_guard lock(mutex_);
    const auto found = devices_.find(cq);
    if (found == devices_.end()) return Tap::PollCq(cq, entries, completions);
    const auto allowed = allowed_.find(found->second);
    if (allowed == allowed_.end()) return Tap::PollCq(cq, entries, completions);
    const int got = Tap::PollCq(cq, std::min(entries, allowed->second), completions);
    if (got > 0) allowed->second -= got;
    return got;
  }
  // From now on so many completions of this device and no more; without a number, all.
  void Allow(const std::string& device, int count) {
    std::lock_guard lock(mutex_);
    allowed_[device] = count;
  }
  void Open(const std::string& device) {
    std::lock_guard lock(mutex_);
    allowed_.erase(device);
  }
  bool Spent(const std::string& device) {
    std::lock_guard lock(mutex_);
    return allowed_[device] == 0;
  }

 private:
  std::mutex mutex_;
  std::map<ibv_cq*, std::string> devices_;
  std::map<std::string, int> allowed_;
};

}  // namespace

TEST_CASE("a Put is reported only when notifications cover every chunk on its rail",
          "[bug][order]") {
  std::shared_ptr<Gate> gate;
  RdmaPairOptions options = EarlyCompletion(2);
  options.rdma.bulk_chunk = kBytes / 2;  // one chunk for each rail
  options.rdma.timeout = 8;
  options.rdma.retry_count = 2;
  options.server_verbs = rdma::Tapped(&gate);
  RdmaPair pair = MakeRdmaPair(options);
  AwaitRails(pair);
  Area area(*pair.near, *pair.far, kBytes);
  const auto await = [&](const std::string& device) {
    const Deadline deadline = Deadline::After(10'000);
    while (!gate->Spent(device) && !deadline.expired()) usleep(500);
    REQUIRE(gate->Spent(device));
  };
  // Both chunks are placed, and their WRITEs complete. Rail 1 then loses its notification, while
  // rail 0 has sent its own and does not hear of it yet.
  gate->Allow("server0", 0);
  gate->Allow("server1", 1);
  Collector near, far;
  REQUIRE(pair.near->Put(*area.local, 0, area.remote->key(), 0, kBytes, 1) == Outcome::kOk);
  await("server1");
  REQUIRE(pair.fabric->AwaitQuiet());
  std::fill(area.there.begin(), area.there.end(), std::byte{0});  // what comes must come again
  pair.fabric->SetLink(ServerAddress(1), ClientAddress(1), false);
  pair.fabric->HoldWrites(true);
  gate->Allow("server0", 1);
  await("server0");
  gate->Open("server1");
  // Rail 1's chunk comes to rail 0, behind the notification there.
  const Deadline deadline = Deadline::After(10'000);
  while (pair.near->counters().bulk_bytes_sent < kBytes && !deadline.expired()) usleep(500);
  usleep(100'000);
  gate->Open("server0");
  ReceiveUntil(*pair.near, near, [&] { return near.done.size() == 1; });
  CHECK(near.done[0].status == BulkStatus::kOk);
  Send(*pair.near, 100, 1);
  NothingComes(*pair.far, far, 100);
  pair.fabric->HoldWrites(false);
  ReceiveUntil(*pair.far, far, [&] { return far.frames.size() == 1; });
  CHECK(area.Same(kBytes / 2, kBytes / 2, kBytes / 2));
  pair.fabric->SetLink(ServerAddress(1), ClientAddress(1), true);
  area.local.reset();
  area.remote.reset();
  CheckClean(pair);
}
