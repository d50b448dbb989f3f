// One rail as the bulk engine sees it, and the pieces of operations that travel on it. Plain data;
// the engine's lock protects it.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "transport/rdma/queue_pair.h"
#include "transport/rdma/wire.h"
#include "transport/transport.h"

namespace penstock::transport::rdma {

struct BulkOperation;

struct BulkChunk {
  BulkOperation* operation = nullptr;
  uint64_t offset = 0;  // from the operation's start
  uint64_t bytes = 0;
};

struct BulkOperation {
  uint64_t cookie = 0;
  bool put = false;
  MemoryRegion* region = nullptr;
  uint64_t local = 0;   // address
  uint64_t remote = 0;  // address
  uint64_t bytes = 0;
  RdmaKeyBlob key;
  BulkStatus status = BulkStatus::kOk;
  uint64_t chunks_left = 0;  // queued or under way
  uint64_t chunks_queued = 0;
  // A Put: what each rail has carried and not yet confirmed by a notification. If the rail dies,
  // it goes again: a completed WRITE alone does not say that the peer can see the bytes. When a
  // notification is posted, it takes `carried` to `promised`, because a chunk that comes to the
  // rail later is not covered by it.
  std::array<std::vector<BulkChunk>, kMaxRails> carried, promised;
  std::array<bool, kMaxRails> notifying{};  // its notification is under way on that rail
  // A move to or from where recent Puts wrote: it may start on a rail when the peer has seen as
  // many notifications on each other rail, and also on this one if its queue pair is a newer one.
  bool after_puts = false;
  std::array<uint32_t, kMaxRails> after{};
  std::array<uint16_t, kMaxRails> after_generation{};
};

struct BulkRequest {  // a posted work request, in the order of the send queue
  enum class Kind : uint8_t { kChunk, kNotification, kKeepalive };
  uint64_t id = 0;
  Kind kind = Kind::kChunk;
  BulkChunk chunk;        // kNotification: only the operation
  uint32_t sequence = 0;  // kNotification
};

struct BulkRail {
  enum class State : uint8_t { kDown, kLive, kDraining };
  State state = State::kDown;
  uint16_t generation = 0;
  std::unique_ptr<QueuePair> queue_pair;
  std::deque<BulkRequest> under_way;
  std::vector<BulkChunk> again;  // of a failed queue pair
  uint64_t bytes_under_way = 0;
  uint32_t chunks_under_way = 0;
  uint32_t notifications_under_way = 0;
  uint32_t receives_missing = 0;
  int64_t active_ns = 0;
  int64_t drain_until_ns = 0;
};

}  // namespace penstock::transport::rdma
