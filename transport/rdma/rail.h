// One rail as the bulk engine sees it, and the pieces of operations that travel on it. Plain data;
// the engine's lock protects it.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "transport/rdma/chain.h"
#include "transport/rdma/queue_pair.h"
#include "transport/rdma/region.h"
#include "transport/rdma/wire.h"
#include "transport/transport.h"

namespace penstock::transport::rdma {

struct BulkOperation;

// Made when a rail first takes it; gone when it is done and, if a Put's, confirmed.
struct BulkChunk {
  Link<BulkChunk> link;
  BulkOperation* operation = nullptr;
  uint64_t offset = 0;  // from the operation's start
  uint64_t bytes = 0;
  bool promised = false;  // which of its Put's chains it is in
};
using Chunks = Chain<BulkChunk, &BulkChunk::link>;

struct BulkOperation {
  Link<BulkOperation> link;     // of all operations
  Link<BulkOperation> waiting;  // of those with chunks that no rail has
  Link<BulkOperation> due;      // of those whose notification found no room
  Link<BulkOperation> late;     // of those that are done but for late packets
  uint64_t cookie = 0;
  bool put = false;
  const RdmaRegion* region = nullptr;
  uint64_t local = 0;   // address
  uint64_t remote = 0;  // address
  uint64_t bytes = 0;
  RdmaKeyBlob key;
  BulkStatus status = BulkStatus::kOk;
  uint32_t called_invalid = 0;  // times that the peer's device has called a request of it so
  uint64_t piece = 0;           // bytes of a chunk
  uint64_t cut = 0;             // chunks behind this offset are still to be made
  Chunks again;                 // that a rail has given back; they go first
  uint64_t chunks_left = 0;     // queued or under way
  uint64_t chunks_queued = 0;
  // A Put: what each rail has carried and not yet confirmed by a notification. If the rail dies,
  // it goes again: a completed WRITE alone does not say that the peer can see the bytes. When a
  // notification is posted, it takes `carried` to `promised`, because a chunk that comes to the
  // rail later is not covered by it.
  std::array<Chunks, kMaxRails> carried, promised;
  std::array<bool, kMaxRails> notifying{};  // its notification is under way on that rail
  // Generations through which it was tried before; their packets may still be in the fabric.
  std::array<uint16_t, kMaxRails> tried{};
  int64_t late_until_ns = 0;
  int64_t stranded_ns = 0;  // since when rails are live, but none that could take it; 0: not so
  // A move to or from where recent Puts wrote: it may start on a rail when the peer has seen as
  // many notifications on each other rail, and also on this one if its queue pair is a newer one.
  bool after_puts = false;
  std::array<uint32_t, kMaxRails> after{};
  std::array<uint16_t, kMaxRails> after_generation{};
};
using Operations = Chain<BulkOperation, &BulkOperation::link>;
using WaitingOperations = Chain<BulkOperation, &BulkOperation::waiting>;
using LateOperations = Chain<BulkOperation, &BulkOperation::late>;
using DueOperations = Chain<BulkOperation, &BulkOperation::due>;

struct BulkRequest {  // a posted work request
  enum class Kind : uint8_t { kChunk, kNotification, kKeepalive };
  uint64_t id = 0;
  Kind kind = Kind::kChunk;
  BulkChunk* chunk = nullptr;          // kChunk
  BulkOperation* operation = nullptr;  // kNotification
  uint32_t sequence = 0;               // kNotification
};

// Posted requests in the order of the send queue, at most as many as that has slots.
class BulkRequests {
 public:
  void Prepare(uint32_t capacity) {
    if (ring_.size() < capacity) ring_.resize(capacity);
  }
  bool empty() const { return head_ == tail_; }
  const BulkRequest& front() const { return ring_[head_ % ring_.size()]; }
  void PushBack(const BulkRequest& request) { ring_[tail_++ % ring_.size()] = request; }
  BulkRequest PopFront() { return ring_[head_++ % ring_.size()]; }
  BulkRequest PopBack() { return ring_[--tail_ % ring_.size()]; }

 private:
  std::vector<BulkRequest> ring_;
  uint64_t head_ = 0, tail_ = 0;
};

struct BulkRail {
  // kEnding: drained, and its queue pair is being destroyed.
  enum class State : uint8_t { kDown, kLive, kDraining, kEnding };
  State state = State::kDown;
  uint16_t generation = 0;
  std::unique_ptr<QueuePair> queue_pair;
  BulkRequests under_way;
  Chunks again;  // of a failed queue pair
  uint64_t bytes_under_way = 0;
  uint32_t chunks_under_way = 0;
  uint32_t reads_under_way = 0;  // of the chunks
  uint32_t notifications_under_way = 0;
  uint32_t receives_missing = 0;
  int64_t active_ns = 0;
  int64_t drain_until_ns = 0;
  // Takes over when the older queue pair is drained.
  std::unique_ptr<QueuePair> successor;
  uint16_t successor_generation = 0;
};

}  // namespace penstock::transport::rdma
