// The call stream's lock: held for some hundred nanoseconds, so a thread that finds it taken spins
// for about that long before it sleeps in the kernel. Costs one atomic exchange when free.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

namespace penstock::interposer {

class FutexLock {
 public:
  void lock() {
    uint32_t expected = kFree;
    if (word_.compare_exchange_strong(expected, kHeld, std::memory_order_acquire)) return;
    LockSlowly();
  }
  void unlock() {
    if (word_.exchange(kFree, std::memory_order_release) == kContended) {
      syscall(SYS_futex, &word_, FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);
    }
  }

 private:
  static constexpr uint32_t kFree = 0, kHeld = 1, kContended = 2;
  // About a microsecond: the time in which a holder that runs is done.
  static constexpr int kSpins = 40;

  __attribute__((noinline)) void LockSlowly() {
    for (int i = 0; i < kSpins; ++i) {
      uint32_t expected = kFree;
      if (word_.load(std::memory_order_relaxed) == kFree &&
          word_.compare_exchange_strong(expected, kHeld, std::memory_order_acquire)) {
        return;
      }
      __builtin_ia32_pause();
    }
    while (word_.exchange(kContended, std::memory_order_acquire) != kFree) {
      syscall(SYS_futex, &word_, FUTEX_WAIT_PRIVATE, kContended, nullptr, nullptr, 0);
    }
  }

  std::atomic<uint32_t> word_{kFree};
};

}  // namespace penstock::interposer
