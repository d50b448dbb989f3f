// What a bulk engine consists of, for the files that implement it: bulk_operations.cc (what a move
// still has to do), bulk_order.cc (moves over where recent Puts wrote), bulk_posting.cc (chunks
// onto rails), bulk_notification.cc (a Put's ends), bulk_completion.cc (what the device says) and
// bulk_failure.cc (rails that end). bulk_engine.cc is the face and takes the lock; everything here
// expects it held.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "transport/completion_queue.h"
#include "transport/rdma/bulk_engine.h"
#include "transport/rdma/domain.h"
#include "transport/rdma/rail.h"
#include "transport/rdma/rdma.h"

namespace penstock::transport::rdma {

inline constexpr int64_t kDrainMs = 2'000;
inline constexpr uint32_t kNotifications = 64;  // under way per rail

// Of counts modulo 2^32.
inline bool Covers(uint32_t reached, uint32_t wanted) {
  return static_cast<int32_t>(reached - wanted) >= 0;
}

inline int64_t KeepaliveNs(const RdmaOptions& options) {
  return int64_t{options.keepalive_ms} * 1'000'000;
}

struct BulkEngine::State {
  State(std::shared_ptr<Domain> domain, const RdmaOptions& options, bool initiator,
        CompletionQueue& completions, std::function<void()> wake,
        std::function<void()> rails_changed);

  struct RecentPut {
    uint64_t address, bytes;
    uint32_t rail;
    uint16_t generation;
    uint32_t sequence;  // of its notification
  };

  const std::shared_ptr<Domain> domain;
  Verbs& verbs;
  const RdmaOptions options;
  const bool initiator;
  CompletionQueue& completions;
  const std::function<void()> wake, rails_changed;
  const int epoll;

  std::mutex mutex;
  std::map<ibv_context*, ibv_comp_channel*> channels;
  std::array<BulkRail, kMaxRails> rails;
  std::list<std::unique_ptr<BulkOperation>> operations;
  std::deque<BulkChunk> queue;
  std::deque<RecentPut> recent_puts;  // that the peer may not see yet
  // The newest notifications of Puts that found no room there: every move waits for those.
  std::array<uint32_t, kMaxRails> forgotten{};
  std::array<uint16_t, kMaxRails> forgotten_generation{};
  std::array<uint32_t, kMaxRails> next_sequence{};
  std::array<uint32_t, kMaxRails> peer_fence{};
  bool closed = false;
  bool changed = false;  // rails_changed is due

  std::array<std::atomic<uint32_t>, kMaxRails> fence{};  // completed, or received when passive
  std::array<std::atomic<uint16_t>, kMaxRails> live{};
  std::atomic<uint64_t> bytes_sent{0}, bytes_received{0}, repeated{0};

  void Finish(BulkOperation& operation);
  void MaybeFinish(BulkOperation& operation);
  void DropQueued(BulkOperation& operation);
  void Remember(const BulkOperation& put, uint32_t rail, uint32_t sequence);
  void OrderAfterPuts(BulkOperation& operation);
  bool Eligible(const BulkChunk& chunk, uint32_t rail) const;
  void PumpAll();
  void Pump(uint32_t rail, uint64_t most);
  bool PostList(uint32_t rail, ibv_send_wr* requests, uint32_t count);
  void Notify(BulkOperation& operation, uint32_t rail);
  void NotifyWhereDue(BulkOperation& operation);
  bool Reap(uint32_t rail);
  void OnDone(uint32_t rail, const BulkRequest& request);
  void OnFailed(uint32_t rail, const BulkRequest& request, ibv_wc_status status);
  bool ReapReceives(uint32_t rail);
  void BreakRail(uint32_t rail, const std::string& reason);
  bool Drained(uint32_t rail) const;
  void FinishDrain(uint32_t rail);
  void Keepalive(uint32_t rail, int64_t now);
  bool PollAll();
};

}  // namespace penstock::transport::rdma
