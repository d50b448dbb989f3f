// The one fact that the parts of a tcp connection share: whether it lives, and why not any more.
// Whoever finds a reason closes both sockets with it; the first reason stays.
#pragma once

#include <atomic>
#include <mutex>
#include <string>

#include "common/log.h"
#include "common/unique_fd.h"
#include "transport/waker.h"

namespace penstock::transport::tcp {

class Lifeline {
 public:
  Lifeline(UniqueFd control, UniqueFd bulk)
      : control_(std::move(control)), bulk_(std::move(bulk)) {}

  int control() const { return control_.get(); }
  int bulk() const { return bulk_.get(); }
  // Wakes the thread that polls the connection.
  Waker& receiver() { return receiver_; }

  bool closed() const { return closed_.load(std::memory_order_acquire); }
  std::string reason() const;

  // Shuts both sockets down, which wakes every thread that sleeps on one. They are closed with the
  // object, so that no thread can meet a descriptor that has become somebody else's.
  //
  // kReadOn is for a peer that has gone: frames it sent before may still be on their way, and a
  // socket shut down for reading would turn them away. Their end comes with the end of the stream,
  // or for a peer that never ends it, kReadOnNs later.
  enum class Control { kShut, kReadOn };
  void Close(const std::string& reason, LogLevel level, Control control = Control::kShut);
  static constexpr int64_t kReadOnNs = 2'000'000'000;
  bool read_on_expired() const;

  // Closes our copies of the descriptors and nothing else.
  void AbandonAfterFork();

 private:
  UniqueFd control_, bulk_;
  Waker receiver_;
  std::atomic<bool> closed_{false};
  int64_t closed_at_ns_ = 0;  // before closed_
  mutable std::mutex mutex_;
  std::string reason_;  // under mutex_
};

}  // namespace penstock::transport::tcp
