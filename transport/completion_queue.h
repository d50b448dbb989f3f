// Bulk moves that ended, on their way from whoever moved the bytes to the thread that polls.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <mutex>

#include "transport/transport.h"
#include "transport/waker.h"

namespace penstock::transport {

struct Completion {
  uint64_t cookie;
  BulkStatus status;
  uint64_t bytes;
};

class CompletionQueue {
 public:
  explicit CompletionQueue(Waker& waker) : waker_(waker) {}

  void Push(const Completion& completion) {
    {
      std::lock_guard lock(mutex_);
      queue_.push_back(completion);
      size_.store(queue_.size(), std::memory_order_release);
    }
    waker_.Signal();
  }

  bool empty() const { return size_.load(std::memory_order_acquire) == 0; }

  // Reports at most `budget` completions. The handler runs without the lock.
  int Report(int budget, Handler& handler) {
    int reported = 0;
    while (reported < budget && !empty()) {
      Completion completion;
      {
        std::lock_guard lock(mutex_);
        if (queue_.empty()) break;
        completion = queue_.front();
        queue_.pop_front();
        size_.store(queue_.size(), std::memory_order_release);
      }
      handler.OnBulkDone(completion.cookie, completion.status, completion.bytes);
      ++reported;
    }
    return reported;
  }

 private:
  Waker& waker_;
  std::mutex mutex_;
  std::deque<Completion> queue_;  // under mutex_
  std::atomic<size_t> size_{0};
};

}  // namespace penstock::transport
