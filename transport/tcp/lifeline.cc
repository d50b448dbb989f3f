#include "transport/tcp/lifeline.h"

#include <sys/socket.h>

namespace penstock::transport::tcp {

std::string Lifeline::reason() const {
  std::lock_guard lock(mutex_);
  return reason_;
}

void Lifeline::Close(const std::string& reason, LogLevel level) {
  {
    std::lock_guard lock(mutex_);
    if (closed_.load(std::memory_order_relaxed)) return;
    reason_ = reason;
    closed_.store(true, std::memory_order_release);
  }
  PENSTOCK_LOG_AT(level, "transport", "%s", reason.c_str());
  shutdown(control_.get(), SHUT_RDWR);
  shutdown(bulk_.get(), SHUT_RDWR);
  receiver_.Signal();
}

void Lifeline::AbandonAfterFork() {
  control_.reset();
  bulk_.reset();
  receiver_.AbandonAfterFork();
}

}  // namespace penstock::transport::tcp
