// The rdma connection under a fabric that breaks: control queue pairs that die in mid-stream, peers
// that vanish, the end of the tcp connection beside it.
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <catch2/catch.hpp>
#include <random>
#include <thread>

#include "tests/transport/rdma_pair.h"

using namespace penstock;
using namespace penstock::transport;
using rdma::fake::FabricOptions;
using rdma::fake::RequestFault;

namespace {

struct Counting : Handler {
  std::atomic<uint32_t> next{0};
  std::atomic<bool> right{true};
  bool OnFrame(std::span<const std::byte> frame) override {
    uint32_t size, serial;
    std::memcpy(&size, frame.data(), sizeof size);
    std::memcpy(&serial, frame.data() + 4, sizeof serial);
    if (serial != next.load() || !IsFrame(frame, size, serial)) right = false;
    ++next;
    return true;
  }
  void OnBulkDone(uint64_t, BulkStatus, uint64_t) override {}
};

// Both ends send `frames` frames and receive those of the other.
void Exchange(RdmaPair& pair, uint32_t frames, uint64_t seed,
              const std::function<void()>& trouble) {
  Counting near, far;
  std::atomic<bool> failed{false};
  const auto send = [&](Connection& from, uint64_t salt) {
    std::mt19937_64 random(salt);
    const Deadline deadline = Deadline::After(30'000);
    for (uint32_t i = 0; i < frames && !failed; ++i) {
      const uint32_t size =
          random() % 50 == 0 ? 8 + random() % 60'000 : 8 + static_cast<uint32_t>(random() % 400);
      const uint32_t flags = random() % 8 == 0 ? kFlush : kNone;
      Outcome outcome;
      while ((outcome = TrySend(from, size, i, flags)) == Outcome::kAgain && !deadline.expired()) {
        usleep(100);
      }
      if (outcome != Outcome::kOk) failed = true;
    }
    from.Flush();
  };
  const auto receive = [&](Connection& at, Counting& counting) {
    const Deadline deadline = Deadline::After(30'000);
    while (counting.next < frames && !deadline.expired() && !failed) {
      if (at.Wait(64, counting, Deadline::After(50)) < 0) failed = true;
    }
  };
  std::thread threads[] = {std::thread(send, std::ref(*pair.near), seed),
                           std::thread(send, std::ref(*pair.far), seed + 1),
                           std::thread(receive, std::ref(*pair.near), std::ref(near)),
                           std::thread(receive, std::ref(*pair.far), std::ref(far))};
  trouble();
  for (std::thread& thread : threads) thread.join();
  INFO("near: " << pair.near->close_reason() << " far: " << pair.far->close_reason());
  CHECK_FALSE(failed);
  CHECK(near.next == frames);
  CHECK(far.next == frames);
  CHECK(near.right);
  CHECK(far.right);
}

}  // namespace

TEST_CASE("a control queue pair that dies in mid-stream loses and repeats nothing",
          "[rdma][failover]") {
  for (uint64_t seed = 1; seed <= 6; ++seed) {
    RdmaPairOptions options;
    options.rails = 1 + seed % 2;
    options.fabric.seed = seed;
    RdmaPair pair = MakeRdmaPair(options);
    std::mt19937_64 random(seed);
    Exchange(pair, 3000, seed, [&] {
      for (int i = 0; i < 4; ++i) {
        RequestFault fault;
        fault.host = random() % 2 ? pair.server.get() : pair.client.get();
        fault.nth = 1 + static_cast<int>(random() % 40);
        fault.arrives = random() % 2 == 0;
        pair.fabric->Fail(fault);
        usleep(50'000);
      }
    });
    CheckClean(pair);
  }
}

TEST_CASE("a storm shares packets on a fabric that completes at once", "[rdma]") {
  RdmaPairOptions options;
  options.fabric = FabricOptions::Calm();
  RdmaPair pair = MakeRdmaPair(options);
  Collector far;
  constexpr uint32_t kFrames = 4000;
  std::thread receive(
      [&] { ReceiveUntil(*pair.far, far, [&] { return far.frames.size() == kFrames; }); });
  for (uint32_t i = 0; i < kFrames; ++i) Send(*pair.near, 160, i, 0);
  receive.join();
  CHECK(pair.near->counters().packets_sent * 8 <= kFrames);
  CheckClean(pair);
}

TEST_CASE("control moves to another rail when its port goes down", "[rdma][failover]") {
  RdmaPairOptions options;
  options.rails = 2;
  RdmaPair pair = MakeRdmaPair(options);
  Exchange(pair, 3000, 9, [&] {
    usleep(5000);
    pair.fabric->SetPort(ServerAddress(0), false);
    usleep(300'000);
    pair.fabric->SetPort(ServerAddress(0), true);
    usleep(300'000);
    pair.fabric->SetPort(ClientAddress(1), false);
    usleep(300'000);
    pair.fabric->SetPort(ClientAddress(1), true);
  });
  CheckClean(pair);
}

TEST_CASE("a partition ends both sides within the configured time", "[rdma][failover]") {
  RdmaPairOptions options;
  options.rdma.keepalive_ms = 100;
  options.rdma.peer_timeout_ms = 1000;
  RdmaPair pair = MakeRdmaPair(options);
  pair.fabric->SetLink(ServerAddress(0), ClientAddress(0), false);
  const int64_t start = NowNanoseconds();
  Collector near, far;
  std::thread other([&] { ReceiveToEnd(*pair.far, far); });
  ReceiveToEnd(*pair.near, near);
  other.join();
  const int64_t took_ms = (NowNanoseconds() - start) / 1'000'000;
  CHECK(took_ms >= 1000);
  CHECK(took_ms < 6000);
  CHECK(pair.near->close_reason().find("out of reach") != std::string::npos);
  CHECK(pair.far->close_reason().find("out of reach") != std::string::npos);
  CheckClean(pair);
}

TEST_CASE("a peer whose process ends without a word is noticed", "[rdma][failover]") {
  for (const bool announced : {true, false}) {
    RdmaPairOptions options;
    options.rdma.keepalive_ms = 100;
    options.rdma.peer_timeout_ms = 1000;
    RdmaPair pair = MakeRdmaPair(options);
    for (uint32_t i = 0; i < 20; ++i) Send(*pair.near, 100, i, kFlush);
    usleep(50'000);
    pair.fabric->Kill(*pair.server, announced);
    Collector far;
    const int64_t start = NowNanoseconds();
    ReceiveToEnd(*pair.far, far);
    CHECK((NowNanoseconds() - start) / 1'000'000 < 6000);
    CHECK(far.frames.size() == 20);
    CHECK(pair.far->closed());
    pair.near->Close(0);
  }
}

TEST_CASE("the end of the tcp connection ends the session at once, after what has arrived",
          "[rdma][lifeline]") {
  rdma::fake::Fabric fabric;
  auto server = fabric.AddHost({{"server0", ServerAddress(0)}});
  auto client = fabric.AddHost({{"client0", ClientAddress(0)}});
  int sockets[2];
  REQUIRE(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) == 0);
  UniqueFd theirs(sockets[1]);  // a third hand on the client's end, which alone will close it
  rdma::RdmaOptions options;
  options.local_addresses = {ClientAddress(0)};
  auto listener = rdma::Listener::Open(server, options, {ServerAddress(0)});
  REQUIRE(listener);
  Result<std::unique_ptr<Connection>> far = Fail(Code::kInternal, "");
  std::thread dialler([&, offer = (*listener)->offer()] {
    far = rdma::Dial(client, options, offer, {}, UniqueFd(), Deadline::After(10'000));
  });
  auto near = (*listener)->Accept({}, UniqueFd(sockets[0]), Deadline::After(10'000));
  dialler.join();
  REQUIRE((near && far));
  for (uint32_t i = 0; i < 30; ++i) Send(**far, 300, i, kFlush);
  usleep(50'000);
  theirs.reset();
  const int64_t start = NowNanoseconds();
  Collector collector;
  ReceiveToEnd(**near, collector);
  CHECK((NowNanoseconds() - start) / 1'000'000 < 1000);
  CHECK(collector.frames.size() == 30);
  CHECK((*near)->close_reason() == "The peer closed the connection.");
  near->reset();
  far->reset();
  for (const std::string& violation : fabric.violations()) FAIL_CHECK(violation);
}
