// Memory that pageable uploads are copied into, so that the program may go on at once.
//
// Two pools of fixed slots, made when first used. A slot is taken by an upload and
// comes back through a progress entry, which says how often the server has released it: absolute
// numbers, so a repeated entry changes nothing. All slots taken means that the streams are far
// behind; the caller waits, as a local driver would.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "protocol/limits.h"
#include "transport/transport.h"

namespace penstock::interposer {

struct StagingSlot {
  uint32_t index = 0;
  std::span<std::byte> memory;
  transport::MemoryKey key;
  uint64_t offset = 0;  // in the registered memory
};

class Staging {
 public:
  explicit Staging(transport::Connection& connection) : connection_(connection) {}

  enum class Outcome { kTaken, kNone, kFailed };
  // A slot of at least so many bytes (at most kLargeStagingBytes).
  Outcome Take(uint64_t bytes, StagingSlot* slot);
  // The upload was not sent after all.
  void PutBack(const StagingSlot& slot);
  // From a progress entry. False if no such slot was ever taken that often.
  bool Released(uint64_t index, uint64_t times);

 private:
  struct Pool {
    uint32_t slot_bytes, slots, first_index;
    std::unique_ptr<transport::MemoryRegion> region;
    std::vector<uint32_t> free;
    std::vector<uint64_t> taken, released;
  };
  bool Map(Pool* pool);

  transport::Connection& connection_;
  std::mutex mutex_;  // guards the pools
  Pool small_{kSmallStagingBytes, kSmallStagingSlots, 0};
  Pool large_{kLargeStagingBytes, kLargeStagingSlots, kSmallStagingSlots};
};

}  // namespace penstock::interposer
