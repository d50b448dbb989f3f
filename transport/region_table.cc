#include "transport/region_table.h"

#include <sys/random.h>

#include <cstring>

namespace penstock::transport {

bool ParseKey(const MemoryKey& key, KeyBlob* blob) {
  if (key.bytes != sizeof *blob) return false;
  std::memcpy(blob, key.blob.data(), sizeof *blob);
  return blob->kind == kKeyKind;
}

Result<std::unique_ptr<MemoryRegion>> RegionTable::Register(void* address, size_t bytes,
                                                            Access access) {
  if (address == nullptr || bytes == 0) {
    return Fail(Code::kInvalidArgument, "A memory registration is empty.");
  }
  if (reinterpret_cast<uintptr_t>(address) + bytes < bytes) {
    return Fail(Code::kInvalidArgument, "A memory registration wraps around the address space.");
  }
  auto region = std::make_shared<Region>();
  region->address = static_cast<std::byte*>(address);
  region->bytes = bytes;
  region->access = access;
  if (getrandom(&region->secret, sizeof region->secret, 0) != sizeof region->secret) {
    return FailErrno("Cannot draw a random key");
  }
  {
    std::lock_guard lock(mutex_);
    if (closed_) return Fail(Code::kUnavailable, "The connection is closed.");
    if (free_.empty()) {
      free_.push_back(static_cast<uint32_t>(slots_.size()));
      slots_.emplace_back();
    }
    region->slot = free_.back();
    free_.pop_back();
    Slot& slot = slots_[region->slot];
    region->generation = ++slot.generation;
    slot.region = region;
  }
  return std::make_unique<RegisteredMemory>(shared_from_this(), std::move(region));
}

std::shared_ptr<Region> RegionTable::Find(const KeyBlob& key, uint64_t offset, uint64_t bytes,
                                          Access wanted) {
  std::lock_guard lock(mutex_);
  if (key.slot >= slots_.size()) return nullptr;
  const std::shared_ptr<Region>& region = slots_[key.slot].region;
  if (region == nullptr || region->generation != key.generation || region->secret != key.secret ||
      !region->Allows(wanted) || !region->Contains(offset, bytes)) {
    return nullptr;
  }
  return region;
}

void RegionTable::Remove(const std::shared_ptr<Region>& region) {
  {
    std::lock_guard lock(mutex_);
    Slot& slot = slots_[region->slot];
    if (slot.region == region) {
      slot.region = nullptr;
      // A slot whose generations are used up is retired: a generation never comes twice.
      if (slot.generation != UINT32_MAX) free_.push_back(region->slot);
    }
  }
  std::lock_guard lock(region->mutex);
  region->alive = false;
}

void RegionTable::CloseAll() {
  std::vector<std::shared_ptr<Region>> regions;
  {
    std::lock_guard lock(mutex_);
    closed_ = true;
    for (Slot& slot : slots_) {
      if (slot.region != nullptr) regions.push_back(slot.region);
    }
  }
  for (const auto& region : regions) {
    std::lock_guard lock(region->mutex);
    region->alive = false;
  }
}

RegisteredMemory::RegisteredMemory(std::shared_ptr<RegionTable> table,
                                   std::shared_ptr<Region> region)
    : table_(std::move(table)), region_(std::move(region)) {
  const KeyBlob blob = {kKeyKind, region_->slot, region_->generation, 0, region_->secret};
  key_.bytes = sizeof blob;
  std::memcpy(key_.blob.data(), &blob, sizeof blob);
}

RegisteredMemory::~RegisteredMemory() {
  table_->Remove(region_);
}

}  // namespace penstock::transport
