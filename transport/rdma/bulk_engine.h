// Bulk data over one or more rails.
//
// A rail is a bulk queue pair between one local and one remote device. The server (the initiator)
// cuts every Get and Put into chunks and keeps them in one queue, from which each live rail takes
// as it has room: a slow rail simply takes fewer. A Put's chunks are WRITEs; when a rail has
// finished all of a Put's chunks that it carried, it sends a 0-byte WRITE_WITH_IMM, and the peer
// counts those per rail. A packet of the control channel says how many the receiver must have seen
// before its frames count (see wire.h), which makes the data visible before the news without a
// round trip.
//
// READs are bounded by what the queue pair was granted besides, so that none blocks its send queue.
//
// When a rail fails, its queue pair is broken and drained first; then its chunks go back to the
// head of the queue for the other rails. A READ or WRITE can be repeated without harm as long as
// its operation has not been reported. With no live rail the chunks wait until a rail comes back or
// the connection ends. A Put whose old packets may still be under way is not reported before the
// peer lets none of them in (bulk_late.cc).
//
// A notification carries its number, which is never used twice on a rail, whatever becomes of the
// queue pair: so a notification that arrived although its sender never learnt of it does no harm.
// A completed WRITE alone proves nothing about what the peer can see, so a Put's chunks are kept
// until their rail's notification is through, and go again by another rail if it is not.
//
// A peer's refusal (remote access error) fails the operation with kRefused; it breaks the queue
// pair as well, which is then made anew. What this end's own device refuses (local protection or
// length error, a request that cannot be posted) it would refuse again on each queue pair: it ends
// the connection, and so does a peer that refuses the 0-byte writes.
//
// Rails are made by the connection (it owns rdma_cm): Admit and Drop tell the engine.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "transport/completion_queue.h"
#include "transport/rdma/device_events.h"
#include "transport/rdma/domain.h"
#include "transport/rdma/queue_pair.h"
#include "transport/rdma/rdma.h"

namespace penstock::transport::rdma {

class BulkEngine {
 public:
  // `wake` makes the keeper thread call Poll soon; `rails_changed` says that live() has changed (a
  // packet should tell the peer). Both are called without the engine's lock, from any thread.
  BulkEngine(std::shared_ptr<Domain> domain, const RdmaOptions& options, bool initiator,
             CompletionQueue& completions, std::function<void()> wake,
             std::function<void()> rails_changed);
  ~BulkEngine();

  // What the connection needs to make a bulk queue pair on this device: the channel is the
  // engine's, its descriptor is in event_fd().
  Result<QueuePairShape> ShapeFor(Domain::Device& device);
  // Posts the receives of a queue pair that is about to be connected or accepted.
  Status PostReceives(QueuePair& queue_pair);

  // A settled queue pair becomes rail `rail`. An older generation there is broken, drained and
  // destroyed first.
  void Admit(uint32_t rail, uint16_t generation, std::unique_ptr<QueuePair> queue_pair);
  // The rail is known to be dead (DISCONNECTED, device gone, port down, the peer says so). Ignored
  // unless the generation is the present one.
  void Drop(uint32_t rail, uint16_t generation, const std::string& reason);
  // A device says that queue pairs are no good any more. And whether there is a live one besides.
  void OnDeviceEvent(const DeviceEvent& event);
  bool LivesWithout(const DeviceEvent& event) const;
  // Generations in use; 0 for a rail that is down, or kRailRefused.
  std::array<uint16_t, kMaxRails> live() const;
  // The newest generations that let nothing in any more.
  std::array<uint16_t, kMaxRails> ended() const;

  // Initiator only. Any thread.
  Outcome Get(MemoryRegion& target, uint64_t target_offset, const MemoryKey& source,
              uint64_t source_offset, uint64_t bytes, uint64_t cookie);
  Outcome Put(MemoryRegion& source, uint64_t source_offset, const MemoryKey& target,
              uint64_t target_offset, uint64_t bytes, uint64_t cookie);

  // Fences. What this end's packets say: notifying writes completed per rail. And whether this end
  // has received as many as a packet asks for; polls the rails if not. Counts go on across
  // generations of a rail. Any thread.
  std::array<uint32_t, kMaxRails> fence() const;
  bool FenceReached(const std::array<uint32_t, kMaxRails>& fence);
  // What the peer's packet says: the notifications that it has received (a move of what a Put wrote
  // goes by another queue pair only once this covers the Put), and the generations that are broken
  // at its end.
  void OnPeerState(const std::array<uint32_t, kMaxRails>& fence,
                   const std::array<uint16_t, kMaxRails>& ended);

  // The keeper's: handle completions and start chunks; true if anything happened. Arm asks for
  // events and returns false if there is something to poll already. event_fd becomes readable then.
  bool Poll();
  bool Arm();
  int event_fd() const;
  // Something went wrong that would go wrong again on any rail: the connection must end. `failure`
  // says what it was.
  bool failed() const;
  const std::string& failure() const;
  // When Poll should be called again although nothing happened (keepalive, drain deadlines).
  Deadline next_tick() const;

  // Reports every pending operation kClosed; breaks, drains (at most drain_ms) and destroys all
  // queue pairs. Afterwards no local memory is touched.
  void Close(int drain_ms);

  uint64_t bytes_sent() const;
  uint64_t bytes_received() const;
  uint64_t chunks_repeated() const;

 private:
  Outcome Submit(bool put, MemoryRegion& local, uint64_t local_offset, const MemoryKey& remote,
                 uint64_t remote_offset, uint64_t bytes, uint64_t cookie);
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace penstock::transport::rdma
