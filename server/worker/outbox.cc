#include "server/worker/outbox.h"

#include <algorithm>
#include <cstring>

namespace penstock::server {

bool Outbox::Write(const FrameHeader& header, std::span<const std::byte> head,
                   std::span<const std::byte> body, uint32_t flags) {
  std::byte* slot = nullptr;
  const uint32_t bytes = header.bytes;
  if (header.sequence != 0 && !retained_.HasRoom(bytes)) return false;
  if (connection_.Reserve(bytes, &slot) != transport::Outcome::kOk) return false;
  FrameHeader sent = header;
  sent.acknowledged = received_;
  memcpy(slot, &sent, sizeof sent);
  std::byte* next = slot + sizeof sent;
  if (!head.empty()) memcpy(next, head.data(), head.size());
  next += head.size();
  if (!body.empty()) memcpy(next, body.data(), body.size());
  const size_t used = sizeof sent + head.size() + body.size();
  memset(slot + used, 0, bytes - used);
  if (header.sequence != 0) retained_.Append(header.sequence, {slot, bytes});
  connection_.Commit(bytes, flags);
  unacknowledged_frames_ = 0;
  unacknowledged_bytes_ = 0;
  return true;
}

void Outbox::Send(FrameHeader header, std::span<const std::byte> head,
                  std::span<const std::byte> body) {
  header.bytes = PaddedTo8(static_cast<uint32_t>(sizeof header + head.size() + body.size()));
  header.epoch = epoch_;
  header.sequence = ++sent_;
  if (queue_.empty() && Write(header, head, body, transport::kFlush)) return;
  std::vector<std::byte> frame(header.bytes);
  memcpy(frame.data(), &header, sizeof header);
  std::copy(head.begin(), head.end(), frame.begin() + sizeof header);
  std::copy(body.begin(), body.end(), frame.begin() + sizeof header + head.size());
  queued_bytes_ += frame.size();
  queue_.push_back(std::move(frame));
}

void Outbox::Reply(const ReplyToken& token, CUresult result, std::span<const std::byte> body) {
  FrameHeader header = {};
  header.type = FrameType::kReply;
  header.function = token.function;
  header.subject = token.sequence;
  header.thread = token.thread;
  header.result = result;
  Send(header, {}, body);
}

void Outbox::HostFunction(uint64_t id, CUresult status) {
  FrameHeader header = {};
  header.type = FrameType::kHostFunction;
  header.subject = id;
  header.result = status;
  Send(header, {}, {});
}

void Outbox::Bounce(uint64_t call, const BouncePiece& piece) {
  FrameHeader header = {};
  header.type = FrameType::kBounce;
  header.subject = call;
  Send(header, {}, std::as_bytes(std::span(&piece, 1)));
}

void Outbox::Output(uint32_t descriptor, std::string_view text) {
  constexpr size_t kPiece = 32 * 1024;
  while (!text.empty()) {
    const std::string_view piece = text.substr(0, kPiece);
    const OutputHeader output = {descriptor, static_cast<uint32_t>(piece.size())};
    FrameHeader header = {};
    header.type = FrameType::kOutput;
    Send(header, std::as_bytes(std::span(&output, 1)), std::as_bytes(std::span(piece)));
    text.remove_prefix(piece.size());
  }
}

bool Outbox::Progress(std::span<const ProgressEntry> entries) {
  constexpr size_t kMost = (kMaxFrameBytes - sizeof(FrameHeader)) / sizeof(ProgressEntry);
  if (entries.size() > kMost) return false;
  FrameHeader header = {};
  header.bytes = static_cast<uint32_t>(sizeof header + entries.size_bytes());
  header.type = FrameType::kProgress;
  header.epoch = epoch_;
  return Write(header, {}, std::as_bytes(entries), transport::kFlush);
}

bool Outbox::Heartbeat() {
  FrameHeader header = {};
  header.bytes = sizeof header;
  header.type = FrameType::kHeartbeat;
  header.epoch = epoch_;
  return Write(header, {}, {}, transport::kFlush);
}

void Outbox::Goodbye(std::string_view text) {
  text = text.substr(0, 1024);
  FrameHeader header = {};
  header.bytes = PaddedTo8(static_cast<uint32_t>(sizeof header + text.size()));
  header.type = FrameType::kGoodbye;
  header.epoch = epoch_;
  Write(header, {}, std::as_bytes(std::span(text)), transport::kFlush);
}

bool Outbox::OnAcknowledged(uint64_t sequence) {
  if (sequence > sent_) return false;
  retained_.Acknowledge(sequence);
  return true;
}

void Outbox::OnReceived(uint64_t sequence, uint64_t bytes) {
  received_ = sequence;
  ++unacknowledged_frames_;
  unacknowledged_bytes_ += bytes;
}

bool Outbox::Pump() {
  bool sent = false;
  while (!queue_.empty()) {
    FrameHeader header;
    memcpy(&header, queue_.front().data(), sizeof header);
    const auto body = std::span<const std::byte>(queue_.front()).subspan(sizeof header);
    if (!Write(header, {}, body, transport::kFlush)) break;
    queued_bytes_ -= queue_.front().size();
    queue_.pop_front();
    sent = true;
  }
  if (unacknowledged_frames_ >= kAcknowledgeFrames / 2 ||
      unacknowledged_bytes_ >= kAcknowledgeBytes / 2) {
    FrameHeader header = {};
    header.bytes = sizeof header;
    header.type = FrameType::kAcknowledge;
    header.epoch = epoch_;
    sent = Write(header, {}, {}, transport::kFlush) || sent;
  }
  return sent;
}

}  // namespace penstock::server
