// A slot map from handles to records, used by both sides.
//
// The client mints from it; the server adopts what the client minted (or mints from its own half).
// A lookup costs one bounds check and one compare. Not thread-safe: the owner locks.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "protocol/handle.h"

namespace penstock {

template <typename Record>
class HandleTable {
 public:
  // first_id: 1 for the client's half (0 is kept for fixed handles), kFirstServerHandleId
  // otherwise.
  explicit HandleTable(HandleKind kind, uint32_t first_id = 1, uint32_t limit = kMaxHandlesPerKind)
      : kind_(kind), first_id_(first_id), limit_(limit) {}

  // A fresh handle with this record; null when the limit is reached.
  Handle Mint(Record record) {
    uint32_t index;
    if (!free_.empty()) {
      index = free_.back();
      free_.pop_back();
    } else {
      if (slots_.size() >= limit_) return Handle{};
      index = static_cast<uint32_t>(slots_.size());
      slots_.emplace_back();
    }
    Slot& slot = slots_[index];
    ++slot.generation;
    slot.record = std::make_unique<Record>(std::move(record));
    return Handle::Make(kind_, slot.generation, first_id_ + index);
  }

  // Takes over a handle that the peer minted. False if no honest peer can have minted it: wrong
  // kind, id out of bounds, a generation that does not grow, a slot still alive.
  bool Adopt(Handle handle, Record record) {
    if (handle.kind() != kind_ || handle.generation() == 0) return false;
    if (handle.id() < first_id_ || handle.id() - first_id_ >= limit_) return false;
    const uint32_t index = handle.id() - first_id_;
    // An honest peer mints ids in order, so the table never grows by more than it holds plus one.
    if (index > slots_.size() + kMaxAdoptGap) return false;
    if (index >= slots_.size()) slots_.resize(index + 1);
    Slot& slot = slots_[index];
    if (slot.record != nullptr || handle.generation() <= slot.generation) return false;
    slot.generation = handle.generation();
    slot.record = std::make_unique<Record>(std::move(record));
    return true;
  }

  // The record, or null if the handle is stale, destroyed, foreign or garbage.
  Record* Find(Handle handle) {
    Slot* slot = FindSlot(handle);
    return slot == nullptr ? nullptr : slot->record.get();
  }

  // True if the handle was minted once (alive or not): what tells a program's stale handle from
  // something that no honest peer sends.
  bool WasMinted(Handle handle) const {
    if (handle.kind() != kind_ || handle.generation() == 0 || handle.id() < first_id_) return false;
    const uint32_t index = handle.id() - first_id_;
    return index < slots_.size() && handle.generation() <= slots_[index].generation;
  }

  // Removes and returns the record; null if there is none. The slot is minted again later; a slot
  // whose generations are used up is retired.
  std::unique_ptr<Record> Remove(Handle handle) {
    Slot* slot = FindSlot(handle);
    if (slot == nullptr) return nullptr;
    std::unique_ptr<Record> record = std::move(slot->record);
    if (slot->generation < kMaxGeneration) free_.push_back(handle.id() - first_id_);
    return record;
  }

  HandleKind kind() const { return kind_; }

  template <typename Visitor>
  void ForEach(Visitor visit) {
    for (uint32_t index = 0; index < slots_.size(); ++index) {
      if (slots_[index].record == nullptr) continue;
      visit(Handle::Make(kind_, slots_[index].generation, first_id_ + index),
            *slots_[index].record);
    }
  }

 private:
  static constexpr uint32_t kMaxAdoptGap = 65536;
  struct Slot {
    uint32_t generation = 0;
    std::unique_ptr<Record> record;
  };

  Slot* FindSlot(Handle handle) {
    if (handle.kind() != kind_ || handle.id() < first_id_) return nullptr;
    const uint32_t index = handle.id() - first_id_;
    if (index >= slots_.size()) return nullptr;
    Slot& slot = slots_[index];
    return slot.generation == handle.generation() && slot.record != nullptr ? &slot : nullptr;
  }

  const HandleKind kind_;
  const uint32_t first_id_;
  const uint32_t limit_;
  std::vector<Slot> slots_;
  std::vector<uint32_t> free_;
};

}  // namespace penstock
