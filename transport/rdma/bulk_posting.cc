// Chunks from the queue onto rails, and the keepalive of idle ones.
#include <algorithm>
#include <cerrno>
#include <cstring>

#include "transport/rdma/bulk_state.h"

namespace penstock::transport::rdma {
namespace {

constexpr uint32_t kMostPosts = 16;

}  // namespace

// A chunk is the rail's from here on, and no more.
void BulkEngine::State::PutOn(BulkRail& state, BulkChunk& chunk, uint32_t rail) {
  state.bytes_under_way += chunk.bytes;
  ++state.chunks_under_way;
  if (chunk.operation->put) {
    chunk.operation->carried[rail].PushBack(chunk);
  } else {
    ++state.reads_under_way;
  }
}

void BulkEngine::State::TakeOff(BulkRail& state, BulkChunk& chunk, uint32_t rail) {
  state.bytes_under_way -= chunk.bytes;
  --state.chunks_under_way;
  if (!chunk.operation->put) {
    --state.reads_under_way;
    return;
  }
  (chunk.promised ? chunk.operation->promised : chunk.operation->carried)[rail].Remove(chunk);
  chunk.promised = false;
}

bool BulkEngine::State::PostList(uint32_t rail, ibv_send_wr* requests, uint32_t count) {
  BulkRail& state = rails[rail];
  ibv_send_wr* bad = nullptr;
  const int error = verbs.PostSend(state.queue_pair->qp(), requests, &bad);
  if (error == 0) return true;
  const uint32_t done = bad == nullptr ? 0 : static_cast<uint32_t>(bad - requests);
  state.queue_pair->ledger().Untake(count - done);
  // What was not posted goes back to the head, in its order.
  for (uint32_t i = count; i > done; --i) {
    const BulkRequest request = state.under_way.PopBack();
    if (request.kind == BulkRequest::Kind::kChunk) {
      TakeOff(state, *request.chunk, rail);
      Requeue(*request.chunk);
    } else if (request.kind == BulkRequest::Kind::kNotification) {
      BulkOperation& operation = *request.operation;
      operation.notifying[rail] = false;
      while (BulkChunk* chunk = operation.promised[rail].PopBack()) {
        chunk->promised = false;
        operation.carried[rail].PushFront(*chunk);
      }
      if (!operation.due.linked) due.PushBack(operation);
      --state.notifications_under_way;
    }
  }
  char text[128];
  if (error == ENOMEM || error == EAGAIN) {
    post_again = true;
  } else {
    const std::string reason =
        std::string("Cannot post: ") + strerror_r(error, text, sizeof text) + ".";
    BreakRail(rail, reason);
    if (error == EINVAL) GiveUp("A bulk request is invalid. " + reason);
  }
  return false;
}

// The least loaded rail first, and each at first no more than its share, so that a move of a few
// chunks uses all rails. Then whoever has room takes what is left.
void BulkEngine::State::PumpAll() {
  if (queued == 0) return;
  std::array<uint32_t, kMaxRails> order = {0, 1, 2, 3};
  uint32_t live_rails = 0;
  for (const BulkRail& rail : rails) live_rails += rail.state == BulkRail::State::kLive ? 1 : 0;
  const auto load = [&](uint32_t rail) {
    return rails[rail].state == BulkRail::State::kLive ? rails[rail].bytes_under_way : UINT64_MAX;
  };
  std::sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) { return load(a) < load(b); });
  for (uint32_t i = 0; i < live_rails; ++i) {
    const uint64_t left = live_rails - i;
    Pump(order[i], (queued + left - 1) / left);
  }
  for (uint32_t i = 0; i < live_rails && live_rails > 1; ++i) Pump(order[i], UINT64_MAX);
}

void BulkEngine::State::Pump(uint32_t rail, uint64_t most) {
  BulkRail& state = rails[rail];
  // What could not be done is not left to another rail once that is the end of the connection.
  while (!failed.load(std::memory_order_relaxed) && state.state == BulkRail::State::kLive &&
         queued > 0 && most > 0) {
    ibv_send_wr requests[kMostPosts] = {};
    ibv_sge parts[kMostPosts];
    BulkOperation* posted_whole[kMostPosts];
    uint32_t count = 0, whole = 0;
    SendLedger& ledger = state.queue_pair->ledger();
    for (BulkOperation* next = waiting.first();
         next != nullptr && count < kMostPosts && count < most;) {
      if (state.chunks_under_way >= options.bulk_depth || ledger.free() <= kReservedSendSlots) {
        break;
      }
      BulkOperation& operation = *next;
      uint32_t lkey = 0;
      const bool has_room = operation.put || state.reads_under_way < state.queue_pair->reads();
      if (!has_room || !Eligible(operation, rail) || !operation.region->LocalKey(rail, &lkey)) {
        next = WaitingOperations::After(operation);
        continue;
      }
      if (operation.chunks_queued == 1) next = WaitingOperations::After(operation);
      BulkChunk& chunk = NextChunk(operation);
      ibv_send_wr& request = requests[count];
      parts[count] = {operation.local + chunk.offset, static_cast<uint32_t>(chunk.bytes), lkey};
      request.wr_id = ledger.Take();
      request.sg_list = &parts[count];
      request.num_sge = 1;
      request.opcode = operation.put ? IBV_WR_RDMA_WRITE : IBV_WR_RDMA_READ;
      request.send_flags = IBV_SEND_SIGNALED;
      request.wr.rdma.remote_addr = operation.remote + chunk.offset;
      request.wr.rdma.rkey = operation.key.rkey[rail];
      if (count > 0) requests[count - 1].next = &request;
      ++count;
      state.under_way.PushBack({request.wr_id, BulkRequest::Kind::kChunk, &chunk, nullptr, 0});
      PutOn(state, chunk, rail);
      if (operation.put && operation.chunks_queued == 0) posted_whole[whole++] = &operation;
    }
    if (count == 0) return;
    most -= count;
    state.active_ns = NowNanoseconds();
    if (!PostList(rail, requests, count)) return;
    // A Put that only this rail carries is notified right behind its bytes.
    for (uint32_t i = 0; i < whole; ++i) NotifyWhereDue(*posted_whole[i]);
  }
}

void BulkEngine::State::Keepalive(uint32_t rail, int64_t now) {
  BulkRail& state = rails[rail];
  if (!initiator || state.state != BulkRail::State::kLive || !state.under_way.empty() ||
      now - state.active_ns < KeepaliveNs(options)) {
    return;
  }
  state.active_ns = now;
  ibv_send_wr request = {};
  request.wr_id = state.queue_pair->ledger().Take();
  request.opcode = IBV_WR_RDMA_WRITE;
  request.send_flags = IBV_SEND_SIGNALED;
  state.under_way.PushBack({request.wr_id, BulkRequest::Kind::kKeepalive, nullptr, nullptr, 0});
  PostList(rail, &request, 1);
}

}  // namespace penstock::transport::rdma
