// The one ordered stream of calls of a session. Many application threads write into it, each under
// one short lock: a frame is encoded straight into the transport's send slot, kept in
// RetainedFrames until the server acknowledges it, and committed. The lock is never held while
// waiting: a full ring is reported to the caller, who receives (that is where acknowledgements come
// from) and tries again.
#pragma once

#include <atomic>
#include <cstdint>
#include <span>

#include "interposer/core/futex_lock.h"
#include "interposer/core/receiver.h"
#include "protocol/frame.h"
#include "protocol/retained.h"
#include "transport/transport.h"

namespace penstock::interposer {

// A call as its issuer describes it.
struct OutgoingCall {
  uint32_t function = 0;
  uint64_t context = 0;  // handle of the current one
  uint32_t thread = 0;
  uint32_t cost = 0;    // in the window of its stream
  bool urgent = false;  // leaves at once, although no reply is asked for
  uint64_t issued = 0;  // set by Session::Post: what that window counts with this call
  const void* command = nullptr;
  size_t command_bytes = 0;
  std::span<const std::span<const std::byte>> sections;

  // Of the frame, with padding.
  uint64_t FrameBytes() const;
};

class CallStream {
 public:
  enum class Outcome : uint8_t { kSent, kFull, kClosed };

  CallStream(transport::Connection& connection, uint32_t epoch)
      : connection_(connection), epoch_(epoch) {}

  // With a waiter, a reply is asked for and `receiver` expects it. FrameBytes() must not exceed the
  // transport's largest frame.
  Outcome Send(const OutgoingCall& call, Receiver* receiver, ReplyWaiter* waiter);
  // Acknowledge, heartbeat, goodbye: unnumbered, not kept.
  Outcome SendControl(FrameType type);

  // From the receiver. Sequences of the server's frames arrive here in order.
  void Received(uint64_t sequence) { received_.store(sequence, std::memory_order_release); }
  uint64_t received() const { return received_.load(std::memory_order_relaxed); }
  void PeerAcknowledged(uint64_t sequence);
  // What the server has been told that we received; frames sent at all.
  uint64_t told() const { return told_.load(std::memory_order_relaxed); }
  uint64_t frames() const { return frames_.load(std::memory_order_relaxed); }

 private:
  void FillHeader(FrameHeader* header, FrameType type, uint32_t bytes);

  transport::Connection& connection_;
  const uint32_t epoch_;
  std::atomic<uint64_t> received_{0};
  std::atomic<uint64_t> peer_acknowledged_{0};
  std::atomic<uint64_t> told_{0};
  std::atomic<uint64_t> frames_{0};

  FutexLock lock_;  // guards everything below, and the sending half of the connection
  RetainedFrames retained_;
  uint64_t next_sequence_ = 1;
  uint64_t trimmed_ = 0;
};

}  // namespace penstock::interposer
