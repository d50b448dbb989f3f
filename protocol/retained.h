// Numbered frames that the peer has not acknowledged yet, oldest first, in one ring of fixed size.
//
// Reconnecting without losing or repeating a call rests on this: after a break the peer says which
// sequence it has seen last, and everything after it is sent again from here. The price is one copy
// of each frame (some 150 bytes, 10 ns). Not thread-safe: lives under the call stream's lock.
#pragma once

#include <cstring>
#include <memory>
#include <span>

#include "protocol/frame.h"

namespace penstock {

class RetainedFrames {
 public:
  explicit RetainedFrames(uint64_t capacity = kRetainedBytes)
      : capacity_(capacity), ring_(new std::byte[capacity]) {
    entries_.reset(new Entry[kMaxEntries]);
  }

  bool HasRoom(uint32_t bytes) const {
    return count_ < kMaxEntries && Place(PaddedTo8(bytes)) != kNoPlace;
  }

  // Keeps a copy. False when there is no room: wait for an acknowledgement first. Sequences must
  // follow each other.
  bool Append(uint64_t sequence, std::span<const std::byte> frame) {
    const uint32_t bytes = PaddedTo8(static_cast<uint32_t>(frame.size()));
    if (count_ == kMaxEntries) return false;
    const uint64_t place = Place(bytes);
    if (place == kNoPlace) return false;
    memcpy(ring_.get() + place, frame.data(), frame.size());
    entries_[(first_ + count_) % kMaxEntries] = {sequence, place,
                                                 static_cast<uint32_t>(frame.size())};
    ++count_;
    tail_ = place + bytes;
    return true;
  }

  // Drops everything up to and including this sequence.
  void Acknowledge(uint64_t sequence) {
    while (count_ > 0 && entries_[first_].sequence <= sequence) {
      first_ = (first_ + 1) % kMaxEntries;
      --count_;
    }
    if (count_ == 0) tail_ = 0;
  }

  // Calls visit(sequence, frame) for each kept frame after the given sequence, in order.
  template <typename Visitor>
  void ForEachAfter(uint64_t sequence, Visitor visit) const {
    for (uint32_t i = 0; i < count_; ++i) {
      const Entry& entry = entries_[(first_ + i) % kMaxEntries];
      if (entry.sequence > sequence) {
        visit(entry.sequence, std::span<const std::byte>(ring_.get() + entry.place, entry.bytes));
      }
    }
  }

  uint32_t count() const { return count_; }
  uint64_t oldest() const { return count_ == 0 ? 0 : entries_[first_].sequence; }

 private:
  static constexpr uint32_t kMaxEntries = 32768;
  static constexpr uint64_t kNoPlace = UINT64_MAX;
  struct Entry {
    uint64_t sequence, place;
    uint32_t bytes;
  };

  // Where the next frame goes: after the newest one, or at the start if it does not fit there.
  uint64_t Place(uint64_t bytes) const {
    if (count_ == 0) return bytes <= capacity_ ? 0 : kNoPlace;
    const uint64_t head = entries_[first_].place;
    if (tail_ > head) {
      if (bytes <= capacity_ - tail_) return tail_;
      return bytes < head ? 0 : kNoPlace;
    }
    return bytes < head - tail_ ? tail_ : kNoPlace;
  }

  const uint64_t capacity_;
  std::unique_ptr<std::byte[]> ring_;
  std::unique_ptr<Entry[]> entries_;
  uint32_t first_ = 0, count_ = 0;
  uint64_t tail_ = 0;
};

}  // namespace penstock
