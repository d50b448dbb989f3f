// An eventfd that is readable exactly while it is signalled.
//
// A sleeper clears the waker, then looks at the thing it waits for, then sleeps on fd(). Whoever
// changes the thing signals afterwards. The flag spares both sides the system call when nothing
// changes; the mutex keeps flag and descriptor in step, without which a signal between two steps of
// Clear would be lost, or would leave the descriptor readable for ever.
#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <mutex>

#include "common/unique_fd.h"

namespace penstock::transport {

class Waker {
 public:
  Waker() : fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}

  bool valid() const { return fd_.valid(); }
  int fd() const { return fd_.get(); }

  bool signalled() const { return signalled_.load(std::memory_order_acquire); }

  void Signal() {
    std::lock_guard lock(mutex_);
    if (signalled_.load(std::memory_order_relaxed)) return;
    signalled_.store(true, std::memory_order_release);
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = write(fd_.get(), &one, sizeof one);
  }

  void Clear() {
    if (!signalled_.load(std::memory_order_acquire)) return;
    std::lock_guard lock(mutex_);
    uint64_t count;
    [[maybe_unused]] const ssize_t got = read(fd_.get(), &count, sizeof count);
    signalled_.store(false, std::memory_order_relaxed);
  }

  // In a forked child: the descriptor goes, the parent's stays.
  void AbandonAfterFork() { fd_.reset(); }

 private:
  UniqueFd fd_;
  std::mutex mutex_;
  std::atomic<bool> signalled_{false};
};

}  // namespace penstock::transport
