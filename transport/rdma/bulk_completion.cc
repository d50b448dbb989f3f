// What the devices report about requests and receives.
#include <arpa/inet.h>

#include <algorithm>

#include "transport/rdma/bulk_state.h"

namespace penstock::transport::rdma {
namespace {

constexpr int kReapBatch = 16;
constexpr uint32_t kRepostBatch = 16;
// soft-RoCE sometimes calls a READ invalid that its peer repeats because the answer is late. A
// request that is invalid in truth is so each time.
constexpr uint32_t kMostCalledInvalid = 3;

bool IsRefusal(ibv_wc_status status) {
  return status == IBV_WC_REM_ACCESS_ERR || status == IBV_WC_REM_INV_REQ_ERR ||
         status == IBV_WC_REM_OP_ERR;
}

// What this end asked for is wrong, or its own memory is not what it said. A "queue pair operation
// error" says neither: soft-RoCE reports it when the link is down.
bool IsOwnFault(ibv_wc_status status) {
  return status == IBV_WC_LOC_LEN_ERR || status == IBV_WC_LOC_EEC_OP_ERR ||
         status == IBV_WC_LOC_PROT_ERR || status == IBV_WC_LOC_ACCESS_ERR ||
         status == IBV_WC_MW_BIND_ERR;
}

}  // namespace

void BulkEngine::State::OnDone(uint32_t rail, const BulkRequest& request) {
  BulkRail& state = rails[rail];
  if (request.kind == BulkRequest::Kind::kKeepalive) return;
  const bool moved = request.kind == BulkRequest::Kind::kChunk;
  BulkOperation& operation = moved ? *request.chunk->operation : *request.operation;
  if (moved) {
    BulkChunk& chunk = *request.chunk;
    state.bytes_under_way -= chunk.bytes;
    --state.chunks_under_way;
    --operation.chunks_left;
    (operation.put ? bytes_sent : bytes_received).fetch_add(chunk.bytes);
    if (!operation.put) {
      --state.reads_under_way;
      chunk_pool.Give(chunk);
    }
    if (operation.chunks_left == 0) NotifyWhereDue(operation);
  } else {
    --state.notifications_under_way;
    operation.notifying[rail] = false;
    while (BulkChunk* chunk = operation.promised[rail].PopFront()) chunk_pool.Give(*chunk);
    fence[rail].store(request.sequence, std::memory_order_release);
    Remember(operation, rail, request.sequence);
    NotifyWhereDue(operation);  // chunks that came to the rail since
  }
  MaybeFinish(operation);
}

void BulkEngine::State::OnFailed(uint32_t rail, const BulkRequest& request, ibv_wc_status status) {
  BulkRail& state = rails[rail];
  if (state.state == BulkRail::State::kLive) {
    BreakRail(rail, std::string("A request failed (") + CompletionName(status) + ").");
  }
  // Only the request at fault has such a status, those behind it are flushed.
  const bool refused = IsRefusal(status);
  if (request.kind != BulkRequest::Kind::kChunk) {
    if (refused || IsOwnFault(status)) {
      GiveUp("A write of nothing over rail " + std::to_string(rail) + " fails (" +
             CompletionName(status) + "), which trying again cannot mend.");
    }
    if (request.kind == BulkRequest::Kind::kKeepalive) return;
    --state.notifications_under_way;
    request.operation->notifying[rail] = false;  // what it stood for goes again
    return;
  }
  BulkChunk& chunk = *request.chunk;
  TakeOff(state, chunk, rail);
  BulkOperation& operation = *chunk.operation;
  if (status == IBV_WC_REM_INV_REQ_ERR && operation.called_invalid++ < kMostCalledInvalid) {
    state.again.PushBack(chunk);
    return;
  }
  if (refused || IsOwnFault(status)) {
    // A GPU's memory may be out of a NIC's reach, which is no fault of anybody's here.
    const bool unreachable = !refused && operation.region->is_device_memory();
    operation.status = refused       ? BulkStatus::kRefused
                       : unreachable ? BulkStatus::kUnreachable
                                     : BulkStatus::kClosed;
    if (!refused && !unreachable) {
      GiveUp(std::string("The device of rail ") + std::to_string(rail) + " refuses to " +
             (operation.put ? "send from" : "receive into") + " memory of this process (" +
             std::to_string(chunk.bytes) + " bytes at " +
             std::to_string(operation.local + chunk.offset) + "): " + CompletionName(status) + ".");
    } else if (state.successor == nullptr) {
      live[rail].store(kRailRefused, std::memory_order_release);
      changed = true;
    }
    --operation.chunks_left;
    chunk_pool.Give(chunk);
    DropQueued(operation);
    return;  // finished with the drain
  }
  state.again.PushBack(chunk);
}

bool BulkEngine::State::Reap(uint32_t rail) {
  BulkRail& state = rails[rail];
  bool any = false;
  while (state.queue_pair != nullptr) {
    ibv_wc completions_[kReapBatch];
    const int got = verbs.PollCq(state.queue_pair->send_cq(), kReapBatch, completions_);
    if (got <= 0) break;
    any = true;
    for (int i = 0; i < got; ++i) {
      if (!state.queue_pair->ledger().Complete(completions_[i].wr_id)) continue;
      while (!state.under_way.empty() && state.under_way.front().id <= completions_[i].wr_id) {
        const BulkRequest request = state.under_way.PopFront();
        if (completions_[i].status == IBV_WC_SUCCESS) {
          OnDone(rail, request);
        } else {
          OnFailed(rail, request, completions_[i].status);
        }
      }
    }
    if (got < kReapBatch) break;
  }
  return any;
}

// Counts the notifications that have come on a queue pair of the rail. False if nothing has come.
bool BulkEngine::State::TakeReceives(uint32_t rail, QueuePair& queue_pair, uint32_t* missing,
                                     ibv_wc_status* failed) {
  bool any = false;
  for (;;) {
    ibv_wc completions_[kReapBatch];
    const int got = verbs.PollCq(queue_pair.receive_cq(), kReapBatch, completions_);
    if (got <= 0) break;
    any = true;
    for (int i = 0; i < got; ++i) {
      ++*missing;
      if (completions_[i].status != IBV_WC_SUCCESS) {
        if (*failed == IBV_WC_SUCCESS) *failed = completions_[i].status;
        continue;
      }
      if (!initiator && completions_[i].opcode == IBV_WC_RECV_RDMA_WITH_IMM) {
        const uint32_t sequence = ntohl(completions_[i].imm_data);
        if (Covers(sequence, fence[rail].load())) {
          fence[rail].store(sequence, std::memory_order_release);
        }
      }
    }
    if (got < kReapBatch) break;
  }
  return any;
}

bool BulkEngine::State::ReapReceives(uint32_t rail) {
  BulkRail& state = rails[rail];
  if (state.queue_pair == nullptr) return false;
  ibv_wc_status failed = IBV_WC_SUCCESS;
  const bool any = TakeReceives(rail, *state.queue_pair, &state.receives_missing, &failed);
  // The initiator learns more from the request that failed.
  if (failed != IBV_WC_SUCCESS && state.state == BulkRail::State::kLive && !initiator) {
    BreakRail(rail, std::string("A receive failed (") + CompletionName(failed) + ").");
  }
  if (state.state == BulkRail::State::kLive && state.receives_missing >= kRepostBatch) {
    for (; state.receives_missing > 0; --state.receives_missing) {
      ibv_recv_wr request = {};
      ibv_recv_wr* bad = nullptr;
      if (verbs.PostRecv(state.queue_pair->qp(), &request, &bad) != 0) break;
    }
  }
  return any;
}

bool BulkEngine::State::ReapDiscarded(int64_t now) {
  bool any = false;
  for (size_t i = 0; i < discarded.size();) {
    Discarded& each = discarded[i];
    ibv_wc_status failed = IBV_WC_SUCCESS;
    any = TakeReceives(each.rail, *each.queue_pair, &each.receives_missing, &failed) || any;
    if (each.receives_missing < each.queue_pair->receive_depth() && now < each.until_ns) {
      ++i;
      continue;
    }
    spent.push_back({std::move(each.queue_pair), each.rail, false});
    discarded.erase(discarded.begin() + i);
    any = true;
  }
  return any;
}

bool BulkEngine::State::PollAll() {
  const int64_t now = NowNanoseconds();
  bool any = ReapDiscarded(now);
  for (uint32_t rail = 0; rail < kMaxRails; ++rail) {
    BulkRail& state = rails[rail];
    if (state.queue_pair == nullptr) continue;
    any = Reap(rail) || any;
    any = ReapReceives(rail) || any;
    if (state.state == BulkRail::State::kDraining &&
        (Drained(rail) || now >= state.drain_until_ns)) {
      EndDrain(rail);
      any = true;
      continue;
    }
    Keepalive(rail, now);
  }
  if ((any || post_again) && initiator && !closed) {
    post_again = false;
    NotifyDue();
    PumpAll();
  }
  if (!late.empty()) FinishLate();
  FailStranded(now);
  return any;
}

}  // namespace penstock::transport::rdma
