// The shm Connection: two rings, and the server's or the client's half of bulk moves, around one
// Link.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>

#include "transport/completion_queue.h"
#include "transport/region_table.h"
#include "transport/shm/bulk_mover.h"
#include "transport/shm/bulk_servant.h"
#include "transport/shm/link.h"
#include "transport/shm/ring.h"
#include "transport/shm/shared_memory.h"
#include "transport/shm/shares.h"
#include "transport/shm/shm.h"
#include "transport/transport.h"

namespace penstock::transport::shm {

class ShmConnection : public Connection {
 public:
  ShmConnection(End here, UniqueFd socket, std::unique_ptr<Segment> segment, uint32_t max_frame);
  ~ShmConnection() override;

  void Start();
  void AbandonAfterFork();

  const Caps& caps() const override { return caps_; }
  Outcome Reserve(uint32_t bytes, std::byte** slot) override;
  void Commit(uint32_t used, uint32_t flags) override;
  Outcome Flush() override { return closed() ? Outcome::kClosed : Outcome::kOk; }
  int Poll(int budget, Handler& handler) override;
  int Wait(int budget, Handler& handler, Deadline deadline) override;
  void Interrupt() override;
  int event_fd() const override { return event_fd_.get(); }
  bool Arm() override;
  Result<std::unique_ptr<MemoryRegion>> Register(void* address, size_t bytes,
                                                 Access access) override;
  Result<std::unique_ptr<MemoryRegion>> Allocate(size_t bytes, Access access) override;
  bool Reach(const MemoryKey& key, uint64_t offset, uint64_t bytes, Access wanted,
             ReachedMemory* memory) override;
  Outcome Get(MemoryRegion& target, uint64_t target_offset, const MemoryKey& source,
              uint64_t source_offset, uint64_t bytes, uint64_t cookie) override;
  Outcome Put(MemoryRegion& source, uint64_t source_offset, const MemoryKey& target,
              uint64_t target_offset, uint64_t bytes, uint64_t cookie) override;
  bool closed() const override { return link_->closed(); }
  std::string close_reason() const override { return link_->reason(); }
  void Close(int drain_ms) override;
  Counters counters() const override;

 private:
  int HandleFrames(int budget, Handler& handler);
  // Reads what the socket has. At its end, or if the peer says nonsense, the connection is closed.
  void ReadLink();
  void OnLinkMessage(const LinkMessage& message, const UniqueFd& file);
  // The peer breaks the protocol.
  void Violation(const std::string& what);
  void Finish(const std::string& reason, LogLevel level);
  void StopSleeping();
  bool Spin(Deadline deadline);
  bool frame_ready() const { return !malformed_ && !in_.empty(); }
  bool over() const { return closed() && mover_.finished() && completions_.empty(); }
  std::shared_ptr<Mapping> FindShare(const MemoryKey& key, uint64_t offset, uint64_t bytes,
                                     Access wanted);
  Outcome Submit(BulkOp op, MemoryRegion& local, uint64_t local_offset, const MemoryKey& key,
                 uint64_t remote_offset, uint64_t bytes, uint64_t cookie);

  const Caps caps_;
  const shm::End here_;
  const std::shared_ptr<Link> link_;
  const std::unique_ptr<Segment> segment_;
  CompletionQueue completions_;
  const std::shared_ptr<RegionTable> regions_;
  RingProducer out_;
  RingConsumer in_;
  BulkMover mover_;                          // the server's
  BulkServant servant_;                      // the client's
  ShareTable shares_;                        // the server's
  const std::shared_ptr<ShareMaker> maker_;  // the client's
  UniqueFd event_fd_;                        // the socket and the waker
  std::atomic<bool> interrupted_{false};
  std::atomic<uint64_t> frames_sent_{0}, bytes_sent_{0};  // written by the producer
  std::atomic<uint64_t> frames_received_{0}, bytes_received_{0};
  std::mutex read_mutex_;   // one reader of the socket
  std::mutex close_mutex_;  // joining the threads

  // The receiver's own.
  bool malformed_ = false;  // nothing more is taken from the ring
  bool sleeping_ = false;   // our word says so
  int64_t link_read_ns_ = 0;
  int spin_credit_ = 0;
  int waits_without_spin_ = 0;
};

}  // namespace penstock::transport::shm
