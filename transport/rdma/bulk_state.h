// What a bulk engine consists of, for the files that implement it: bulk_operations.cc (what a move
// still has to do), bulk_order.cc (moves over where recent Puts wrote), bulk_posting.cc (chunks
// onto rails), bulk_notification.cc (a Put's ends), bulk_completion.cc (what the device says) and
// bulk_failure.cc (rails that end). bulk_engine.cc is the face and takes the lock; everything here
// expects it held.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "transport/completion_queue.h"
#include "transport/rdma/bulk_engine.h"
#include "transport/rdma/domain.h"
#include "transport/rdma/rail.h"
#include "transport/rdma/rdma.h"

namespace penstock::transport::rdma {

inline constexpr int64_t kDrainMs = 2'000;
inline constexpr uint32_t kNotifications = 64;  // under way per rail
// So long may a packet be under way in a fabric.
inline constexpr int64_t kLatePacketNs = 1'000'000'000;
inline constexpr size_t kMostOperations = 4096;  // accepted and not yet reported
inline constexpr size_t kRecentPuts = 256;

inline uint32_t BulkSendDepth(const RdmaOptions& options) {
  return options.bulk_depth + kNotifications + 2 * kReservedSendSlots;
}

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

  // Holds the lock. At its end, without it, spent queue pairs are destroyed, and whom it concerns
  // is told what has changed.
  class Turn {
   public:
    explicit Turn(State& state) : state_(state), lock_(state.mutex) {}
    ~Turn();

   private:
    State& state_;
    std::unique_lock<std::mutex> lock_;
  };

  struct RecentPut {
    uint64_t address, bytes;
    uint32_t rail;
    uint16_t generation;
    uint32_t sequence;  // of its notification
  };

  // A queue pair that a newer one replaces before its turn has come. The peer may have used it all
  // the same: what it has notified there is counted before the queue pair goes.
  struct Discarded {
    std::unique_ptr<QueuePair> queue_pair;
    uint32_t rail;
    uint32_t receives_missing;
    int64_t until_ns;
  };

  // To be destroyed. That of a drained rail goes before what it carried is given to others.
  struct Spent {
    std::unique_ptr<QueuePair> queue_pair;
    uint32_t rail;
    bool drained;
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
  std::vector<Discarded> discarded;
  std::vector<Spent> spent;
  Pool<BulkOperation, &BulkOperation::link> operation_pool;
  Pool<BulkChunk, &BulkChunk::link> chunk_pool;
  Operations operations;
  WaitingOperations waiting;
  DueOperations due;
  LateOperations late;
  uint64_t queued = 0;                 // chunks of `waiting`
  bool post_again = false;             // a device had no room although there was a slot
  std::vector<RecentPut> recent_puts;  // that the peer may not see yet
  // The newest notifications of Puts that found no room there: every move waits for those.
  std::array<uint32_t, kMaxRails> forgotten{};
  std::array<uint16_t, kMaxRails> forgotten_generation{};
  std::array<uint32_t, kMaxRails> next_sequence{};
  std::array<uint32_t, kMaxRails> peer_fence{};
  std::array<uint16_t, kMaxRails> peer_ended{};
  int64_t stranded_checked_ns = 0;
  bool closed = false;
  std::string failure;  // why the connection cannot go on; written once, before `failed`
  bool wants_wake = false, changed = false;  // wake and rails_changed are due

  std::array<std::atomic<uint32_t>, kMaxRails> fence{};  // completed, or received when passive
  std::array<std::atomic<uint16_t>, kMaxRails> live{}, ended{};
  std::atomic<bool> failed{false};
  std::atomic<uint64_t> bytes_sent{0}, bytes_received{0}, repeated{0};

  BulkChunk& NextChunk(BulkOperation& operation);
  void Requeue(BulkChunk& chunk);
  void Finish(BulkOperation& operation);
  void MaybeFinish(BulkOperation& operation);
  void DropQueued(BulkOperation& operation);
  void Remember(const BulkOperation& put, uint32_t rail, uint32_t sequence);
  void OrderAfterPuts(BulkOperation& operation);
  bool Eligible(const BulkOperation& operation, uint32_t rail) const;
  void ExpectLatePackets(BulkOperation& put, uint32_t rail);
  bool MayBeWritten(const BulkOperation& put) const;
  void FinishLate();
  void OnPeerEnded(const std::array<uint16_t, kMaxRails>& generations);
  void End(uint32_t rail, uint16_t generation);
  void OnPeerFence(const std::array<uint32_t, kMaxRails>& reached);
  void PumpAll();
  void Pump(uint32_t rail, uint64_t most);
  void PutOn(BulkRail& state, BulkChunk& chunk, uint32_t rail);
  void TakeOff(BulkRail& state, BulkChunk& chunk, uint32_t rail);
  bool PostList(uint32_t rail, ibv_send_wr* requests, uint32_t count);
  void Notify(BulkOperation& operation, uint32_t rail);
  void NotifyWhereDue(BulkOperation& operation);
  void NotifyDue();
  bool Reap(uint32_t rail);
  void OnDone(uint32_t rail, const BulkRequest& request);
  void OnFailed(uint32_t rail, const BulkRequest& request, ibv_wc_status status);
  bool TakeReceives(uint32_t rail, QueuePair& queue_pair, uint32_t* missing, ibv_wc_status* failed);
  bool ReapReceives(uint32_t rail);
  bool ReapDiscarded(int64_t now);
  void GiveUp(const std::string& reason);
  void BreakRail(uint32_t rail, const std::string& reason);
  void InstallSuccessor(uint32_t rail);
  bool Drained(uint32_t rail) const;
  void EndDrain(uint32_t rail);
  void FinishDrain(uint32_t rail);
  void Discard(uint32_t rail, uint16_t generation, std::unique_ptr<QueuePair> queue_pair);
  void FailStranded(int64_t now);
  void Keepalive(uint32_t rail, int64_t now);
  bool PollAll();
};

}  // namespace penstock::transport::rdma
