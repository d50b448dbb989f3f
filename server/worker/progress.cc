#include "server/worker/progress.h"

#include <algorithm>

#include "server/worker/worker.h"

namespace penstock::server {
namespace {

template <typename T>
void AddOnce(std::vector<T>& list, const T& item) {
  if (std::find(list.begin(), list.end(), item) == list.end()) list.push_back(item);
}

}  // namespace

void Progress::Charge(const std::shared_ptr<StreamState>& stream, uint32_t cost) {
  stream->issued += cost;
  ++stream->operations;
  const bool frees = !stream->frees.empty() && stream->frees.back().first == stream->operations;
  if (frees || stream->issued - stream->marked_cost >= kMarkEvery ||
      stream->operations - stream->marked_operations >= kMarkEvery) {
    Mark(stream);
  }
}

CUresult Progress::EnsureWords(StreamState& stream) {
  if (stream.words.progress != 0) return CUDA_SUCCESS;
  auto context = stream.context.lock();
  if (context == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (CUresult result = worker_.PrepareContext(*context); result != CUDA_SUCCESS) return result;
  if (!context->arena->TakeWords(&stream.words)) return CUDA_ERROR_OUT_OF_MEMORY;
  stream.word_base = context->arena->Load(stream.words.progress);
  stream.gates = context->arena->Load(stream.words.go);
  return CUDA_SUCCESS;
}

CUresult Progress::Mark(const std::shared_ptr<StreamState>& stream) {
  if (stream->marked_operations == stream->operations) return CUDA_SUCCESS;
  if (CUresult result = EnsureWords(*stream); result != CUDA_SUCCESS) return result;
  auto context = stream->context.lock();
  const CUresult result = worker_.driver().cuStreamWriteValue32_v2(
      stream->stream, context->arena->DeviceAddress(stream->words.progress),
      stream->word_base + stream->marks + 1, 0);
  if (result != CUDA_SUCCESS) return result;
  ++stream->marks;
  stream->marked_cost = stream->issued;
  stream->marked_operations = stream->operations;
  stream->unseen.push_back({stream->marks, stream->issued, stream->operations});
  AddOnce(active_, stream);
  return CUDA_SUCCESS;
}

void Progress::Destroy(const std::shared_ptr<StreamState>& stream) {
  const CUresult marked = Mark(stream);
  stream->destroyed = true;
  if (stream->words.progress == 0) return;
  if (stream->unseen.empty() && marked == CUDA_SUCCESS) {
    // Nothing is to come that Step would look for.
    Retire(*stream);
  } else if (auto context = stream->context.lock()) {
    context->retiring.push_back(stream);
  }
}

void Progress::HoldSlot(const std::shared_ptr<StreamState>& stream, InlineSlot slot) {
  // Used by the operation that is being issued, which is counted when its handler returns.
  stream->slots.emplace_back(stream->operations + 1, slot);
}

void Progress::HoldCharge(const std::shared_ptr<StreamState>& stream,
                          std::shared_ptr<Quota::Charge> charge) {
  stream->frees.emplace_back(stream->operations + 1, std::move(charge));
}

void Progress::CatchUp(const std::shared_ptr<StreamState>& stream, uint64_t value) {
  if (value <= stream->issued) return;
  const uint64_t missing = value - stream->issued;
  stream->issued += missing;
  stream->finished += missing;
  stream->marked_cost += missing;
  for (StreamState::Mark& mark : stream->unseen) mark.cost += missing;
  AddOnce(untold_, stream);
}

void Progress::GiveUp(const std::shared_ptr<StreamState>& stream) {
  stream->finished = stream->issued;
  stream->unseen.clear();
  AddOnce(untold_, stream);
}

void Progress::ReleaseStagingSlot(uint32_t slot) {
  if (slot >= slot_releases_.size()) slot_releases_.resize(slot + 1);
  ++slot_releases_[slot];
  AddOnce(untold_slots_, slot);
}

bool Progress::Look(StreamState& stream) {
  auto context = stream.context.lock();
  if (context == nullptr || context->arena == nullptr || stream.unseen.empty()) return false;
  const uint32_t value = context->arena->Load(stream.words.progress) - stream.word_base;
  uint64_t operations = 0;
  bool moved = false;
  // Modulo 2^32; fewer than 2^31 marks are ever unseen.
  while (!stream.unseen.empty() &&
         static_cast<int32_t>(value - stream.unseen.front().number) >= 0) {
    stream.finished = stream.unseen.front().cost;
    operations = stream.unseen.front().operations;
    stream.unseen.pop_front();
    moved = true;
  }
  while (!stream.slots.empty() && stream.slots.front().first <= operations) {
    context->arena->ReturnSlot(stream.slots.front().second);
    stream.slots.pop_front();
  }
  while (!stream.frees.empty() && stream.frees.front().first <= operations) {
    stream.frees.front().second->Release();
    stream.frees.pop_front();
  }
  return moved;
}

void Progress::Retire(StreamState& stream) {
  auto context = stream.context.lock();
  if (context == nullptr) return;
  if (context->arena != nullptr) context->arena->ReturnWords(stream.words);
  stream.words = {};
  std::erase_if(context->retiring, [&](const auto& other) { return other.get() == &stream; });
}

bool Progress::Step() {
  bool moved = false;
  for (size_t i = 0; i < active_.size();) {
    StreamState& stream = *active_[i];
    if (Look(stream)) {
      moved = true;
      if (!stream.destroyed) AddOnce(untold_, active_[i]);
    }
    if (!stream.unseen.empty() && !stream.context.expired()) {
      ++i;
      continue;
    }
    if (stream.destroyed) Retire(stream);
    active_[i] = active_.back();
    active_.pop_back();
  }
  return moved;
}

bool Progress::Tell(bool all) {
  bool worth = untold_slots_.size() >= kTellSlots || (all && !untold_slots_.empty());
  for (const auto& stream : untold_) {
    worth = worth || stream->finished - stream->told >= (all ? 1 : kTellEvery);
  }
  if (!worth) return false;
  std::vector<ProgressEntry> entries;
  constexpr size_t kMost = 1024;  // the rest goes with the next frame
  for (const auto& stream : untold_) {
    if (entries.size() == kMost) return false;
    if (stream->finished == stream->told) continue;
    ProgressEntry entry = {ProgressKind::kStream, stream->handle.generation(), stream->handle.id(),
                           stream->finished};
    if (stream->handle == kLegacyStream) {
      auto context = stream->context.lock();
      if (context == nullptr) continue;
      entry.id = context->handle.bits & ((1ull << 56) - 1);
    }
    entries.push_back(entry);
  }
  size_t slots = 0;
  for (; slots < untold_slots_.size() && entries.size() < kMost; ++slots) {
    const uint32_t slot = untold_slots_[slots];
    entries.push_back({ProgressKind::kStagingSlot, 0, slot, slot_releases_[slot]});
  }
  if (!worker_.outbox().Progress(entries)) return false;
  for (const auto& stream : untold_) stream->told = stream->finished;
  untold_.clear();
  untold_slots_.erase(untold_slots_.begin(), untold_slots_.begin() + slots);
  return true;
}

}  // namespace penstock::server
