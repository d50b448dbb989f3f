// What is left to do of each move, and its report.
//
// A move is cut into chunks as rails take them, so that a large one costs no more than a small one
// until then. Its chunks are counted from the start: `chunks_queued` no rail has yet,
// `chunks_left` are not done.
#include <algorithm>

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
