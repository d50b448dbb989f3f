#include "transport/rdma/rail_monitor.h"

#include <catch2/catch.hpp>

namespace penstock::transport::rdma {
namespace {

constexpr int64_t kMs = RailMonitor::kMillisecond;

// The milliseconds from `now` until the monitor would try.
int64_t Pause(const RailMonitor& monitor, int64_t now) {
  int64_t pause = 0;
  while (!monitor.Due(now + pause * kMs)) ++pause;
  return pause;
}

TEST_CASE("a rail that was never tried is due at once, one that is up never", "[rdma][rail]") {
  RailMonitor monitor;
  CHECK(monitor.Due(0));
  monitor.Succeeded(5 * kMs);
  CHECK_FALSE(monitor.Due(1'000'000 * kMs));
  CHECK(monitor.NextAttempt(0).poll_timeout_ms() == -1);
}

TEST_CASE("attempts that fail come slower, but never more than 4 s apart", "[rdma][rail]") {
  RailMonitor monitor;
  int64_t now = 1'000'000 * kMs;
  for (const int64_t pause : {100, 200, 400, 800, 1600, 3200, 4000, 4000, 4000}) {
    monitor.Failed(now);
    CHECK(Pause(monitor, now) == pause);
    now += pause * kMs;
  }
  monitor.Succeeded(now);
  monitor.Failed(now + kMs);
  CHECK(Pause(monitor, now + kMs) == 100);
}

TEST_CASE("a rail that fails three times in 10 s cools down, longer each time", "[rdma][rail]") {
  RailMonitor monitor;
  int64_t now = 1'000'000 * kMs;
  for (const int64_t cool_down : {2000, 4000, 8000, 16000, 30000, 30000}) {
    for (int failure = 1; failure <= 3; ++failure) {
      monitor.Succeeded(now);
      now += 10 * kMs;
      monitor.Failed(now);
      const int64_t pause = Pause(monitor, now);
      CHECK(pause == (failure < 3 ? 100 : cool_down));
      now += pause * kMs;
    }
  }
}

TEST_CASE("failures far apart earn no cool-down, and a quiet minute forgives", "[rdma][rail]") {
  RailMonitor monitor;
  int64_t now = 1'000'000 * kMs;
  for (int failure = 0; failure < 10; ++failure) {
    monitor.Succeeded(now);
    now += 5001 * kMs;
    monitor.Failed(now);
    CHECK(Pause(monitor, now) == 100);
  }
  for (int round = 0; round < 3; ++round) {
    now += 61'000 * kMs;
    for (int failure = 0; failure < 3; ++failure) {
      monitor.Succeeded(now);
      now += kMs;
      monitor.Failed(now);
    }
    CHECK(Pause(monitor, now) == 2000);
  }
}

TEST_CASE("an attempt that fails during a cool-down does not shorten it", "[rdma][rail]") {
  RailMonitor monitor;
  const int64_t now = 1'000'000 * kMs;
  for (int failure = 0; failure < 3; ++failure) {
    monitor.Succeeded(now);
    monitor.Failed(now);
  }
  monitor.Failed(now + kMs);
  CHECK(Pause(monitor, now + kMs) == 1999);
}

TEST_CASE("hope shortens a pause but no cool-down", "[rdma][rail]") {
  RailMonitor monitor;
  int64_t now = 1'000'000 * kMs;
  for (int i = 0; i < 6; ++i) monitor.Failed(now);
  CHECK(Pause(monitor, now) == 3200);
  monitor.Hope(now);
  CHECK(Pause(monitor, now) == 100);
  monitor.Failed(now + 100 * kMs);
  CHECK(Pause(monitor, now + 100 * kMs) == 100);
  now += 60'000 * kMs;
  for (int i = 0; i < 3; ++i) {
    monitor.Succeeded(now);
    monitor.Failed(now);
  }
  CHECK(Pause(monitor, now) == 2000);
  monitor.Hope(now);
  CHECK(Pause(monitor, now) == 2000);
}

}  // namespace
}  // namespace penstock::transport::rdma
