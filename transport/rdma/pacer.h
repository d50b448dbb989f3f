// When frames should be gathered into fuller packets although the device would take each at once.
// Pure: the caller brings the time.
//
// Completions alone do not tell: a fast device, or one that works inside the post (soft-RoCE),
// completes every packet before the next frame is there, and a storm of frames would cost a post
// each. So the pace decides as well. When as many packets as may be under way at once were posted
// within a window, further frames are gathered; the keeper posts what has gathered once a period,
// and the first period in which nothing has ends the gathering. The window follows what a post
// costs here, so that posting never takes more than a fraction of the sender's time; the period
// grows while the storm lasts. Price: the last frame of a storm that nobody flushes waits for one
// period.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

namespace penstock::transport::rdma {

class Pacer {
 public:
  static constexpr int64_t kLeastWindowNs = 50'000, kMostWindowNs = 2'000'000;
  static constexpr int64_t kCostFactor = 8;
  static constexpr int64_t kMostPeriods = 8;  // windows

  explicit Pacer(uint32_t packets_at_once)
      : at_once_(std::clamp<uint32_t>(packets_at_once, 1, kRecent)) {}

  void Posted(int64_t began, int64_t ended, uint32_t packets) {
    const int64_t cost = std::min<int64_t>(ended - began, kMostWindowNs) / packets;
    cost_ = cost_ == 0 ? cost : (7 * cost_ + cost) / 8;
    for (uint32_t i = 0; i < std::min(packets, kRecent); ++i) recent_[count_++ % kRecent] = ended;
  }

  // Whether a packet that is not full should wait. The first true asks for the keeper.
  bool Gather(int64_t now) {
    if (!gathering_ && count_ >= at_once_ &&
        now - recent_[(count_ - at_once_) % kRecent] < window()) {
      gathering_ = true;
      periods_ = 1;
      next_ = now + window();
    }
    return gathering_;
  }
  bool gathering() const { return gathering_; }
  int64_t next_look() const { return next_; }  // the keeper's, while gathering

  // The keeper's look. True when what has gathered is to be posted now.
  bool Look(int64_t now, bool anything) {
    if (!gathering_ || now < next_) return false;
    if (!anything) {
      gathering_ = false;
      return false;
    }
    periods_ = std::min(2 * periods_, kMostPeriods);
    next_ = now + periods_ * window();
    return true;
  }

 private:
  static constexpr uint32_t kRecent = 16;
  int64_t window() const { return std::clamp(kCostFactor * cost_, kLeastWindowNs, kMostWindowNs); }

  const uint32_t at_once_;
  std::array<int64_t, kRecent> recent_{};  // when the newest packets were posted
  uint64_t count_ = 0;
  int64_t cost_ = 0;  // of posting a packet, averaged
  bool gathering_ = false;
  int64_t periods_ = 1, next_ = 0;
};

}  // namespace penstock::transport::rdma
