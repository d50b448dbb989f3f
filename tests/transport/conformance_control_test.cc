// What every backend promises about frames, waiting and closing.
#include <poll.h>

#include <random>
#include <thread>

#include "harness.h"

namespace penstock::transport {
namespace {

#define FOR_EVERY_BACKEND(backend)                          \
  const Backend backend = GENERATE(from_range(Backends())); \
  CAPTURE(backend.name)

bool Readable(int fd, int timeout_ms) {
  pollfd entry = {fd, POLLIN, 0};
  return poll(&entry, 1, timeout_ms) == 1;
}

TEST_CASE("frames of every size arrive in order, exactly once", "[control]") {
  FOR_EVERY_BACKEND(backend);
  Pair pair = backend.make({});
  const uint32_t max = pair.near->caps().max_frame;
  std::vector<uint32_t> sizes = {8, 9, 15, 16, 17, 100, 4095, 4096, 4097, max - 1, max, 8};
  uint32_t serial = 0;
  for (const uint32_t size : sizes) Send(*pair.near, size, serial++);
  Collector collector;
  ReceiveUntil(*pair.far, collector, [&] { return collector.frames.size() >= sizes.size(); });
  for (size_t i = 0; i < sizes.size(); ++i) CHECK(IsFrame(collector.frames[i], sizes[i], i));
  CHECK(pair.far->Poll(64, collector) == 0);
  CHECK(collector.frames.size() == sizes.size());
  CHECK(pair.near->counters().frames_sent == sizes.size());
  CHECK(pair.far->counters().frames_received == sizes.size());
  CHECK(pair.near->counters().bytes_sent == pair.far->counters().bytes_received);
}

TEST_CASE("a producer and a receiver on two threads keep order over many ring laps", "[control]") {
  FOR_EVERY_BACKEND(backend);
  PairOptions options;
  options.ring_bytes = 16 << 10;
  options.max_frame = 4096;
  Pair pair = backend.make(options);
  constexpr uint32_t kFrames = 5000;
  std::mt19937 random(7);
  std::vector<uint32_t> sizes(kFrames);
  for (uint32_t& size : sizes) size = 8 + random() % (random() % 8 == 0 ? 4089 : 200);
  std::thread producer([&] {
    for (uint32_t i = 0; i < kFrames; ++i) {
      Send(*pair.near, sizes[i], i, i % 100 == 0 ? kFlush : kNone);
    }
  });
  struct Checker : Handler {
    const std::vector<uint32_t>& sizes;
    uint32_t next = 0, wrong = 0;
    explicit Checker(const std::vector<uint32_t>& sizes) : sizes(sizes) {}
    bool OnFrame(std::span<const std::byte> frame) override {
      if (reinterpret_cast<uintptr_t>(frame.data()) % 8 != 0) ++wrong;
      if (next >= sizes.size() || !IsFrame(frame, sizes[next], next)) ++wrong;
      ++next;
      return true;
    }
    void OnBulkDone(uint64_t, BulkStatus, uint64_t) override { ++wrong; }
  } checker(sizes);
  const Deadline deadline = Deadline::After(20'000);
  while (checker.next < kFrames && !deadline.expired()) {
    pair.far->Wait(32, checker, Deadline::After(100));
  }
  producer.join();
  CHECK(checker.next == kFrames);
  CHECK(checker.wrong == 0);
}

TEST_CASE("a frame without flush arrives without further calls", "[control]") {
  FOR_EVERY_BACKEND(backend);
  Pair pair = backend.make({});
  Collector collector;
  for (uint32_t i = 0; i < 20; ++i) {
    Send(*pair.near, 64, i, kNone);
    if (i % 5 == 4) ReceiveUntil(*pair.far, collector, [&] { return collector.frames.size() > i; });
  }
  CHECK(IsFrame(collector.frames[19], 64, 19));
}

TEST_CASE("Commit may use less than was reserved", "[control]") {
  FOR_EVERY_BACKEND(backend);
  Pair pair = backend.make({});
  std::byte* slot = ReserveSoon(*pair.near, 4096);
  CHECK(reinterpret_cast<uintptr_t>(slot) % 8 == 0);
  FillFrame(slot, 19, 5);
  pair.near->Commit(19, kNone);
  Send(*pair.near, 24, 6);
  Collector collector;
  ReceiveUntil(*pair.far, collector, [&] { return collector.frames.size() == 2; });
  CHECK(IsFrame(collector.frames[0], 19, 5));
  CHECK(IsFrame(collector.frames[1], 24, 6));
}

TEST_CASE("a full ring gives kAgain, and works again once the peer has read", "[control]") {
  FOR_EVERY_BACKEND(backend);
  PairOptions options;
  options.ring_bytes = 64 << 10;
  options.max_frame = 16 << 10;
  Pair pair = backend.make(options);
  uint32_t sent = 0;
  // The kernel's socket buffers come first, and they grow: count on megabytes, but not for ever.
  Outcome outcome = Outcome::kOk;
  const Deadline deadline = Deadline::After(10'000);
  int again = 0;
  while (again < 50 && !deadline.expired()) {
    outcome = TrySend(*pair.near, 16 << 10, sent, kNone);
    if (outcome == Outcome::kOk) {
      ++sent;
      again = 0;
    } else {
      ++again;
      pair.near->Flush();
      poll(nullptr, 0, 1);
    }
  }
  REQUIRE(outcome == Outcome::kAgain);
  CHECK(pair.near->Flush() != Outcome::kClosed);
  Collector collector;
  ReceiveUntil(*pair.far, collector, [&] { return collector.frames.size() == sent; });
  Send(*pair.near, 100, sent);
  ReceiveUntil(*pair.far, collector, [&] { return collector.frames.size() == sent + 1; });
  for (uint32_t i = 0; i < sent; ++i) REQUIRE(IsFrame(collector.frames[i], 16 << 10, i));
  CHECK(IsFrame(collector.frames[sent], 100, sent));
}

TEST_CASE("Poll handles at most its budget", "[control]") {
  FOR_EVERY_BACKEND(backend);
  Pair pair = backend.make({});
  for (uint32_t i = 0; i < 10; ++i) Send(*pair.near, 32, i);
  Collector collector;
  size_t before = 0;
  const Deadline deadline = Deadline::After(5000);
  while (before < 10 && !deadline.expired()) {
    const int handled = pair.far->Wait(3, collector, Deadline::After(1000));
    CHECK(handled <= 3);
    CHECK(collector.frames.size() == before + handled);
    before = collector.frames.size();
  }
  CHECK(before == 10);
}

TEST_CASE("Wait ends at its deadline, and at once when interrupted", "[control]") {
  FOR_EVERY_BACKEND(backend);
  Pair pair = backend.make({});
  Collector collector;
  const int64_t start = NowNanoseconds();
  CHECK(pair.far->Wait(8, collector, Deadline::After(30)) == 0);
  CHECK(NowNanoseconds() - start >= 29'000'000);
  std::thread other([&] { pair.far->Interrupt(); });
  CHECK(pair.far->Wait(8, collector, Deadline::After(10'000)) == 0);
  other.join();
  CHECK(NowNanoseconds() - start < 9'000'000'000);
  // An interrupt before the Wait counts too, else there would be a moment in which it is lost.
  pair.far->Interrupt();
  CHECK(pair.far->Wait(8, collector, Deadline::After(10'000)) == 0);
  CHECK(NowNanoseconds() - start < 9'000'000'000);
}

TEST_CASE("event_fd becomes readable after Arm, also for an interrupt", "[control]") {
  FOR_EVERY_BACKEND(backend);
  Pair pair = backend.make({});
  Collector collector;
  // What a connection says to itself in its first moments (credits, a sign of life) wakes it for
  // nothing; then it is quiet.
  bool quiet = false;
  for (int i = 0; i < 100 && !quiet; ++i) {
    quiet = pair.far->Arm() && !Readable(pair.far->event_fd(), 0);
    if (!quiet) CHECK(pair.far->Poll(8, collector) == 0);
  }
  CHECK(quiet);
  Send(*pair.near, 40, 1);
  // It may be readable for less than a frame, too (a credit), but then Arm says so.
  bool armed = true;
  for (int i = 0; i < 10 && armed && Readable(pair.far->event_fd(), 5000); ++i) {
    armed = pair.far->Arm();
  }
  CHECK_FALSE(armed);
  ReceiveUntil(*pair.far, collector, [&] { return collector.frames.size() == 1; });
  REQUIRE(pair.far->Arm());
  pair.far->Interrupt();
  CHECK(Readable(pair.far->event_fd(), 5000));
}

TEST_CASE("no frame is lost between Arm and sleep", "[control]") {
  FOR_EVERY_BACKEND(backend);
  Pair pair = backend.make({});
  constexpr uint32_t kFrames = 2000;
  std::thread producer([&] {
    for (uint32_t i = 0; i < kFrames; ++i) {
      Send(*pair.near, 24, i, i % 3 == 0 ? kFlush : kNone);
      if (i % 64 == 0) poll(nullptr, 0, 1);
    }
  });
  Collector collector;
  int lost = 0;
  while (collector.frames.size() < kFrames && lost == 0) {
    while (pair.far->Poll(16, collector) > 0) {
    }
    if (collector.frames.size() == kFrames) break;
    if (pair.far->Arm() && !Readable(pair.far->event_fd(), 5000)) ++lost;
  }
  producer.join();
  CHECK(lost == 0);
  CHECK(collector.frames.size() == kFrames);
}

TEST_CASE("both directions carry frames at the same time", "[control]") {
  FOR_EVERY_BACKEND(backend);
  Pair pair = backend.make({});
  constexpr uint32_t kRounds = 500;
  struct Echo : Handler {
    Connection& back;
    explicit Echo(Connection& back) : back(back) {}
    bool OnFrame(std::span<const std::byte> frame) override {
      std::byte* slot = ReserveSoon(back, frame.size());
      std::memcpy(slot, frame.data(), frame.size());
      back.Commit(frame.size(), kFlush);
      return true;
    }
    void OnBulkDone(uint64_t, BulkStatus, uint64_t) override {}
  } echo(*pair.far);
  std::thread server([&] {
    while (pair.far->Wait(16, echo, Deadline::After(10'000)) > 0) {
    }
  });
  Collector collector;
  for (uint32_t i = 0; i < kRounds; ++i) {
    Send(*pair.near, 128, i);
    ReceiveUntil(*pair.near, collector, [&] { return collector.frames.size() == i + 1; });
  }
  CHECK(IsFrame(collector.frames.back(), 128, kRounds - 1));
  pair.near->Close(0);
  server.join();
}

TEST_CASE("what was sent before Close arrives, then the end", "[control][close]") {
  FOR_EVERY_BACKEND(backend);
  Pair pair = backend.make({});
  for (uint32_t i = 0; i < 50; ++i) Send(*pair.near, 1000, i, kNone);
  std::thread closer([&] { pair.near->Close(5000); });
  Collector collector;
  ReceiveToEnd(*pair.far, collector);
  closer.join();
  CHECK(pair.near->closed());
  CHECK_FALSE(pair.near->close_reason().empty());
  REQUIRE(collector.frames.size() == 50);
  for (uint32_t i = 0; i < 50; ++i) CHECK(IsFrame(collector.frames[i], 1000, i));
  CHECK(pair.far->closed());
  CHECK(pair.far->close_reason().find("closed") != std::string::npos);
  std::byte* slot = nullptr;
  CHECK(pair.near->Reserve(64, &slot) == Outcome::kClosed);
  CHECK(pair.far->Reserve(64, &slot) == Outcome::kClosed);
  CHECK(pair.far->Flush() == Outcome::kClosed);
  CHECK(pair.far->Poll(8, collector) == -1);
}

TEST_CASE("Close from another thread ends a Wait, and may come twice", "[control][close]") {
  FOR_EVERY_BACKEND(backend);
  Pair pair = backend.make({});
  Collector collector;
  std::thread closer([&] { pair.far->Close(0); });
  ReceiveToEnd(*pair.far, collector);
  closer.join();
  pair.far->Close(100);
  CHECK(pair.far->Wait(8, collector, Deadline::After(5000)) == -1);
  ReceiveToEnd(*pair.near, collector);
}

TEST_CASE("a handler that refuses a frame ends the connection", "[control][close]") {
  FOR_EVERY_BACKEND(backend);
  Pair pair = backend.make({});
  Send(*pair.near, 64, 0);
  Send(*pair.near, 64, 1);
  Collector collector;
  collector.accept = false;
  ReceiveToEnd(*pair.far, collector);
  CHECK(collector.frames.size() == 1);
  CHECK(pair.far->close_reason().find("malformed") != std::string::npos);
  ReceiveToEnd(*pair.near, collector);
}

TEST_CASE("a frame whose first word is not its length is never sent", "[control][close]") {
  FOR_EVERY_BACKEND(backend);
  Pair pair = backend.make({});
  std::byte* slot = ReserveSoon(*pair.near, 64);
  FillFrame(slot, 60, 0);
  pair.near->Commit(64, kFlush);
  CHECK(pair.near->closed());
  CHECK(pair.near->close_reason().find("(60") != std::string::npos);
  Collector collector;
  ReceiveToEnd(*pair.far, collector);
  CHECK(collector.frames.empty());
}

}  // namespace
}  // namespace penstock::transport
