// A Connection whose peer is the fuzzer's input: frames come from there, one after the other, moves
// of bulk data end as it says, and what is sent is thrown away after a look at it. All on the
// calling thread, so that an input does the same each time.
//
// The input is a list of records: a RecordHeader, then that many bytes of a frame (fewer at the
// input's end). Corpora are made of recorded sessions by record.py in this form. Unless the record
// says kAsItIs, size, epoch and sequence of the frame are set right, so that the fuzzer gets behind
// the first checks without having to guess numbers.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "protocol/frame.h"
#include "tests/fuzz/input.h"
#include "transport/transport.h"

namespace penstock::fuzz {

struct RecordHeader {
  uint16_t bytes;
  uint16_t flags;
};
enum RecordFlags : uint16_t {
  kAsItIs = 1,       // of a frame: nothing is set right
  kMoveRefused = 2,  // moves started from here on are refused
  kNoReach = 4,      // the peer's memory cannot be reached
  kRoundBefore = 8,  // the receiver finds nothing once, before this frame
};

class Region : public transport::MemoryRegion {
 public:
  Region(void* address, size_t bytes) : address_(static_cast<std::byte*>(address)), bytes_(bytes) {
    key_.bytes = 16;
  }
  std::byte* address() const override { return address_; }
  size_t size() const override { return bytes_; }
  const transport::MemoryKey& key() const override { return key_; }

 private:
  std::byte* address_;
  size_t bytes_;
  transport::MemoryKey key_;
};

class ScriptedConnection : public transport::Connection {
 public:
  ScriptedConnection(Input& input, bool registration_is_dear) : input_(input) {
    caps_.name = "fuzz";
    caps_.max_frame = kMaxFrameBytes;
    caps_.max_bulk = uint64_t{1} << 40;
    caps_.registration_is_dear = registration_is_dear;
  }

  const transport::Caps& caps() const override { return caps_; }
  // Replies are to the newest call, unless their record says kAsItIs.
  void AnswerLastCall() { answers_last_call_ = true; }

  // Each slot is an allocation of the size asked for.
  transport::Outcome Reserve(uint32_t bytes, std::byte** slot) override {
    if (closed_) return transport::Outcome::kClosed;
    Require(bytes <= caps_.max_frame);
    slot_.reset(new std::byte[bytes]);
    reserved_ = bytes;
    *slot = slot_.get();
    return transport::Outcome::kOk;
  }
  void Commit(uint32_t used, uint32_t) override {
    Require(slot_ != nullptr && used <= reserved_ && used >= sizeof(FrameHeader));
    FrameHeader header;
    memcpy(&header, slot_.get(), sizeof header);
    Require(header.bytes == used);
    if (header.sequence > sent_) sent_ = header.sequence;
    // Whatever lies in a frame that is sent must have been written.
    unsigned sum = 0;
    for (uint32_t i = 0; i < used; ++i) sum += static_cast<unsigned>(slot_[i]);
    sink_ = sum;
    slot_.reset();
  }
  transport::Outcome Flush() override {
    return closed_ ? transport::Outcome::kClosed : transport::Outcome::kOk;
  }

  int Poll(int budget, transport::Handler& handler) override {
    int handled = 0;
    while (handled < budget && !moves_.empty()) {
      const Move move = moves_.front();
      moves_.pop_front();
      handler.OnBulkDone(move.cookie, move.status, move.bytes);
      ++handled;
    }
    if (closed_) return handled > 0 ? handled : -1;
    if (handled > 0) return handled;
    if (input_.empty()) {
      // Some rounds in which everything that is under way can come to an end.
      if (++idle_rounds_ > kLastRounds) closed_ = true;
      return closed_ ? -1 : 0;
    }
    if (!has_record_) {
      record_ = input_.Take<RecordHeader>();
      has_record_ = true;
      if (record_.flags & kRoundBefore) return 0;
    }
    has_record_ = false;
    std::vector<std::byte> frame = input_.TakeBytes(record_.bytes);
    if (!(record_.flags & kAsItIs) && frame.size() >= sizeof(FrameHeader)) {
      FrameHeader header;
      memcpy(&header, frame.data(), sizeof header);
      header.bytes = static_cast<uint32_t>(frame.size());
      header.epoch = 1;
      header.acknowledged = sent_;
      const bool numbered = header.type == FrameType::kCall || header.type == FrameType::kReply ||
                            header.type == FrameType::kHostFunction ||
                            header.type == FrameType::kBounce || header.type == FrameType::kOutput;
      header.sequence = numbered ? ++sequence_ : 0;
      if (answers_last_call_ &&
          (header.type == FrameType::kReply || header.type == FrameType::kBounce)) {
        header.subject = sent_;
      }
      memcpy(frame.data(), &header, sizeof header);
    }
    if (!handler.OnFrame(frame)) closed_ = true;
    return 1;
  }
  int Wait(int budget, transport::Handler& handler, Deadline) override {
    const int handled = Poll(budget, handler);
    if (handled != 0) return handled;
    // A moment for helper threads, whose results come with an interrupt.
    std::unique_lock lock(mutex_);
    condition_.wait_for(lock, std::chrono::microseconds(50), [this] { return interrupted_; });
    interrupted_ = false;
    return 0;
  }
  void Interrupt() override {
    std::lock_guard lock(mutex_);
    interrupted_ = true;
    condition_.notify_one();
  }
  int event_fd() const override { return -1; }
  bool Arm() override { return false; }

