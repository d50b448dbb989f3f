// What is left to do of each move, and its report.
//
// A move is cut into chunks as rails take them, so that a large one costs no more than a small one
// until then. Its chunks are counted from the start: `chunks_queued` no rail has yet,
// `chunks_left` are not done.
#include <algorithm>

#include "common/log.h"
#include "transport/rdma/bulk_state.h"

namespace penstock::transport::rdma {

BulkChunk& BulkEngine::State::NextChunk(BulkOperation& operation) {
  BulkChunk* chunk = operation.again.PopFront();
  if (chunk == nullptr) {
    chunk = &chunk_pool.Take();
    chunk->operation = &operation;
    chunk->offset = operation.cut;
    chunk->bytes = std::min(operation.piece, operation.bytes - operation.cut);
    operation.cut += chunk->bytes;
  }
  --queued;
  if (--operation.chunks_queued == 0) waiting.Remove(operation);
  return *chunk;
}

// Before everything else that waits.
void BulkEngine::State::Requeue(BulkChunk& chunk) {
  BulkOperation& operation = *chunk.operation;
  operation.again.PushFront(chunk);
  ++queued;
  ++operation.chunks_queued;
  if (!operation.waiting.linked) waiting.PushFront(operation);
}

void BulkEngine::State::DropQueued(BulkOperation& operation) {
  while (BulkChunk* chunk = operation.again.PopFront()) chunk_pool.Give(*chunk);
  operation.cut = operation.bytes;
  queued -= operation.chunks_queued;
  operation.chunks_left -= std::exchange(operation.chunks_queued, 0);
  if (operation.waiting.linked) waiting.Remove(operation);
}

// A rail that is down comes back, or the connection ends. But while others are live, a move that
// only that rail can take may wait for ever: its memory has no key on the devices of the others,
// because one that took another's place has refused to register it.
void BulkEngine::State::FailStranded(int64_t now) {
  constexpr int64_t kCheckEveryNs = 50'000'000;
  if (waiting.empty() || closed || now - stranded_checked_ns < kCheckEveryNs) return;
  stranded_checked_ns = now;
  uint32_t live_rails = 0;
  for (uint32_t rail = 0; rail < kMaxRails; ++rail) {
    if (rails[rail].state == BulkRail::State::kLive) live_rails |= 1u << rail;
  }
  for (BulkOperation *each = waiting.first(), *next; each != nullptr; each = next) {
    next = WaitingOperations::After(*each);
    uint32_t local_rails = 0, lkey = 0;
    for (uint32_t rail = 0; rail < kMaxRails; ++rail) {
      if (each->region->LocalKey(rail, &lkey)) local_rails |= 1u << rail;
    }
    if (live_rails == 0 || (live_rails & local_rails & each->key.rails) != 0) {
      each->stranded_ns = 0;
      continue;
    }
    if (each->stranded_ns == 0) each->stranded_ns = now;
    if (now - each->stranded_ns < int64_t{options.peer_timeout_ms} * 1'000'000) continue;
    LOG_WARNING(
        "transport",
        "A move of (%lu) bytes is given up: for (%u) ms no live rail (mask 0x%x) has reached "
        "both this end's memory (0x%x) and the peer's (0x%x).",
        each->bytes, options.peer_timeout_ms, live_rails, local_rails, each->key.rails);
    each->status = BulkStatus::kUnreachable;
    DropQueued(*each);
    if (each->chunks_left == 0) MaybeFinish(*each);
  }
}

void BulkEngine::State::Finish(BulkOperation& operation) {
  const uint64_t bytes = operation.status == BulkStatus::kOk ? operation.bytes : 0;
  completions.Push({operation.cookie, operation.status, bytes});
  DropQueued(operation);
  for (auto* chains : {&operation.carried, &operation.promised}) {
    for (Chunks& chain : *chains) {
      while (BulkChunk* chunk = chain.PopFront()) chunk_pool.Give(*chunk);
    }
  }
  if (operation.due.linked) due.Remove(operation);
  if (operation.late.linked) late.Remove(operation);
  operations.Remove(operation);
  operation_pool.Give(operation);
}

void BulkEngine::State::MaybeFinish(BulkOperation& operation) {
  if (operation.chunks_left > 0) return;
  for (uint32_t rail = 0; rail < kMaxRails; ++rail) {
    if (operation.notifying[rail]) return;
    if (operation.put && operation.status == BulkStatus::kOk &&
        !(operation.carried[rail].empty() && operation.promised[rail].empty())) {
      return;
    }
  }
  if (MayBeWritten(operation)) {
    if (!operation.late.linked) late.PushBack(operation);
    return;
  }
  Finish(operation);
}

}  // namespace penstock::transport::rdma
