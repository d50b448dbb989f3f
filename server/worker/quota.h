// How much device memory a session may hold on each of its GPUs: the memory of its slot.
//
// A charge is taken before the driver allocates and given back when the driver has freed, on
// whatever thread that happens. It counts what the program asked for, to the byte; what contexts
// and modules take is reserved beside the slots (pool/slots.h).
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>

#include "protocol/limits.h"

namespace penstock::server {

class Quota {
 public:
  // One allocation's share. Releases once: explicitly, or at the latest when it is destroyed.
  class Charge {
   public:
    Charge(std::shared_ptr<Quota> quota, uint32_t device, uint64_t bytes)
        : quota_(std::move(quota)), device_(device), bytes_(bytes) {}
    ~Charge() { Release(); }
    Charge(const Charge&) = delete;
    Charge& operator=(const Charge&) = delete;
    void Release() { quota_->used_[device_] -= bytes_.exchange(0); }

   private:
    const std::shared_ptr<Quota> quota_;
    const uint32_t device_;
    std::atomic<uint64_t> bytes_;
  };

  explicit Quota(uint64_t limit) : limit_(limit) {}

  bool limited() const { return limit_ != 0; }
  uint64_t limit() const { return limit_; }
  uint64_t left(uint32_t device) const {
    const uint64_t used = used_[device];
    return used < limit_ ? limit_ - used : 0;
  }
  // Null if there is not so much left.
  static std::shared_ptr<Charge> Take(const std::shared_ptr<Quota>& quota, uint32_t device,
                                      uint64_t bytes) {
    std::atomic<uint64_t>& used = quota->used_[device];
    uint64_t now = used;
    do {
      if (quota->limited() && bytes > quota->limit_ - now) return nullptr;
    } while (!used.compare_exchange_weak(now, now + bytes));
    return std::make_shared<Charge>(quota, device, bytes);
  }

 private:
  const uint64_t limit_;  // bytes per device; 0: none
  std::array<std::atomic<uint64_t>, kMaxDevices> used_{};
};

}  // namespace penstock::server
