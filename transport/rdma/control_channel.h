// The control plane of an rdma connection: frames in numbered packets over one queue pair at a
// time, and over the next one when that fails.
//
// Sending. A frame is written straight into the registered ring. While few packets are under way a
// packet leaves with every frame; else, or when frames come too fast for that (see pacer.h), they
// gather until a packet is full, a completion makes room, or somebody waits (kFlush). What is left
// unsent has an owner, always: the keeper thread, which the send queue's completion channel or the
// pacer's period wakes. Packets stay in the
// ring until the peer acknowledges them, so that a new queue pair repeats exactly those that the
// peer has not received.
//
// Receiving has two steps. Receive takes packets from the completion queue: it checks the header
// and takes what the sending side needs from it, on any thread. Deliver hands their frames to the
// handler, on the receiver's thread, and gives the slots back. A packet whose fence is not reached
// waits, and those behind it.
//
// Locks: receive_mutex_ before send_mutex_; no handler or callback runs under either, except the
// wakers.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "transport/rdma/bulk_engine.h"
#include "transport/rdma/domain.h"
#include "transport/rdma/pacer.h"
#include "transport/rdma/queue_pair.h"
#include "transport/rdma/rdma.h"
#include "transport/rdma/retained_ring.h"
#include "transport/waker.h"

namespace penstock::transport::rdma {

class ControlChannel {
 public:
  // Completion channels are added to the epoll descriptors of who sleeps on them.
  ControlChannel(std::shared_ptr<Domain> domain, BulkEngine& bulk, const RdmaOptions& options,
                 Waker& receiver, Waker& keeper, int receiver_epoll, int keeper_epoll);
  ~ControlChannel();
  Status Start();  // maps the memory

  // --- the queue pair (keeper and mender) ---
  Result<QueuePairShape> ShapeFor(Domain::Device& device);
  // The slots that hold no packet, for a queue pair that is about to be connected.
  Status PostReceives(QueuePair& queue_pair, Domain::Device& device);
  // The queue pair did not get connected and is gone.
  void TakeBackReceives();
  // From now on packets travel here. `peer_received`: newest number that the peer has; what follows
  // is sent again. False if the peer says what cannot be.
  bool Install(std::unique_ptr<QueuePair> queue_pair, uint32_t peer_slots, uint64_t peer_received);
  // Breaks and drains the queue pair and takes what has arrived on it.
  void Remove();
  // The connection manager says that the queue pair is gone.
  void ReportDown(const std::string& reason);
  void OnDeviceEvent(const DeviceEvent& event);
  bool up() const { return up_.load(std::memory_order_acquire); }
  bool installed() const;
  std::string down_reason() const;
  uint64_t received() const;  // newest packet number

  // --- sending ---
  Outcome Reserve(uint32_t bytes, std::byte** slot);
  // Returns what the frame itself says to be its length; if that is not `used`, or not possible,
  // nothing is sent.
  uint32_t Commit(uint32_t used, uint32_t flags);
  uint32_t reserved_bytes() const;
  void Flush();
  void Announce();     // tells the peer which rails live
  void SendGoodbye();  // the last packet
  bool drained();      // everything committed has been sent and completed
  void Close();        // Reserve fails from now on

  // --- keeper ---
  void OnSendEvent();
  // Completions, the unsent tail, and received acknowledgements if that is what it waits for.
  void Pump();
  bool starved() const { return starved_.load(std::memory_order_relaxed); }
  // When Pump should be called although nothing happens.
  Deadline next_pump() const;
  void Keepalive();

  // --- receiver ---
  // Takes what has arrived; true if there was anything.
  bool Receive();
  // At most `budget` frames; false in *fine when the connection must end (malformed says why).
  int Deliver(int budget, Handler& handler, bool* fine);
  bool deliverable();  // Deliver would do something
  bool Arm();          // false: look again first
  void OnReceiveEvent();
  bool is_malformed() const { return is_malformed_.load(std::memory_order_acquire); }
  const std::string& malformed() const { return malformed_; }
  bool goodbye() const { return goodbye_.load(std::memory_order_acquire); }
  bool all_delivered();
  bool waiting();  // packets have arrived that Deliver has not begun
  // The rails that the peer uses.
  std::array<uint16_t, kMaxRails> peer_live();

  uint64_t frames_sent() const { return frames_sent_.load(std::memory_order_relaxed); }
  uint64_t bytes_sent() const { return bytes_sent_.load(std::memory_order_relaxed); }
  uint64_t frames_received() const { return frames_received_.load(std::memory_order_relaxed); }
  uint64_t bytes_received() const { return bytes_received_.load(std::memory_order_relaxed); }
  uint64_t packets_sent() const { return packets_sent_.load(std::memory_order_relaxed); }
  uint64_t packets_received() const { return packets_received_.load(std::memory_order_relaxed); }

