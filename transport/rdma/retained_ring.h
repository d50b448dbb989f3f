// The ring in which committed frames stay until the peer has them for good.
//
// Three positions chase each other: frames are committed at `head`, put into packets up to `cut`,
// and given back up to `tail`, when the peer has acknowledged their packets. Between tail and cut
// the bytes are kept as they were, so that a new queue pair can carry them again. Positions only
// grow; position % capacity is the place. Frames are contiguous and start at multiples of 8; one
// that does not fit before the end of the ring starts at the next lap, and `wrap_` remembers where
// the lap ended. One mark is enough, because head - tail never exceeds the capacity.
//
// Not synchronised: the control channel's lock protects it. The memory is the caller's, registered.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace penstock::transport::rdma {

class RetainedRing {
 public:
  // What fits into one packet. An empty run has no bytes.
  struct Run {
    uint64_t offset = 0;  // in the memory
    uint32_t bytes = 0;
    uint64_t end = 0;     // position behind it
    uint32_t frames = 0;  // that end in it
  };

  // At least four frames of the largest size, a power of two.
  static size_t CapacityFor(size_t bytes, size_t max_frame) {
    return std::bit_ceil(bytes > 4 * PadTo8(max_frame) ? bytes : 4 * PadTo8(max_frame));
  }
  static constexpr uint64_t PadTo8(uint64_t bytes) { return (bytes + 7) & ~uint64_t{7}; }

  RetainedRing(std::byte* memory, size_t capacity) : memory_(memory), capacity_(capacity) {}

  // nullptr when there is no space now.
  std::byte* Reserve(uint32_t bytes) {
    const uint64_t need = PadTo8(bytes);
    const uint64_t to_end = capacity_ - place(head_);
    reserved_at_ = need <= to_end ? head_ : head_ + to_end;
    if (reserved_at_ + need - tail_ > capacity_) return nullptr;
    reserved_bytes_ = bytes;
    return memory_ + place(reserved_at_);
  }
  uint32_t reserved_bytes() const { return reserved_bytes_; }
  // Of the reserved frame.
  uint32_t FirstWord() const {
    uint32_t word;
    std::memcpy(&word, memory_ + place(reserved_at_), sizeof word);
    return word;
  }

  // The frame's first word is its length, `used`.
  void Commit(uint32_t used) {
    const uint64_t end = reserved_at_ + PadTo8(used);
    std::memset(memory_ + place(reserved_at_) + used, 0, PadTo8(used) - used);
    if (reserved_at_ != head_) wrap_ = head_;
    head_ = end;
  }

  bool all_cut() const { return cut_ == head_; }
  uint64_t uncut() const { return head_ - cut_; }

  // The next bytes to send: whole frames as far as they fit into `room`, or a part of one that is
  // larger than that. Does not move `cut`.
  Run Next(uint32_t room) const {
    uint64_t from = cut_;
    if (from == head_) return {};
    if (from == wrap_) from += capacity_ - place(from);
    const uint64_t lap_end = from + (capacity_ - place(from));
    uint64_t stop = head_ < lap_end ? head_ : lap_end;
    if (wrap_ > from && wrap_ < stop) stop = wrap_;
    Run run{place(from), 0, from, 0};
    if (split_left_ > 0) {
      run.bytes = split_left_ < room ? static_cast<uint32_t>(split_left_) : room;
      run.frames = run.bytes == split_left_ ? 1 : 0;
      run.end = from + run.bytes;
      return run;
    }
    while (run.end < stop) {
      uint32_t length;
      std::memcpy(&length, memory_ + place(run.end), sizeof length);
      const uint64_t padded = PadTo8(length);
      if (run.bytes + padded > room) {
        if (run.bytes == 0) {
          run.bytes = room;
          run.end += room;
        }
        break;
      }
      run.bytes += static_cast<uint32_t>(padded);
      run.end += padded;
      ++run.frames;
    }
    return run;
  }

  // The run has become a packet.
  void Cut(const Run& run) {
    if (split_left_ > 0) {
      split_left_ -= run.bytes;
    } else if (run.frames == 0) {
      uint32_t length;
      std::memcpy(&length, memory_ + run.offset, sizeof length);
      split_left_ = PadTo8(length) - run.bytes;
    }
    cut_ = run.end;
  }

  // Everything before the position, an `end` of a run, is the peer's for good.
  void Release(uint64_t position) { tail_ = position; }

 private:
  uint64_t place(uint64_t position) const { return position & (capacity_ - 1); }

  std::byte* const memory_;
  const uint64_t capacity_;
  uint64_t head_ = 0, cut_ = 0, tail_ = 0;
  uint64_t wrap_ = UINT64_MAX;  // where the lap before the newest frames ended
  uint64_t reserved_at_ = 0;
  uint32_t reserved_bytes_ = 0;
  uint64_t split_left_ = 0;  // of a frame that is only partly cut
};

}  // namespace penstock::transport::rdma
