// What the worker sends. Replies, output, host functions and bounce pieces are numbered and kept
// until the client acknowledges them; progress is not. The dispatch thread never waits for room:
// what does not fit now is queued here and sent by Pump.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <deque>
#include <span>
#include <string_view>
#include <vector>

#include "protocol/frame.h"
#include "protocol/retained.h"
#include "transport/transport.h"

namespace penstock::server {

// Names a call that somebody waits for, so that it can be answered later.
struct ReplyToken {
  uint64_t sequence = 0;
  uint32_t function = 0;
  uint32_t thread = 0;
  uint64_t context = 0;  // the current one
  bool needed = false;   // false: a posted call; its failure is kept for the thread
};

class Outbox {
 public:
  Outbox(transport::Connection& connection, uint32_t epoch)
      : connection_(connection), epoch_(epoch) {}

  void Reply(const ReplyToken& token, CUresult result, std::span<const std::byte> body);
  void HostFunction(uint64_t id, CUresult status);
  // A piece of this call is in a bounce slot, or shall be put there.
  void Bounce(uint64_t call, const BouncePiece& piece);
  void Output(uint32_t descriptor, std::string_view text);
  // False when there is no room now.
  bool Progress(std::span<const ProgressEntry> entries);
  bool Heartbeat();
  void Goodbye(std::string_view text);

  // What the peer says it has received. False if it was never sent.
  bool OnAcknowledged(uint64_t sequence);
  // A numbered frame has arrived; acknowledges at the latest after so many.
  void OnReceived(uint64_t sequence, uint64_t bytes);
  // Sends what waited for room, and an acknowledgement that is due. True if anything was sent.
  bool Pump();

  bool backlog() const { return !queue_.empty(); }
  // The peer does not read: this many bytes wait.
  uint64_t backlog_bytes() const { return queued_bytes_; }

 private:
  void Send(FrameHeader header, std::span<const std::byte> head, std::span<const std::byte> body);
  bool Write(const FrameHeader& header, std::span<const std::byte> head,
             std::span<const std::byte> body, uint32_t flags);

  transport::Connection& connection_;
  const uint32_t epoch_;
  uint64_t sent_ = 0;      // sequence of the newest numbered frame
  uint64_t received_ = 0;  // the peer's newest
  uint32_t unacknowledged_frames_ = 0;
  uint64_t unacknowledged_bytes_ = 0;
  RetainedFrames retained_;
  std::deque<std::vector<std::byte>> queue_;  // whole numbered frames, in order
  uint64_t queued_bytes_ = 0;
};

}  // namespace penstock::server
