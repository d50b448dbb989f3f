#include "transport/fault/fault.h"

#include <sys/epoll.h>
#include <sys/timerfd.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <mutex>
#include <random>

#include "common/unique_fd.h"
#include "transport/sleep.h"

namespace penstock::transport::fault {
namespace {

struct HeldFrame {
  int64_t due_ns;
  std::vector<std::byte> bytes;
};

struct HeldCompletion {
  int64_t due_ns;
  uint64_t cookie;
  BulkStatus status;
  uint64_t bytes;
};

class Faulty : public Connection, private Handler {
 public:
  Faulty(std::unique_ptr<Connection> inner, FaultPlan plan);

  const Caps& caps() const override { return inner_->caps(); }
  Outcome Reserve(uint32_t bytes, std::byte** slot) override;
  void Commit(uint32_t used, uint32_t flags) override;
  Outcome Flush() override { return inner_->Flush(); }
  int Poll(int budget, Handler& handler) override;
  int Wait(int budget, Handler& handler, Deadline deadline) override;
  void Interrupt() override { inner_->Interrupt(); }
  int event_fd() const override { return event_fd_.get(); }
  bool Arm() override;
  Result<std::unique_ptr<MemoryRegion>> Register(void* address, size_t bytes,
                                                 Access access) override {
    return inner_->Register(address, bytes, access);
  }
  Result<std::unique_ptr<MemoryRegion>> Allocate(size_t bytes, Access access) override {
    return inner_->Allocate(bytes, access);
  }
  bool Reach(const MemoryKey& key, uint64_t offset, uint64_t bytes, Access wanted,
             ReachedMemory* memory) override {
    return inner_->Reach(key, offset, bytes, wanted, memory);
  }
  Result<std::unique_ptr<MemoryRegion>> RegisterDevice(uint64_t device_address, size_t bytes,
                                                       int dmabuf, uint64_t offset) override {
    return inner_->RegisterDevice(device_address, bytes, dmabuf, offset);
  }
  Result<std::vector<std::unique_ptr<Loopback>>> OpenLoopbacks(Deadline deadline) override {
    return inner_->OpenLoopbacks(deadline);
  }
  Outcome Get(MemoryRegion& target, uint64_t target_offset, const MemoryKey& source,
              uint64_t source_offset, uint64_t bytes, uint64_t cookie) override;
  Outcome Put(MemoryRegion& source, uint64_t source_offset, const MemoryKey& target,
              uint64_t target_offset, uint64_t bytes, uint64_t cookie) override;
  bool closed() const override { return inner_->closed(); }
  std::string close_reason() const override;
  void Close(int drain_ms) override { inner_->Close(drain_ms); }
  Counters counters() const override { return inner_->counters(); }

 private:
  // What comes from the inner connection is held first.
  bool OnFrame(std::span<const std::byte> frame) override;
  void OnBulkDone(uint64_t cookie, BulkStatus status, uint64_t bytes) override;

  // Calls the handler for what is due.
  int Deliver(int budget, Handler& handler);
  // Nanoseconds until the next held thing is due, 0 when one is; INT64_MAX for nothing held.
  int64_t Due();
  void Break(const std::string& reason);
  // True when this Get or Put is to be refused.
  bool FaultBulk(uint64_t cookie);
  int64_t DelayNs() { return plan_.delay_us == 0 ? 0 : random_() % (plan_.delay_us * 1000ull); }

  const std::unique_ptr<Connection> inner_;
  const FaultPlan plan_;
  UniqueFd timer_, event_fd_;
  // The producer's own.
  uint64_t reserves_ = 0, commits_ = 0;
  // The receiver's own.
  std::deque<HeldFrame> frames_;
  uint64_t frames_delivered_ = 0;
  bool dropping_ = false;  // the rest of the frames is thrown away
  bool inner_over_ = false;

