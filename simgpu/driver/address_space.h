// Where device memory, pinned host memory and everything else that CUDA gave out lives.
//
// Device addresses are host addresses inside one large reserved range of this process. Allocations
// are put at random places of it with unmapped gaps between them, so that a program that runs past
// an allocation, uses a freed one or relies on neighbouring addresses is found, by the check of the
// executor (against live ranges) and by the MMU (for the host). Small allocations share mapped
// slabs; between them only the first check applies.
#pragma once

#include <cuda.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <shared_mutex>
#include <vector>

namespace simgpu {

class Context;
struct Device;
struct MemoryPool;

enum class MemoryKind {
  kDevice,
  kHost,        // cuMemHostAlloc
  kRegistered,  // cuMemHostRegister
  kManaged,
  kVariable,         // of a module
  kManagedVariable,  // of a module, declared __managed__
};

struct Allocation {
  uint64_t begin = 0;
  size_t bytes = 0;  // as asked for
  MemoryKind kind = MemoryKind::kDevice;
  bool read_only = false;
  unsigned flags = 0;  // of cuMemHostAlloc, cuMemHostRegister, cuMemAllocManaged
  uint64_t buffer_id = 0;
  Device* device = nullptr;
  size_t charged_bytes = 0;        // of the device's memory
  std::weak_ptr<Context> context;  // that made it
  Context* context_key = nullptr;  // the same, for comparing only
  std::shared_ptr<MemoryPool> pool;
  bool sync_memops = false;
  std::atomic<bool> freeing{false};  // cuMemFreeAsync is on its way

  uint64_t end() const { return begin + bytes; }
  bool host_accessible() const {
    return kind == MemoryKind::kHost || kind == MemoryKind::kRegistered || managed();
  }
  bool managed() const {
    return kind == MemoryKind::kManaged || kind == MemoryKind::kManagedVariable;
  }
};

class AddressSpace {
 public:
  // Once, before anything else.
  bool Reserve();

  // From now on every mapping is a memory file, so that Export can give it away. Before the first
  // allocation.
  void BackByFiles() { files_wanted_ = true; }
  // A descriptor of the file whose first byte is this one, for a range that begins where a mapping
  // does and lies in it; -1 if there is none. A file cannot begin in the middle of another, so
  // small allocations, which share mappings, have none.
  int Export(uint64_t begin, size_t bytes) const;

  // Maps memory and enters it; 0 if there is no room. Fills in begin and buffer_id. Zeroed.
  uint64_t Allocate(std::shared_ptr<Allocation> allocation, uint64_t alignment);
  // Enters memory that belongs to somebody else; false if it overlaps something.
  bool Enter(std::shared_ptr<Allocation> allocation);
  // Takes the allocation that begins at the address out of the table and unmaps it, if Allocate
  // mapped it. Null if there is none.
  std::shared_ptr<Allocation> Remove(uint64_t begin);

  // The allocation that contains the address.
  std::shared_ptr<Allocation> Find(uint64_t address) const;
  // The same if all `bytes` bytes lie in it.
  std::shared_ptr<Allocation> FindRange(uint64_t address, size_t bytes) const;
  // Inside the range that device memory comes from, live or not.
  bool InReserved(uint64_t address) const {
    return address >= base_ && address < base_ + reserved_bytes_;
  }
  uint64_t generation() const { return generation_.load(std::memory_order_acquire); }
  // Everything that a context made.
  std::vector<std::shared_ptr<Allocation>> OfContext(const Context* context) const;

 private:
  struct Slab {
    size_t used = 0;  // bytes handed out so far, gaps included
    size_t live = 0;  // allocations
  };

  uint64_t PlaceLarge(size_t bytes, uint64_t alignment);
  uint64_t PlaceSmall(size_t bytes, uint64_t alignment);
  uint64_t MapAtRandom(size_t bytes, uint64_t alignment);
  bool Map(uint64_t address, size_t bytes);
  void Unmap(uint64_t address, size_t bytes);

  uint64_t base_ = 0;
  size_t reserved_bytes_ = 0;
  mutable std::shared_mutex mutex_;
  std::map<uint64_t, std::shared_ptr<Allocation>> allocations_;  // by begin
  std::map<uint64_t, size_t> mappings_;                          // by begin: mapped bytes
  std::map<uint64_t, int> files_;                                // by begin of the mapping
  bool files_wanted_ = false;
  std::map<uint64_t, Slab> slabs_;  // by begin; kSlabBytes each
  uint64_t current_slab_ = 0;
  uint64_t next_buffer_id_ = 1;
  std::mt19937_64 random_{std::random_device{}()};
  std::atomic<uint64_t> generation_{1};
};

}  // namespace simgpu
