#include "simgpu/driver/address_space.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <mutex>

namespace simgpu {
namespace {

constexpr uint64_t kPage = 4096;
constexpr uint64_t kGapPages = 16;        // unmapped on either side of a mapping
constexpr size_t kSlabBytes = 2 << 20;    // what the real driver maps at once, too
constexpr size_t kSmallBytes = 64 << 10;  // larger ones get a mapping of their own
constexpr uint64_t kSmallGap = 512;       // between allocations of one slab, at least
constexpr int kPlaceAttempts = 256;       // the range is nearly empty: one try is the rule
constexpr int kMapFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

uint64_t RoundUp(uint64_t value, uint64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

}  // namespace

bool AddressSpace::Reserve() {
  // A tebibyte where the machine allows it; with a low RLIMIT_AS a smaller range will do.
  for (size_t bytes = size_t{1} << 40; bytes >= size_t{1} << 34; bytes >>= 1) {
    void* address = mmap(nullptr, bytes, PROT_NONE, kMapFlags, -1, 0);
    if (address == MAP_FAILED) continue;
    madvise(address, bytes, MADV_DONTDUMP);
    base_ = reinterpret_cast<uint64_t>(address);
    reserved_bytes_ = bytes;
    return true;
  }
  return false;
}

bool AddressSpace::Map(uint64_t address, size_t bytes) {
  void* const at = reinterpret_cast<void*>(address);
  // MAP_FIXED over our own reservation: gives fresh zeroed pages.
  int file = -1, flags = kMapFlags | MAP_FIXED;
  if (files_wanted_) {
    file = memfd_create("simgpu-memory", MFD_CLOEXEC);
    flags = MAP_SHARED | MAP_NORESERVE | MAP_FIXED;
    if (file < 0) return false;
    if (ftruncate(file, static_cast<off_t>(bytes)) != 0) {
      close(file);
      return false;
    }
  }
  if (mmap(at, bytes, PROT_READ | PROT_WRITE, flags, file, 0) != at) {
    if (file >= 0) close(file);
    return false;
  }
  if (file >= 0) files_[address] = file;
  madvise(at, bytes, MADV_DODUMP);
  mappings_[address] = bytes;
  return true;
}

void AddressSpace::Unmap(uint64_t address, size_t bytes) {
  mmap(reinterpret_cast<void*>(address), bytes, PROT_NONE, kMapFlags | MAP_FIXED, -1, 0);
  mappings_.erase(address);
  if (const auto file = files_.find(address); file != files_.end()) {
    close(file->second);
    files_.erase(file);
  }
}

int AddressSpace::Export(uint64_t begin, size_t bytes) const {
  std::shared_lock lock(mutex_);
  const auto file = files_.find(begin);
  if (file == files_.end() || bytes > mappings_.at(begin)) return -1;
  return fcntl(file->second, F_DUPFD_CLOEXEC, 0);
}

uint64_t AddressSpace::MapAtRandom(size_t bytes, uint64_t alignment) {
  if (alignment < kPage) alignment = kPage;
  bytes = RoundUp(bytes, kPage);
  const uint64_t gap = kGapPages * kPage;
  if (bytes + alignment + 2 * gap > reserved_bytes_) return 0;
  const uint64_t room = reserved_bytes_ - bytes - alignment - 2 * gap;
  for (int attempt = 0; attempt < kPlaceAttempts; ++attempt) {
    const uint64_t address = RoundUp(base_ + gap + random_() % (room + 1), alignment);
    auto next = mappings_.lower_bound(address);
    if (next != mappings_.end() && next->first < address + bytes + gap) continue;
    if (next != mappings_.begin()) {
      const auto previous = std::prev(next);
      if (previous->first + previous->second + gap > address) continue;
    }
    return Map(address, bytes) ? address : 0;
  }
  return 0;
}

uint64_t AddressSpace::PlaceLarge(size_t bytes, uint64_t alignment) {
  return MapAtRandom(bytes, alignment);
}

uint64_t AddressSpace::PlaceSmall(size_t bytes, uint64_t alignment) {
  for (int round = 0; round < 2; ++round) {
    if (current_slab_ != 0) {
      Slab& slab = slabs_[current_slab_];
      const uint64_t gap = kSmallGap * (1 + random_() % 4);
      const uint64_t offset = RoundUp(slab.used + gap, alignment);
      if (offset + bytes + kSmallGap <= kSlabBytes) {
        slab.used = offset + bytes;
        ++slab.live;
        return current_slab_ + offset;
      }
      const uint64_t full = current_slab_;
      current_slab_ = 0;
      if (slab.live == 0) {
        slabs_.erase(full);
        Unmap(full, kSlabBytes);
      }
    }
    current_slab_ = MapAtRandom(kSlabBytes, kSlabBytes);
    if (current_slab_ == 0) return 0;
    slabs_[current_slab_] = {};
  }
  return 0;
}

uint64_t AddressSpace::Allocate(std::shared_ptr<Allocation> allocation, uint64_t alignment) {
  std::unique_lock lock(mutex_);
  const size_t bytes = allocation->bytes;
  const bool small = bytes <= kSmallBytes && alignment <= kPage;
  // CUDA promises 256 bytes at least; programs have come to rely on more.
  if (alignment < 512) alignment = 512;
  const uint64_t address = small ? PlaceSmall(bytes, alignment) : PlaceLarge(bytes, alignment);
  if (address == 0) return 0;
  allocation->begin = address;
  allocation->buffer_id = next_buffer_id_++;
  allocations_[address] = std::move(allocation);
  generation_.fetch_add(1, std::memory_order_release);
  return address;
}

bool AddressSpace::Enter(std::shared_ptr<Allocation> allocation) {
  std::unique_lock lock(mutex_);
  auto next = allocations_.lower_bound(allocation->begin);
  if (next != allocations_.end() && next->first < allocation->end()) return false;
  if (next != allocations_.begin() && std::prev(next)->second->end() > allocation->begin) {
    return false;
  }
  allocation->buffer_id = next_buffer_id_++;
  const uint64_t begin = allocation->begin;
  allocations_[begin] = std::move(allocation);
  generation_.fetch_add(1, std::memory_order_release);
  return true;
}

std::shared_ptr<Allocation> AddressSpace::Remove(uint64_t begin) {
  std::unique_lock lock(mutex_);
  const auto found = allocations_.find(begin);
  if (found == allocations_.end()) return nullptr;
  std::shared_ptr<Allocation> allocation = std::move(found->second);
  allocations_.erase(found);
  generation_.fetch_add(1, std::memory_order_release);
  if (!InReserved(begin)) return allocation;
  if (const auto mapping = mappings_.find(begin);
      mapping != mappings_.end() && !slabs_.contains(begin)) {
    Unmap(begin, mapping->second);
    return allocation;
  }
  auto slab = slabs_.upper_bound(begin);
  if (slab == slabs_.begin()) return allocation;
  --slab;
  if (--slab->second.live == 0) {
    const uint64_t address = slab->first;
    if (address == current_slab_) current_slab_ = 0;
    slabs_.erase(slab);
    Unmap(address, kSlabBytes);
  }
  return allocation;
}

std::shared_ptr<Allocation> AddressSpace::Find(uint64_t address) const {
  std::shared_lock lock(mutex_);
  auto next = allocations_.upper_bound(address);
  if (next == allocations_.begin()) return nullptr;
  const std::shared_ptr<Allocation>& candidate = std::prev(next)->second;
  return address < candidate->end() ? candidate : nullptr;
}

std::shared_ptr<Allocation> AddressSpace::FindRange(uint64_t address, size_t bytes) const {
  std::shared_ptr<Allocation> found = Find(address);
  if (found == nullptr || bytes > found->end() - address) return nullptr;
  return found;
}

std::vector<std::shared_ptr<Allocation>> AddressSpace::OfContext(const Context* context) const {
  std::shared_lock lock(mutex_);
  std::vector<std::shared_ptr<Allocation>> found;
  for (const auto& [begin, allocation] : allocations_) {
    if (allocation->context_key == context) found.push_back(allocation);
  }
  return found;
}

}  // namespace simgpu
