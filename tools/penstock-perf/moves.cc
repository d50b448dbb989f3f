#include "tools/penstock-perf/moves.h"

#include <algorithm>
#include <cstring>
#include <random>

#include "common/clock.h"

namespace penstock::perf {
namespace {

using transport::BulkStatus;
using transport::Connection;
using transport::Outcome;

enum Kind : uint32_t {
  kEcho = 1,   // comes back as it is
  kDrop = 2,   // counts
  kCount = 3,  // is answered when as many have been dropped as `value` says
  kPull = 4,   // the serving end gets `value` bytes
  kPush = 5,   // and puts them
};

struct Order {
  uint32_t frame_bytes;  // of the whole frame, which may be longer than this struct
  uint32_t kind;
  uint64_t value;
  transport::MemoryKey key;
};

void FillRandom(std::vector<std::byte>& memory) {
  std::mt19937_64 random(1);
  for (size_t i = 0; i + 8 <= memory.size(); i += 8) {
    const uint64_t value = random();
    memcpy(memory.data() + i, &value, sizeof value);
  }
}

// Waits until Reserve has room. The caller polls nothing meanwhile, so the other end must not wait
// for this one to read.
Result<std::byte*> ReserveFrame(Connection& connection, uint32_t bytes) {
  const Deadline deadline = Deadline::After(kPatienceMs);
  std::byte* slot = nullptr;
  for (;;) {
    const Outcome outcome = connection.Reserve(bytes, &slot);
    if (outcome == Outcome::kOk) return slot;
    if (outcome == Outcome::kClosed) return Fail(Code::kUnavailable, connection.close_reason());
    if (deadline.expired()) return Fail(Code::kTimeout, "The send ring stays full.");
    const timespec pause = {0, 20'000};
    nanosleep(&pause, nullptr);
  }
}

class ServingEnd final : public transport::Handler {
 public:
  explicit ServingEnd(Connection& connection) : connection_(connection) {}

  bool OnFrame(std::span<const std::byte> frame) override {
    Order order;
    if (frame.size() < sizeof order) return false;
    memcpy(&order, frame.data(), sizeof order);
    switch (order.kind) {
      case kEcho:
        return Reply(frame);
      case kDrop:
        ++dropped_;
        return true;
      case kCount:
        // Frames arrive in order, so all of them have been counted by now.
        if (dropped_ != order.value) return false;
        dropped_ = 0;
        return Reply(frame);
      case kPull:
      case kPush:
        return Move(order, frame);
    }
    return false;
  }

  void OnBulkDone(uint64_t, BulkStatus status, uint64_t) override {
    if (status != BulkStatus::kOk) failed_ = true;
    Reply(waiting_);
  }

  bool failed() const { return failed_; }

 private:
  bool Reply(std::span<const std::byte> frame) {
    const auto slot = ReserveFrame(connection_, static_cast<uint32_t>(frame.size()));
    if (!slot) return false;
    memcpy(*slot, frame.data(), frame.size());
    connection_.Commit(static_cast<uint32_t>(frame.size()), transport::kFlush);
    return true;
  }

  bool Move(const Order& order, std::span<const std::byte> frame) {
    if (order.value == 0 || order.value > kMostMoveBytes) return false;
    if (memory_.size() < order.value) {
      region_.reset();
      memory_.resize(order.value);
      FillRandom(memory_);
      auto region = connection_.Register(memory_.data(), memory_.size(),
                                         transport::Access::kPeerReadsAndWrites);
      if (!region) return false;
      region_ = std::move(*region);
    }
    waiting_.assign(frame.begin(), frame.end());
    const Outcome outcome = order.kind == kPull
                                ? connection_.Get(*region_, 0, order.key, 0, order.value, 1)
                                : connection_.Put(*region_, 0, order.key, 0, order.value, 1);
    return outcome == Outcome::kOk;
  }

  Connection& connection_;
  uint64_t dropped_ = 0;
  bool failed_ = false;
  std::vector<std::byte> memory_, waiting_;
  std::unique_ptr<transport::MemoryRegion> region_;
};

}  // namespace

Status ServeMoves(Connection& connection) {
  ServingEnd end(connection);
  while (connection.Wait(64, end, Deadline::Never()) >= 0) {
    if (end.failed()) return Fail(Code::kUnavailable, "A bulk move fails.");
  }
  return {};
}

class Mover::Ends final : public transport::Handler {
 public:
  explicit Ends(Mover& mover) : mover_(mover) {}
  bool OnFrame(std::span<const std::byte>) override { return mover_.answered_ = true; }
  void OnBulkDone(uint64_t, BulkStatus, uint64_t) override {}

