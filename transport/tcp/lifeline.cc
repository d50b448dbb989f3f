#include "transport/tcp/lifeline.h"

#include <sys/socket.h>

#include "common/clock.h"

namespace penstock::transport::tcp {

std::string Lifeline::reason() const {
  std::lock_guard lock(mutex_);
  return reason_;
}

bool Lifeline::read_on_expired() const {
  return closed() && NowNanoseconds() - closed_at_ns_ > kReadOnNs;
}

void Lifeline::Close(const std::string& reason, LogLevel level, Control control) {
  {
    std::lock_guard lock(mutex_);
    if (closed_.load(std::memory_order_relaxed)) return;
    reason_ = reason;
    closed_at_ns_ = NowNanoseconds();
    closed_.store(true, std::memory_order_release);
  }
  PENSTOCK_LOG_AT(level, "transport", "%s", reason.c_str());
  shutdown(control_.get(), control == Control::kReadOn ? SHUT_WR : SHUT_RDWR);
  shutdown(bulk_.get(), SHUT_RDWR);
  receiver_.Signal();
}

void Lifeline::AbandonAfterFork() {
  control_.reset();
  bulk_.reset();
  receiver_.AbandonAfterFork();
}

}  // namespace penstock::transport::tcp
