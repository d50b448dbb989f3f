// A ring of frames with one producer and one consumer, where every frame is contiguous.
//
// The producer writes a frame in place (Reserve, then Commit), the consumer sees runs of whole
// frames (pending, then Consume). Positions only grow; position % capacity is the place, and
// position / capacity the lap. A frame that does not fit before the end of the ring starts at the
// next lap instead, and wrap_at_ remembers where the lap really ended. One such mark is enough: the
// producer cannot end another lap before the consumer has left this one, because head - tail never
// exceeds the capacity.
//
// Frames start at multiples of 8; the bytes that fill up the last word are zeroed, so that nothing
// of an older frame reaches the peer.
//
// Order: head_ and tail_ are stored and loaded sequentially consistent where a sleeping flag is
// checked afterwards (see Sender), so that "store, then look whether the other sleeps" works.
#pragma once

#include <sys/uio.h>

#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>

namespace penstock::transport {

constexpr uint64_t RoundUpTo8(uint64_t bytes) {
  return (bytes + 7) & ~uint64_t{7};
}

class FrameRing {
 public:
  struct Run {
    iovec parts[2];
    int count = 0;
    size_t bytes = 0;
  };

  // `bytes` is rounded up to a power of two, and to four frames of the largest size: with less than
  // two, a frame could fit neither before nor after the end.
  FrameRing(size_t bytes, size_t max_frame)
      : capacity_(std::bit_ceil(std::max(bytes, 4 * RoundUpTo8(max_frame)))),
        data_(new std::byte[capacity_]) {}

  // Producer. nullptr when there is no space now.
  std::byte* Reserve(uint32_t bytes) {
    const uint64_t need = RoundUpTo8(bytes);
    const uint64_t head = head_.load(std::memory_order_relaxed);
    const uint64_t to_end = capacity_ - (head & (capacity_ - 1));
    const uint64_t start = need <= to_end ? head : head + to_end;
    if (start + need - tail_seen_ > capacity_) {
      tail_seen_ = tail_.load(std::memory_order_acquire);
      if (start + need - tail_seen_ > capacity_) return nullptr;
    }
    reserved_at_ = start;
    reserved_bytes_ = bytes;
    return place(start);
  }

  std::byte* reserved() { return place(reserved_at_); }
  uint32_t reserved_bytes() const { return reserved_bytes_; }

  void Commit(uint32_t used) {
    const uint64_t head = head_.load(std::memory_order_relaxed);
    const uint64_t end = reserved_at_ + RoundUpTo8(used);
    std::memset(place(reserved_at_) + used, 0, RoundUpTo8(used) - used);
    if (lap(end) != lap(head)) {
      wrap_at_.store(reserved_at_ == head ? end : head, std::memory_order_relaxed);
    }
    reserved_bytes_ = 0;
    head_.store(end, std::memory_order_seq_cst);
  }

  // Consumer: everything committed and not yet consumed, oldest first.
  Run pending() {
    Run run;
    head_seen_ = head_.load(std::memory_order_seq_cst);
    const uint64_t tail = tail_.load(std::memory_order_relaxed);
    if (lap(tail) == lap(head_seen_)) {
      Add(run, tail, head_seen_);
    } else {
      Add(run, tail, wrap_at_.load(std::memory_order_relaxed));
      Add(run, head_seen_ & ~(capacity_ - 1), head_seen_);
    }
    return run;
  }

  // At most what the last pending() showed.
  void Consume(size_t bytes) {
    uint64_t tail = tail_.load(std::memory_order_relaxed);
    if (lap(tail) == lap(head_seen_)) {
      tail += bytes;
    } else {
      const uint64_t left = wrap_at_.load(std::memory_order_relaxed) - tail;
      tail = bytes < left ? tail + bytes : (head_seen_ & ~(capacity_ - 1)) + (bytes - left);
    }
    tail_.store(tail, std::memory_order_seq_cst);
  }

  uint64_t head() const { return head_.load(std::memory_order_seq_cst); }
  uint64_t tail() const { return tail_.load(std::memory_order_seq_cst); }
  bool empty() const { return head() == tail(); }
  size_t capacity() const { return capacity_; }

 private:
  uint64_t lap(uint64_t position) const { return position / capacity_; }
  std::byte* place(uint64_t position) { return data_.get() + (position & (capacity_ - 1)); }
  void Add(Run& run, uint64_t from, uint64_t to) {
    if (from == to) return;
    run.parts[run.count++] = {place(from), to - from};
    run.bytes += to - from;
  }

  const uint64_t capacity_;
  std::unique_ptr<std::byte[]> data_;
  // Written by the producer.
  alignas(64) std::atomic<uint64_t> head_{0};
  std::atomic<uint64_t> wrap_at_{0};
  uint64_t tail_seen_ = 0;
  uint64_t reserved_at_ = 0;
  uint32_t reserved_bytes_ = 0;
  // Written by the consumer.
  alignas(64) std::atomic<uint64_t> tail_{0};
  uint64_t head_seen_ = 0;
};

}  // namespace penstock::transport
