// The rdma Connection: a ControlChannel and a BulkEngine over one Domain, and two threads.
//
// The keeper handles what no caller waits for: rdma_cm and device events, unsent frames, bulk
// completions, keepalive, the lifeline. It never waits for a peer. The client has a mender besides,
// which dials: a new control queue pair when the old one has failed, a bulk queue pair for each
// rail that is down, again and again, the more rarely the longer it fails.
//
// A failed control queue pair does not end the connection: both sides keep the packets that the
// other has not got, and the next queue pair starts with them. Only when none can be made for
// peer_timeout_ms, or the lifeline ends, or the peer says goodbye or nonsense, is the connection
// closed.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "common/log.h"
#include "transport/completion_queue.h"
#include "transport/rdma/bulk_engine.h"
#include "transport/rdma/cm.h"
#include "transport/rdma/control_channel.h"
#include "transport/rdma/device_events.h"
#include "transport/rdma/domain.h"
#include "transport/rdma/rail_monitor.h"
#include "transport/rdma/rdma.h"
#include "transport/thread.h"
#include "transport/waker.h"

namespace penstock::transport::rdma {

class RdmaConnection : public Connection {
 public:
  // The client's; Dial makes and connects it.
  RdmaConnection(std::shared_ptr<Verbs> verbs, const RdmaOptions& options, const Token& token,
                 bool client, std::unique_ptr<CmChannel> cm, UniqueFd lifeline);
  ~RdmaConnection() override;

  Status Prepare();
  // Client: the control queue pair and every rail that works. Server: waits for the client's.
  Status ConnectTo(const Offer& offer, Deadline deadline);
  Status AwaitPeer(Deadline deadline);
  // Server: the ids that listen live as long as the connection.
  void KeepListening(std::vector<rdma_cm_id*> ids, const Offer& offer) {
    listening_ = std::move(ids);
    offer_ = offer;
  }
  void Start();  // the threads
  void AbandonAfterFork();

  const Caps& caps() const override { return caps_; }
  Outcome Reserve(uint32_t bytes, std::byte** slot) override;
  void Commit(uint32_t used, uint32_t flags) override;
  Outcome Flush() override;
  int Poll(int budget, Handler& handler) override;
  int Wait(int budget, Handler& handler, Deadline deadline) override;
  void Interrupt() override;
  int event_fd() const override { return receiver_epoll_.get(); }
  bool Arm() override;
  Result<std::unique_ptr<MemoryRegion>> Register(void* address, size_t bytes,
                                                 Access access) override;
  Result<std::unique_ptr<MemoryRegion>> RegisterDevice(uint64_t device_address, size_t bytes,
                                                       int dmabuf, uint64_t offset) override;
  Result<std::vector<std::unique_ptr<Loopback>>> OpenLoopbacks(Deadline deadline) override;
  Outcome Get(MemoryRegion& target, uint64_t target_offset, const MemoryKey& source,
              uint64_t source_offset, uint64_t bytes, uint64_t cookie) override;
  Outcome Put(MemoryRegion& source, uint64_t source_offset, const MemoryKey& target,
              uint64_t target_offset, uint64_t bytes, uint64_t cookie) override;
  bool closed() const override { return closed_.load(std::memory_order_acquire); }
  std::string close_reason() const override;
  void Close(int drain_ms) override;
  Counters counters() const override;

 private:
  struct Dialled {
    std::unique_ptr<QueuePair> queue_pair;
    uint64_t tag = 0;
    uint16_t generation = 0;
    ConnectReply reply;
  };
  struct Pending {  // accepted, not established
    std::unique_ptr<QueuePair> queue_pair;
    uint64_t tag = 0;
    ConnectRequest request;
    uint8_t reads = 0;  // asked for
  };

  // client
  Result<uint16_t> NextGeneration(QueuePairRole role, uint32_t rail);
  Result<Dialled> DialQueuePair(QueuePairRole role, uint32_t rail, Deadline deadline);
  Result<ConnectReply> FinishDial(rdma_cm_id* id, uint64_t tag, const ConnectRequest& request,
                                  Deadline deadline);
  Result<CmEvent> Expect(uint64_t tag, rdma_cm_event_type wanted, const std::string& what,
                         Deadline deadline);
  void FindDevice(uint32_t rail);
  Status DialControl(uint32_t rail, Deadline deadline);
  Status DialRail(uint32_t rail, Deadline deadline);
  void Mend();
  bool PeerRefused(uint32_t rail);

  // server
  void OnRequest(const CmEvent& event);
  Result<Rejection> CheckRequest(const CmEvent& event, ConnectRequest* request);
  Status AcceptQueuePair(rdma_cm_id* id, const ConnectRequest& request, uint8_t peer_reads);
  void OnEstablished(Pending pending);

  // keeper
  void Keep();
  void HandleCm();
  void CheckLifeline();
  void CheckLinks();
  void Fail(const std::string& reason, LogLevel level);
  void HandleDeviceEvents();

  void Drain(int milliseconds);
  void SayGoodbye(int drain_ms);
  int Handle(int budget, Handler& handler);
  bool over();
  bool Spin(Deadline deadline);
  int spin_us() const;

  Caps caps_;
  const std::shared_ptr<Verbs> verbs_;
  const RdmaOptions options_;
  const Token token_;
  const bool client_;
  Waker receiver_, keeper_;
  UniqueFd receiver_epoll_, keeper_epoll_;
  std::unique_ptr<CmChannel> cm_;
  UniqueFd lifeline_;
  CompletionQueue completions_;
  std::shared_ptr<Domain> domain_;
  std::unique_ptr<BulkEngine> bulk_;
  std::unique_ptr<ControlChannel> control_;
  std::unique_ptr<DeviceEvents> device_events_;
  std::vector<rdma_cm_id*> listening_;
  Offer offer_;  // the client's: received; the server's: made

  std::mutex links_mutex_;
  uint64_t control_tag_ = 0;         // under links_mutex_
  uint16_t control_generation_ = 0;  // under links_mutex_
  struct RailLink {
    uint64_t tag = 0;
    uint16_t generation = 0;
    int64_t since_ns = 0;
  };
  std::array<RailLink, kMaxRails> rails_{};  // under links_mutex_
  std::vector<Pending> pending_;             // the keeper's
  // Of one attempt to dial, all steps. The packets that connect a queue pair are datagrams, which
  // rdma_cm repeats after more than 4 s; beginning anew is quicker. An attempt that takes too long
  // earns the next one twice the time.
  static constexpr int64_t kFirstDialMs = 1'000, kLastDialMs = 4'000;
  int64_t dial_ms_ = kFirstDialMs;               // who dials: ConnectTo, then the mender
  std::array<bool, kMaxRails> believed_up_{};    // the mender's
  std::array<RailMonitor, kMaxRails> monitors_;  // the mender's
  std::atomic<int64_t> lost_since_ns_{0};        // without a control queue pair; 0: there is one
  std::atomic<bool> hopeful_{false};  // rails that could not be connected may be worth a try
  std::atomic<bool> announce_{false}, lifeline_over_{false};

  std::atomic<bool> closed_{false}, leaving_{false}, stop_{false}, bulk_closed_{false},
      interrupted_{false};
  mutable std::mutex reason_mutex_;
  std::string reason_;  // under reason_mutex_
  std::mutex close_mutex_;
  std::mutex mender_mutex_;
  std::condition_variable mender_wake_;
  bool mend_now_ = false;  // under mender_mutex_
  std::thread keeper_thread_, mender_thread_;
};

}  // namespace penstock::transport::rdma
