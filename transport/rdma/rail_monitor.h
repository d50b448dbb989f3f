// When to try a rail again. Pure: the caller brings the time.
//
// Two troubles, two answers. A rail that cannot be connected (its link is down) is tried again
// after 100 ms, then twice as long each time up to 4 s, for ever: however long the outage was, the
// rail is in use a few seconds after its end. A rail that connects and then fails, again and again,
// does harm each time, since its chunks wait for the drain; the third failure within 10 s earns a
// cool-down of 2 s, the next twice that, up to 30 s. A minute without failure clears its name.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "common/clock.h"

namespace penstock::transport::rdma {

class RailMonitor {
 public:
  static constexpr int64_t kMillisecond = 1'000'000;
  static constexpr int64_t kFirstRetry = 100 * kMillisecond, kLastRetry = 4'000 * kMillisecond;
  static constexpr int64_t kWindow = 10'000 * kMillisecond;
  static constexpr int kFailuresInWindow = 3;
  static constexpr int64_t kFirstCoolDown = 2'000 * kMillisecond;
  static constexpr int64_t kLastCoolDown = 30'000 * kMillisecond;
  static constexpr int64_t kForgiven = 60'000 * kMillisecond;

  // An attempt to connect failed, or a connected rail did. `now`: as NowNanoseconds() gives it.
  void Failed(int64_t now) {
    if (!up_) {
      retry_ = retry_ == 0 ? kFirstRetry : std::min(2 * retry_, kLastRetry);
      next_ = std::max(next_, now + retry_);
      return;
    }
    up_ = false;
    retry_ = 0;
    if (now - last_failure_ >= kForgiven) cool_down_ = 0;
    last_failure_ = now;
    failures_[failure_count_++ % kFailuresInWindow] = now;
    const int64_t oldest = failures_[failure_count_ % kFailuresInWindow];
    if (failure_count_ >= kFailuresInWindow && now - oldest < kWindow) {
      cool_down_ = cool_down_ == 0 ? kFirstCoolDown : std::min(2 * cool_down_, kLastCoolDown);
      failure_count_ = 0;  // the next cool-down has to be earned anew
      next_ = now + cool_down_;
    } else {
      next_ = now + kFirstRetry;
    }
  }

  void Succeeded(int64_t) {
    up_ = true;
    retry_ = 0;
  }

  // Something has changed for the better: pauses between attempts begin anew, cool-downs stay.
  void Hope(int64_t now) {
    if (up_ || retry_ == 0) return;
    retry_ = 0;
    next_ = std::min(next_, now + kFirstRetry);
  }

  // When to connect; never while the rail is up. A rail that was never tried is due at once.
  Deadline NextAttempt(int64_t) const {
    return up_ ? Deadline::Never() : Deadline::AtNanoseconds(next_);
  }
  bool Due(int64_t now) const { return !up_ && now >= next_; }

 private:
  bool up_ = false;
  int64_t next_ = 0;
  int64_t retry_ = 0;      // the last pause between attempts; 0: none failed
  int64_t cool_down_ = 0;  // the last one; 0: none yet
  int64_t last_failure_ = 0;
  std::array<int64_t, kFailuresInWindow> failures_{};  // of a connected rail, oldest overwritten
  uint32_t failure_count_ = 0;
};

}  // namespace penstock::transport::rdma
