// Queues that fill: send slots, inline room, completion queues.
#include <algorithm>
#include <atomic>
#include <catch2/catch.hpp>
#include <thread>

#include "tests/transport/rdma_bugs/tools.h"

using namespace penstock;
using namespace penstock::transport;

TEST_CASE("a peer's answer that overtakes our own completions does not overfill the send queue",
          "[bug][queues]") {
  RdmaPairOptions options = Quiet();
  options.rdma.send_depth = 16;
  RdmaPair pair = MakeRdmaPair(options);
  pair.fabric->HoldSendCompletions(true);
  // Small frames are inline and unsignalled, large ones are neither: both take a slot. The peer
  // gives all its credits back meanwhile.
  constexpr uint32_t kFrames = 60;
  Collector far;
  for (uint32_t i = 0; i < kFrames; ++i) {
    REQUIRE(TrySend(*pair.near, i % 2 == 0 ? 100 : 3000, i, kFlush) == Outcome::kOk);
    pair.far->Wait(64, far, Deadline::After(2));
  }
  CHECK(far.frames.size() > 0);
  CHECK(far.frames.size() <= 16);
  pair.fabric->HoldSendCompletions(false);
  ReceiveUntil(*pair.far, far, [&] { return far.frames.size() == kFrames; });
  for (uint32_t i = 0; i < kFrames; ++i) CHECK(IsFrame(far.frames[i], i % 2 == 0 ? 100 : 3000, i));
  CheckClean(pair);
}

namespace {

// A device that grants less inline room than it is asked for.
class Frugal : public rdma::Tap {
 public:
  using Tap::Tap;
  int CreateQp(rdma_cm_id* id, ibv_pd* pd, ibv_qp_init_attr* attributes) override {
    attributes->cap.max_inline_data = std::min(attributes->cap.max_inline_data, 60u);
    return Tap::CreateQp(id, pd, attributes);
  }
};

// Frames of all sizes from an end that does nothing but send.
void SendOnly(RdmaPair& pair, uint32_t frames) {
  Collector far;
  std::atomic<bool> failed{false};
  std::thread receiver([&] {
    const Deadline deadline = Deadline::After(10'000);
    while (far.frames.size() < frames && !deadline.expired()) {
      if (pair.far->Wait(64, far, Deadline::After(100)) < 0) break;
    }
    failed = far.frames.size() < frames;
  });
  const auto size = [](uint32_t i) { return 8 + i * 37 % (i % 16 == 0 ? 9000 : 240); };
  uint32_t sent = 0;
  while (sent < frames && !failed) {
    if (TrySend(*pair.near, size(sent), sent, kNone) == Outcome::kOk) ++sent;
  }
  receiver.join();
  REQUIRE_FALSE(failed);
  for (uint32_t i = 0; i < frames; ++i) REQUIRE(IsFrame(far.frames[i], size(i), i));
}

}  // namespace

TEST_CASE("a work request never exceeds what the device grants", "[bug][queues]") {
  RdmaPairOptions options = Quiet();
  SECTION("less inline room is granted than was asked for") {
    std::shared_ptr<Frugal> server, client;
    options.server_verbs = rdma::Tapped(&server);
    options.client_verbs = rdma::Tapped(&client);
    RdmaPair pair = MakeRdmaPair(options);
    SendOnly(pair, 2000);
    CheckClean(pair);
  }
  SECTION("so much inline room is refused") {
    options.fabric.most_inline = 100;
    RdmaPair pair = MakeRdmaPair(options);
    SendOnly(pair, 2000);
    CheckClean(pair);
  }
  SECTION("nobody but the sender polls for its completions") {
    options.rdma.send_depth = 8;
    RdmaPair pair = MakeRdmaPair(options);
    SendOnly(pair, 5000);
    CheckClean(pair);
  }
}

TEST_CASE("completion queues hold what all queue pairs of a device can complete", "[bug][queues]") {
  rdma::fake::Fabric fabric(rdma::fake::FabricOptions::Calm());
  auto server = fabric.AddHost({{"server0", ServerAddress(0)}});
  auto client = fabric.AddHost({{"client0", ClientAddress(0)}});
  rdma::RdmaOptions options = Quiet().rdma;
  options.local_addresses = {ClientAddress(0)};
  {
    constexpr size_t kSessions = 3, kMoves = 40, kBytes = 64 << 10;
    std::vector<Ends> sessions;
    std::vector<std::unique_ptr<Area>> areas;
    std::vector<uint32_t> sent(kSessions);
    for (size_t s = 0; s < kSessions; ++s) {
      sessions.push_back(ConnectEnds(server, options, {ServerAddress(0)}, client, options));
      areas.push_back(std::make_unique<Area>(*sessions[s].near, *sessions[s].far, kBytes));
    }
    // Nobody polls: each session has as much under way as it may.
    for (size_t s = 0; s < kSessions; ++s) {
      Connection& near = *sessions[s].near;
      while (TrySend(near, 4000, sent[s]) == Outcome::kOk) REQUIRE(++sent[s] < 10'000);
      for (uint64_t i = 0; i < kMoves; ++i) {
        near.Put(*areas[s]->local, i * 8, areas[s]->remote->key(), i * 8, 8, i);
      }
    }
    for (size_t s = 0; s < kSessions; ++s) {
      Collector near, far;
      ReceiveUntil(*sessions[s].far, far, [&] { return far.frames.size() == sent[s]; });
      for (uint32_t i = 0; i < sent[s]; ++i) CHECK(IsFrame(far.frames[i], 4000, i));
      ReceiveUntil(*sessions[s].near, near, [&] { return near.done.size() == kMoves; });
      for (const Done& done : near.done) CHECK(done.status == BulkStatus::kOk);
      Settle(*sessions[s].near, *sessions[s].far);
      CHECK(areas[s]->Same(0, 0, kMoves * 8));
    }
  }
  for (const std::string& violation : fabric.violations()) FAIL_CHECK(violation);
  for (const std::string& object : fabric.objects()) FAIL_CHECK("Leaked: " << object);
}

TEST_CASE("one wake-up stands for any number of completions", "[bug][queues]") {
  RdmaPairOptions options = Quiet();
  std::shared_ptr<rdma::Blind> tap;
  options.server_verbs = rdma::Tapped(&tap);
  options.rdma.slots = options.rdma.send_depth = 512;
  options.rdma.ring_bytes = 4 << 20;
  RdmaPair pair = MakeRdmaPair(options);
  // The server does not look while it sends, so that the client's credits pile up in its completion
  // queue: packets that hold no frame, more than one call of poll takes. A frame comes behind them.
  constexpr uint32_t kFrames = 480;
  Collector near, far;
  AwaitRails(pair);
  tap->blind = true;
  for (uint32_t i = 0; i < kFrames; ++i) {
    REQUIRE(TrySend(*pair.near, 4000, i, kFlush) == Outcome::kOk);
    pair.far->Poll(64, far);
  }
  ReceiveUntil(*pair.far, far, [&] { return far.frames.size() == kFrames; });
  REQUIRE(TrySend(*pair.far, 100, 7, kFlush) == Outcome::kOk);
  REQUIRE(pair.fabric->AwaitQuiet());
  tap->blind = false;
  CHECK_FALSE(pair.near->Arm());
  ReceiveByEvents(*pair.near, near, 1);
  CHECK(IsFrame(near.frames[0], 100, 7));
  CheckClean(pair);
}
