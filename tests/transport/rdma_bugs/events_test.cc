// Notifications: completions that come just before somebody asks to be told, events that must be
// acknowledged, events that queue up.
#include <atomic>
#include <catch2/catch.hpp>
#include <functional>

#include "tests/transport/fake_verbs/endpoint.h"
#include "tests/transport/rdma_bugs/tools.h"

using namespace penstock;
using namespace penstock::transport;

namespace {

// Does something right before a completion queue of the control queue pair is armed.
class BeforeArming : public rdma::Tap {
 public:
  using Tap::Tap;
  int CreateQp(rdma_cm_id* id, ibv_pd* pd, ibv_qp_init_attr* attributes) override {
    if (attributes->cap.max_send_sge == 2) {  // control: header and payload
      send_cq = attributes->send_cq;
      receive_cq = attributes->recv_cq;
    }
    return Tap::CreateQp(id, pd, attributes);
  }
  int ReqNotifyCq(ibv_cq* cq, int solicited_only) override {
    if (cq == watched.load() && watched.exchange(nullptr) != nullptr) act();
    return Tap::ReqNotifyCq(cq, solicited_only);
  }
  std::atomic<ibv_cq*> send_cq{nullptr}, receive_cq{nullptr};
  std::atomic<ibv_cq*> watched{nullptr};  // once
  std::function<void()> act;
};

}  // namespace

TEST_CASE("a message that slips in before the arming is found before the sleep", "[bug][events]") {
  std::shared_ptr<BeforeArming> tap;
  RdmaPairOptions options = Quiet();
  options.client_verbs = rdma::Tapped(&tap);
  RdmaPair pair = MakeRdmaPair(options);
  tap->act = [&] {
    pair.fabric->HoldReceiveCompletions(false);
    REQUIRE(pair.fabric->AwaitQuiet());
  };
  Collector far;
  AwaitRails(pair);
  for (uint32_t i = 0; i < 20; i += 2) {
    // An event for the first frame, so that nothing is armed when the second one comes.
    while (!pair.far->Arm()) pair.far->Poll(64, far);
    REQUIRE(TrySend(*pair.near, 100, i, kFlush) == Outcome::kOk);
    REQUIRE(Readable(pair.far->event_fd(), 5000));
    while (far.frames.size() == i) pair.far->Poll(64, far);
    pair.fabric->HoldReceiveCompletions(true);
    REQUIRE(TrySend(*pair.near, 100, i + 1, kFlush) == Outcome::kOk);
    tap->watched = tap->receive_cq.load();
    CHECK_FALSE(pair.far->Arm());
    while (far.frames.size() < i + 2) pair.far->Poll(64, far);
    CHECK(IsFrame(far.frames[i + 1], 100, i + 1));
    CHECK(tap->watched == nullptr);
  }
  CheckClean(pair);
}

TEST_CASE("a send completion that slips in before the arming lets the next packet leave",
          "[bug][events]") {
  for (int round = 0; round < 3; ++round) {
    std::shared_ptr<BeforeArming> tap;
    RdmaPairOptions options = Quiet();
    options.rdma.packets_at_once = 1;
    options.server_verbs = rdma::Tapped(&tap);
    RdmaPair pair = MakeRdmaPair(options);
    tap->act = [&] {
      pair.fabric->HoldSendCompletions(false);
      REQUIRE(pair.fabric->AwaitQuiet());
    };
    AwaitRails(pair);
    pair.fabric->HoldSendCompletions(true);
    REQUIRE(TrySend(*pair.near, 100, 0, kNone) == Outcome::kOk);
    usleep(5000);  // longer than any pace that would gather frames
    const uint64_t before = pair.near->counters().packets_sent;
    tap->watched = tap->send_cq.load();
    REQUIRE(TrySend(*pair.near, 100, 1, kNone) == Outcome::kOk);
    CHECK(tap->watched == nullptr);
    CHECK(pair.near->counters().packets_sent == before + 1);
    Collector far;
    ReceiveUntil(*pair.far, far, [&] { return far.frames.size() == 2; });
    CHECK(IsFrame(far.frames[1], 100, 1));
    CheckClean(pair);
  }
}

TEST_CASE("every completion event that was read is acknowledged before its queue goes",
          "[bug][events]") {
  for (const uint32_t events : {1u, 2u, 63u, 64u, 65u, 150u}) {
    RdmaPair pair = MakeRdmaPair(Quiet());
    Collector far;
    for (uint32_t i = 0; i < events; ++i) {
      while (!pair.far->Arm()) pair.far->Poll(64, far);
      REQUIRE(TrySend(*pair.near, 100, i, kFlush) == Outcome::kOk);
      REQUIRE(Readable(pair.far->event_fd(), 5000));
    }
    ReceiveByEvents(*pair.far, far, events);
    (void)pair.far->Arm();  // which reads the last event
    // Once with the queue pair replaced in between.
    if (events == 65) {
      rdma::fake::RequestFault fault;
      fault.host = pair.server.get();
      pair.fabric->Fail(fault);
      Send(*pair.near, 100, events);
      ReceiveUntil(*pair.far, far, [&] { return far.frames.size() == events + 1; });
    }
    CheckClean(pair);
  }
}

TEST_CASE("events that queue up are all handled at one wake-up", "[bug][events]") {
  SECTION("of the connection manager") {
    RdmaPair pair = MakeRdmaPair(Quiet());
    auto stranger = pair.fabric->AddHost({{"stranger0", "10.99.0.77"}});
    // The server's port is not told to strangers; one who finds it sends requests without a token.
    const uint16_t port = 40000;
    std::vector<std::unique_ptr<rdma::fake::Endpoint>> dialled;
    for (int i = 0; i < 30; ++i) {
      dialled.push_back(
          std::make_unique<rdma::fake::Endpoint>(*stranger, rdma::fake::EndpointOptions()));
      dialled.back()->Resolve("10.99.0.77", ServerAddress(0), port);
      dialled.back()->MakeQueuePair();
    }
    const int64_t start = NowNanoseconds();
    for (auto& each : dialled) {
      rdma_conn_param parameters = each->Parameters();
      REQUIRE(stranger->Connect(each->id, &parameters) == 0);
    }
    for (auto& each : dialled) {
      REQUIRE(each->Event(10'000) == RDMA_CM_EVENT_REJECTED);
      CHECK(each->status == 28);  // by the server's code, not for lack of a listener
    }
    CHECK(MillisecondsSince(start) < 1500);
    dialled.clear();
    Settle(*pair.near, *pair.far);
    CheckClean(pair);
  }
  SECTION("of the device") {
    RdmaPairOptions options = Quiet(2);
    options.rdma.keepalive_ms = 50;
    RdmaPair pair = MakeRdmaPair(options);
    for (int i = 0; i < 100; ++i) {
      pair.fabric->RaiseAsync(ServerAddress(0), IBV_EVENT_COMM_EST);
      pair.fabric->RaiseAsync(ClientAddress(0), IBV_EVENT_COMM_EST);
    }
    pair.fabric->SetPort(ServerAddress(0), false);
    const int64_t start = NowNanoseconds();
    Settle(*pair.near, *pair.far);
    Settle(*pair.far, *pair.near);
    CHECK(MillisecondsSince(start) < 3000);
    CheckClean(pair);
  }
}
