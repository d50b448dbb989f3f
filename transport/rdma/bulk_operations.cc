// What is left to do of each move, and its report.
#include "transport/rdma/bulk_state.h"

namespace penstock::transport::rdma {

void BulkEngine::State::Finish(BulkOperation& operation) {
  const uint64_t bytes = operation.status == BulkStatus::kOk ? operation.bytes : 0;
  completions.Push({operation.cookie, operation.status, bytes});
  operations.remove_if([&](const auto& each) { return each.get() == &operation; });
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
  Finish(operation);
}

void BulkEngine::State::DropQueued(BulkOperation& operation) {
  const size_t before = queue.size();
  std::erase_if(queue, [&](const BulkChunk& chunk) { return chunk.operation == &operation; });
  operation.chunks_left -= before - queue.size();
  operation.chunks_queued = 0;
}

}  // namespace penstock::transport::rdma
