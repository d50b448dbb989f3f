// Bulk moves over rails of the fake fabric that fail: right bytes, each move reported once.
#include <unistd.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <random>

#include "tests/transport/rdma_pair.h"

using namespace penstock;
using namespace penstock::transport;
using rdma::fake::RequestFault;

namespace {

constexpr size_t kMemory = 16 << 20;

// Registered memory at both ends.
struct Field {
  explicit Field(RdmaPair& pair, size_t bytes = kMemory)
      : here(Noise(bytes, 1)), there(Noise(bytes, 2)) {
    auto near = pair.near->Register(here.data(), here.size(), Access::kPeerReadsAndWrites);
    auto far = pair.far->Register(there.data(), there.size(), Access::kPeerReadsAndWrites);
    REQUIRE(near);
    REQUIRE(far);
    local = std::move(*near);
    remote = std::move(*far);
  }
  std::vector<std::byte> here, there;
  std::unique_ptr<MemoryRegion> local, remote;
};

// What was reported, by cookie: each of 0..count-1 exactly once.
std::vector<Done> Sorted(const Collector& collector, size_t count) {
  std::vector<Done> done = collector.done;
  std::sort(done.begin(), done.end(),
            [](const Done& a, const Done& b) { return a.cookie < b.cookie; });
  REQUIRE(done.size() == count);
  for (size_t i = 0; i < count; ++i) CHECK(done[i].cookie == i);
  return done;
}

// Waits for `count` reports, and a little longer for one too many.
void Finish(RdmaPair& pair, Collector& collector, size_t count) {
  ReceiveUntil(*pair.near, collector, [&] { return collector.done.size() >= count; });
  pair.near->Wait(64, collector, Deadline::After(20));
}

// Random moves between distinct places, with trouble while they are under way.
template <typename Trouble>
void MoveUnder(RdmaPair& pair, uint64_t seed, Trouble trouble) {
  constexpr size_t kPlace = 1 << 20, kPlaces = 16;
  Field field(pair, kPlace * kPlaces);
  std::vector<std::byte> here = field.here, there = field.there;
  std::mt19937_64 random(seed);
  Collector collector, far;
  for (size_t i = 0; i < kPlaces; ++i) {
    const size_t bytes = i % 3 == 0 ? kPlace : 1 + random() % kPlace;
    const size_t at = i * kPlace;
    if (i % 2 == 0) {
      REQUIRE(pair.near->Put(*field.local, at, field.remote->key(), at, bytes, i) == Outcome::kOk);
      std::copy_n(here.begin() + at, bytes, there.begin() + at);
    } else {
      REQUIRE(pair.near->Get(*field.local, at, field.remote->key(), at, bytes, i) == Outcome::kOk);
      std::copy_n(there.begin() + at, bytes, here.begin() + at);
    }
    trouble(i);
  }
  Finish(pair, collector, kPlaces);
  for (const Done& done : Sorted(collector, kPlaces)) CHECK(done.status == BulkStatus::kOk);
  Settle(*pair.near, *pair.far);
  CHECK(Same(field.here, here));
  CHECK(Same(field.there, there));
}

}  // namespace

TEST_CASE("moves of all sizes bring the right bytes over one and two rails", "[rdma][bulk]") {
  for (const uint32_t rails : {1u, 2u}) {
    RdmaPairOptions options;
    options.rails = rails;
    RdmaPair pair = MakeRdmaPair(options);
    Field field(pair);
    Collector collector;
    std::vector<std::byte> here = field.here, there = field.there;
    uint64_t cookie = 0;
    for (const size_t bytes : {size_t{0}, size_t{1}, size_t{4095}, size_t{4096}, size_t{4097},
                               size_t{524289}, size_t{1} << 20, size_t{8} << 20}) {
      REQUIRE(pair.near->Put(*field.local, 5, field.remote->key(), 7, bytes, cookie++) ==
              Outcome::kOk);
      Finish(pair, collector, cookie);
      std::copy_n(here.begin() + 5, bytes, there.begin() + 7);
      Settle(*pair.near, *pair.far);
      CHECK(Same(field.there, there));
      const size_t from = kMemory - bytes;
      REQUIRE(pair.near->Get(*field.local, from, field.remote->key(), from, bytes, cookie++) ==
              Outcome::kOk);
      Finish(pair, collector, cookie);
      std::copy_n(there.begin() + from, bytes, here.begin() + from);
      CHECK(Same(field.here, here));
    }
    for (const Done& done : Sorted(collector, cookie)) CHECK(done.status == BulkStatus::kOk);
    field.local.reset();
    field.remote.reset();
    CheckClean(pair);
  }
}

TEST_CASE("a move follows a reported Put to the same place over any rail", "[rdma][bulk]") {
  for (uint64_t seed = 1; seed <= 4; ++seed) {
    RdmaPairOptions options;
    options.rails = 2;
    options.rdma.bulk_chunk = 64 << 10;
    options.fabric.seed = seed;
    RdmaPair pair = MakeRdmaPair(options);
    constexpr size_t kBytes = 1 << 20;
    Field field(pair, 3 * kBytes);
    Collector collector;
    uint64_t cookie = 0;
    // Put one noise, then another, then read back: always the second.
    for (int round = 0; round < 8; ++round) {
      for (int i = 0; i < 2; ++i) {
        pair.near->Put(*field.local, static_cast<size_t>(i) * kBytes, field.remote->key(), 0,
                       kBytes, cookie++);
        Finish(pair, collector, cookie);
      }
      std::fill_n(field.here.begin() + 2 * kBytes, kBytes, std::byte{0});
      pair.near->Get(*field.local, 2 * kBytes, field.remote->key(), 0, kBytes, cookie++);
      Finish(pair, collector, cookie);
      CHECK(std::memcmp(&field.here[2 * kBytes], &field.here[kBytes], kBytes) == 0);
    }
    Sorted(collector, cookie);
    field.local.reset();
    field.remote.reset();
    CheckClean(pair);
  }
}

