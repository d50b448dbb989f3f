// What every backend promises about bulk moves.
#include <poll.h>

#include <atomic>
#include <random>
#include <thread>

#include "harness.h"

namespace penstock::transport {
namespace {

#define FOR_EVERY_BACKEND(backend)                          \
  const Backend backend = GENERATE(from_range(Backends())); \
  CAPTURE(backend.name)

std::unique_ptr<MemoryRegion> Register(Connection& at, std::vector<std::byte>& memory,
                                       Access access = Access::kPeerReadsAndWrites) {
  auto region = at.Register(memory.data(), memory.size(), access);
  REQUIRE(region);
  return std::move(*region);
}

Done Await(Connection& at, uint64_t cookie) {
  Collector collector;
  ReceiveUntil(at, collector, [&] { return !collector.done.empty(); });
  CHECK(collector.done.size() == 1);
  CHECK(collector.done[0].cookie == cookie);
  return collector.done[0];
}

TEST_CASE("Get and Put move exactly the asked bytes", "[bulk]") {
  FOR_EVERY_BACKEND(backend);
  PairOptions options;
  options.bulk_chunk = 64 << 10;  // so that moves of a few hundred KB have many chunks
  Pair pair = backend.make(options);
  constexpr size_t kSize = 1 << 20;
  std::vector<std::byte> local = Noise(kSize, 1), remote = Noise(kSize, 2);
  std::vector<std::byte> local_model = local, remote_model = remote;
  auto near = Register(*pair.near, local);
  auto far = Register(*pair.far, remote);
  std::mt19937_64 random(3);
  for (uint64_t i = 0; i < 40; ++i) {
    const uint64_t bytes = i % 4 == 0 ? random() % (kSize / 2) : random() % 5000;
    const uint64_t from = random() % (kSize - bytes), to = random() % (kSize - bytes);
    if (i % 2 == 0) {
      REQUIRE(pair.near->Get(*near, to, far->key(), from, bytes, i) == Outcome::kOk);
      std::memcpy(local_model.data() + to, remote_model.data() + from, bytes);
    } else {
      REQUIRE(pair.near->Put(*near, from, far->key(), to, bytes, i) == Outcome::kOk);
      std::memcpy(remote_model.data() + to, local_model.data() + from, bytes);
    }
    const Done done = Await(*pair.near, i);
    CHECK(done.status == BulkStatus::kOk);
    CHECK(done.bytes == bytes);
    REQUIRE(Same(local, local_model));
    Settle(*pair.near, *pair.far);
  }
  CHECK(Same(remote, remote_model));
}

TEST_CASE("either end can start moves", "[bulk]") {
  FOR_EVERY_BACKEND(backend);
  if (!backend.either_starts) return;
  Pair pair = backend.make({});
  std::vector<std::byte> a = Noise(100'000, 1), b(100'000), c = Noise(100'000, 2), d(100'000);
  auto ra = Register(*pair.near, a), rd = Register(*pair.near, d);
  auto rb = Register(*pair.far, b), rc = Register(*pair.far, c);
  REQUIRE(pair.near->Put(*ra, 0, rb->key(), 0, a.size(), 1) == Outcome::kOk);
  REQUIRE(pair.far->Put(*rc, 0, rd->key(), 0, c.size(), 2) == Outcome::kOk);
  CHECK(Await(*pair.near, 1).status == BulkStatus::kOk);
  CHECK(Await(*pair.far, 2).status == BulkStatus::kOk);
  Settle(*pair.near, *pair.far);
  Settle(*pair.far, *pair.near);
  CHECK(Same(a, b));
  CHECK(Same(c, d));
}

TEST_CASE("many moves at once all complete with the right bytes", "[bulk]") {
  FOR_EVERY_BACKEND(backend);
  PairOptions options;
  options.bulk_chunk = 32 << 10;
  options.bulk_window = 128 << 10;
  Pair pair = backend.make(options);
  constexpr uint64_t kMoves = 300, kPiece = 7001;
  std::vector<std::byte> source = Noise(kMoves * kPiece, 4), target(kMoves * kPiece);
  auto local = Register(*pair.near, target);
  auto remote = Register(*pair.far, source, Access::kPeerReads);
  for (uint64_t i = 0; i < kMoves; ++i) {
    REQUIRE(pair.near->Get(*local, i * kPiece, remote->key(), i * kPiece, kPiece, i) ==
            Outcome::kOk);
  }
  Collector collector;
  ReceiveUntil(*pair.near, collector, [&] { return collector.done.size() == kMoves; });
  std::vector<int> seen(kMoves);
  for (const Done& done : collector.done) {
    CHECK(done.status == BulkStatus::kOk);
    ++seen[done.cookie];
  }
  CHECK(std::count(seen.begin(), seen.end(), 1) == kMoves);
  CHECK(Same(source, target));
  CHECK(pair.near->counters().bulk_bytes_received == kMoves * kPiece);
}

TEST_CASE("a large move both ways at once does not lock up", "[bulk]") {
  FOR_EVERY_BACKEND(backend);
  Pair pair = backend.make({});
  constexpr size_t kSize = 12 << 20;
  std::vector<std::byte> a = Noise(kSize, 1), b(kSize), c = Noise(kSize, 2), d(kSize);
  auto ra = Register(*pair.near, a), rd = Register(*pair.near, d);
  auto rb = Register(*pair.far, b), rc = Register(*pair.far, c);
  REQUIRE(pair.near->Put(*ra, 0, rb->key(), 0, kSize, 1) == Outcome::kOk);
  REQUIRE(pair.near->Get(*rd, 0, rc->key(), 0, kSize, 2) == Outcome::kOk);
  if (backend.either_starts) {
    REQUIRE(pair.far->Put(*rb, 0, ra->key(), 0, 0, 3) == Outcome::kOk);
  }
  Collector collector;
  ReceiveUntil(*pair.near, collector, [&] { return collector.done.size() == 2; });
  if (backend.either_starts) CHECK(Await(*pair.far, 3).bytes == 0);
  Settle(*pair.near, *pair.far);
  CHECK(Same(a, b));
  CHECK(Same(c, d));
}

TEST_CASE("zero bytes complete without touching memory", "[bulk]") {
  FOR_EVERY_BACKEND(backend);
  Pair pair = backend.make({});
  std::vector<std::byte> a = Noise(64, 1), b = Noise(64, 2);
  const auto before = b;
  auto ra = Register(*pair.near, a), rb = Register(*pair.far, b);
  REQUIRE(pair.near->Put(*ra, 64, rb->key(), 64, 0, 9) == Outcome::kOk);
  const Done done = Await(*pair.near, 9);
  CHECK(done.status == BulkStatus::kOk);
  CHECK(done.bytes == 0);
  CHECK(Same(b, before));
}

TEST_CASE("a move outside the registration or its access is refused whole", "[bulk]") {
  FOR_EVERY_BACKEND(backend);
  PairOptions options;
  options.bulk_chunk = 4096;
  Pair pair = backend.make(options);
  std::vector<std::byte> a = Noise(64 << 10, 1), b = Noise(64 << 10, 2);
  const auto a_before = a, b_before = b;
  auto ra = Register(*pair.near, a);
  auto rb = Register(*pair.far, b);
  auto read_only = Register(*pair.far, b, Access::kPeerReads);
  auto write_only = Register(*pair.far, b, Access::kPeerWrites);
  const uint64_t size = b.size();
  uint64_t cookie = 0;
  auto refused = [&](Outcome outcome) {
    REQUIRE(outcome == Outcome::kOk);
    const Done done = Await(*pair.near, cookie);
    CHECK(done.status == BulkStatus::kRefused);
    CHECK(done.bytes == 0);
    CHECK(Same(a, a_before));
    CHECK(Same(b, b_before));
  };
  refused(pair.near->Put(*ra, 0, rb->key(), 1, size, ++cookie));
  refused(pair.near->Get(*ra, 0, rb->key(), 1, size, ++cookie));
  refused(pair.near->Put(*ra, 0, rb->key(), size, 1, ++cookie));
  refused(pair.near->Put(*ra, 0, rb->key(), UINT64_MAX - 10, 100, ++cookie));
  refused(pair.near->Get(*ra, 0, rb->key(), UINT64_MAX, 1, ++cookie));
  refused(pair.near->Put(*ra, 0, read_only->key(), 0, 100, ++cookie));
  refused(pair.near->Get(*ra, 0, write_only->key(), 0, 100, ++cookie));
  // Our own side is checked too.
  refused(pair.near->Put(*ra, 1, rb->key(), 0, size, ++cookie));
  // The connection has survived all of it.
  REQUIRE(pair.near->Get(*ra, 0, read_only->key(), 0, 100, ++cookie) == Outcome::kOk);
  CHECK(Await(*pair.near, cookie).status == BulkStatus::kOk);
  CHECK(std::memcmp(a.data(), b.data(), 100) == 0);
}

TEST_CASE("a stale, foreign or garbled key is refused", "[bulk]") {
  FOR_EVERY_BACKEND(backend);
  Pair pair = backend.make({});
  std::vector<std::byte> a(4096), b = Noise(4096, 2);
  const auto b_before = b;
  auto ra = Register(*pair.near, a), rb = Register(*pair.far, b);
  const MemoryKey stale = rb->key();
  rb.reset();
  rb = Register(*pair.far, b);  // the same memory, perhaps the same slot
  MemoryKey garbled = rb->key();
  for (uint32_t i = 1; i <= 16; ++i) garbled.blob[garbled.bytes - i] ^= std::byte{1};
  MemoryKey empty;
  MemoryKey oversized = rb->key();
  oversized.bytes = 4000;
  uint64_t cookie = 0;
  for (const MemoryKey& key : {stale, garbled, empty, oversized, ra->key()}) {
    REQUIRE(pair.near->Put(*ra, 0, key, 0, 64, ++cookie) == Outcome::kOk);
    CHECK(Await(*pair.near, cookie).status == BulkStatus::kRefused);
    CHECK(Same(b, b_before));
  }
  REQUIRE(pair.near->Put(*ra, 0, rb->key(), 0, 64, ++cookie) == Outcome::kOk);
  CHECK(Await(*pair.near, cookie).status == BulkStatus::kOk);
}

TEST_CASE("after deregistration the peer writes no more, even in mid-move", "[bulk]") {
  FOR_EVERY_BACKEND(backend);
  PairOptions options;
  options.bulk_chunk = 256 << 10;
  Pair pair = backend.make(options);
  constexpr size_t kSize = 8 << 20;
  std::vector<std::byte> ones(kSize, std::byte{1}), target(kSize);
  auto local = Register(*pair.near, ones);
  for (int round = 0; round < 4; ++round) {
    auto region = Register(*pair.far, target);
    uint64_t cookies = 0;
    for (int i = 0; i < 4; ++i) {
      REQUIRE(pair.near->Put(*local, 0, region->key(), 0, kSize, ++cookies) == Outcome::kOk);
    }
    poll(nullptr, 0, round);
    region.reset();
    std::memset(target.data(), 2,
                kSize);  // ours alone again: tsan and this loop would see a writer
    Collector collector;
    ReceiveUntil(*pair.near, collector, [&] { return collector.done.size() == cookies; });
    for (const Done& done : collector.done) {
      CHECK((done.status == BulkStatus::kOk || done.status == BulkStatus::kRefused));
    }
    CHECK(AllAre(target, std::byte{2}));
  }
}

TEST_CASE("a frame sent after a completed Put finds the bytes in place", "[bulk]") {
  FOR_EVERY_BACKEND(backend);
  Pair pair = backend.make({});
  constexpr size_t kSize = 100'000;
  std::vector<std::byte> source(kSize), target(kSize);
  auto local = Register(*pair.near, source), remote = Register(*pair.far, target);
  for (uint32_t round = 1; round <= 30; ++round) {
    std::memset(source.data(), round, kSize);
    REQUIRE(pair.near->Put(*local, 0, remote->key(), 0, kSize, round) == Outcome::kOk);
    CHECK(Await(*pair.near, round).status == BulkStatus::kOk);
    Send(*pair.near, 16, round);
    Collector collector;
    ReceiveUntil(*pair.far, collector, [&] { return collector.frames.size() == 1; });
    REQUIRE(Same(source, target));
  }
}

TEST_CASE("a completion wakes a sleeping Wait and makes event_fd readable", "[bulk]") {
  FOR_EVERY_BACKEND(backend);
  Pair pair = backend.make({});
  std::vector<std::byte> a(4096), b = Noise(4096, 1);
  auto ra = Register(*pair.near, a), rb = Register(*pair.far, b);
  std::thread other([&] {
    poll(nullptr, 0, 5);
    pair.near->Get(*ra, 0, rb->key(), 0, 4096, 1);
  });
  Collector collector;
  CHECK(pair.near->Wait(8, collector, Deadline::After(10'000)) == 1);
  other.join();
  CHECK(Same(a, b));
  REQUIRE(pair.near->Arm());
  REQUIRE(pair.near->Get(*ra, 0, rb->key(), 0, 4096, 2) == Outcome::kOk);
  pollfd entry = {pair.near->event_fd(), POLLIN, 0};
  CHECK(poll(&entry, 1, 5000) == 1);
  CHECK_FALSE(pair.near->Arm());
  CHECK(Await(*pair.near, 2).status == BulkStatus::kOk);
}

TEST_CASE("when the peer goes in mid-move, every move is reported", "[bulk][close]") {
  FOR_EVERY_BACKEND(backend);
  Pair pair = backend.make({});
  constexpr size_t kSize = 16 << 20;
  std::vector<std::byte> source = Noise(kSize, 1), target(kSize);
  auto local = Register(*pair.near, source), remote = Register(*pair.far, target);
  for (uint64_t i = 0; i < 20; ++i) {
    REQUIRE(pair.near->Put(*local, 0, remote->key(), 0, kSize, i) == Outcome::kOk);
  }
  std::thread peer([&] {
    poll(nullptr, 0, 3);
    pair.far->Close(0);
    std::memset(target.data(), 0, kSize);  // after Close nobody touches it
  });
  Collector collector;
  ReceiveToEnd(*pair.near, collector);
  peer.join();
  CHECK(collector.done.size() == 20);
  for (const Done& done : collector.done) {
    CHECK((done.status == BulkStatus::kOk || done.status == BulkStatus::kClosed));
  }
  CHECK(pair.near->Put(*local, 0, remote->key(), 0, 64, 99) == Outcome::kClosed);
  CHECK(AllAre(target, std::byte{0}));
}

TEST_CASE("Close here in mid-move leaves local memory alone and reports every move",
          "[bulk][close]") {
  FOR_EVERY_BACKEND(backend);
  Pair pair = backend.make({});
  constexpr size_t kSize = 16 << 20;
  std::vector<std::byte> source = Noise(kSize, 1), target(kSize);
  auto local = Register(*pair.near, target), remote = Register(*pair.far, source);
  for (uint64_t i = 0; i < 20; ++i) {
    REQUIRE(pair.near->Get(*local, 0, remote->key(), 0, kSize, i) == Outcome::kOk);
  }
  pair.near->Close(0);
  std::memset(target.data(), 0, kSize);
  Collector collector;
  ReceiveToEnd(*pair.near, collector);
  CHECK(collector.done.size() == 20);
  CHECK(AllAre(target, std::byte{0}));
}

TEST_CASE("an impossible registration is an error", "[bulk]") {
  FOR_EVERY_BACKEND(backend);
  Pair pair = backend.make({});
  std::byte byte{};
  CHECK_FALSE(pair.near->Register(nullptr, 8, Access::kPeerReads));
  CHECK_FALSE(pair.near->Register(&byte, 0, Access::kPeerReads));
  CHECK_FALSE(pair.near->Register(&byte, SIZE_MAX, Access::kPeerReads));
}

}  // namespace
}  // namespace penstock::transport
