// Which addresses mean what in this process: the server's device allocations, and host memory that
// CUDA knows (pinned or registered).
//
// Device pointers are the server's own addresses, and CUDA infers from an address what lies there
// (cuMemcpy, cuPointerGetAttribute). So each allocation's range is also reserved here, without
// access rights, in whole blocks of 2 MiB counted by use: no later mapping of the program can come
// to lie on a device pointer, and a program that dereferences one faults, as it does with a local
// GPU. docs/decisions/0005 has the reasons.
//
// Lookups take a shared lock only; everything that changes the tables is a call or a free.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <shared_mutex>
#include <unordered_map>
#include <vector>

#include "interposer/core/records.h"
#include "transport/transport.h"

namespace penstock::interposer {

struct DeviceAllocation {
  uint64_t base = 0;
  uint64_t bytes = 0;
  ContextRecord* context = nullptr;
  uint64_t buffer_id = 0;      // CU_POINTER_ATTRIBUTE_BUFFER_ID
  bool module_global = false;  // part of a module: not the program's to free
  bool pooled = false;         // from cuMemAllocAsync
};

// Pinned memory of the program. `region` makes it readable and writable for the server.
struct HostAllocation {
  std::byte* base = nullptr;
  size_t bytes = 0;  // as the program asked
  unsigned flags = 0;
  bool registered = false;  // cuMemHostRegister: the memory is the program's own
  ContextRecord* context = nullptr;
  uint64_t buffer_id = 0;
  std::shared_ptr<transport::MemoryRegion> region;
  // Posted copies that may still touch it: freeing waits for them. Guarded by the plan's lock.
  struct Use {
    StreamRecord* stream;
    Handle stream_handle;
    ContextRecord* context;
    uint64_t value;
    bool orphan = false;  // the stream was destroyed before it had come so far
  };
  std::vector<Use> uses;
};

class AddressPlan {
 public:
  explicit AddressPlan(bool reserve) : reserve_(reserve) {}
  ~AddressPlan();

  // Enters an allocation of the server and reserves its range. False if something in this process
  // has that address already.
  bool AddDevice(uint64_t base, uint64_t bytes, ContextRecord* context, bool pooled);
  // A variable of a module. Never fails: its address is only looked up, not inferred from.
  void AddGlobal(uint64_t base, uint64_t bytes, ContextRecord* context);
  void RemoveGlobal(uint64_t base);
  // By its first address; nothing if there is none. Variables of modules are not found.
  std::optional<DeviceAllocation> RemoveDevice(uint64_t base);
  // Removes what belongs to a context.
  void DropContext(ContextRecord* context);

  std::optional<DeviceAllocation> FindDevice(uint64_t address) const;
  // Does [address, address + bytes) lie in one live allocation?
  bool DeviceRange(uint64_t address, uint64_t bytes) const;
  bool IsDevice(uint64_t address) const { return DeviceRange(address, 1); }

  std::shared_ptr<HostAllocation> FindHost(const void* address) const;
  // Null unless the whole range lies in one pinned allocation.
  std::shared_ptr<HostAllocation> FindHost(const void* address, uint64_t bytes) const;
  // False if it overlaps another one.
  bool AddHost(std::shared_ptr<HostAllocation> allocation);
  std::shared_ptr<HostAllocation> RemoveHost(const void* base);
  void NoteUse(HostAllocation& allocation, StreamRecord* stream, uint64_t value);
  // The stream is about to be destroyed: nobody sees its progress any more.
  void OrphanUses(const StreamRecord& stream);
  std::vector<HostAllocation::Use> TakeUses(HostAllocation& allocation);
  uint64_t NextBufferId() { return next_buffer_id_.fetch_add(1, std::memory_order_relaxed); }

 private:
  bool ReserveBlocks(uint64_t base, uint64_t bytes);
  void ReleaseBlocks(uint64_t base, uint64_t bytes);
  std::map<uint64_t, DeviceAllocation>::const_iterator Above(uint64_t address) const;

  const bool reserve_;
  mutable std::shared_mutex mutex_;  // guards everything below
  std::map<uint64_t, DeviceAllocation> device_;
  std::map<uint64_t, std::shared_ptr<HostAllocation>> host_;
  std::unordered_map<uint64_t, uint32_t> blocks_;  // address / kBlock -> allocations in it
  std::atomic<uint64_t> next_buffer_id_{1};
};

}  // namespace penstock::interposer