TEST_CASE("requests that fail in mid-move go again", "[rdma][bulk][failover]") {
  for (uint64_t seed = 1; seed <= 4; ++seed) {
    RdmaPairOptions options;
    options.rails = 1 + seed % 2;
    options.rdma.bulk_chunk = 64 << 10;
    options.fabric.seed = seed;
    RdmaPair pair = MakeRdmaPair(options);
    MoveUnder(pair, seed, [&](size_t i) {
      if (i % 5 != 0) return;
      constexpr ibv_wr_opcode kOpcodes[] = {IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ,
                                            IBV_WR_RDMA_WRITE_WITH_IMM};
      RequestFault fault;
      fault.host = pair.server.get();
      fault.opcode = kOpcodes[(seed + i) % 3];
      fault.nth = 1 + static_cast<int>((seed + i) % 4);
      fault.arrives = seed % 4 < 2;
      pair.fabric->Fail(fault);
    });
    CheckClean(pair);
  }
}

TEST_CASE("a rail that goes away in mid-move leaves its chunks to the other",
          "[rdma][bulk][failover]") {
  for (uint64_t seed = 1; seed <= 3; ++seed) {
    RdmaPairOptions options;
    options.rails = 2;
    options.rdma.bulk_chunk = 64 << 10;
    options.rdma.timeout = 12;
    options.fabric.seed = seed;
    RdmaPair pair = MakeRdmaPair(options);
    MoveUnder(pair, seed, [&](size_t i) {
      if (i == 7) pair.fabric->SetLink(ServerAddress(1), ClientAddress(1), false);
    });
    CheckClean(pair);
  }
}

TEST_CASE("without any rail moves wait until one is back", "[rdma][bulk][failover]") {
  RdmaPairOptions options;
  options.rails = 2;
  options.rdma.timeout = 12;
  RdmaPair pair = MakeRdmaPair(options);
  MoveUnder(pair, 1, [&](size_t i) {
    if (i == 3) {
      for (uint32_t r = 0; r < 2; ++r) {
        pair.fabric->SetLink(ServerAddress(r), ClientAddress(r), false);
      }
    }
    if (i == 12) {
      usleep(400'000);
      pair.fabric->SetLink(ServerAddress(0), ClientAddress(0), true);
    }
  });
  CheckClean(pair);
}

TEST_CASE("a refused move among others fails alone", "[rdma][bulk]") {
  for (const uint32_t rails : {1u, 2u}) {
    RdmaPairOptions options;
    options.rails = rails;
    RdmaPair pair = MakeRdmaPair(options);
    Field field(pair);
    std::vector<std::byte> gone(kMemory);
    auto region = pair.far->Register(gone.data(), gone.size(), Access::kPeerReadsAndWrites);
    REQUIRE(region);
    const MemoryKey key = (*region)->key();
    region->reset();
    constexpr size_t kBytes = 2 << 20;
    Collector collector;
    for (uint64_t i = 0; i < 6; ++i) {
      const size_t at = i * kBytes;
      pair.near->Put(*field.local, at, i == 2 ? key : field.remote->key(), at, kBytes, i);
    }
    Finish(pair, collector, 6);
    const std::vector<Done> done = Sorted(collector, 6);
    Settle(*pair.near, *pair.far);
    for (size_t i = 0; i < 6; ++i) {
      CHECK(done[i].status == (i == 2 ? BulkStatus::kRefused : BulkStatus::kOk));
      const bool same = std::memcmp(&field.here[i * kBytes], &field.there[i * kBytes], kBytes) == 0;
      CHECK(same == (i != 2));
    }
    CHECK(AllAre(gone, std::byte{0}));
    field.local.reset();
    field.remote.reset();
    CheckClean(pair);
  }
}

TEST_CASE("Close with moves under way reports each once", "[rdma][bulk][close]") {
  for (uint64_t seed = 1; seed <= 4; ++seed) {
    RdmaPairOptions options;
    options.rails = 2;
    options.rdma.bulk_chunk = 64 << 10;
    options.fabric.seed = seed;
    RdmaPair pair = MakeRdmaPair(options);
    Field field(pair);
    constexpr size_t kMoves = 16, kBytes = 1 << 20;
    for (uint64_t i = 0; i < kMoves; ++i) {
      const size_t at = i * kBytes;
      if (i % 2 == 0) {
        pair.near->Put(*field.local, at, field.remote->key(), at, kBytes, i);
      } else {
        pair.near->Get(*field.local, at, field.remote->key(), at, kBytes, i);
      }
    }
    usleep(static_cast<useconds_t>(seed * 300));
    pair.near->Close(0);
    const std::vector<std::byte> at_close = field.here;
    CHECK(pair.near->Get(*field.local, 0, field.remote->key(), 0, 8, 99) == Outcome::kClosed);
    Collector collector;
    ReceiveToEnd(*pair.near, collector);
    for (const Done& done : Sorted(collector, kMoves)) {
      CHECK((done.status == BulkStatus::kOk || done.status == BulkStatus::kClosed));
    }
    CHECK(Same(field.here, at_close));
    field.local.reset();
    field.remote.reset();
    CheckClean(pair);
  }
}