  Result<std::unique_ptr<transport::MemoryRegion>> Register(void* address, size_t bytes,
                                                            transport::Access) override {
    return std::unique_ptr<transport::MemoryRegion>(new Region(address, bytes));
  }
  bool Reach(const transport::MemoryKey& key, uint64_t offset, uint64_t bytes, transport::Access,
             transport::ReachedMemory* memory) override {
    constexpr uint64_t kMost = 1 << 20;
    if ((record_.flags & kNoReach) || bytes > kMost || offset > kMost || key.bytes > 56) {
      return false;
    }
    auto block = std::make_shared<std::vector<std::byte>>(offset + bytes);
    memory->address = block->data() + offset;
    memory->base = block->data();
    memory->bytes = block->size();
    memory->keep = block;
    return true;
  }

  transport::Outcome Get(transport::MemoryRegion& target, uint64_t target_offset,
                         const transport::MemoryKey&, uint64_t, uint64_t bytes,
                         uint64_t cookie) override {
    Require(target_offset <= target.size() && bytes <= target.size() - target_offset);
    memset(target.address() + target_offset, 0x5a, bytes);
    return Finish(bytes, cookie);
  }
  transport::Outcome Put(transport::MemoryRegion& source, uint64_t source_offset,
                         const transport::MemoryKey&, uint64_t, uint64_t bytes,
                         uint64_t cookie) override {
    Require(source_offset <= source.size() && bytes <= source.size() - source_offset);
    unsigned sum = 0;
    for (uint64_t i = 0; i < bytes; ++i) {
      sum += static_cast<unsigned>(source.address()[source_offset + i]);
    }
    sink_ = sum;
    return Finish(bytes, cookie);
  }

  bool closed() const override { return closed_; }
  std::string close_reason() const override { return closed_ ? "The input has ended." : ""; }
  void Close(int) override { closed_ = true; }
  transport::Counters counters() const override { return {}; }

 private:
  static constexpr int kLastRounds = 40;
  struct Move {
    uint64_t cookie;
    transport::BulkStatus status;
    uint64_t bytes;
  };

  transport::Outcome Finish(uint64_t bytes, uint64_t cookie) {
    if (closed_) return transport::Outcome::kClosed;
    const bool refused = (record_.flags & kMoveRefused) != 0;
    using transport::BulkStatus;
    moves_.push_back(
        {cookie, refused ? BulkStatus::kRefused : BulkStatus::kOk, refused ? 0 : bytes});
    return transport::Outcome::kOk;
  }

  transport::Caps caps_;
  Input& input_;
  RecordHeader record_{};
  bool has_record_ = false;
  bool answers_last_call_ = false;
  uint64_t sequence_ = 0;
  std::atomic<uint64_t> sent_{0};
  int idle_rounds_ = 0;
  std::unique_ptr<std::byte[]> slot_;
  uint32_t reserved_ = 0;
  std::deque<Move> moves_;
  std::atomic<bool> closed_{false};
  std::mutex mutex_;
  std::condition_variable condition_;
  bool interrupted_ = false;  // under mutex_
  volatile unsigned sink_ = 0;
};

}  // namespace penstock::fuzz
