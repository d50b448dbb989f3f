// The sending half of a tcp connection's control plane.
//
// Problem: a posted call must cost its caller no system call, yet must leave soon; a call that is
// waited for must leave at once, on the caller's thread, for a hop to another thread costs more
// than the send. So frames go into a ring, and whoever holds the send role writes them to the
// socket: the sender thread normally, the committing thread when it asks for kFlush and the role is
// free.
//
// The sender thread yields a few times when it runs out of work, then naps in short steps while the
// last work is recent, then parks. Only a parked sender has to be woken, so a burst of posts costs
// one wake. Price: a posted frame may wait one nap (about 60 us) before it leaves.
//
// Two races are settled by "store, then look" in sequentially consistent order:
//   head (producer) against parked (sender): either the producer sees parked and wakes, or the
//     sender sees the frame and does not sleep;
//   head against the send role: a flusher that finds the role taken leaves its frame to the holder,
//     which looks at head again after giving the role back.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <thread>

#include "common/clock.h"
#include "transport/frame_ring.h"
#include "transport/tcp/lifeline.h"
#include "transport/transport.h"

namespace penstock::transport::tcp {

class Sender {
 public:
  Sender(Lifeline& life, size_t ring_bytes, uint32_t max_frame);
  ~Sender();

  void Start();
  // Waits until what is committed now has left this host, or the deadline passes.
  void Drain(Deadline deadline);
  // Ends the thread. The lifeline is closed before.
  void Stop();

  Outcome Reserve(uint32_t bytes, std::byte** slot);
  void Commit(uint32_t used, uint32_t flags);
  Outcome Flush();

  uint64_t frames_sent() const { return frames_sent_.load(std::memory_order_relaxed); }
  uint64_t bytes_sent() const { return bytes_sent_.load(std::memory_order_relaxed); }

 private:
  enum class Progress { kDone, kBlocked, kFailed };

  void Run();
  void Park();
  void WakeIfParked() {
    if (parked_.load(std::memory_order_seq_cst)) Wake();
  }
  void Wake();
  bool TakeRole() { return !role_taken_.exchange(true, std::memory_order_seq_cst); }
  void GiveRole() { role_taken_.store(false, std::memory_order_seq_cst); }
  Progress Write();  // with the role
  void FlushHere();

  Lifeline& life_;
  const uint32_t max_frame_;
  FrameRing ring_;
  std::atomic<uint64_t> frames_sent_{0}, bytes_sent_{0};  // written by the producer
  alignas(64) std::atomic<bool> role_taken_{false};
  std::atomic<bool> parked_{false};
  std::atomic<bool> stop_{false};
  std::mutex park_mutex_;
  std::condition_variable park_;
  std::thread thread_;
};

}  // namespace penstock::transport::tcp
