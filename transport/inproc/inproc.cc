#include "transport/inproc/inproc.h"

#include <poll.h>

#include <atomic>
#include <cstring>
#include <mutex>
#include <string>

#include "common/log.h"
#include "transport/completion_queue.h"
#include "transport/frame_ring.h"
#include "transport/region_table.h"
#include "transport/waker.h"

namespace penstock::transport::inproc {
namespace {

// What one end leaves where the other can reach it. Both ends hold the whole Wire, so neither cares
// whether the other object still exists.
struct End {
  explicit End(const InprocOptions& options) : outgoing(options.ring_bytes, options.max_frame) {}

  FrameRing outgoing;  // produced here, consumed by the other end
  Waker waker;         // wakes this end's receiver
  // Set before this end's receiver sleeps and looks at the ring once more; see Sender in tcp/ for
  // why "store, then look" on both sides loses no wake-up.
  std::atomic<bool> sleeping{false};
  CompletionQueue completions{waker};
  std::shared_ptr<RegionTable> regions = std::make_shared<RegionTable>();

  std::atomic<uint64_t> bulk_sent{0}, bulk_received{0};

  std::atomic<bool> closed{false};
  std::mutex mutex;
  std::string reason;  // under mutex

  void MarkClosed(const std::string& why, LogLevel level) {
    {
      std::lock_guard lock(mutex);
      if (closed.load(std::memory_order_relaxed)) return;
      reason = why;
      closed.store(true, std::memory_order_seq_cst);
    }
    PENSTOCK_LOG_AT(level, "transport", "%s", why.c_str());
    waker.Signal();
  }
};

struct Wire {
  explicit Wire(const InprocOptions& options) : ends{End(options), End(options)} {}
  End ends[2];
};

class InprocConnection : public Connection {
 public:
  InprocConnection(std::shared_ptr<Wire> wire, int which, const InprocOptions& options)
      : caps_{"inproc", options.max_frame, uint64_t{1} << 40, options.registration_is_dear},
        wire_(std::move(wire)),
        here_(wire_->ends[which]),
        there_(wire_->ends[1 - which]) {}
  ~InprocConnection() override { Close(0); }

  const Caps& caps() const override { return caps_; }
  Outcome Reserve(uint32_t bytes, std::byte** slot) override;
  void Commit(uint32_t used, uint32_t flags) override;
  Outcome Flush() override { return closed() ? Outcome::kClosed : Outcome::kOk; }
  int Poll(int budget, Handler& handler) override;
  int Wait(int budget, Handler& handler, Deadline deadline) override;
  void Interrupt() override;
  int event_fd() const override { return here_.waker.fd(); }
  bool Arm() override;
  Result<std::unique_ptr<MemoryRegion>> Register(void* address, size_t bytes,
                                                 Access access) override {
    return here_.regions->Register(address, bytes, access);
  }
  Outcome Get(MemoryRegion& target, uint64_t target_offset, const MemoryKey& source,
              uint64_t source_offset, uint64_t bytes, uint64_t cookie) override {
    return Move(target, target_offset, source, source_offset, bytes, cookie, Access::kPeerReads);
  }
  Outcome Put(MemoryRegion& source, uint64_t source_offset, const MemoryKey& target,
              uint64_t target_offset, uint64_t bytes, uint64_t cookie) override {
    return Move(source, source_offset, target, target_offset, bytes, cookie, Access::kPeerWrites);
  }
  bool closed() const override { return here_.closed.load(std::memory_order_acquire); }
  std::string close_reason() const override {
    std::lock_guard lock(here_.mutex);
    return here_.reason;
  }
  void Close(int drain_ms) override;
  Counters counters() const override;

