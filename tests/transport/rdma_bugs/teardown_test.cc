// Ends of connections: in the middle of everything, from anywhere, and soon.
#include <atomic>
#include <catch2/catch.hpp>
#include <cstdlib>
#include <mutex>
#include <random>
#include <thread>

#include "tests/transport/rdma_bugs/tools.h"

using namespace penstock;
using namespace penstock::transport;

namespace {

// Closes the connection that it is called by.
struct Closing : Collector {
  explicit Closing(Connection& connection) : connection(connection) {}
  bool OnFrame(std::span<const std::byte> frame) override {
    Collector::OnFrame(frame);
    connection.Close(0);
    return true;
  }
  void OnBulkDone(uint64_t cookie, BulkStatus status, uint64_t bytes) override {
    Collector::OnBulkDone(cookie, status, bytes);
    connection.Close(0);
  }
  Connection& connection;
};

}  // namespace

TEST_CASE("Close may be called by the handler that the connection calls", "[bug][teardown]") {
  SECTION("with a frame in its hands") {
    RdmaPair pair = MakeRdmaPair();
    for (uint32_t i = 0; i < 5; ++i) Send(*pair.near, 300, i);
    Closing far(*pair.far);
    const int64_t start = NowNanoseconds();
    while (!pair.far->closed()) pair.far->Wait(64, far, Deadline::After(100));
    CHECK(MillisecondsSince(start) < 2000);
    CHECK(IsFrame(far.frames.at(0), 300, 0));
    Collector near;
    ReceiveToEnd(*pair.near, near);
    CHECK(pair.near->close_reason() == "The peer closed the connection.");
    CheckClean(pair);
  }
  SECTION("with the report of a move, while others are under way") {
    RdmaPair pair = MakeRdmaPair();
    Area area(*pair.near, *pair.far, 4 << 20);
    for (uint64_t i = 0; i < 8; ++i) {
      pair.near->Put(*area.local, 0, area.remote->key(), 0, 4 << 20, i);
    }
    Closing near(*pair.near);
    ReceiveToEnd(*pair.near, near);
    CHECK(near.done.size() == 8);
    area.local.reset();
    area.remote.reset();
    CheckClean(pair);
  }
  SECTION("with the news that the peer has disconnected on its way") {
    for (int round = 0; round < 20; ++round) {
      RdmaPair pair = MakeRdmaPair();
      Send(*pair.near, 300, 1);
      Closing far(*pair.far);
      std::thread other([&] { pair.near->Close(0); });
      ReceiveToEnd(*pair.far, far);
      other.join();
      CheckClean(pair);
    }
  }
}

TEST_CASE("the end waits for no answer of a peer that has gone", "[bug][teardown]") {
  for (const bool answers : {true, false}) {
    RdmaPairOptions options = Quiet();
    options.rdma.timeout = 20;  // the device gives up after three seconds
    LogCapture log;
    {
      RdmaPair pair = MakeRdmaPair(options);
      Area area(*pair.near, *pair.far, 4 << 20);
      for (uint64_t i = 0; i < 16; ++i) {
        pair.near->Put(*area.local, 0, area.remote->key(), 0, 4 << 20, i);
        TrySend(*pair.near, 3000, static_cast<uint32_t>(i), kFlush);
      }
      if (!answers) pair.fabric->SetLink(ServerAddress(0), ClientAddress(0), false);
      pair.fabric->Kill(*pair.client, answers);
      const int64_t start = NowNanoseconds();
      pair.near->Close(200);
      CHECK(MillisecondsSince(start) < 1500);
      Collector near;
      ReceiveToEnd(*pair.near, near);
      CHECK(near.done.size() == 16);
      area.local.reset();
    }
    CHECK_THAT(log.text(), !Catch::Contains(" E "));
  }
}

