// How much device memory a session may hold on each of its GPUs: the memory of its slot.
//
// A charge is taken before the driver allocates and given back when the driver has freed, on
// whatever thread that happens. It counts what the driver takes for an allocation as far as its
// size tells (CountOf); the slot has room for one context of each GPU beside it (pool/slots.h), and
// every further context is charged like an allocation. What is not counted stands in
// docs/operations.md.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

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
    uint32_t device() const { return device_; }
    bool released() const { return bytes_ == 0; }
    // A part of it as a charge of its own; null if it is smaller.
    std::shared_ptr<Charge> Split(uint64_t bytes) {
      uint64_t now = bytes_;
      do {
        if (bytes > now) return nullptr;
      } while (!bytes_.compare_exchange_weak(now, now - bytes));
      return std::make_shared<Charge>(quota_, device_, bytes);
    }

   private:
    const std::shared_ptr<Quota> quota_;
    const uint32_t device_;
    std::atomic<uint64_t> bytes_;
  };

  explicit Quota(uint64_t limit) : limit_(limit) {}

  // Bytes charged on all devices.
  uint64_t used() const {
    uint64_t sum = 0;
    for (const auto& device : used_) sum += device.load(std::memory_order_relaxed);
    return sum;
  }
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

  // What the driver takes for so many bytes. It hands out small pieces, in multiples of 512 bytes,
  // of blocks of 2 MiB, and whole blocks from 1 MiB on. Pools (`pooled`) cut their memory into
  // pieces of any size. That a block stays taken while one of its pieces is in use, is not counted.
  static uint64_t CountOf(uint64_t bytes, bool pooled) {
    constexpr uint64_t kPiece = 512, kBlock = 2 << 20, kLeastBlock = 1 << 20;
    const uint64_t unit = pooled || bytes < kLeastBlock ? kPiece : kBlock;
    const uint64_t rest = bytes % unit;
    return rest == 0 || bytes > UINT64_MAX - unit ? bytes : bytes + unit - rest;
  }

 private:
  const uint64_t limit_;  // bytes per device; 0: none
  std::array<std::atomic<uint64_t>, kMaxDevices> used_{};
};

// The contexts of a session on each of its GPUs, whichever way they are made. The slot's plan has
// room for the first; whoever makes another one pays for it. Dispatch thread only.
class ContextCharges {
 public:
  // `bytes` is what a context takes of each device.
  ContextCharges(std::shared_ptr<Quota> quota, const std::array<uint64_t, kMaxDevices>& bytes)
      : quota_(std::move(quota)), bytes_(bytes) {}

  // Before one is made. False if the slot has no room for it.
  bool Take(uint32_t device) {
    if (living_[device] > 0) {
      auto charge = Quota::Take(quota_, device, bytes_[device]);
      if (charge == nullptr) return false;
      further_[device].push_back(std::move(charge));
    }
    ++living_[device];
    return true;
  }
  // After one has gone, or was not made. Which one does not matter: one more is free of charge.
  void GiveBack(uint32_t device) {
    --living_[device];
    if (!further_[device].empty()) further_[device].pop_back();
  }

 private:
  const std::shared_ptr<Quota> quota_;
  const std::array<uint64_t, kMaxDevices> bytes_;
  std::array<uint32_t, kMaxDevices> living_{};
  std::array<std::vector<std::shared_ptr<Quota::Charge>>, kMaxDevices> further_;
};

}  // namespace penstock::server