 private:
  void Fail(const std::string& reason, LogLevel level) {
    here_.MarkClosed(reason, level);
    there_.MarkClosed("The peer closed the connection.", LogLevel::kInfo);
  }
  Outcome Move(MemoryRegion& local, uint64_t local_offset, const MemoryKey& key,
               uint64_t remote_offset, uint64_t bytes, uint64_t cookie, Access wanted);
  BulkStatus Copy(Region& local, uint64_t local_offset, const MemoryKey& key,
                  uint64_t remote_offset, uint64_t bytes, Access wanted);
  int HandleFrames(int budget, Handler& handler);
  // Something to handle, or the news that nothing will come any more.
  bool Ready() const;

  const Caps caps_;
  const std::shared_ptr<Wire> wire_;
  End& here_;
  End& there_;
  std::atomic<bool> interrupted_{false};
  bool malformed_ = false;  // the receiver's own: what else is in the ring is not looked at
  std::atomic<uint64_t> frames_sent_{0}, frames_received_{0}, bytes_sent_{0}, bytes_received_{0};
  std::atomic<uint64_t> bulk_copies_{0};
};

void Add(std::atomic<uint64_t>& counter, uint64_t amount) {
  counter.fetch_add(amount, std::memory_order_relaxed);
}

Outcome InprocConnection::Reserve(uint32_t bytes, std::byte** slot) {
  if (bytes > caps_.max_frame) {
    Fail("A frame to send (" + std::to_string(bytes) + " bytes) exceeds the largest frame (" +
             std::to_string(caps_.max_frame) + ").",
         LogLevel::kError);
  }
  if (closed()) return Outcome::kClosed;
  *slot = here_.outgoing.Reserve(bytes);
  return *slot != nullptr ? Outcome::kOk : Outcome::kAgain;
}

void InprocConnection::Commit(uint32_t used, uint32_t) {
  if (closed()) return;
  uint32_t length;
  std::memcpy(&length, here_.outgoing.reserved(), sizeof length);
  if (length != used || used < 8 || used > here_.outgoing.reserved_bytes()) {
    Fail("A frame to send has a bad length (" + std::to_string(length) + "; committed " +
             std::to_string(used) + " of " + std::to_string(here_.outgoing.reserved_bytes()) +
             " reserved bytes).",
         LogLevel::kError);
    return;
  }
  here_.outgoing.Commit(used);
  Add(frames_sent_, 1);
  Add(bytes_sent_, used);
  if (there_.sleeping.load(std::memory_order_seq_cst)) there_.waker.Signal();
}

int InprocConnection::HandleFrames(int budget, Handler& handler) {
  int handled = 0;
  FrameRing& ring = there_.outgoing;
  while (handled < budget && !malformed_) {
    // The ring shows runs of whole frames, checked by Commit; take the first.
    const FrameRing::Run run = ring.pending();
    if (run.bytes == 0) break;
    const auto* frame = static_cast<const std::byte*>(run.parts[0].iov_base);
    uint32_t length;
    std::memcpy(&length, frame, sizeof length);
    Add(frames_received_, 1);
    Add(bytes_received_, length);
    ++handled;
    const bool sound = handler.OnFrame({frame, length});
    ring.Consume(RoundUpTo8(length));
    if (!sound) {
      malformed_ = true;
      Fail("The peer sent a malformed frame (" + std::to_string(length) + " bytes).",
           LogLevel::kWarning);
    }
  }
  return handled;
}

bool InprocConnection::Ready() const {
  return !here_.completions.empty() || (!malformed_ && !there_.outgoing.empty()) || closed();
}

int InprocConnection::Poll(int budget, Handler& handler) {
  here_.sleeping.store(false, std::memory_order_relaxed);
  here_.waker.Clear();
  // Before looking for frames: what came before the end must be seen before the end is.
  const bool over = closed();
  int handled = here_.completions.Report(budget, handler);
  handled += HandleFrames(budget - handled, handler);
  return handled == 0 && over ? -1 : handled;
}

int InprocConnection::Wait(int budget, Handler& handler, Deadline deadline) {
  for (;;) {
    const int handled = Poll(budget, handler);
    if (handled != 0) return handled;
    if (interrupted_.load(std::memory_order_relaxed) && interrupted_.exchange(false)) return 0;
    here_.sleeping.store(true, std::memory_order_seq_cst);
    if (Ready()) continue;
    pollfd entry = {here_.waker.fd(), POLLIN, 0};
    timespec left;
    if (ppoll(&entry, 1, deadline.ppoll_timeout(&left), nullptr) == 0) {
      here_.sleeping.store(false, std::memory_order_relaxed);
      return 0;
    }
  }
}

void InprocConnection::Interrupt() {
  interrupted_.store(true);
  here_.waker.Signal();
}

bool InprocConnection::Arm() {
  here_.waker.Clear();
  here_.sleeping.store(true, std::memory_order_seq_cst);
  return !Ready() && !interrupted_.exchange(false);
}

Outcome InprocConnection::Move(MemoryRegion& local, uint64_t local_offset, const MemoryKey& key,
                               uint64_t remote_offset, uint64_t bytes, uint64_t cookie,
                               Access wanted) {
  if (closed()) return Outcome::kClosed;
  BulkStatus status = BulkStatus::kOk;
  if (bytes > 0) {
    Region& region = *static_cast<RegisteredMemory&>(local).region();
    status = Copy(region, local_offset, key, remote_offset, bytes, wanted);
  }
  here_.completions.Push({cookie, status, status == BulkStatus::kOk ? bytes : 0});
  return Outcome::kOk;
}

BulkStatus InprocConnection::Copy(Region& local, uint64_t local_offset, const MemoryKey& key,
                                  uint64_t remote_offset, uint64_t bytes, Access wanted) {
  KeyBlob blob;
  if (!local.Contains(local_offset, bytes) || !ParseKey(key, &blob)) return BulkStatus::kRefused;
  const auto remote = there_.regions->Find(blob, remote_offset, bytes, wanted);
  if (remote == nullptr || remote.get() == &local) return BulkStatus::kRefused;
  std::scoped_lock touching(local.mutex, remote->mutex);
  if (closed()) return BulkStatus::kClosed;
  if (!local.alive) return BulkStatus::kCancelled;
  if (!remote->alive) return BulkStatus::kRefused;
  std::byte* const here = local.address + local_offset;
  std::byte* const there = remote->address + remote_offset;
  Add(bulk_copies_, bytes);
  // The two may be the same memory, registered twice.
  if (wanted == Access::kPeerReads) {
    std::memmove(here, there, bytes);
    Add(here_.bulk_received, bytes);
    Add(there_.bulk_sent, bytes);
  } else {
    std::memmove(there, here, bytes);
    Add(here_.bulk_sent, bytes);
    Add(there_.bulk_received, bytes);
  }
  return BulkStatus::kOk;
}

// Committed frames stay in the ring for the peer to read after the end, so there is nothing to
// drain.
void InprocConnection::Close(int) {
  Fail("The connection was closed by this side.", LogLevel::kDebug);
  here_.regions->CloseAll();
}

Counters InprocConnection::counters() const {
  Counters counters;
  counters.frames_sent = frames_sent_.load(std::memory_order_relaxed);
  counters.frames_received = frames_received_.load(std::memory_order_relaxed);
  counters.bytes_sent = bytes_sent_.load(std::memory_order_relaxed);
  counters.bytes_received = bytes_received_.load(std::memory_order_relaxed);
  counters.bulk_bytes_sent = here_.bulk_sent.load(std::memory_order_relaxed);
  counters.bulk_bytes_received = here_.bulk_received.load(std::memory_order_relaxed);
  counters.bulk_copies = bulk_copies_.load(std::memory_order_relaxed);
  return counters;
}

}  // namespace

std::pair<std::unique_ptr<Connection>, std::unique_ptr<Connection>> MakePair(
    const InprocOptions& options) {
  auto wire = std::make_shared<Wire>(options);
  return {std::make_unique<InprocConnection>(wire, 0, options),
          std::make_unique<InprocConnection>(wire, 1, options)};
}

}  // namespace penstock::transport::inproc
