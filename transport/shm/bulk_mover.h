// The server's half of bulk moves. One thread does all of them, in chunks:
//
//   - memory that the client has shared is read and written where it is;
//   - anything else is reached through the slots of the shared segment: of a Get the client's
//     BulkServant fills a slot and this thread empties it, of a Put the other way round. While one
//     side copies a chunk, the other copies the next.
//
// Slots are used in turn and answered in order, so the two threads agree on everything by two
// numbers. What a slot is used for is remembered here, in private memory; of the client's answer
// only the status is read, once.
#pragma once

#include <atomic>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <thread>

#include "transport/completion_queue.h"
#include "transport/region_table.h"
#include "transport/shm/link.h"
#include "transport/shm/shared_memory.h"
#include "transport/transport.h"

namespace penstock::transport::shm {

class BulkMover {
 public:
  BulkMover(Link& link, Segment& segment, CompletionQueue& completions);
  ~BulkMover() { Stop(); }

  struct Move {
    BulkOp op = kBulkGet;
    std::shared_ptr<Region> local;
    uint64_t local_offset = 0, remote_offset = 0, bytes = 0, cookie = 0;
    KeyBlob key{};
    std::shared_ptr<Mapping> shared;  // null: through slots
    uint64_t issued = 0;
    uint32_t in_flight = 0;
    BulkStatus status = BulkStatus::kOk;
  };
  // The move is sound on this side.
  Outcome Submit(Move move);

  void Start();
  // The link is closed before. Every move is reported.
  void Stop();
  // Wakes the thread: the link has closed.
  void Kick();
  bool finished() const { return finished_.load(std::memory_order_acquire); }

  uint64_t bytes_sent() const { return bytes_sent_.load(std::memory_order_relaxed); }
  uint64_t bytes_received() const { return bytes_received_.load(std::memory_order_relaxed); }
  uint64_t copied() const { return copied_.load(std::memory_order_relaxed); }

 private:
  struct Chunk {
    std::list<Move>::iterator move;
    uint64_t offset = 0;  // in the move
    uint32_t bytes = 0;
  };

  void Run();
  bool TakeSubmissions();
  bool MoveShared();   // a chunk of the oldest move of shared memory
  bool StartChunk();   // the next chunk into a free slot
  bool FinishChunk();  // the oldest chunk, if it is answered
  // Copies between the move's local memory and `other`. False if that memory is gone.
  bool CopyChunk(Move& move, uint64_t offset, std::byte* other, uint64_t bytes);
  void FinishIfDone(std::list<Move>::iterator move);
  void FinishAll();
  void Sleep();

  Link& link_;
  Segment& segment_;
  CompletionQueue& completions_;
  std::thread thread_;
  std::atomic<bool> finished_{true};
  std::atomic<uint64_t> bytes_sent_{0}, bytes_received_{0}, copied_{0};

  std::mutex mutex_;
  std::deque<Move> submitted_;  // under mutex_
  size_t unfinished_ = 0;       // under mutex_
  bool accepting_ = false;      // under mutex_

  // The thread's own.
  std::list<Move> moves_;
  std::deque<std::list<Move>::iterator> to_issue_, shared_;  // with chunks left to start
  Chunk chunks_[kBulkSlots];
  uint32_t started_ = 0, answered_ = 0;  // chunks through slots, ever
};

}  // namespace penstock::transport::shm
