#include "interposer/core/staging.h"

#include "common/log.h"

namespace penstock::interposer {

bool Staging::Map(Pool* pool) {
  const size_t bytes = size_t{pool->slot_bytes} * pool->slots;
  auto region = connection_.Allocate(bytes, transport::Access::kPeerReads);
  if (!region) {
    LOG_ERROR("memory", "Cannot make staging memory (%zu bytes): %s", bytes,
              region.error().message.c_str());
    return false;
  }
  pool->region = std::move(*region);
  pool->taken.assign(pool->slots, 0);
  pool->released.assign(pool->slots, 0);
  for (uint32_t slot = pool->slots; slot-- > 0;) pool->free.push_back(slot);
  return true;
}

Staging::Outcome Staging::Take(uint64_t bytes, StagingSlot* slot) {
  std::lock_guard lock(mutex_);
  Pool* const pool = bytes <= small_.slot_bytes ? &small_ : &large_;
  if (pool->region == nullptr && !Map(pool)) return Outcome::kFailed;
  if (pool->free.empty()) return Outcome::kNone;
  const uint32_t place = pool->free.back();
  pool->free.pop_back();
  ++pool->taken[place];
  slot->index = pool->first_index + place;
  slot->offset = uint64_t{place} * pool->slot_bytes;
  slot->memory = {pool->region->address() + slot->offset, pool->slot_bytes};
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
  if (pool->region == nullptr || place >= pool->slots || times > pool->taken[place]) return false;
  if (times <= pool->released[place]) return true;
  pool->released[place] = times;
  // Taken again only when free, so at most one use is outstanding.
  if (times == pool->taken[place]) pool->free.push_back(static_cast<uint32_t>(place));
  return true;
}

}  // namespace penstock::interposer