  mutable std::mutex mutex_;
  std::mt19937_64 random_;                   // under mutex_
  std::vector<HeldCompletion> completions_;  // under mutex_
  uint64_t bulks_ = 0;                       // under mutex_
  std::string reason_;                       // under mutex_
};

Faulty::Faulty(std::unique_ptr<Connection> inner, FaultPlan plan)
    : inner_(std::move(inner)),
      plan_(std::move(plan)),
      timer_(timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK)),
      event_fd_(epoll_create1(EPOLL_CLOEXEC)),
      random_(plan_.seed) {
  for (const int fd : {inner_->event_fd(), timer_.get()}) WatchReadable(event_fd_.get(), fd);
}

void Faulty::Break(const std::string& reason) {
  {
    std::lock_guard lock(mutex_);
    if (reason_.empty()) reason_ = reason;
  }
  inner_->Close(0);
}

std::string Faulty::close_reason() const {
  std::lock_guard lock(mutex_);
  return reason_.empty() ? inner_->close_reason() : reason_;
}

Outcome Faulty::Reserve(uint32_t bytes, std::byte** slot) {
  const std::string& pattern = plan_.reserve_pattern;
  if (!pattern.empty() && pattern[reserves_++ % pattern.size()] == 'a' && !closed()) {
    return Outcome::kAgain;
  }
  return inner_->Reserve(bytes, slot);
}

void Faulty::Commit(uint32_t used, uint32_t flags) {
  if (++commits_ == plan_.close_at_commit) {
    return Break("The fault plan closes the connection at commit (" + std::to_string(commits_) +
                 ").");
  }
  inner_->Commit(used, flags);
}

// --- bulk ---

bool Faulty::FaultBulk(uint64_t cookie) {
  std::unique_lock lock(mutex_);
  const uint64_t count = ++bulks_;
  if (count == plan_.close_at_bulk) {
    lock.unlock();
    Break("The fault plan closes the connection at bulk move (" + std::to_string(count) + ").");
    return false;
  }
  const auto& refuse = plan_.refuse_bulk;
  const bool refused = std::find(refuse.begin(), refuse.end(), count) != refuse.end() ||
                       (plan_.refuse_permille > 0 && random_() % 1000 < plan_.refuse_permille);
  if (!refused || closed()) return false;
  completions_.push_back({NowNanoseconds(), cookie, BulkStatus::kRefused, 0});
  lock.unlock();
  inner_->Interrupt();
  return true;
}

Outcome Faulty::Get(MemoryRegion& target, uint64_t target_offset, const MemoryKey& source,
                    uint64_t source_offset, uint64_t bytes, uint64_t cookie) {
  if (FaultBulk(cookie)) return Outcome::kOk;
  return inner_->Get(target, target_offset, source, source_offset, bytes, cookie);
}

Outcome Faulty::Put(MemoryRegion& source, uint64_t source_offset, const MemoryKey& target,
                    uint64_t target_offset, uint64_t bytes, uint64_t cookie) {
  if (FaultBulk(cookie)) return Outcome::kOk;
  return inner_->Put(source, source_offset, target, target_offset, bytes, cookie);
}

// --- receiving ---

bool Faulty::OnFrame(std::span<const std::byte> frame) {
  if (dropping_) return true;
  std::lock_guard lock(mutex_);
  int64_t due = NowNanoseconds() + DelayNs();
  if (!frames_.empty()) due = std::max(due, frames_.back().due_ns);
  frames_.push_back({due, {frame.begin(), frame.end()}});
  return true;
}

void Faulty::OnBulkDone(uint64_t cookie, BulkStatus status, uint64_t bytes) {
  std::lock_guard lock(mutex_);
  // At least a little, or nothing would overtake anything.
  const uint64_t most_us = std::max<uint64_t>(plan_.delay_us, 100);
  const int64_t delay = plan_.reorder_completions ? random_() % (most_us * 1000) : 0;
  completions_.push_back({NowNanoseconds() + delay, cookie, status, bytes});
}

int64_t Faulty::Due() {
  std::lock_guard lock(mutex_);
  int64_t first = INT64_MAX;
  if (!frames_.empty()) first = frames_.front().due_ns;
  for (const HeldCompletion& held : completions_) first = std::min(first, held.due_ns);
  return first == INT64_MAX ? first : std::max<int64_t>(0, first - NowNanoseconds());
}

int Faulty::Deliver(int budget, Handler& handler) {
  int delivered = 0;
  while (delivered < budget) {
    HeldCompletion next = {INT64_MAX, 0, BulkStatus::kOk, 0};
    {
      std::lock_guard lock(mutex_);
      auto first =
          std::min_element(completions_.begin(), completions_.end(),
                           [](const auto& a, const auto& b) { return a.due_ns < b.due_ns; });
      if (first == completions_.end() || first->due_ns > NowNanoseconds()) break;
      next = *first;
      completions_.erase(first);
    }
    handler.OnBulkDone(next.cookie, next.status, next.bytes);
    ++delivered;
  }
  while (delivered < budget && !frames_.empty() && frames_.front().due_ns <= NowNanoseconds()) {
    if (++frames_delivered_ == plan_.close_at_frame) {
      dropping_ = true;
      frames_.clear();
      Break("The fault plan closes the connection at frame (" + std::to_string(frames_delivered_) +
            ").");
      break;
    }
    const std::vector<std::byte> frame = std::move(frames_.front().bytes);
    frames_.pop_front();
    ++delivered;
    if (!handler.OnFrame(frame)) {
      dropping_ = true;
      frames_.clear();
      Break("The peer sent a malformed frame (" + std::to_string(frame.size()) + " bytes).");
    }
  }
  return delivered;
}

int Faulty::Poll(int budget, Handler& handler) {
  const itimerspec never = {};
  timerfd_settime(timer_.get(), 0, &never, nullptr);  // also makes it unreadable
  int delivered = Deliver(budget, handler);
  if (delivered > 0) return delivered;
  if (!inner_over_ && inner_->Poll(budget, *this) < 0) inner_over_ = true;
  delivered = Deliver(budget, handler);
  return delivered == 0 && inner_over_ && Due() == INT64_MAX ? -1 : delivered;
}

int Faulty::Wait(int budget, Handler& handler, Deadline deadline) {
  for (;;) {
    const int delivered = Poll(budget, handler);
    if (delivered != 0) return delivered;
    if (deadline.expired()) return 0;
    const int64_t due = Due();
    if (due == 0) continue;
    const Deadline sooner =
        due == INT64_MAX ? deadline : Deadline::After((due + 999'999) / 1'000'000);
    const bool until_due = due != INT64_MAX;
    if (inner_over_) {
      // Only held things are left; they are due within milliseconds.
      const timespec pause = {0, std::min<int64_t>(due, 1'000'000)};
      nanosleep(&pause, nullptr);
      continue;
    }
    const int got = inner_->Wait(budget, *this, sooner);
    if (got < 0) inner_over_ = true;
    if (got != 0 || Due() == 0) continue;
    // Nothing came and nothing is due: the caller's time is up, or somebody interrupted.
    if (!until_due || !sooner.expired()) return 0;
  }
}

bool Faulty::Arm() {
  const int64_t due = Due();
  if (due == 0 || (inner_over_ && due == INT64_MAX)) return false;
  if (due != INT64_MAX) {
    const itimerspec at = {{0, 0}, {due / 1'000'000'000, due % 1'000'000'000}};
    timerfd_settime(timer_.get(), 0, &at, nullptr);
  }
  return inner_over_ || inner_->Arm();
}

}  // namespace

std::unique_ptr<Connection> FaultConnection(std::unique_ptr<Connection> inner, FaultPlan plan) {
  return std::make_unique<Faulty>(std::move(inner), std::move(plan));
}

}  // namespace penstock::transport::fault
