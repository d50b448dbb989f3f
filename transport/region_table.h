// The memory that one end of a connection has registered, and the check of every key the peer
// shows.
//
// A key is {slot, generation, secret}: the slot finds the entry, the generation makes the key of an
// earlier registration in the same slot stale, the random secret makes keys unguessable. Whoever
// moves bytes holds the entry's mutex during each single, non-blocking step (one recv, one send,
// one memcpy of a chunk) and checks `alive` first. So deregistration waits for microseconds at
// most, never for the peer, and needs no count of users.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "common/result.h"
#include "transport/transport.h"

namespace penstock::transport {

struct Region {
  std::byte* address = nullptr;
  size_t bytes = 0;
  Access access = Access::kPeerReads;
  uint32_t slot = 0;
  uint32_t generation = 0;
  uint64_t secret = 0;
  std::mutex mutex;   // held while bytes move
  bool alive = true;  // under mutex

  bool Contains(uint64_t offset, uint64_t length) const {
    return offset <= bytes && length <= bytes - offset;
  }
  bool Allows(Access wanted) const {
    return (static_cast<uint8_t>(access) & static_cast<uint8_t>(wanted)) != 0;
  }
};

// What a MemoryKey's blob holds, for every backend whose passive side checks in software.
struct KeyBlob {
  uint32_t kind;
  uint32_t slot;
  uint32_t generation;
  uint32_t reserved;
  uint64_t secret;
};
static_assert(sizeof(KeyBlob) == 24);
constexpr uint32_t kKeyKind = 0x314b4d50;  // "PMK1"

// False for a blob that no Register of ours has made.
bool ParseKey(const MemoryKey& key, KeyBlob* blob);

class RegionTable : public std::enable_shared_from_this<RegionTable> {
 public:
  Result<std::unique_ptr<MemoryRegion>> Register(void* address, size_t bytes, Access access);

  // The region if the key is current and grants `wanted` for the whole range; else nullptr. The
  // caller still checks `alive` under the region's mutex before it touches the memory.
  std::shared_ptr<Region> Find(const KeyBlob& key, uint64_t offset, uint64_t bytes, Access wanted);

  // Ends all access, as if everything were deregistered. Returns when nobody touches any memory.
  void CloseAll();

 private:
  friend class RegisteredMemory;
  void Remove(const std::shared_ptr<Region>& region);

  struct Slot {
    std::shared_ptr<Region> region;
    uint32_t generation = 0;
  };
  std::mutex mutex_;
  std::vector<Slot> slots_;     // under mutex_
  std::vector<uint32_t> free_;  // under mutex_
  bool closed_ = false;         // under mutex_
};

// The MemoryRegion of tcp and inproc. May outlive the connection that made it.
class RegisteredMemory : public MemoryRegion {
 public:
  RegisteredMemory(std::shared_ptr<RegionTable> table, std::shared_ptr<Region> region);
  ~RegisteredMemory() override;
  std::byte* address() const override { return region_->address; }
  size_t size() const override { return region_->bytes; }
  const MemoryKey& key() const override { return key_; }
  const std::shared_ptr<Region>& region() const { return region_; }

 private:
  std::shared_ptr<RegionTable> table_;
  std::shared_ptr<Region> region_;
  MemoryKey key_;
};

}  // namespace penstock::transport
