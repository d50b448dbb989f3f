// Making a connection: whatever fails leaves everything as it was, says why, and in time; what is
// made has the attributes that it should have.
#include <sys/resource.h>
#include <sys/socket.h>

#include <catch2/catch.hpp>
#include <mutex>
#include <thread>

#include "tests/transport/rdma_bugs/tools.h"

using namespace penstock;
using namespace penstock::transport;
using rdma::fake::Call;
using rdma::fake::FabricOptions;

namespace {

// A server and a client with two tcp sockets between them, of which the lifelines are duplicates.
struct Setup {
  Setup()
      : fabric(FabricOptions::Calm()),
        server(fabric.AddHost({{"server0", ServerAddress(0)}})),
        client(fabric.AddHost({{"client0", ClientAddress(0)}})) {
    options.local_addresses = {ClientAddress(0)};
    options.peer_timeout_ms = 500;
    options.slots = 16;  // each is a call that can fail
    int pair[2];
    REQUIRE(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
    ours.reset(pair[0]);
    theirs.reset(pair[1]);
  }
  void Connect() {
    auto listener = rdma::Listener::Open(server, options, {ServerAddress(0)});
    if (!listener) {
      near = tl::unexpected<Error>(listener.error());
      return;
    }
    std::thread dialler([&, offer = (*listener)->offer()] {
      far = rdma::Dial(client, options, offer, {}, UniqueFd(dup(theirs.get())),
                       Deadline::After(5000));
      // The server need not wait any longer: a byte on the lifeline ends its attempt.
      if (!far) hurried = write(theirs.get(), "x", 1) == 1;
    });
    near = (*listener)->Accept({}, UniqueFd(dup(ours.get())), Deadline::After(5000));
    dialler.join();
  }
  bool SocketsWork() {
    char byte = 0;
    if (hurried && (read(ours.get(), &byte, 1) != 1 || byte != 'x')) return false;
    return write(ours.get(), "a", 1) == 1 && read(theirs.get(), &byte, 1) == 1 && byte == 'a' &&
           write(theirs.get(), "b", 1) == 1 && read(ours.get(), &byte, 1) == 1 && byte == 'b';
  }
  void CheckClean() {
    near = Fail(Code::kInternal, "Over.");
    far = Fail(Code::kInternal, "Over.");
    for (const std::string& violation : fabric.violations()) FAIL_CHECK(violation);
    for (const std::string& object : fabric.objects()) FAIL_CHECK("Leaked: " << object);
  }

  rdma::fake::Fabric fabric;
  std::shared_ptr<rdma::fake::Host> server, client;
  rdma::RdmaOptions options;
  UniqueFd ours, theirs;
  bool hurried = false;
  Result<std::unique_ptr<Connection>> near = Fail(Code::kInternal, "Not tried.");
  Result<std::unique_ptr<Connection>> far = Fail(Code::kInternal, "Not tried.");
};

}  // namespace

TEST_CASE("any verbs call may fail during the setup and tcp takes over", "[bug][setup]") {
  int fallbacks = 0, repaired = 0;
  for (const bool at_server : {false, true}) {
    for (int nth = 1; nth < 400; ++nth) {
      INFO("call " << nth << " of the " << (at_server ? "server" : "client"));
      Setup setup;
      const auto& host = at_server ? setup.server : setup.client;
      setup.fabric.FailAnyCall(*host, nth, ENOMEM);
      setup.Connect();
      if (!setup.near) CHECK_FALSE(setup.near.error().message.empty());
      if (setup.near && setup.far) {
        // Whatever failed was not needed, or is repaired.
        Settle(**setup.near, **setup.far);
        ++repaired;
      } else if (!setup.near && !setup.far) {
        CHECK(setup.SocketsWork());
        ++fallbacks;
      }
      // Beyond the setup's last call nothing more can fail.
      const bool all = setup.fabric.calls(*host).size() < static_cast<size_t>(nth);
      setup.CheckClean();
      if (all) break;
    }
  }
  CHECK(fallbacks > 20);
  CHECK(repaired > 20);
}

TEST_CASE("a failed dial leaves no event unacknowledged", "[bug][setup]") {
  Setup setup;
  auto listener = rdma::Listener::Open(setup.server, setup.options, {ServerAddress(0)});
  REQUIRE(listener);
  const rdma::Offer offer = (*listener)->offer();
  const rdma::Token token{1};
  Result<std::unique_ptr<Connection>> near = Fail(Code::kInternal, "");
  std::thread acceptor(
      [&] { near = (*listener)->Accept(token, UniqueFd(), Deadline::After(2500)); });
  const auto dial = [&](const rdma::Offer& to, const rdma::Token& with, const std::string& why) {
    const int64_t start = NowNanoseconds();
    auto far = rdma::Dial(setup.client, setup.options, to, with, UniqueFd(), Deadline::After(2000));
    CHECK(MillisecondsSince(start) < 1500);
    REQUIRE_FALSE(far);
    CHECK_THAT(far.error().message, Catch::Contains(why));
  };
  dial({offer.port, {"10.99.9.9"}}, token, "no RDMA device leads to the address");
  dial({1, offer.addresses}, token, "nobody listens there");
  dial(offer, rdma::Token{2}, "the session's token is wrong");
  setup.fabric.SetLink(ServerAddress(0), ClientAddress(0), false);
  dial(offer, token, "the peer cannot be reached");
  acceptor.join();
  CHECK_FALSE(near);
  listener->reset();
  setup.CheckClean();
}

TEST_CASE("devices of different MTUs agree on the smaller one", "[bug][setup]") {
  for (const bool at_server : {false, true}) {
    RdmaPairOptions options = Quiet();
    (at_server ? options.server_mtu : options.client_mtu) = 1024;
    RdmaPair pair = MakeRdmaPair(options);
    constexpr size_t kBytes = 1 << 20;
    Area area(*pair.near, *pair.far, 2 * kBytes);
    Collector near, far;
    pair.near->Put(*area.local, 0, area.remote->key(), 0, kBytes, 0);
    pair.near->Get(*area.local, kBytes, area.remote->key(), kBytes, kBytes, 1);
    ReceiveUntil(*pair.near, near, [&] { return near.done.size() == 2; });
    for (const Done& done : near.done) CHECK(done.status == BulkStatus::kOk);
    Send(*pair.near, 4000, 1);
    ReceiveUntil(*pair.far, far, [&] { return far.frames.size() == 1; });
    CHECK(IsFrame(far.frames[0], 4000, 1));
    CHECK(area.Same(0, 0, 2 * kBytes));
    area.local.reset();
    area.remote.reset();
    CheckClean(pair);
  }
}

namespace {

// Remembers the queue pairs that live.
class QueuePairs : public rdma::Tap {
 public:
  using Tap::Tap;
  int CreateQp(rdma_cm_id* id, ibv_pd* pd, ibv_qp_init_attr* attributes) override {
    const int result = Tap::CreateQp(id, pd, attributes);
    std::lock_guard lock(mutex_);
    if (result == 0) live_.push_back(id->qp);
    return result;
  }
  void DestroyQp(rdma_cm_id* id) override {
    {
      std::lock_guard lock(mutex_);
      std::erase(live_, id->qp);
    }
    Tap::DestroyQp(id);
  }
  std::vector<ibv_qp_attr> Attributes() {
    std::lock_guard lock(mutex_);
    std::vector<ibv_qp_attr> all;
    for (ibv_qp* qp : live_) {
      REQUIRE(QueryQp(qp, &all.emplace_back(), IBV_QP_MIN_RNR_TIMER | IBV_QP_STATE, nullptr) == 0);
    }
    return all;
  }