 private:
  Mover& mover_;
};

Mover::Mover(Connection& connection, double seconds) : connection_(connection), seconds_(seconds) {}

Result<std::unique_ptr<Mover>> Mover::Create(Connection& connection, uint64_t most_bytes,
                                             double seconds) {
  std::unique_ptr<Mover> mover(new Mover(connection, seconds));
  mover->memory_.resize(most_bytes);
  FillRandom(mover->memory_);
  ASSIGN_OR_RETURN(mover->region_, connection.Register(mover->memory_.data(), most_bytes,
                                                       transport::Access::kPeerReadsAndWrites));
  return mover;
}

bool Mover::Enough(int64_t since_ns, size_t count) const {
  return count >= 3 && static_cast<double>(NowNanoseconds() - since_ns) > seconds_ * 1e9;
}

Status Mover::Send(uint32_t kind, uint32_t frame_bytes, uint64_t value) {
  const uint32_t bytes = (std::max<uint32_t>(frame_bytes, sizeof(Order)) + 7) & ~7u;
  ASSIGN_OR_RETURN(std::byte * slot, ReserveFrame(connection_, bytes));
  const Order order = {bytes, kind, value, region_->key()};
  memcpy(slot, &order, sizeof order);
  memset(slot + sizeof order, 0, bytes - sizeof order);
  connection_.Commit(bytes, kind == kDrop ? transport::kNone : transport::kFlush);
  answered_ = false;
  return {};
}

Status Mover::AwaitAnswer() {
  Ends ends(*this);
  const Deadline deadline = Deadline::After(kPatienceMs);
  while (!answered_) {
    if (connection_.Wait(16, ends, deadline) < 0) {
      return Fail(Code::kUnavailable, "The other end is gone: " + connection_.close_reason());
    }
    if (deadline.expired()) return Fail(Code::kTimeout, "The other end does not answer.");
  }
  return {};
}

Result<double> Mover::RoundTripMicroseconds(uint32_t bytes) {
  std::vector<double> times;
  const int64_t since = NowNanoseconds();
  while (!Enough(since, times.size())) {
    const int64_t start = NowNanoseconds();
    RETURN_IF_ERROR(Send(kEcho, bytes, 0));
    RETURN_IF_ERROR(AwaitAnswer());
    times.push_back(static_cast<double>(NowNanoseconds() - start) / 1e3);
  }
  return Median(std::move(times));
}

Result<double> Mover::MessagesPerMicrosecond(uint32_t bytes) {
  constexpr uint64_t kBatch = 1000;
  std::vector<double> rates;
  const int64_t since = NowNanoseconds();
  while (!Enough(since, rates.size())) {
    const int64_t start = NowNanoseconds();
    for (uint64_t i = 0; i < kBatch; ++i) RETURN_IF_ERROR(Send(kDrop, bytes, 0));
    RETURN_IF_ERROR(Send(kCount, 0, kBatch));
    RETURN_IF_ERROR(AwaitAnswer());
    rates.push_back(kBatch * 1e3 / static_cast<double>(NowNanoseconds() - start));
  }
  return Median(std::move(rates));
}

Status Mover::MoveOnce(bool to_server, uint64_t bytes) {
  RETURN_IF_ERROR(Send(to_server ? kPull : kPush, 0, bytes));
  return AwaitAnswer();
}

Result<double> Mover::GigabytesPerSecond(bool to_server, uint64_t bytes) {
  std::vector<double> rates;
  RETURN_IF_ERROR(MoveOnce(to_server, bytes));  // touches and registers the memory
  const int64_t since = NowNanoseconds();
  while (!Enough(since, rates.size())) {
    const int64_t start = NowNanoseconds();
    RETURN_IF_ERROR(MoveOnce(to_server, bytes));
    rates.push_back(static_cast<double>(bytes) / static_cast<double>(NowNanoseconds() - start));
  }
  return Median(std::move(rates));
}

}  // namespace penstock::perf
