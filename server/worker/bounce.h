// The client's bounce slots, as the server deals them out.
//
// Memory of the program that is not registered travels through slots that are: the client copies
// into one and the server pulls from there, or the server pushes to one and the client copies out.
// The client owns the memory, but the server decides who uses a slot when, because only it knows
// which copies their streams have reached. A copy that still waits for its stream holds none, so
// copies never wait for each other in a circle.
//
//   free -> taken -> lent -> free      download: pushed to, then the client empties it
//   free -> lent -> taken -> free      upload: the client fills it, then it is pulled from
//
// A slot that is lent comes back by the client's kBounceDone alone, also when its copy has failed
// meanwhile: until then the client may touch it.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <vector>

#include "protocol/frame.h"
#include "protocol/limits.h"
#include "server/worker/outbox.h"

namespace penstock::server {

class BounceSlots {
 public:
  explicit BounceSlots(Outbox& outbox);

  static constexpr uint32_t kNone = kBounceSlots;
  // kNone when none is free.
  uint32_t Take();
  void Return(uint32_t slot);
  // Tells the client of a piece in a slot that was taken. `done` runs when the client has answered,
  // and the slot is taken again then; without it, the slot is free.
  void Lend(uint32_t slot, uint64_t call, uint64_t offset, uint64_t bytes,
            std::function<void()> done = nullptr);
  // The client has answered. False if this slot is not lent to this call.
  bool OnDone(uint64_t call, uint32_t slot);

  // Runs in the next Step: for those that found no slot, or no room for a move.
  void RunLater(std::function<void()> job) { later_.push_back(std::move(job)); }
  bool Step();
  bool waiting() const { return !later_.empty(); }

  uint64_t Offset(uint32_t slot) const { return uint64_t{slot} * kBounceSlotBytes; }

 private:
  struct Slot {
    bool lent = false;
    uint64_t call = 0;
    std::function<void()> done;
  };
  Outbox& outbox_;
  std::array<Slot, kBounceSlots> slots_;
  std::vector<uint32_t> free_;
  std::vector<std::function<void()>> later_;
};

}  // namespace penstock::server
