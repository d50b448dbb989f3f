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

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

#include "transport/transport.h"

namespace penstock::interposer {

// A thread that waits for the reply to one call. Lives on its stack.
struct ReplyWaiter {
  // Where the reply goes: first its fixed part, then the rest, into `direct` if given, else `tail`.
  std::span<std::byte> fixed;
  std::span<std::byte> direct;
  std::vector<std::byte>* tail = nullptr;

  uint64_t sequence = 0;  // of the call; set when it is sent
  bool done = false;      // guarded by the receiver's lock, as is all below
  CUresult result = CUDA_ERROR_UNKNOWN;
  bool complete = false;  // the fixed part was there
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
  // Ends every wait, now and later.
  void Fail(CUresult error);

 private:
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
