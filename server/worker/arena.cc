#include "server/worker/arena.h"

#include <sys/mman.h>

#include "common/log.h"
#include "server/driver.h"

namespace penstock::server {

Result<std::unique_ptr<Arena>> Arena::Create(const Driver& driver,
                                             transport::Connection& connection, CUresult* failure) {
  *failure = CUDA_ERROR_OUT_OF_MEMORY;
  std::unique_ptr<Arena> arena(new Arena);
  void* memory = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return FailErrno("Cannot map staging memory");
  arena->memory_ = static_cast<std::byte*>(memory);
  arena->words_ = static_cast<uint32_t*>(memory);
  const CUresult pinned = driver.cuMemHostRegister_v2(memory, kBytes, CU_MEMHOSTREGISTER_DEVICEMAP);
  if (pinned != CUDA_SUCCESS) {
    *failure = pinned;
    return Fail(Code::kSystem,
                std::string("Staging memory cannot be pinned: ") + ErrorName(driver, pinned) + ".");
  }
  const CUresult mapped = driver.cuMemHostGetDevicePointer_v2(&arena->device_base_, memory, 0);
  if (mapped != CUDA_SUCCESS) {
    *failure = mapped;
    return Fail(Code::kSystem, std::string("Staging memory has no device address: ") +
                                   ErrorName(driver, mapped) + ".");
  }
  ASSIGN_OR_RETURN(arena->region_,
                   connection.Register(memory, kBytes, transport::Access::kPeerReadsAndWrites));
  for (uint32_t i = kSmallSlots; i-- > 0;) arena->free_small_.push_back(i);
  for (uint32_t i = kLargeSlots; i-- > 0;) arena->free_large_.push_back(i);
  for (uint32_t i = kChunks; i-- > 0;) arena->free_chunks_.push_back(i);
  return arena;
}

Arena::~Arena() {
  region_.reset();
  if (memory_ != nullptr) munmap(memory_, kBytes);
}

bool Arena::TakeWords(StreamWords* words) {
  if (!free_words_.empty()) {
    *words = free_words_.back();
    free_words_.pop_back();
    return true;
  }
  if (next_word_ + 3 > kWords) return false;
  *words = {next_word_, next_word_ + 1, next_word_ + 2};
  next_word_ += 3;
  return true;
}

void Arena::ReturnWords(const StreamWords& words) {
  if (words.progress != 0) free_words_.push_back(words);
}

WordIndex Arena::TakeWord() {
  return next_word_ < kWords ? next_word_++ : 0;
}

InlineSlot Arena::TakeSlot(uint32_t bytes) {
  if (bytes <= kSmallSlotBytes && !free_small_.empty()) {
    const uint32_t index = free_small_.back();
    free_small_.pop_back();
    return {memory_ + kSmallOffset + uint64_t{index} * kSmallSlotBytes, index, false};
  }
  if (bytes <= kLargeSlotBytes && !free_large_.empty()) {
    const uint32_t index = free_large_.back();
    free_large_.pop_back();
    return {memory_ + kLargeOffset + uint64_t{index} * kLargeSlotBytes, index, true};
  }
  return {};
}

void Arena::ReturnSlot(InlineSlot slot) {
  (slot.large ? free_large_ : free_small_).push_back(slot.index);
}

uint32_t Arena::TakeChunk() {
  if (free_chunks_.empty()) return kChunks;
  const uint32_t chunk = free_chunks_.back();
  free_chunks_.pop_back();
  return chunk;
}

}  // namespace penstock::server