 private:
  std::mutex mutex_;
  std::vector<ibv_qp*> live_;
};

}  // namespace

TEST_CASE("a receiver that is not ready stalls the sender for a moment only", "[bug][setup]") {
  RdmaPairOptions options = Quiet();
  std::shared_ptr<QueuePairs> server, client;
  options.server_verbs = rdma::Tapped(&server);
  options.client_verbs = rdma::Tapped(&client);
  RdmaPair pair = MakeRdmaPair(options);
  // The first queue pairs, and those that take their place.
  for (int round = 0; round < 2; ++round) {
    AwaitRails(pair);
    for (const auto& end : {server, client}) {
      const auto all = end->Attributes();
      CHECK(all.size() == 2);
      for (const ibv_qp_attr& attributes : all) CHECK(attributes.min_rnr_timer == 12);
    }
    if (round == 1) break;
    rdma::fake::RequestFault fault;
    fault.host = pair.server.get();
    pair.fabric->Fail(fault);
    Settle(*pair.near, *pair.far);
  }
  CheckClean(pair);
}

TEST_CASE("a limit of locked memory is named with its remedy and tcp takes over", "[bug][setup]") {
  rlimit before;
  REQUIRE(getrlimit(RLIMIT_MEMLOCK, &before) == 0);
  rlimit low = before;
  low.rlim_cur = std::min<rlim_t>(before.rlim_max, 64 << 10);
  REQUIRE(setrlimit(RLIMIT_MEMLOCK, &low) == 0);
  const std::string named = std::to_string(low.rlim_cur / 1024) + " KiB";
  for (const Call call : {Call::kCreateCq, Call::kCreateQp, Call::kRegMr}) {
    INFO(rdma::fake::CallName(call));
    {
      Setup setup;
      setup.fabric.FailCall(*setup.client, call, 1, ENOMEM);
      setup.Connect();
      REQUIRE_FALSE(setup.far);
      CHECK_THAT(setup.far.error().message, Catch::Contains(named) && Catch::Contains("ulimit -l"));
      CHECK(setup.SocketsWork());
      setup.CheckClean();
    }
    Setup setup;
    LogCapture log;
    setup.fabric.FailCall(*setup.server, call, 1, ENOMEM);
    setup.Connect();
    REQUIRE_FALSE(setup.far);
    CHECK_THAT(setup.far.error().message, Catch::Contains("its log says why"));
    CHECK_THAT(log.text(), Catch::Contains(named) && Catch::Contains("ulimit -l"));
    CHECK(setup.SocketsWork());
    setup.CheckClean();
  }
  REQUIRE(setrlimit(RLIMIT_MEMLOCK, &before) == 0);
}
