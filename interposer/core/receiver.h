// Who receives: the thread that waits.
//
// A reply must reach the thread that waits for it without a thread switch, so the first waiting
// thread (the leader) polls the connection itself, hands frames to whom they belong, and passes the
// lead on once its own reply is there. Other waiting threads (followers) sleep, each on a condition
// of its own. When nobody waits, the session's background thread takes a look now and then.
// docs/decisions/0004 has the reasons.
//
// At most one thread is the leader; only it calls Poll or Wait of the connection.
#pragma once

#include <cuda.h>

#include <array>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

#include "protocol/frame.h"
#include "transport/transport.h"

namespace penstock::interposer {

// What a waiting thread does itself for its call meanwhile: the copies between bounce slots and the
// program's memory. Not done by the leader, so that the copies of several threads run at once and
// nobody's reply waits behind them.
class PieceServer {
 public:
  explicit PieceServer(uint64_t bytes) : bytes_(bytes) {}
  virtual ~PieceServer() = default;
  // A piece within the copy, of at most a slot.
  virtual void Serve(uint64_t call, const BouncePiece& piece) = 0;
  bool Holds(const BouncePiece& piece) const {
    return piece.slot < kBounceSlots && piece.bytes <= kBounceSlotBytes && piece.offset <= bytes_ &&
           piece.bytes <= bytes_ - piece.offset;
  }

 protected:
  const uint64_t bytes_;  // of the whole copy
};

// A thread that waits for the reply to one call. Lives on its stack.
struct ReplyWaiter {
  // Where the reply goes: first its fixed part, then the rest, into `direct` if given, else `tail`.
  std::span<std::byte> fixed;
  std::span<std::byte> direct;
  std::vector<std::byte>* tail = nullptr;
  PieceServer* pieces = nullptr;  // if the call's data goes through bounce slots

  uint64_t sequence = 0;  // of the call; set when it is sent
  bool done = false;      // guarded by the receiver's lock, as is all below
  CUresult result = CUDA_ERROR_UNKNOWN;
  bool complete = false;                          // the fixed part was there
  bool serving = false;                           // the thread is at its pieces and does not sleep
  std::array<BouncePiece, kBounceSlots> waiting;  // pieces that have come; a slot is in one of them
  uint32_t waiting_count = 0;
  std::condition_variable condition;
};

// Sees frames and completions, from one thread at a time.
class ReceiverHandler : public transport::Handler {
 public:
  // The connection is closed and everything that had arrived has been handled.
  virtual void OnClosed() = 0;
  // The peer has said that it ends, so nothing more is worth waiting for.
  virtual bool ended() const = 0;
};

class Receiver {
 public:
  Receiver(transport::Connection& connection, ReceiverHandler& handler)
      : connection_(connection), handler_(handler) {}

  // Before the call is committed, so that the reply cannot come first.
  void Expect(ReplyWaiter* waiter);
  void Await(ReplyWaiter* waiter);

  // Handles what has arrived, without sleeping. False if another thread is at it or all is quiet.
  bool PollOnce();
  // Sleeps until a frame has been handled, by this thread or another, or the deadline has passed:
  // for threads that wait for room, a window or a staging slot.
  void WaitForChange(Deadline deadline);
  // The same for a thread that looks for something special: how many rounds of receiving there have
  // been, and a wait that ends at once if there was another since.
  uint64_t rounds();
  void WaitForRound(uint64_t seen, Deadline deadline);

  // From the handler: the reply to a call. False if nobody waits for it.
  bool Deliver(uint64_t sequence, CUresult result, std::span<const std::byte> reply);
  // From the handler: a piece for the call. False if nobody waits for such a piece, or for so many.
  bool DeliverPiece(uint64_t sequence, const BouncePiece& piece);
  // Ends every wait, now and later.
  void Fail(CUresult error);

 private:
  void ServePieces(std::unique_lock<std::mutex>& lock, ReplyWaiter* waiter);
  // Somebody has to receive for the others.
  void PassLead();
  bool Lead(std::unique_lock<std::mutex>& lock, Deadline deadline, bool sleep);
  void WaitForRound(std::unique_lock<std::mutex>& lock, uint64_t seen, Deadline deadline);

  transport::Connection& connection_;
  ReceiverHandler& handler_;
  std::mutex mutex_;  // guards everything below
  bool leading_ = false;
  CUresult failed_ = CUDA_SUCCESS;
  std::vector<ReplyWaiter*> waiters_;  // as many as threads wait: searched linearly
  uint64_t rounds_ = 0;
  uint32_t change_waiters_ = 0;
  std::condition_variable change_;
};

}  // namespace penstock::interposer
