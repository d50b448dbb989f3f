// The two ends of a ring of frames in shared memory. Positions only grow; position % capacity is
// the place. The memory is mapped twice in a row, so every frame is contiguous. Frames start at
// multiples of 8, and their first word is their length.
//
// Each end trusts only its own position. The peer's is copied, checked against the own one, and
// only then used; a length is copied before it is checked, and the frame is copied before anybody
// looks at it.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <span>

#include "transport/frame_ring.h"
#include "transport/shm/layout.h"
#include "transport/shm/order.h"

namespace penstock::transport::shm {

class RingProducer {
 public:
  RingProducer(RingWords& words, std::byte* memory, size_t capacity)
      : words_(words), memory_(memory), capacity_(capacity) {}

  // nullptr when there is no space now, or the consumer's position is impossible (`sound`).
  std::byte* Reserve(uint32_t bytes, bool* sound) {
    const uint64_t need = RoundUpTo8(bytes);
    if (head_ + need - tail_seen_ > capacity_) {
      const uint64_t tail = Observe(words_.tail);
      if (tail - tail_seen_ > head_ - tail_seen_ || tail % 8 != 0) {
        *sound = false;
        return nullptr;
      }
      tail_seen_ = tail;
      if (head_ + need - tail_seen_ > capacity_) return nullptr;
    }
    reserved_bytes_ = bytes;
    return reserved();
  }

  std::byte* reserved() const { return memory_ + (head_ & (capacity_ - 1)); }
  uint32_t reserved_bytes() const { return reserved_bytes_; }

  void Commit(uint32_t used) {
    // Nothing of an older frame stays behind the new one.
    std::memset(reserved() + used, 0, RoundUpTo8(used) - used);
    head_ += RoundUpTo8(used);
    reserved_bytes_ = 0;
    Publish(words_.head, head_, std::memory_order_seq_cst);
  }

  // True once the consumer has taken everything, as far as it says.
  bool drained() const { return Observe(words_.tail) == head_; }

 private:
  RingWords& words_;
  std::byte* const memory_;
  const uint64_t capacity_;
  uint64_t head_ = 0, tail_seen_ = 0;
  uint32_t reserved_bytes_ = 0;
};

class RingConsumer {
 public:
  enum class Next { kNone, kFrame, kBadPosition, kBadLength, kChanged };

  RingConsumer(RingWords& words, const std::byte* memory, size_t capacity, uint32_t max_frame)
      : words_(words),
        memory_(memory),
        capacity_(capacity),
        max_frame_(max_frame),
        frame_(new std::byte[RoundUpTo8(max_frame)]) {}

  bool empty() const { return words_.head.load(std::memory_order_seq_cst) == tail_; }

  // Copies the next frame out of the ring and gives its space back. The copy is valid until the
  // next call. Of a bad length, `length` tells it.
  Next Take(std::span<const std::byte>* frame, uint32_t* length) {
    const uint64_t head = Observe(words_.head);
    const uint64_t waiting = head - tail_;
    if (waiting == 0) return Next::kNone;
    if (waiting > capacity_ || waiting % 8 != 0) return Next::kBadPosition;
    const std::byte* const place = memory_ + (tail_ & (capacity_ - 1));
    *length = __atomic_load_n(reinterpret_cast<const uint32_t*>(place), __ATOMIC_RELAXED);
    if (*length < 8 || *length > max_frame_ || RoundUpTo8(*length) > waiting) {
      return Next::kBadLength;
    }
    std::memcpy(frame_.get(), place, *length);
    // The peer may have written to the frame meanwhile; what is handled has the length that was
    // checked.
    uint32_t copied;
    std::memcpy(&copied, frame_.get(), sizeof copied);
    if (copied != *length) return Next::kChanged;
    tail_ += RoundUpTo8(*length);
    Publish(words_.tail, tail_, std::memory_order_release);
    *frame = {frame_.get(), *length};
    return Next::kFrame;
  }

 private:
  RingWords& words_;
  const std::byte* const memory_;
  const uint64_t capacity_;
  const uint32_t max_frame_;
  std::unique_ptr<std::byte[]> frame_;
  uint64_t tail_ = 0;
};

}  // namespace penstock::transport::shm
