// Links that go and come back, and peers that go without a word.
#include <atomic>
#include <catch2/catch.hpp>
#include <map>
#include <mutex>
#include <thread>

#include "tests/transport/rdma_bugs/tools.h"

using namespace penstock;
using namespace penstock::transport;

namespace {

// Counts queue pairs, and the bytes that each device is asked to move.
class Meter : public rdma::Tap {
 public:
  using Tap::Tap;
  int PostSend(ibv_qp* qp, ibv_send_wr* list, ibv_send_wr** bad) override {
    std::lock_guard lock(mutex_);
    uint64_t& bytes = bytes_[GetDeviceName(qp->context->device)];
    for (const ibv_send_wr* wr = list; wr != nullptr; wr = wr->next) {
      if (wr->opcode == IBV_WR_SEND) continue;
      for (int i = 0; i < wr->num_sge; ++i) bytes += wr->sg_list[i].length;
    }
    return Tap::PostSend(qp, list, bad);
  }
  int CreateQp(rdma_cm_id* id, ibv_pd* pd, ibv_qp_init_attr* attributes) override {
    ++made;
    return Tap::CreateQp(id, pd, attributes);
  }
  std::atomic<int> made{0};
  uint64_t bytes(const std::string& device) {
    std::lock_guard lock(mutex_);
    return bytes_[device];
  }

 private:
  std::mutex mutex_;
  std::map<std::string, uint64_t> bytes_;
};

RdmaPairOptions Impatient(uint32_t rails) {
  RdmaPairOptions options;
  options.rails = rails;
  options.rdma.timeout = 8;
  options.rdma.retry_count = 2;
  options.rdma.keepalive_ms = 50;
  options.rdma.peer_timeout_ms = 1'500;
  return options;
}

void PutAll(RdmaPair& pair, Area& area, Collector& near) {
  const size_t before = near.done.size();
  REQUIRE(pair.near->Put(*area.local, 0, area.remote->key(), 0, area.here.size(), before) ==
          Outcome::kOk);
  ReceiveUntil(*pair.near, near, [&] { return near.done.size() == before + 1; });
  CHECK(near.done.back().status == BulkStatus::kOk);
}

}  // namespace

TEST_CASE("a rail whose port flaps gets a new queue pair and its share again", "[bug][links]") {
  std::shared_ptr<Meter> meter;
  RdmaPairOptions options = Impatient(2);
  options.server_verbs = rdma::Tapped(&meter);
  RdmaPair pair = MakeRdmaPair(options);
  Area area(*pair.near, *pair.far, 8 << 20);
  Collector near;
  pair.fabric->SetPort(ServerAddress(1), false);
  for (int i = 0; i < 3; ++i) PutAll(pair, area, near);
  usleep(200'000);  // the outage: long enough for failed attempts
  pair.fabric->SetPort(ServerAddress(1), true);
  // Within ten seconds a move goes by both rails again, half by half.
  const Deadline deadline = Deadline::After(10'000);
  uint64_t share = 0;
  while (share < area.here.size() / 4 && !deadline.expired()) {
    const uint64_t before = meter->bytes("server1");
    PutAll(pair, area, near);
    share = meter->bytes("server1") - before;
  }
  CHECK(share >= area.here.size() / 4);
  Settle(*pair.near, *pair.far);
  CHECK(area.Same(0, 0, area.here.size()));
  area.local.reset();
  area.remote.reset();
  CheckClean(pair);
}

TEST_CASE("a rail is not given up because nobody reads that the server uses it", "[bug][links]") {
  std::shared_ptr<Meter> client;
  RdmaPairOptions options = Quiet(2);
  options.client_verbs = rdma::Tapped(&client);
  RdmaPair pair = MakeRdmaPair(options);
  usleep(1'500'000);  // the client's program does not come to receive
  Area area(*pair.near, *pair.far, 1 << 20);
  Collector near;
  PutAll(pair, area, near);
  CHECK(client->made == 3);
  area.local.reset();
  area.remote.reset();
  CheckClean(pair);
}

TEST_CASE("an address that goes and comes back at another index is found again", "[bug][links]") {
  for (const bool at_server : {true, false}) {
    RdmaPairOptions options = Impatient(1);
    options.rdma.peer_timeout_ms = 8'000;
    RdmaPair pair = MakeRdmaPair(options);
    AwaitRails(pair);
    const std::string address = at_server ? ServerAddress(0) : ClientAddress(0);
    pair.fabric->SetAddress(address, false);
    usleep(400'000);  // the loss is noticed, and dialling fails
    pair.fabric->SetAddress(address, true);
    Send(*pair.near, 300, 5);
    Collector far;
    ReceiveUntil(*pair.far, far, [&] { return far.frames.size() == 1; });
    CHECK(IsFrame(far.frames[0], 300, 5));
    AwaitRails(pair);
    CHECK_FALSE(pair.near->closed());
    CHECK_FALSE(pair.far->closed());
    CheckClean(pair);
  }
}

TEST_CASE("a peer that vanished is noticed although nothing is sent", "[bug][links]") {
  SECTION("its host crashed while the link was down") {
    RdmaPair pair = MakeRdmaPair(Impatient(1));
    AwaitRails(pair);  // nothing of our own is under way, which would notice
    pair.fabric->SetLink(ServerAddress(0), ClientAddress(0), false);
    pair.fabric->Kill(*pair.client, false);
    pair.fabric->SetLink(ServerAddress(0), ClientAddress(0), true);
    const int64_t start = NowNanoseconds();
    Collector near;
    ReceiveToEnd(*pair.near, near);
    CHECK(MillisecondsSince(start) >= 1'400);
    CHECK(MillisecondsSince(start) < 6'000);
    CHECK_THAT(pair.near->close_reason(), Catch::Contains("out of reach"));
  }
  SECTION("the link is cut, and both ends say so") {
    RdmaPair pair = MakeRdmaPair(Impatient(2));
    AwaitRails(pair);
    for (uint32_t r = 0; r < 2; ++r) {
      pair.fabric->SetLink(ServerAddress(r), ClientAddress(r), false);
    }
    const int64_t start = NowNanoseconds();
    Collector near, far;
    std::thread other([&] { ReceiveToEnd(*pair.far, far); });
    ReceiveToEnd(*pair.near, near);
    other.join();
    CHECK(MillisecondsSince(start) < 8'000);
    CHECK_THAT(pair.near->close_reason(), Catch::Contains("out of reach"));
    CHECK_THAT(pair.far->close_reason(), Catch::Contains("out of reach"));
    CheckClean(pair);
  }
  SECTION("the connection ends while a keepalive is unanswered") {
    for (int round = 0; round < 10; ++round) {
      RdmaPairOptions options = Impatient(1);
      options.rdma.keepalive_ms = 5;
      options.rdma.timeout = 16;
      RdmaPair pair = MakeRdmaPair(options);
      pair.fabric->SetLink(ServerAddress(0), ClientAddress(0), false);
      usleep(static_cast<useconds_t>(10'000 + 3000 * round));
      CheckClean(pair);
    }
  }
}
