// The ends of Puts: 0-byte WRITEs with immediate data, which tell the peer that what they follow
// has come.
#include <arpa/inet.h>

#include "transport/rdma/bulk_state.h"

namespace penstock::transport::rdma {

// Notifications follow the bytes on the same queue pair. With several rails they wait until all
// bytes are done, so that a chunk that must go again never comes after its notification.
void BulkEngine::State::NotifyWhereDue(BulkOperation& operation) {
  if (!operation.put || operation.status != BulkStatus::kOk || operation.chunks_queued > 0) return;
  uint32_t used = 0;
  for (const auto& chunks : operation.carried) used += chunks.empty() ? 0 : 1;
  if (used > 1 && operation.chunks_left > 0) return;
  for (uint32_t rail = 0; rail < kMaxRails; ++rail) {
    if (!operation.carried[rail].empty() && !operation.notifying[rail]) Notify(operation, rail);
  }
}

// Those that found no room.
void BulkEngine::State::NotifyDue() {
  for (size_t left = due.size(); left > 0 && !due.empty(); --left) NotifyWhereDue(*due.PopFront());
}

void BulkEngine::State::Notify(BulkOperation& operation, uint32_t rail) {
  BulkRail& state = rails[rail];
  if (state.state != BulkRail::State::kLive) return;  // its chunks go again
  SendLedger& ledger = state.queue_pair->ledger();
  if (state.notifications_under_way >= kNotifications || ledger.free() == 0) {
    if (!operation.due.linked) due.PushBack(operation);  // the next completion looks again
    return;
  }
  const uint32_t sequence = ++next_sequence[rail];
  ibv_send_wr request = {};
  request.wr_id = ledger.Take();
  request.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
  request.send_flags = IBV_SEND_SIGNALED;
  request.imm_data = htonl(sequence);
  state.under_way.PushBack(
      {request.wr_id, BulkRequest::Kind::kNotification, nullptr, &operation, sequence});
  ++state.notifications_under_way;
  operation.notifying[rail] = true;
  while (BulkChunk* chunk = operation.carried[rail].PopFront()) {
    chunk->promised = true;
    operation.promised[rail].PushBack(*chunk);
  }
  PostList(rail, &request, 1);
}

}  // namespace penstock::transport::rdma
