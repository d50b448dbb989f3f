// One connected queue pair: its rdma_cm id, its two completion queues, and the ledger of its send
// queue.
//
// The ledger counts in software, because a device need not tell (soft-RoCE never says that its
// queue is full): a send slot is taken when a work request is posted and freed only when a *send*
// completion that covers it has been polled. Nothing is ever posted without a free slot. Credits of
// the peer say nothing about slots: its answer may be polled before our own completion.
//
// Every work request's wr_id is its count since the queue pair was made, so that a completion,
// also an error of an unsignalled one, tells how many requests before it are done.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "common/clock.h"
#include "common/result.h"
#include "transport/rdma/rdma.h"
#include "transport/rdma/verbs.h"

namespace penstock::transport::rdma {

// "transport retry counter exceeded", for messages.
const char* CompletionName(ibv_wc_status status);

// How many READs a queue pair of this device may have under way: those that it starts, or those
// that it answers. At most 16.
enum class ReadSide : uint8_t { kStarts, kAnswers };
uint8_t ReadDepth(Verbs& verbs, ibv_context* context, ReadSide side);

class SendLedger {
 public:
  explicit SendLedger(uint32_t depth) : depth_(depth) {}
  uint32_t free() const { return depth_ - static_cast<uint32_t>(posted_ - done_); }
  uint64_t posted() const { return posted_; }
  uint64_t done() const { return done_; }
  bool idle() const { return posted_ == done_; }
  uint64_t Take() { return ++posted_; }      // the wr_id of the next request
  void Untake(uint32_t n) { posted_ -= n; }  // from bad_wr on
  // False for an id that was never posted or is done already.
  bool Complete(uint64_t wr_id) {
    if (wr_id <= done_ || wr_id > posted_) return false;
    done_ = wr_id;
    return true;
  }

 private:
  const uint32_t depth_;
  uint64_t posted_ = 0, done_ = 0;
};

struct QueuePairShape {
  ibv_pd* pd = nullptr;
  ibv_comp_channel* send_channel = nullptr;
  ibv_comp_channel* receive_channel = nullptr;
  uint32_t send_depth = 0, receive_depth = 0;  // queue slots; the completion queues hold as many
  uint32_t send_sge = 2;
  uint32_t inline_bytes = 0;
  bool reads = false;  // this end starts READs
};

// Owns the id, the queue pair and both completion queues, not the channels. Destroying it moves the
// queue pair to the error state, acknowledges all events it counted, and frees in the order that
// verbs ask for (destroy_qp, destroy_cq x2, destroy_id); it must not happen while a CM event of the
// id is unacknowledged.
class QueuePair {
 public:
  // `id` must have its device resolved. It stays the caller's on failure.
  static Result<std::unique_ptr<QueuePair>> Make(Verbs& verbs, rdma_cm_id* id,
                                                 const QueuePairShape& shape);
  ~QueuePair();

  rdma_cm_id* id() const { return id_; }
  ibv_qp* qp() const { return id_->qp; }
  ibv_cq* send_cq() const { return send_cq_; }
  ibv_cq* receive_cq() const { return receive_cq_; }
  uint32_t inline_bytes() const { return inline_bytes_; }  // granted
  uint32_t receive_depth() const { return receive_depth_; }
  SendLedger& ledger() { return ledger_; }
  Verbs& verbs() const { return verbs_; }

  // After ESTABLISHED: min_rnr_timer 12 (rdma_cm leaves 0, which is 655 ms), and a look whether
  // timeout and retry count are what was asked for, and how many of the `reads` that this end asked
  // for it has got.
  Status Settle(const RdmaOptions& options, uint32_t reads);
  // READs that this end may have under way at a time. Another one would wait at the head of the
  // send queue, and with it every WRITE behind it.
  uint32_t reads() const { return reads_; }
  // To the error state: everything posted flushes, and nothing of the peer's is let in any more.
  // Idempotent. False if the device did not say so.
  bool Break();
  // Events read from a channel for one of our completion queues; acknowledged in batches.
  void CountEvent(ibv_cq* cq);

 private:
  QueuePair(Verbs& verbs, rdma_cm_id* id, const QueuePairShape& shape);
  Verbs& verbs_;
  rdma_cm_id* id_;  // null if it was never ours
  ibv_cq* send_cq_ = nullptr;
  ibv_cq* receive_cq_ = nullptr;
  SendLedger ledger_;
  uint32_t inline_bytes_ = 0, receive_depth_ = 0, reads_ = 0;
  uint32_t send_events_ = 0, receive_events_ = 0;  // unacknowledged
  bool broken_ = false, breaks_ = false;
};

}  // namespace penstock::transport::rdma
