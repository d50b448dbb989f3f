// Which addresses mean what in this process: the servers' device allocations, and host memory that
// CUDA knows (pinned or registered).
//
// Device pointers are the servers' own addresses, and CUDA infers from an address what lies there
// (cuMemcpy, cuPointerGetAttribute). So each allocation's range is also reserved here, without
// access rights, in whole blocks of 2 MiB counted by use: no later mapping of the program can come
// to lie on a device pointer, and a program that dereferences one faults, as it does with a local
// GPU. docs/decisions/0005 has the reasons.
//
// With several servers no allocation of one may overlap anything of another: AddDevice refuses it,
// and the caller asks for another place. Variables of modules have no choice of place and may
// overlap; a lookup therefore takes what the server it is made for has there, if it has anything.
//
// Lookups take a shared lock only; everything that changes the tables is a call or a free.
#pragma once

#include <cuda.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <unordered_map>
#include <vector>

#include "common/result.h"
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

// Pinned memory of the program. A region makes it readable and writable for one server; the memory
// itself may belong to the first.
struct HostAllocation {
  std::byte* base = nullptr;
  size_t bytes = 0;  // as the program asked
  unsigned flags = 0;
  bool registered = false;  // cuMemHostRegister: the memory is the program's own
  ContextRecord* context = nullptr;
  uint64_t buffer_id = 0;
  // By the server's index. The first one is there from the beginning (and may own the memory),
  // those of other servers are made when these need them.
  std::array<std::atomic<transport::MemoryRegion*>, kMaxServers> regions{};
  uint32_t first_server = 0;
  std::mutex registering;  // held to make a region
  // Posted copies that may still touch it: freeing waits for them. Guarded by the plan's lock.
  struct Use {
    StreamRecord* stream;
    Handle stream_handle;
    ContextRecord* context;
    uint64_t value;
    bool orphan = false;  // the stream was destroyed before it had come so far
  };
  std::vector<Use> uses;

  // The one through which this server's transport reaches the memory, made where it is missing.
  Result<transport::MemoryRegion*> RegionFor(transport::Connection& connection, uint32_t server);
  void DropRegions();
  ~HostAllocation() { DropRegions(); }
};

class AddressPlan {
 public:
  explicit AddressPlan(bool reserve) : reserve_(reserve) {}
  ~AddressPlan();

  // Enters an allocation of the context's server and reserves its range. False if something in this
  // process, or on another server, has that address already.
  bool AddDevice(uint64_t base, uint64_t bytes, ContextRecord* context, bool pooled);
  // A variable of a module. Never fails: its address is only looked up, not inferred from.
  void AddGlobal(uint64_t base, uint64_t bytes, ContextRecord* context);
  void RemoveGlobal(uint64_t base, const ContextRecord* context);
  // By its first address; nothing if there is none. Variables of modules are not found.
  std::optional<DeviceAllocation> RemoveDevice(uint64_t base);
  // Removes what belongs to a context.
  void DropContext(ContextRecord* context);

  // What lies there, first of all on the given server (the index of a session).
  std::optional<DeviceAllocation> FindDevice(uint64_t address, uint32_t server = 0) const;
  // Does [address, address + bytes) lie in one live allocation? *owner is its context.
  bool DeviceRange(uint64_t address, uint64_t bytes, uint32_t server = 0,
                   ContextRecord** owner = nullptr) const;
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
  using Place = std::pair<uint32_t, uint64_t>;  // index of the server, address
  using Device = std::map<Place, DeviceAllocation>;
  Device::const_iterator At(uint64_t address, uint32_t server) const;
  Device::const_iterator AtAny(uint64_t address, uint32_t first) const;
  bool Overlaps(uint64_t base, uint64_t bytes, uint32_t server) const;

  const bool reserve_;
  mutable std::shared_mutex mutex_;  // guards everything below
  Device device_;
  uint32_t servers_ = 1;  // one more than the highest index in device_ so far
  std::map<uint64_t, std::shared_ptr<HostAllocation>> host_;
  std::unordered_map<uint64_t, uint32_t> blocks_;  // address / kBlock -> allocations in it
  std::atomic<uint64_t> next_buffer_id_{1};
};

}  // namespace penstock::interposer
