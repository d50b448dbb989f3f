// What the client knows about the objects that its handles name.
//
// Every launch looks up a function and a stream, on any thread, so a lookup must not lock: slots
// lie in chunks that never move and are never freed, and a slot's live generation is published
// last and withdrawn first. A thread that still uses a record while another destroys the object
// (a mistake of the program, as with a local driver) reads old or newer contents of the record, but
// no freed memory. A slot rests in a queue before it is used again.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>

#include "protocol/handle.h"

namespace penstock::interposer {

template <typename Record>
class RecordTable {
 public:
  explicit RecordTable(HandleKind kind) : kind_(kind) {}
  ~RecordTable() {
    for (auto& chunk : chunks_) delete[] chunk.load();
  }
  RecordTable(const RecordTable&) = delete;
  RecordTable& operator=(const RecordTable&) = delete;

  // A fresh record, prepared by fill(record, handle) before anybody can find it. Null when
  // kMaxHandlesPerKind objects are alive.
  template <typename Fill>
  Record* Mint(Fill fill) {
    std::lock_guard lock(mutex_);
    uint32_t index;
    if (free_.size() > kRest || (used_ == kMaxHandlesPerKind && !free_.empty())) {
      index = free_.front();
      free_.pop_front();
    } else {
      if (used_ == kMaxHandlesPerKind) return nullptr;
      index = used_++;
      if (chunks_[index / kChunk].load(std::memory_order_relaxed) == nullptr) {
        chunks_[index / kChunk].store(new Slot[kChunk], std::memory_order_release);
      }
    }
    Slot& slot = *SlotAt(index);
    const uint32_t generation = ++slot.generation;
    const Handle handle = Handle::Make(kind_, generation, kFirstId + index);
    slot.record.Reset();
    slot.record.handle = handle;
    fill(slot.record, handle);
    slot.live.store(generation, std::memory_order_release);
    return &slot.record;
  }

  // Null if the handle is stale, foreign or garbage.
  Record* Find(Handle handle) const {
    if (handle.kind() != kind_) return nullptr;
    return Find(handle.generation(), handle.id());
  }
  Record* Find(uint32_t generation, uint32_t id) const {
    const uint32_t index = id - kFirstId;
    if (index >= kMaxHandlesPerKind || generation == 0) return nullptr;
    Slot* chunk = chunks_[index / kChunk].load(std::memory_order_acquire);
    if (chunk == nullptr) return nullptr;
    Slot& slot = chunk[index % kChunk];
    return slot.live.load(std::memory_order_acquire) == generation ? &slot.record : nullptr;
  }

  // False if it was not alive: of two threads that destroy one object, one succeeds.
  bool Remove(Handle handle) {
    std::lock_guard lock(mutex_);
    if (Find(handle) == nullptr) return false;
    RemoveLocked(handle.id() - kFirstId);
    return true;
  }

  template <typename Visitor>
  void ForEach(Visitor visit) {
    std::lock_guard lock(mutex_);
    for (uint32_t index = 0; index < used_; ++index) {
      Slot& slot = *SlotAt(index);
      if (slot.live.load(std::memory_order_relaxed) != 0) visit(slot.record);
    }
  }

  template <typename Predicate>
  void RemoveIf(Predicate predicate) {
    std::lock_guard lock(mutex_);
    for (uint32_t index = 0; index < used_; ++index) {
      Slot& slot = *SlotAt(index);
      if (slot.live.load(std::memory_order_relaxed) != 0 && predicate(slot.record)) {
        RemoveLocked(index);
      }
    }
  }

 private:
  static constexpr uint32_t kFirstId = 1;  // 0 is kept for fixed handles
  static constexpr uint32_t kChunk = 1024;
  static constexpr size_t kRest = 64;
  struct Slot {
    std::atomic<uint32_t> live{0};  // generation of the object here; 0 for none
    uint32_t generation = 0;        // the last one given out
    Record record;
  };

  Slot* SlotAt(uint32_t index) {
    return chunks_[index / kChunk].load(std::memory_order_relaxed) + index % kChunk;
  }
  void RemoveLocked(uint32_t index) {
    Slot& slot = *SlotAt(index);
    slot.live.store(0, std::memory_order_release);
    if (slot.generation < kMaxGeneration) free_.push_back(index);
  }

  const HandleKind kind_;
  std::mutex mutex_;  // of minting and removing
  std::atomic<Slot*> chunks_[kMaxHandlesPerKind / kChunk] = {};
  uint32_t used_ = 0;
  std::deque<uint32_t> free_;
};

}  // namespace penstock::interposer
