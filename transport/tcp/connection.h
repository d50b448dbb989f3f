// The tcp Connection: a Sender, a receive buffer and a BulkEngine around one Lifeline.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>

#include "transport/completion_queue.h"
#include "transport/region_table.h"
#include "transport/tcp/bulk.h"
#include "transport/tcp/lifeline.h"
#include "transport/tcp/sender.h"
#include "transport/tcp/tcp.h"
#include "transport/transport.h"

namespace penstock::transport::tcp {

class TcpConnection : public Connection {
 public:
  TcpConnection(UniqueFd control, UniqueFd bulk, const TcpOptions& options);
  ~TcpConnection() override;

  void Start();
  void AbandonAfterFork();

  const Caps& caps() const override { return caps_; }
  Outcome Reserve(uint32_t bytes, std::byte** slot) override;
  void Commit(uint32_t used, uint32_t flags) override { sender_.Commit(used, flags); }
  Outcome Flush() override { return sender_.Flush(); }
  int Poll(int budget, Handler& handler) override;
  int Wait(int budget, Handler& handler, Deadline deadline) override;
  void Interrupt() override;
  int event_fd() const override { return event_fd_.get(); }
  bool Arm() override;
  Result<std::unique_ptr<MemoryRegion>> Register(void* address, size_t bytes,
                                                 Access access) override;
  Outcome Get(MemoryRegion& target, uint64_t target_offset, const MemoryKey& source,
              uint64_t source_offset, uint64_t bytes, uint64_t cookie) override;
  Outcome Put(MemoryRegion& source, uint64_t source_offset, const MemoryKey& target,
              uint64_t target_offset, uint64_t bytes, uint64_t cookie) override;
  bool closed() const override { return life_.closed(); }
  std::string close_reason() const override { return life_.reason(); }
  void Close(int drain_ms) override;
  Counters counters() const override;

 private:
  // Completions, then frames that are wholly in the buffer. Never enters the kernel for data.
  int Handle(int budget, Handler& handler);
  int HandleFrames(int budget, Handler& handler);
  // Reads what the socket has, without waiting. False when there was nothing.
  bool Receive();
  bool Spin(Deadline deadline);  // true when there is something to handle
  void EndOfControl(const std::string& reason, LogLevel level);
  bool frame_ready() const;
  // Everything that will ever come has been handled.
  bool over() const;

  const Caps caps_;
  Lifeline life_;
  CompletionQueue completions_;
  const std::shared_ptr<RegionTable> regions_;
  Sender sender_;
  BulkEngine bulk_;
  std::atomic<bool> interrupted_{false};
  std::atomic<uint64_t> frames_received_{0}, bytes_received_{0};
  mutable std::mutex close_mutex_;  // joining the threads

  // The receiver's own. Bytes [begin_, end_) of the buffer have arrived and are not handled. begin_
  // is a multiple of 8 whenever a frame starts there, so frames are aligned for their readers.
  const size_t capacity_;
  std::unique_ptr<std::byte[]> buffer_;
  size_t begin_ = 0, end_ = 0;
  bool control_over_ = false;  // nothing more will be read
  // Control socket and the receiver's waker in an epoll, which is also cheaper to sleep on than a
  // poll() of the two. Level-triggered: an edge would have to be remembered wherever data are left.
  UniqueFd event_fd_;
  int spin_credit_ = 0;
  int waits_without_spin_ = 0;
};

}  // namespace penstock::transport::tcp
