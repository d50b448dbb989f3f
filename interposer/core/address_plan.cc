#include "interposer/core/address_plan.h"

#include <sys/mman.h>

#include <algorithm>
#include <mutex>

namespace penstock::interposer {
namespace {

constexpr uint64_t kBlock = 2ull << 20;
// Above this no user mapping can lie on x86-64 with four-level page tables, so nothing can collide.
constexpr uint64_t kTopOfUserSpace = 0x7FFFFFFFF000;

uint32_t ServerOf(const ContextRecord* context) {
  return context == nullptr ? 0 : context->server;
}

}  // namespace

Result<transport::MemoryRegion*> HostAllocation::RegionFor(transport::Connection& connection,
                                                           uint32_t server) {
  transport::MemoryRegion* region = regions[server].load(std::memory_order_acquire);
  if (region != nullptr) return region;
  std::lock_guard lock(registering);
  region = regions[server].load(std::memory_order_relaxed);
  if (region != nullptr) return region;
  ASSIGN_OR_RETURN(auto made,
                   connection.Register(base, bytes, transport::Access::kPeerReadsAndWrites));
  region = made.release();
  regions[server].store(region, std::memory_order_release);
  return region;
}

void HostAllocation::DropRegions() {
  for (uint32_t server = 0; server < kMaxServers; ++server) {
    if (server != first_server) delete regions[server].exchange(nullptr);
  }
  delete regions[first_server].exchange(nullptr);  // and the memory with it, where it is the owner
}

AddressPlan::~AddressPlan() {
  for (const auto& [block, uses] : blocks_) {
    munmap(reinterpret_cast<void*>(block * kBlock), kBlock);
  }
}

bool AddressPlan::ReserveBlocks(uint64_t base, uint64_t bytes) {
  if (!reserve_) return true;
  const uint64_t first = base / kBlock, last = (base + bytes - 1) / kBlock;
  if ((last + 1) * kBlock > kTopOfUserSpace) return true;
  for (uint64_t block = first; block <= last;) {
    if (blocks_.count(block) != 0) {
      ++blocks_[block++];
      continue;
    }
    // A run of new blocks is one mapping.
    uint64_t end = block + 1;
    while (end <= last && blocks_.count(end) == 0) ++end;
    void* const wanted = reinterpret_cast<void*>(block * kBlock);
    void* const got =
        mmap(wanted, (end - block) * kBlock, PROT_NONE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
    if (got != wanted) {
      // A kernel before 4.17 takes the address for a hint.
      if (got != MAP_FAILED) munmap(got, (end - block) * kBlock);
      if (block > first) ReleaseBlocks(base, block * kBlock - base);
      return false;
    }
    for (; block < end; ++block) blocks_[block] = 1;
  }
  return true;
}

void AddressPlan::ReleaseBlocks(uint64_t base, uint64_t bytes) {
  if (!reserve_) return;
  const uint64_t first = base / kBlock, last = (base + bytes - 1) / kBlock;
  if ((last + 1) * kBlock > kTopOfUserSpace) return;
  for (uint64_t block = first; block <= last;) {
    uint64_t end = block;
    for (; end <= last; ++end) {
      const auto entry = blocks_.find(end);
      if (entry == blocks_.end() || --entry->second != 0) break;
      blocks_.erase(entry);
    }
    if (end > block) munmap(reinterpret_cast<void*>(block * kBlock), (end - block) * kBlock);
    block = end + (end <= last ? 1 : 0);
  }
}

bool AddressPlan::Overlaps(uint64_t base, uint64_t bytes, uint32_t server) const {
  const auto after = device_.lower_bound({server, base});
  if (after != device_.end() && after->first.first == server &&
      after->first.second - base < bytes) {
    return true;
  }
  return At(base, server) != device_.end();
}

bool AddressPlan::AddDevice(uint64_t base, uint64_t bytes, ContextRecord* context, bool pooled) {
  if (bytes == 0) return true;
  const uint32_t server = ServerOf(context);
  std::unique_lock lock(mutex_);
  for (uint32_t other = 0; other < servers_; ++other) {
    if (other != server && Overlaps(base, bytes, other)) return false;
  }
  if (!ReserveBlocks(base, bytes)) return false;
  device_[{server, base}] = {base, bytes, context, NextBufferId(), false, pooled};
  servers_ = std::max(servers_, server + 1);
  return true;
}

void AddressPlan::AddGlobal(uint64_t base, uint64_t bytes, ContextRecord* context) {
  if (bytes == 0) return;
  const uint32_t server = ServerOf(context);
  std::unique_lock lock(mutex_);
  device_.try_emplace({server, base},
                      DeviceAllocation{base, bytes, context, NextBufferId(), true, false});
  servers_ = std::max(servers_, server + 1);
}

void AddressPlan::RemoveGlobal(uint64_t base, const ContextRecord* context) {
  std::unique_lock lock(mutex_);
  const auto entry = device_.find({ServerOf(context), base});
  if (entry != device_.end() && entry->second.module_global) device_.erase(entry);
}

std::optional<DeviceAllocation> AddressPlan::RemoveDevice(uint64_t base) {
  std::unique_lock lock(mutex_);
  for (uint32_t server = 0; server < servers_; ++server) {
    const auto entry = device_.find({server, base});
    if (entry == device_.end() || entry->second.module_global) continue;
    const DeviceAllocation allocation = entry->second;
    device_.erase(entry);
    ReleaseBlocks(allocation.base, allocation.bytes);
    return allocation;
  }
  return std::nullopt;
}

void AddressPlan::DropContext(ContextRecord* context) {
  std::unique_lock lock(mutex_);
  for (auto entry = device_.begin(); entry != device_.end();) {
    if (entry->second.context != context) {
      ++entry;
      continue;
    }
    if (!entry->second.module_global) ReleaseBlocks(entry->second.base, entry->second.bytes);
    entry = device_.erase(entry);
  }
}

AddressPlan::Device::const_iterator AddressPlan::At(uint64_t address, uint32_t server) const {
  const auto after = device_.upper_bound({server, address});
  if (after == device_.begin()) return device_.end();
  const auto entry = std::prev(after);
  return entry->first.first == server && address - entry->second.base < entry->second.bytes
             ? entry
             : device_.end();
}

AddressPlan::Device::const_iterator AddressPlan::AtAny(uint64_t address, uint32_t first) const {
  auto entry = At(address, first);
  for (uint32_t server = 0; server < servers_ && entry == device_.end(); ++server) {
    if (server != first) entry = At(address, server);
  }
  return entry;
}

std::optional<DeviceAllocation> AddressPlan::FindDevice(uint64_t address, uint32_t server) const {
  std::shared_lock lock(mutex_);
  const auto entry = AtAny(address, server);
  if (entry == device_.end()) return std::nullopt;
  return entry->second;
}

bool AddressPlan::DeviceRange(uint64_t address, uint64_t bytes, uint32_t server,
                              ContextRecord** owner) const {
  std::shared_lock lock(mutex_);
  const auto entry = AtAny(address, server);
  if (entry == device_.end() || bytes > entry->second.bytes - (address - entry->second.base)) {
    return false;
  }
  if (owner != nullptr) *owner = entry->second.context;
  return true;
}

std::shared_ptr<HostAllocation> AddressPlan::FindHost(const void* address) const {
  const uint64_t wanted = reinterpret_cast<uint64_t>(address);
  std::shared_lock lock(mutex_);
  const auto after = host_.upper_bound(wanted);
  if (after == host_.begin()) return nullptr;
  const auto entry = std::prev(after);
  return wanted - entry->first < entry->second->bytes ? entry->second : nullptr;
}

std::shared_ptr<HostAllocation> AddressPlan::FindHost(const void* address, uint64_t bytes) const {
  std::shared_ptr<HostAllocation> allocation = FindHost(address);
  if (allocation == nullptr) return nullptr;
  const size_t offset = static_cast<const std::byte*>(address) - allocation->base;
  return bytes <= allocation->bytes - offset ? allocation : nullptr;
}

bool AddressPlan::AddHost(std::shared_ptr<HostAllocation> allocation) {
  const uint64_t base = reinterpret_cast<uint64_t>(allocation->base);
  std::unique_lock lock(mutex_);
  const auto after = host_.lower_bound(base);
  if (after != host_.end() && after->first - base < allocation->bytes) return false;
  if (after != host_.begin()) {
    const auto before = std::prev(after);
    if (base - before->first < before->second->bytes) return false;
  }
  allocation->buffer_id = NextBufferId();
  host_[base] = std::move(allocation);
  return true;
}

std::shared_ptr<HostAllocation> AddressPlan::RemoveHost(const void* base) {
  std::unique_lock lock(mutex_);
  const auto entry = host_.find(reinterpret_cast<uint64_t>(base));
  if (entry == host_.end()) return nullptr;
  std::shared_ptr<HostAllocation> allocation = std::move(entry->second);
  host_.erase(entry);
  return allocation;
}

void AddressPlan::NoteUse(HostAllocation& allocation, StreamRecord* stream, uint64_t value) {
  std::unique_lock lock(mutex_);
  for (HostAllocation::Use& use : allocation.uses) {
    if (use.stream == stream && use.stream_handle == stream->handle) {
      if (value > use.value) use.value = value;
      return;
    }
  }
  allocation.uses.push_back({stream, stream->handle, stream->context, value});
}

void AddressPlan::OrphanUses(const StreamRecord& stream) {
  const uint64_t finished = stream.finished.load();
  if (finished >= stream.issued.load()) return;
  std::unique_lock lock(mutex_);
  for (const auto& [base, allocation] : host_) {
    for (HostAllocation::Use& use : allocation->uses) {
      if (use.stream_handle == stream.handle && use.value > finished) use.orphan = true;
    }
  }
}

std::vector<HostAllocation::Use> AddressPlan::TakeUses(HostAllocation& allocation) {
  std::unique_lock lock(mutex_);
  return std::exchange(allocation.uses, {});
}

}  // namespace penstock::interposer
