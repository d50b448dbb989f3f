#include "interposer/core/call_stream.h"

#include <cstring>
#include <mutex>

namespace penstock::interposer {
namespace {

constexpr uint64_t Padded(uint64_t bytes) {
  return (bytes + 7) & ~uint64_t{7};
}

std::byte* Append(std::byte* place, const void* data, size_t bytes) {
  const size_t padded = Padded(bytes);
  // The padding is zero: nothing of ours leaks to the server, and equal calls have equal frames.
  if (padded != bytes) memset(place + padded - 8, 0, 8);
  if (bytes != 0) memcpy(place, data, bytes);
  return place + padded;
}

}  // namespace

uint64_t OutgoingCall::FrameBytes() const {
  uint64_t bytes = sizeof(FrameHeader) + Padded(command_bytes);
  for (const auto& section : sections) bytes += Padded(section.size());
  return bytes;
}

void CallStream::FillHeader(FrameHeader* header, FrameType type, uint32_t bytes) {
  *header = FrameHeader{};
  header->bytes = bytes;
  header->type = type;
  header->epoch = epoch_;
  header->acknowledged = received_.load(std::memory_order_acquire);
  told_.store(header->acknowledged, std::memory_order_relaxed);
  frames_.store(frames_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
}

CallStream::Outcome CallStream::Send(const OutgoingCall& call, Receiver* receiver,
                                     ReplyWaiter* waiter) {
  const uint32_t bytes = static_cast<uint32_t>(call.FrameBytes());
  std::lock_guard lock(lock_);
  const uint64_t acknowledged = peer_acknowledged_.load(std::memory_order_acquire);
  if (acknowledged != trimmed_) {
    retained_.Acknowledge(acknowledged);
    trimmed_ = acknowledged;
  }
  if (!retained_.HasRoom(bytes)) return connection_.closed() ? Outcome::kClosed : Outcome::kFull;
  std::byte* slot = nullptr;
  switch (connection_.Reserve(bytes, &slot)) {
    case transport::Outcome::kOk:
      break;
    case transport::Outcome::kAgain:
      return Outcome::kFull;
    case transport::Outcome::kClosed:
      return Outcome::kClosed;
  }
  FrameHeader header;
  FillHeader(&header, FrameType::kCall, bytes);
  header.flags = waiter != nullptr ? kNeedsReply : 0;
  header.function = call.function;
  header.sequence = next_sequence_++;
  header.subject = call.context;
  header.thread = call.thread;
  header.result = static_cast<int32_t>(call.cost);
  memcpy(slot, &header, sizeof header);
  std::byte* place = Append(slot + sizeof header, call.command, call.command_bytes);
  for (const auto& section : call.sections) place = Append(place, section.data(), section.size());

  retained_.Append(header.sequence, {slot, bytes});
  if (waiter != nullptr) {
    waiter->sequence = header.sequence;
    receiver->Expect(waiter);
  }
  const bool now = waiter != nullptr || call.urgent;
  connection_.Commit(bytes, now ? transport::kFlush : transport::kNone);
  return Outcome::kSent;
}

CallStream::Outcome CallStream::SendControl(FrameType type) {
  std::lock_guard lock(lock_);
  std::byte* slot = nullptr;
  switch (connection_.Reserve(sizeof(FrameHeader), &slot)) {
    case transport::Outcome::kOk:
      break;
    case transport::Outcome::kAgain:
      return Outcome::kFull;
    case transport::Outcome::kClosed:
      return Outcome::kClosed;
  }
  FrameHeader header;
  FillHeader(&header, type, sizeof header);
  memcpy(slot, &header, sizeof header);
  connection_.Commit(sizeof header, transport::kFlush);
  return Outcome::kSent;
}

void CallStream::PeerAcknowledged(uint64_t sequence) {
  uint64_t seen = peer_acknowledged_.load(std::memory_order_relaxed);
  while (seen < sequence &&
         !peer_acknowledged_.compare_exchange_weak(seen, sequence, std::memory_order_release)) {
  }
}

}  // namespace penstock::interposer
