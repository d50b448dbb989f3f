#include "transport/shm/bulk_mover.h"

#include <sched.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "transport/shm/futex.h"
#include "transport/shm/order.h"
#include "transport/thread.h"

namespace penstock::transport::shm {
namespace {

constexpr size_t kMostMoves = 4096;         // submitted and not reported
constexpr uint64_t kSharedChunk = 1 << 20;  // copied at once, with the local memory locked
constexpr int kYields = 32;  // before sleeping: the other side mostly answers within microseconds

}  // namespace

BulkMover::BulkMover(Link& link, Segment& segment, CompletionQueue& completions)
    : link_(link), segment_(segment), completions_(completions) {}

void BulkMover::Start() {
  accepting_ = true;
  finished_.store(false);
  if (StartThread(thread_, "penstock-bulk", [this] { Run(); })) return;
  accepting_ = false;
  finished_.store(true);
  link_.Close("The system has no thread for bulk moves.", LogLevel::kError);
}

void BulkMover::Stop() {
  Kick();
  if (thread_.joinable()) thread_.join();
}

void BulkMover::Kick() {
  WakeUp(segment_.words().bulk[kServer]);
}

Outcome BulkMover::Submit(Move move) {
  {
    std::lock_guard lock(mutex_);
    if (!accepting_) return Outcome::kClosed;
    if (unfinished_ == kMostMoves) return Outcome::kAgain;
    ++unfinished_;
    submitted_.push_back(std::move(move));
  }
  Kick();
  return Outcome::kOk;
}

void BulkMover::Run() {
  int idle = 0;
  while (!link_.closed()) {
    bool moved = TakeSubmissions();
    while (FinishChunk()) moved = true;
    moved = StartChunk() || moved;
    moved = MoveShared() || moved;
    if (moved) {
      idle = 0;
    } else if (idle < kYields) {
      ++idle;
      sched_yield();
    } else {
      Sleep();
    }
  }
  FinishAll();
}

void BulkMover::Sleep() {
  BulkWords& words = segment_.words().bulk[kServer];
  const uint32_t seen = words.changes.load(std::memory_order_seq_cst);
  words.sleeping.store(1, std::memory_order_seq_cst);
  bool work = link_.closed();
  {
    std::lock_guard lock(mutex_);
    work = work || !submitted_.empty();
  }
  if (answered_ != started_) {
    const BulkDescriptor& next = segment_.descriptor(answered_ % kBulkSlots);
    work = work || next.reply.load(std::memory_order_seq_cst) == answered_ + 1;
  }
  if (!work) SleepWhile(words, seen);
  words.sleeping.store(0, std::memory_order_relaxed);
}

bool BulkMover::TakeSubmissions() {
  std::deque<Move> taken;
  {
    std::lock_guard lock(mutex_);
    if (submitted_.empty()) return false;
    taken.swap(submitted_);
  }
  for (Move& move : taken) {
    const auto place = moves_.insert(moves_.end(), std::move(move));
    if (place->status != BulkStatus::kOk || place->bytes == 0) {
      FinishIfDone(place);
    } else if (place->shared != nullptr) {
      shared_.push_back(place);
    } else {
      to_issue_.push_back(place);
    }
  }
  return true;
}

bool BulkMover::CopyChunk(Move& move, uint64_t offset, std::byte* other, uint64_t bytes) {
  std::lock_guard touching(move.local->mutex);
  if (!move.local->alive) return false;
  std::byte* const here = move.local->address + move.local_offset + offset;
  if (move.op == kBulkGet) {
    std::memcpy(here, other, bytes);
    bytes_received_.fetch_add(bytes, std::memory_order_relaxed);
  } else {
    std::memcpy(other, here, bytes);
    bytes_sent_.fetch_add(bytes, std::memory_order_relaxed);
  }
  return true;
}

bool BulkMover::MoveShared() {
  if (shared_.empty()) return false;
  const auto move = shared_.front();
  shared_.pop_front();
  const uint64_t bytes = std::min(kSharedChunk, move->bytes - move->issued);
  std::byte* const there = move->shared->address() + move->remote_offset + move->issued;
  if (CopyChunk(*move, move->issued, there, bytes)) {
    move->issued += bytes;
    if (move->issued < move->bytes) shared_.push_back(move);
  } else {
    move->status = BulkStatus::kCancelled;
  }
  FinishIfDone(move);
  return true;
}

bool BulkMover::StartChunk() {
  if (to_issue_.empty() || started_ - answered_ == kBulkSlots) return false;
  const auto move = to_issue_.front();
  to_issue_.pop_front();
  const uint32_t slot = started_ % kBulkSlots;
  Chunk& chunk = chunks_[slot];
  chunk.move = move;
  chunk.offset = move->issued;
  chunk.bytes =
      static_cast<uint32_t>(std::min<uint64_t>(segment_.slot_bytes(), move->bytes - move->issued));
  if (move->op == kBulkPut) {
    if (!CopyChunk(*move, chunk.offset, segment_.slot(slot), chunk.bytes)) {
      move->status = BulkStatus::kCancelled;
      FinishIfDone(move);
      return true;
    }
    copied_.fetch_add(chunk.bytes, std::memory_order_relaxed);
  }
  BulkDescriptor& descriptor = segment_.descriptor(slot);
  descriptor.body = {.op = move->op,
                     .key_slot = move->key.slot,
                     .key_generation = move->key.generation,
                     .bytes = chunk.bytes,
                     .key_secret = move->key.secret,
                     .offset = move->remote_offset + chunk.offset,
                     .move_offset = move->remote_offset,
                     .move_bytes = move->bytes};
  move->issued += chunk.bytes;
  ++move->in_flight;
  if (move->issued < move->bytes) to_issue_.push_back(move);
  ++started_;
  Publish(descriptor.request, started_, std::memory_order_seq_cst);
  WakeUp(segment_.words().bulk[kClient]);
  return true;
}

bool BulkMover::FinishChunk() {
  if (answered_ == started_) return false;
  const uint32_t slot = answered_ % kBulkSlots;
  BulkDescriptor& descriptor = segment_.descriptor(slot);
  if (Observe(descriptor.reply) != answered_ + 1) return false;
  const uint32_t status = __atomic_load_n(&descriptor.status, __ATOMIC_RELAXED);
  ++answered_;
  Chunk& chunk = chunks_[slot];
  Move& move = *chunk.move;
  --move.in_flight;
  if (status > kBulkRefused) {
    link_.Close(
        "The peer breaks the bulk protocol: answer with status (" + std::to_string(status) + ").",
        LogLevel::kWarning);
    return false;
  }
  BulkStatus outcome = status == kBulkOk ? BulkStatus::kOk : BulkStatus::kRefused;
  if (outcome == BulkStatus::kOk && move.status == BulkStatus::kOk && move.op == kBulkGet) {
    if (CopyChunk(move, chunk.offset, segment_.slot(slot), chunk.bytes)) {
      copied_.fetch_add(chunk.bytes, std::memory_order_relaxed);
    } else {
      outcome = BulkStatus::kCancelled;
    }
  }
  if (outcome != BulkStatus::kOk && move.status == BulkStatus::kOk) {
    move.status = outcome;
    std::erase(to_issue_, chunk.move);
  }
  FinishIfDone(chunk.move);
  return true;
}

void BulkMover::FinishIfDone(std::list<Move>::iterator move) {
  const bool ok = move->status == BulkStatus::kOk;
  if (move->in_flight > 0 || (ok && move->issued < move->bytes)) return;
  const Completion completion = {move->cookie, move->status, ok ? move->bytes : 0};
  moves_.erase(move);
  {
    std::lock_guard lock(mutex_);
    --unfinished_;
  }
  completions_.Push(completion);
}

void BulkMover::FinishAll() {
  std::vector<uint64_t> cookies;
  for (const Move& move : moves_) cookies.push_back(move.cookie);
  {
    std::lock_guard lock(mutex_);
    accepting_ = false;
    for (const Move& move : submitted_) cookies.push_back(move.cookie);
    submitted_.clear();
  }
  to_issue_.clear();
  shared_.clear();
  moves_.clear();
  for (const uint64_t cookie : cookies) completions_.Push({cookie, BulkStatus::kClosed, 0});
  finished_.store(true, std::memory_order_release);
  link_.receiver().Signal();
}

}  // namespace penstock::transport::shm
