#include "server/worker/bounce.h"

#include <utility>

namespace penstock::server {

BounceSlots::BounceSlots(Outbox& outbox) : outbox_(outbox) {
  for (uint32_t slot = kBounceSlots; slot-- > 0;) free_.push_back(slot);
}

uint32_t BounceSlots::Take() {
  if (free_.empty()) return kNone;
  const uint32_t slot = free_.back();
  free_.pop_back();
  return slot;
}

void BounceSlots::Return(uint32_t slot) {
  free_.push_back(slot);
}

void BounceSlots::Lend(uint32_t slot, uint64_t call, uint64_t offset, uint64_t bytes,
                       std::function<void()> done) {
  slots_[slot] = {true, call, std::move(done)};
  outbox_.Bounce(call, {offset, static_cast<uint32_t>(bytes), slot});
}

bool BounceSlots::OnDone(uint64_t call, uint32_t slot) {
  if (slot >= kBounceSlots || !slots_[slot].lent || slots_[slot].call != call) return false;
  slots_[slot].lent = false;
  const auto done = std::exchange(slots_[slot].done, nullptr);
  if (done) {
    done();
  } else {
    Return(slot);
  }
  return true;
}

bool BounceSlots::Step() {
  if (later_.empty()) return false;
  const auto jobs = std::exchange(later_, {});
  const size_t free_before = free_.size();
  for (const auto& job : jobs) job();
  return free_.size() != free_before || later_.size() < jobs.size();
}

}  // namespace penstock::server
