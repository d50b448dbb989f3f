// One connection to one server. Posting and calling go through here; what exists there on behalf of
// this program stands in the client's Objects, which all sessions share.
//
// A session dies when the connection closes, the server says goodbye or sends something that no
// honest server sends. From then on every call returns CUDA_ERROR_DEVICE_UNAVAILABLE: the devices
// were there and are gone, and no retry in this process brings the program's data back. One log
// line tells why. After a deliberate end (the program exits) it is CUDA_ERROR_DEINITIALIZED.
#pragma once

#include <cuda.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "interposer/core/bounce.h"
#include "interposer/core/call_stream.h"
#include "interposer/core/host_functions.h"
#include "interposer/core/objects.h"
#include "interposer/core/receiver.h"
#include "interposer/core/staging.h"
#include "interposer/core/statistics.h"
#include "protocol/hello.h"
#include "transport/transport.h"

namespace penstock::interposer {

struct SessionOptions {
  std::string server = "the server";  // HOST:PORT, for messages
  uint32_t index = 0;                 // among the client's sessions, below kMaxServers
  bool synchronous = false;           // PENSTOCK_SYNC: every call waits
  bool reserve_addresses = true;
  bool inline_copies = true;
  bool staging = true;
  bool window = true;
  bool bounce = true;          // the server deals out bounce slots
  bool volumes = true;         // and copies volumes, and between contexts
  bool host_functions = true;  // the server can have the program's functions in streams
  void (*abandon)(transport::Connection&) = nullptr;  // what a forked child does with it
};

class Session final : private ReceiverHandler {
 public:
  // Without `objects` it has its own.
  Session(std::unique_ptr<transport::Connection> connection, ParsedWelcome welcome,
          SessionOptions options, std::shared_ptr<Objects> objects = nullptr);
  ~Session() override;

  const ServerInfo& server() const { return welcome_.welcome.server; }
  const std::vector<DeviceInfo>& offered_devices() const { return welcome_.devices; }
  const SessionOptions& options() const { return options_; }
  transport::Connection& connection() { return *connection_; }
  SessionCounters& counters() { return counters_; }

  // Sends one way. A stream with a cost counts it in its window and waits while that is full,
  // outside all locks.
  CUresult Post(OutgoingCall& call, StreamRecord* stream);
  // The waiting and counting alone, before an Invoke of an operation that has a cost.
  CUresult TakeWindow(OutgoingCall& call, StreamRecord* stream);
  // Sends and waits. The waiter says where the reply goes; an incomplete one that claims success is
  // a broken server.
  CUresult Invoke(const OutgoingCall& call, ReplyWaiter* waiter);
  bool synchronous() const { return options_.synchronous; }

  // Waits until `value` of what was issued to the stream has finished.
  CUresult WaitForProgress(const OutgoingCall& origin, StreamRecord* stream, uint64_t value);
  // A staging slot, waiting while all are taken. False when the session has ended or memory is
  // short.
  bool TakeStaging(uint64_t bytes, StagingSlot* slot);
  void PutBackStaging(const StagingSlot& slot) { staging_.PutBack(slot); }
  // The program's memory is copied rather than registered.
  bool bounces() const {
    return options_.staging && options_.bounce && connection_->caps().registration_is_dear;
  }
  Bounce& bounce() { return bounce_; }
  // A bounce slot has been filled or emptied. Urgent if the server may wait for it.
  void BounceDone(const BounceDoneCommand& done, uint32_t thread, bool urgent);

  HostFunctions& host_functions() { return host_functions_; }
  // For the thread that runs host functions: receives, if nobody else does, until something has
  // arrived. `seen` is what rounds() said before it looked in vain.
  uint64_t rounds() { return receiver_.rounds(); }
  void WaitForRound(uint64_t seen);

  // CUDA_SUCCESS while alive, else what every call returns.
  CUresult state() const { return state_.load(std::memory_order_acquire); }
  // In the child of a fork: lets go of the connection without ending the parent's. Touches nothing
  // that a thread of the parent may have held.
  void AbandonAfterFork() {
    if (options_.abandon != nullptr) options_.abandon(*connection_);
  }
  // Ends the session on purpose: sends what is posted, says goodbye, closes.
  void End();

  Objects& objects() { return *objects_; }
  const std::shared_ptr<Objects>& shared_objects() const { return objects_; }
  // Which of the client's sessions this is: a bit in ModuleRecord::loaded and the like.
  uint32_t index() const { return options_.index; }
  ContextRecord primary_contexts[kMaxDevices];  // by number at the server

  // By the server's name for it, and only of this session. A primary context is found whether it is
  // active or not.
  ContextRecord* FindContext(Handle wire);

 private:
  bool OnFrame(std::span<const std::byte> frame) override;
  void OnBulkDone(uint64_t, transport::BulkStatus, uint64_t) override {}
  void OnClosed() override;
  bool ended() const override { return goodbye_; }
  bool HandleFrame(std::span<const std::byte> frame);
  bool OnBounce(uint64_t call, std::span<const std::byte> pieces);
  bool OnProgress(std::span<const std::byte> entries);
  void OnOutput(std::span<const std::byte> body);
  StreamRecord* FindStream(const ProgressEntry& entry);
  // Sends, waiting for room as long as it takes.
  CUresult Send(const OutgoingCall& call, ReplyWaiter* waiter);
  void Die(const std::string& reason);
  void Tend();  // the background thread
  void Acknowledge();

  const std::shared_ptr<Objects> objects_;
  std::unique_ptr<transport::Connection> connection_;
  const ParsedWelcome welcome_;
  const SessionOptions options_;
  const uint64_t window_;
  SessionCounters counters_;
  std::atomic<CUresult> state_{CUDA_SUCCESS};
  CallStream calls_;
  Receiver receiver_;
  Staging staging_;
  Bounce bounce_;
  HostFunctions host_functions_;
  std::string last_words_;  // why the server ends the session; touched by the leader only
  bool goodbye_ = false;    // it has said so; likewise

  std::mutex tend_mutex_;
  std::condition_variable tend_condition_;
  bool stop_ = false;  // guarded by tend_mutex_
  std::thread tender_;
};

}  // namespace penstock::interposer
