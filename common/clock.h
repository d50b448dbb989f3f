// Monotonic time, and deadlines built on it.
#pragma once

#include <cstdint>
#include <ctime>

namespace penstock {

inline int64_t NowNanoseconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1'000'000'000LL + now.tv_nsec;
}

// A point in time that code must not wait beyond. Deadline::Never() never expires.
class Deadline {
 public:
  static Deadline After(int64_t milliseconds) {
    return Deadline(NowNanoseconds() + milliseconds * 1'000'000);
  }
  static Deadline AfterMicroseconds(int64_t microseconds) {
    return Deadline(NowNanoseconds() + microseconds * 1'000);
  }
  static Deadline AtNanoseconds(int64_t at_ns) { return Deadline(at_ns); }
  static Deadline Never() { return Deadline(INT64_MAX); }
  friend Deadline Earlier(Deadline a, Deadline b) { return a.at_ns_ < b.at_ns_ ? a : b; }

  bool expired() const { return at_ns_ != INT64_MAX && NowNanoseconds() >= at_ns_; }
  // Milliseconds left, rounded up, for poll(): 0 when expired, -1 for never.
  int poll_timeout_ms() const {
    if (at_ns_ == INT64_MAX) return -1;
    const int64_t left = at_ns_ - NowNanoseconds();
    return left <= 0 ? 0 : static_cast<int>((left + 999'999) / 1'000'000);
  }
  // What is left, for ppoll(): null for never. Fills *storage.
  const timespec* ppoll_timeout(timespec* storage) const {
    if (at_ns_ == INT64_MAX) return nullptr;
    const int64_t left = at_ns_ - NowNanoseconds();
    *storage = left <= 0 ? timespec{0, 0} : timespec{left / 1'000'000'000, left % 1'000'000'000};
    return storage;
  }

 private:
  explicit Deadline(int64_t at_ns) : at_ns_(at_ns) {}
  int64_t at_ns_;
};

}  // namespace penstock
