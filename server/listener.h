// The supervisor: accepts connections, checks who is there, starts one worker process per session
// and hands it the two sockets. It never opens the driver and never blocks on a peer.
//
//   control socket:  hello -> challenge -> proof -> (worker starts) -> welcome
//   bulk socket:     bulk hello -> bulk welcome -> both sockets go to the worker
//
// Everything before the hand-over has a deadline and the number of such connections is bounded, so
// a peer that says nothing costs a descriptor for a few seconds, and nobody else a moment. One
// thread, one poll loop.
#pragma once

#include <sys/types.h>

#include <list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/clock.h"
#include "common/result.h"
#include "common/unique_fd.h"
#include "control/server.h"
#include "pool/slots.h"
#include "protocol/hello.h"
#include "server/options.h"
#include "server/probe.h"
#include "server/process.h"
#include "transport/tcp/socket.h"

namespace penstock::server {

class Supervisor final : private control::Answers {
 public:
  // Probes the driver and starts to listen. A driver whose library cannot be loaded is an error;
  // one that loads and does not work is logged, and clients are refused with its words.
  static Result<std::unique_ptr<Supervisor>> Start(const Options& options);
  ~Supervisor() override;

  uint16_t port() const { return listener_.port(); }
  // Until SIGTERM or SIGINT (blocked by Start, read from a descriptor).
  Status Run();

 private:
  struct Peer;     // a socket that is not handed over yet
  struct Session;  // a worker process

  explicit Supervisor(transport::tcp::Listener listener);

  void Accept();
  void MakeRoom();
  void OnReadable(Peer& peer);
  bool TakeBlob(Peer& peer, std::vector<std::byte>* blob);
  void OnBlob(Peer& peer, std::span<const std::byte> blob);
  void OnHello(Peer& peer, std::span<const std::byte> blob);
  bool RdmaIsOffered() const;
  bool ShmIsOffered() const;
  uint32_t Offered() const;  // GPUs
  void WelcomeManager(Peer& peer);
  control::Status Report() override;
  uint32_t Drain() override;
  void Resume() override;
  bool OnSignal();
  void OnProof(Peer& peer, std::span<const std::byte> blob);
  void OnBulkHello(Peer& peer, std::span<const std::byte> blob);
  Status PlanSlots();
  Status StartSession(Peer& peer, const std::vector<uint32_t>& gpus);
  void OnWorkerMessage(Session& session);
  void OnWorkerEnd(Session& session);
  void HandOver(Session& session, Peer& bulk);
  void Queue(Peer& peer, std::span<const std::byte> blob);
  void Flush(Peer& peer);
  bool MayLog();
  // Says why to the peer, logs one line, and closes once that is sent.
  void Refuse(Peer& peer, Refusal refusal, const std::string& text);
  void CheckDeadlines();
  void Sweep();

  // Held while Run works, but not while it waits: the control plane looks at everything below.
  std::mutex state_mutex_;
  bool draining_ = false;  // no new sessions
  bool ending_ = false;    // and the daemon ends with the last one, or when patience_ does
  Deadline patience_ = Deadline::Never();
  Options options_;
  Key key_;
  std::string library_;
  // Where the workers' simulated GPUs keep count of their common memory. Invalid for a real driver,
  // and where SIMGPU_SHARED already names another place.
  UniqueFd simulated_memory_;
  Inventory inventory_;
  std::string driver_error_;          // empty if the driver works
  std::optional<pool::Slots> slots_;  // empty: every program sees every GPU
  transport::tcp::Listener listener_;
  UniqueFd signals_;
  std::list<Peer> peers_;
  std::list<Session> sessions_;
  uint64_t next_session_ = 1;
  int64_t log_budget_ = 0, log_budget_ns_ = 0;  // lines about strangers; when they were earned
  uint64_t unlogged_ = 0;
  std::unique_ptr<control::Server> control_;
  int64_t crowded_ns_ = 0;  // when it was last logged that strangers crowd the door
};

}  // namespace penstock::server
