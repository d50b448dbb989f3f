// Pinned memory of one context that the worker shares with the GPU and the transport:
//
//   words    32-bit counters. The device writes progress and "reached", the host or a copy stream
//            writes "go". Every word only grows (modulo 2^32), so one never has to be reset while
//            somebody may still look at it, and a word set can be used again by a later stream.
//   slots    for the bytes of small copies that travel inside frames
//   chunks   of kChunkBytes, what bulk moves are cut into
//
// It belongs to one context, because the driver unpins registered memory when that context goes.
// The bound is deliberate: a chunk is held only by a copy whose stream has reached it, so whoever
// holds one makes progress, and any number of transfers can share few chunks.
#pragma once

#include <cuda.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "common/result.h"
#include "transport/transport.h"

namespace penstock::server {

struct Driver;

inline constexpr uint32_t kChunkBytes = 2048 * 1024;
inline constexpr uint32_t kChunks = 12;
inline constexpr uint32_t kWords = 64 * 1024;
inline constexpr uint32_t kSmallSlotBytes = 1024;
inline constexpr uint32_t kSmallSlots = 1024;
inline constexpr uint32_t kLargeSlotBytes = 16 * 1024;
inline constexpr uint32_t kLargeSlots = 192;

using WordIndex = uint32_t;  // 0: none

// The words of one stream.
struct StreamWords {
  WordIndex progress = 0, reached = 0, go = 0;
};

struct InlineSlot {
  std::byte* address = nullptr;  // null: none
  uint32_t index = 0;            // of its size class
  bool large = false;
};

class Arena {
 public:
  // The context must be current. When there is none, *failure is what its calls return.
  static Result<std::unique_ptr<Arena>> Create(const Driver& driver,
                                               transport::Connection& connection,
                                               CUresult* failure);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  uint32_t Load(WordIndex word) const {
    return std::atomic_ref<uint32_t>(words_[word]).load(std::memory_order_acquire);
  }
  void Store(WordIndex word, uint32_t value) {
    std::atomic_ref<uint32_t>(words_[word]).store(value, std::memory_order_release);
  }
  CUdeviceptr DeviceAddress(WordIndex word) const { return device_base_ + word * sizeof(uint32_t); }

  // The words may hold values of an earlier stream: count on from them. False when none is left.
  bool TakeWords(StreamWords* words);
  void ReturnWords(const StreamWords& words);
  WordIndex TakeWord();

  InlineSlot TakeSlot(uint32_t bytes);
  void ReturnSlot(InlineSlot slot);

  // kChunks when none is free.
  uint32_t TakeChunk();
  void ReturnChunk(uint32_t chunk) { free_chunks_.push_back(chunk); }
  size_t free_chunks() const { return free_chunks_.size(); }
  std::byte* chunk(uint32_t index) const { return memory_ + ChunkOffset(index); }
  // Of the chunk in region().
  uint64_t ChunkOffset(uint32_t index) const {
    return kChunksOffset + uint64_t{index} * kChunkBytes;
  }
  transport::MemoryRegion& region() { return *region_; }

 private:
  static constexpr uint64_t kSmallOffset = uint64_t{kWords} * sizeof(uint32_t);
  static constexpr uint64_t kLargeOffset = kSmallOffset + uint64_t{kSmallSlots} * kSmallSlotBytes;
  static constexpr uint64_t kChunksOffset = kLargeOffset + uint64_t{kLargeSlots} * kLargeSlotBytes;
  static constexpr uint64_t kBytes = kChunksOffset + uint64_t{kChunks} * kChunkBytes;

  Arena() = default;

  std::byte* memory_ = nullptr;
  uint32_t* words_ = nullptr;
  CUdeviceptr device_base_ = 0;
  std::unique_ptr<transport::MemoryRegion> region_;
  WordIndex next_word_ = 1;
  std::vector<StreamWords> free_words_;
  std::vector<uint32_t> free_small_, free_large_, free_chunks_;
};

}  // namespace penstock::server
