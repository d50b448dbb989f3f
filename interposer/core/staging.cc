#include "interposer/core/staging.h"

#include <sys/mman.h>

#include "common/log.h"

namespace penstock::interposer {

Staging::~Staging() {
  for (Pool* pool : {&small_, &large_}) {
    pool->region.reset();
    if (pool->memory != nullptr) {
      munmap(pool->memory, uint64_t{pool->slot_bytes} * pool->slots);
    }
  }
}

bool Staging::Map(Pool* pool) {
  const size_t bytes = size_t{pool->slot_bytes} * pool->slots;
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    LOG_ERROR("memory", "Cannot map staging memory (%zu bytes).", bytes);
    return false;
  }
  auto region = connection_.Register(memory, bytes, transport::Access::kPeerReads);
  if (!region) {
    LOG_ERROR("memory", "Cannot register staging memory: %s", region.error().message.c_str());
    munmap(memory, bytes);
    return false;
  }
  pool->memory = static_cast<std::byte*>(memory);
  pool->region = std::move(*region);
  pool->taken.assign(pool->slots, 0);
  pool->released.assign(pool->slots, 0);
  for (uint32_t slot = pool->slots; slot-- > 0;) pool->free.push_back(slot);
  return true;
}

Staging::Outcome Staging::Take(uint64_t bytes, StagingSlot* slot) {
  std::lock_guard lock(mutex_);
  Pool* const pool = bytes <= small_.slot_bytes ? &small_ : &large_;
  if (pool->memory == nullptr && !Map(pool)) return Outcome::kFailed;
  if (pool->free.empty()) return Outcome::kNone;
  const uint32_t place = pool->free.back();
  pool->free.pop_back();
  ++pool->taken[place];
  slot->index = pool->first_index + place;
  slot->offset = uint64_t{place} * pool->slot_bytes;
  slot->memory = {pool->memory + slot->offset, pool->slot_bytes};
  slot->key = pool->region->key();
  return Outcome::kTaken;
}

void Staging::PutBack(const StagingSlot& slot) {
  std::lock_guard lock(mutex_);
  Pool* const pool = slot.index < large_.first_index ? &small_ : &large_;
  const uint32_t place = slot.index - pool->first_index;
  --pool->taken[place];
  pool->free.push_back(place);
}

bool Staging::Released(uint64_t index, uint64_t times) {
  std::lock_guard lock(mutex_);
  Pool* const pool = index < large_.first_index ? &small_ : &large_;
  const uint64_t place = index - pool->first_index;
  if (pool->memory == nullptr || place >= pool->slots || times > pool->taken[place]) return false;
  if (times <= pool->released[place]) return true;
  pool->released[place] = times;
  // Taken again only when free, so at most one use is outstanding.
  if (times == pool->taken[place]) pool->free.push_back(static_cast<uint32_t>(place));
  return true;
}

}  // namespace penstock::interposer