TEST_CASE("a device may be removed under load", "[bug][teardown]") {
  // The kernel's removal of a device waits until every id on it is destroyed, also those that
  // listen, so they must go by themselves.
  for (const bool at_server : {true, false}) {
    RdmaPairOptions options;
    options.rails = 2;
    RdmaPair pair = MakeRdmaPair(options);
    Area area(*pair.near, *pair.far, 8 << 20);
    constexpr uint64_t kMoves = 12;
    for (uint64_t i = 0; i < kMoves; ++i) {
      pair.near->Put(*area.local, 0, area.remote->key(), 0, 8 << 20, i);
    }
    for (uint32_t i = 0; i < 40; ++i) Send(*pair.near, 3000, i, kNone);
    const std::string address = at_server ? ServerAddress(0) : ClientAddress(0);
    CHECK(pair.fabric->ids_at(address) > 1);
    pair.fabric->RemoveDevice(address);
    Collector near, far;
    ReceiveUntil(*pair.near, near, [&] { return near.done.size() == kMoves; });
    for (const Done& done : near.done) CHECK(done.status == BulkStatus::kOk);
    ReceiveUntil(*pair.far, far, [&] { return far.frames.size() == 40; });
    for (uint32_t i = 0; i < 40; ++i) CHECK(IsFrame(far.frames[i], 3000, i));
    const Deadline deadline = Deadline::After(8'000);
    while (pair.fabric->ids_at(address) > 0 && !deadline.expired()) usleep(1000);
    CHECK(pair.fabric->ids_at(address) == 0);
    Settle(*pair.near, *pair.far);
    CHECK(area.Same(0, 0, 8 << 20));
    area.local.reset();
    area.remote.reset();
    CheckClean(pair);
  }
}

TEST_CASE("connections with traffic come and go and wait for nothing that may not come",
          "[bug][teardown]") {
  // Soft-RoCE never says that the last request is reached, nor flushes a receive that is posted
  // after the error. Such receives are posted here: for packets that came before it, by an end that
  // does not know of it yet.
  for (uint64_t seed = 1; seed <= 4; ++seed) {
    std::shared_ptr<rdma::Blind> tap;
    RdmaPairOptions options = Quiet();
    options.fabric.seed = seed;
    options.client_verbs = rdma::Tapped(&tap);
    RdmaPair pair = MakeRdmaPair(options);
    AwaitRails(pair);
    tap->blind = true;
    Collector near, far;
    for (uint32_t i = 0; i < 64; ++i) Send(*pair.far, 4000, i);
    ReceiveUntil(*pair.near, near, [&] { return near.frames.size() == 64; });
    REQUIRE(pair.fabric->AwaitQuiet());  // the server's credits are there
    rdma::fake::RequestFault fault;
    fault.host = pair.client.get();
    pair.fabric->Fail(fault);
    pair.fabric->HoldSendCompletions(true);
    Send(*pair.far, 4000, 64);
    usleep(10'000);
    tap->blind = false;
    pair.far->Poll(64, far);
    pair.fabric->HoldSendCompletions(false);
    ReceiveUntil(*pair.near, near, [&] { return near.frames.size() == 65; });
    CHECK(IsFrame(near.frames[64], 4000, 64));
    CheckClean(pair);
  }
  for (uint32_t round = 0; round < 100; ++round) {
    RdmaPairOptions options;
    options.fabric.seed = round + 1;
    RdmaPair pair = MakeRdmaPair(options);
    Area area(*pair.near, *pair.far, 64 << 10);
    pair.near->Put(*area.local, 0, area.remote->key(), 0, 64 << 10, 1);
    for (uint32_t i = 0; i < 20; ++i) Send(*pair.near, 200, i, kNone);
    Send(*pair.near, 200, 20, kFlush);
    Collector near, far;
    ReceiveUntil(*pair.far, far, [&] { return far.frames.size() == 21; });
    ReceiveUntil(*pair.near, near, [&] { return near.done.size() == 1; });
    Settle(*pair.near, *pair.far);
    CHECK(area.Same(0, 0, 64 << 10));
    const int64_t start = NowNanoseconds();
    if (round % 2) pair.near->Close(50);
    if (round % 3) pair.far->Close(50);
    pair.near->Close(0);
    CHECK(MillisecondsSince(start) < 5000);
    area.local.reset();
    area.remote.reset();
    CheckClean(pair);
  }
}

namespace {

// Eight producers, moves and receivers at work while either side closes.
void RaceWithTheEnd(uint32_t round) {
  std::mt19937 random(round);
  RdmaPairOptions options;
  options.fabric.seed = round + 1;
  RdmaPair pair = MakeRdmaPair(options);
  Area area(*pair.near, *pair.far, 4096);
  std::mutex stream;  // a call stream's lock: one frame is written at a time
  std::atomic<bool> over{false};
  const auto produce = [&](uint32_t t) {
    Connection& end = t % 2 == 0 ? *pair.near : *pair.far;
    for (uint32_t i = 0; !over; ++i) {
      if (i % 8 == 7) usleep(100);  // all at once would only wait for each other
      std::unique_lock hold(stream, std::defer_lock);
      if (t % 2 == 0) hold.lock();
      std::byte* slot = nullptr;
      const uint32_t size = 64 + 8 * (i % 40);
      const Outcome outcome =
          t == 2 || t == 3 || t == 0 ? end.Reserve(size, &slot) : Outcome::kAgain;
      if (outcome == Outcome::kClosed) return;
      if (outcome == Outcome::kOk) {
        FillFrame(slot, size, i);
        // The end may come between the two, and be over before the second.
        if (t == 2 && i % 16 == 15) usleep(round % 10 == 0 ? 60'000 : 300);
        end.Commit(size, i % 4 == 0 ? kFlush : kNone);
      } else if (end.Flush() == Outcome::kClosed) {
        return;
      }
      if (t == 4 &&
          pair.near->Put(*area.local, 0, area.remote->key(), 0, 4096, i) == Outcome::kClosed) {
        return;
      }
    }
  };
  const auto receive = [&](Connection& end) {
    Collector collector;
    while (end.Wait(64, collector, Deadline::After(20)) >= 0 && !over) collector.frames.clear();
  };
  std::vector<std::thread> threads;
  // Of the client's producers only one writes frames: it has no lock of its own here.
  for (const uint32_t t : {0u, 2u, 3u, 4u, 5u, 6u, 7u, 8u}) threads.emplace_back(produce, t);
  threads.emplace_back(receive, std::ref(*pair.near));
  threads.emplace_back(receive, std::ref(*pair.far));
  usleep(random() % 2000);
  Connection& first = round % 2 == 0 ? *pair.near : *pair.far;
  Connection& second = round % 2 == 0 ? *pair.far : *pair.near;
  first.Close(round % 4 < 2 ? 20 : 0);
  if (round % 3 == 0) second.Close(0);
  usleep(random() % 2000);
  over = true;
  for (std::thread& thread : threads) thread.join();
  pair.near->Close(0);  // before the memory of its moves goes
  area.local.reset();
  area.remote.reset();
  CheckClean(pair);
}

uint32_t FromEnvironment(const char* name, uint32_t otherwise) {
  const char* text = getenv(name);
  return text == nullptr ? otherwise : static_cast<uint32_t>(atoi(text));
}

}  // namespace

// PENSTOCK_RACES says how many, PENSTOCK_FIRST_RACE which is the first: each has its own schedule.
TEST_CASE("producers race with the end", "[bug][teardown][races]") {
  const uint32_t races = FromEnvironment("PENSTOCK_RACES", 200);
  const uint32_t first = FromEnvironment("PENSTOCK_FIRST_RACE", 0);
  for (uint32_t round = first; round < first + races; ++round) {
    INFO("round " << round);
    RaceWithTheEnd(round);
  }
}