  void AbandonAfterFork();

 private:
  struct DeviceState {  // what belongs to a device that a control queue pair has used
    Domain::Device* device = nullptr;
    ibv_mr* memory = nullptr;
    ibv_comp_channel* send_channel = nullptr;
    ibv_comp_channel* receive_channel = nullptr;
  };
  struct Packet {                  // sent and not released
    uint64_t offset = 0, end = 0;  // of the payload: in the ring's memory; position behind it
    uint64_t request = 0;          // wr_id that must be done before release; 0: none
    uint32_t bytes = 0;
    uint16_t flags = 0;
  };
  struct Arrived {
    uint32_t slot = 0;
    uint32_t payload = 0;
    std::array<uint32_t, kMaxRails> fence{};
  };
  enum class SlotState : uint8_t { kFree, kPosted, kHeld };

  static constexpr uint32_t kRecords = 1024;  // packets not released: more than slots and sends
  static constexpr uint32_t kMostSlots = 512;
  static constexpr uint32_t kMostPosts = 16;  // one doorbell
  static constexpr uint32_t kRepostBatch = 8;

  Result<DeviceState*> StateFor(Domain::Device& device);
  const DeviceState* StateOf(const QueuePair& queue_pair) const;

  // Under send_mutex_.
  void PostData(bool flush);
  void CutAndPost(bool flush);
  bool PostNumbered();
  void NumberPacket(const RetainedRing::Run& run, uint16_t flags);
  uint32_t credits() const;
  bool Reap();
  void ReleasePackets();
  void SendHeaderOnly(uint16_t flags);
  void FailLink(const std::string& reason);

  // Under receive_mutex_.
  bool TakePacket(uint32_t slot, uint32_t bytes, uint64_t* acknowledged);
  bool Malformed(const std::string& reason);
  void PostFreeSlots();
  void CountReposted();

  bool Flushed();
  void OnAcknowledged(uint64_t acknowledged);
  void GiveBack(uint32_t slot);
  void ReturnCredits();

  const std::shared_ptr<Domain> domain_;
  Verbs& verbs_;
  BulkEngine& bulk_;
  const RdmaOptions options_;
  Waker& receiver_;
  Waker& keeper_;
  const int receiver_epoll_, keeper_epoll_;

  // One mapping: ring, headers, slots.
  std::byte* memory_ = nullptr;
  size_t memory_bytes_ = 0;
  const size_t ring_bytes_;
  PacketHeader* headers_ = nullptr;
  std::byte* slots_ = nullptr;
  std::vector<std::unique_ptr<DeviceState>> devices_;  // grows only; under receive_mutex_

  std::atomic<bool> up_{false};
  std::unique_ptr<QueuePair> queue_pair_;  // changed under both locks
  const DeviceState* device_ = nullptr;    // of queue_pair_

  mutable std::mutex send_mutex_;
  std::unique_ptr<RetainedRing> ring_;
  std::vector<Packet> packets_{kRecords};
  uint64_t numbered_ = 0;      // newest packet made
  uint64_t posted_ = 0;        // newest packet posted on this queue pair
  uint64_t acknowledged_ = 0;  // by the peer
  uint64_t released_ = 0;
  uint32_t peer_slots_ = 0;
  uint32_t unsignalled_ = 0;
  Pacer pacer_;
  uint64_t acknowledged_to_peer_ = 0;
  bool send_armed_ = false;
  bool closed_ = false, goodbye_sent_ = false, wants_room_ = false;
  std::string down_reason_;
  std::atomic<bool> starved_{false};
  std::atomic<uint64_t> frames_sent_{0}, bytes_sent_{0}, packets_sent_{0};

  mutable std::mutex receive_mutex_;
  std::vector<SlotState> slot_states_;
  std::vector<Arrived> arrived_;  // a ring of kMostSlots
  uint64_t arrived_head_ = 0, arrived_tail_ = 0;
  uint64_t received_ = 0;
  uint64_t given_back_ = 0;  // packets whose slot holds them no more
  uint32_t free_slots_ = 0;
  std::atomic<uint64_t> reposted_{0};  // what the peer may be told
  std::array<uint16_t, kMaxRails> peer_live_{};
  std::string malformed_;  // written once, before is_malformed_
  std::atomic<bool> is_malformed_{false};
  std::atomic<bool> goodbye_{false};
  std::atomic<uint64_t> packets_received_{0};

  // The receiver's own.
  bool has_current_ = false;
  Arrived current_;
  uint32_t current_at_ = 0;
  std::unique_ptr<std::byte[]> joined_;  // a frame of several packets
  uint32_t joined_bytes_ = 0, joined_wanted_ = 0;
  std::atomic<uint64_t> frames_received_{0}, bytes_received_{0};
};

}  // namespace penstock::transport::rdma
