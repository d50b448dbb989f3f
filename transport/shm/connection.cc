#include "transport/shm/connection.h"

#include <sched.h>
#include <sys/epoll.h>

#include <algorithm>
#include <cstring>

#include "transport/sleep.h"

namespace penstock::transport::shm {
namespace {

// As over tcp: longer than it takes to wake a peer that sleeps on an idle core, else two ends that
// both went to sleep once would go on sleeping, each too late for the other's look.
constexpr int64_t kSpinUs = 80;
constexpr int kMostSpinCredit = 8;
// Whoever polls without ever sleeping still hears of the peer's end.
constexpr int64_t kReadLinkNs = 200'000;
constexpr int kMessagesAtOnce = 64;

void Add(std::atomic<uint64_t>& counter, uint64_t amount) {
  counter.store(counter.load(std::memory_order_relaxed) + amount, std::memory_order_relaxed);
}

}  // namespace

ShmConnection::ShmConnection(shm::End here, UniqueFd socket, std::unique_ptr<Segment> segment,
                             uint32_t max_frame)
    : caps_{"shm", max_frame, uint64_t{1} << 40, true},
      here_(here),
      link_(std::make_shared<Link>(std::move(socket))),
      segment_(std::move(segment)),
      completions_(link_->receiver()),
      regions_(std::make_shared<RegionTable>()),
      out_(segment_->words().to[Other(here)], segment_->ring(Other(here)), segment_->ring_bytes()),
      in_(segment_->words().to[here], segment_->ring(here), segment_->ring_bytes(), max_frame),
      mover_(*link_, *segment_, completions_),
      servant_(*link_, *segment_, regions_),
      maker_(std::make_shared<ShareMaker>(link_)),
      event_fd_(epoll_create1(EPOLL_CLOEXEC)) {
  for (const int fd : {link_->fd(), link_->receiver().fd()}) {
    epoll_event event = {};
    event.events = EPOLLIN;
    event.data.fd = fd;
    epoll_ctl(event_fd_.get(), EPOLL_CTL_ADD, fd, &event);
  }
}

ShmConnection::~ShmConnection() {
  Close(0);
}

void ShmConnection::Start() {
  if (!event_fd_.valid() || !link_->receiver().valid()) {
    Finish("The system has no descriptor for waiting.", LogLevel::kError);
  }
  if (here_ == kServer) mover_.Start();
}

void ShmConnection::AbandonAfterFork() {
  link_->AbandonAfterFork();
  event_fd_.reset();
}

void ShmConnection::Finish(const std::string& reason, LogLevel level) {
  link_->Close(reason, level);
  mover_.Kick();
  servant_.Kick();
}

void ShmConnection::Violation(const std::string& what) {
  malformed_ = true;
  Finish("The peer breaks the shared memory protocol: " + what + ".", LogLevel::kWarning);
}

// --- sending ---

Outcome ShmConnection::Reserve(uint32_t bytes, std::byte** slot) {
  if (bytes > caps_.max_frame) {
    Finish("A frame to send (" + std::to_string(bytes) + " bytes) exceeds the largest frame (" +
               std::to_string(caps_.max_frame) + ").",
           LogLevel::kError);
  }
  if (closed()) return Outcome::kClosed;
  bool sound = true;
  *slot = out_.Reserve(bytes, &sound);
  if (*slot != nullptr) return Outcome::kOk;
  if (sound) return Outcome::kAgain;
  Finish("The peer breaks the shared memory protocol: impossible position in the ring of frames.",
         LogLevel::kWarning);
  return Outcome::kClosed;
}

void ShmConnection::Commit(uint32_t used, uint32_t) {
  if (closed()) return;
  uint32_t length;
  std::memcpy(&length, out_.reserved(), sizeof length);
  if (length != used || used < 8 || used > out_.reserved_bytes()) {
    Finish("A frame to send has a bad length (" + std::to_string(length) + "; committed " +
               std::to_string(used) + " of " + std::to_string(out_.reserved_bytes()) +
               " reserved bytes).",
           LogLevel::kError);
    return;
  }
  out_.Commit(used);
  Add(frames_sent_, 1);
  Add(bytes_sent_, used);
  std::atomic<uint32_t>& sleeping = segment_->words().to[Other(here_)].sleeping;
  if (sleeping.load(std::memory_order_seq_cst) != 0 && sleeping.exchange(0) != 0) {
    link_->SendWake();
  }
}

// --- receiving ---

int ShmConnection::HandleFrames(int budget, Handler& handler) {
  int handled = 0;
  while (handled < budget && !malformed_) {
    std::span<const std::byte> frame;
    uint32_t length = 0;
    switch (in_.Take(&frame, &length)) {
      case RingConsumer::Next::kNone:
        return handled;
      case RingConsumer::Next::kBadPosition:
        Violation("impossible position in the ring of frames");
        return handled;
      case RingConsumer::Next::kBadLength:
        Violation("frame with a bad length (" + std::to_string(length) + ")");
        return handled;
      case RingConsumer::Next::kChanged:
        Violation("frame (" + std::to_string(length) + " bytes) that changes while it is read");
        return handled;
      case RingConsumer::Next::kFrame:
        break;
    }
    Add(frames_received_, 1);
    Add(bytes_received_, length);
    ++handled;
    if (!handler.OnFrame(frame)) {
      malformed_ = true;
      Finish("The peer sent a malformed frame (" + std::to_string(length) + " bytes).",
             LogLevel::kWarning);
    }
  }
  return handled;
}

void ShmConnection::ReadLink() {
  std::lock_guard lock(read_mutex_);
  for (int i = 0; i < kMessagesAtOnce && !closed(); ++i) {
    LinkMessage message;
    UniqueFd file;
    switch (link_->Receive(&message, &file)) {
      case Link::Received::kNone:
        return;
      case Link::Received::kWake:
        break;
      case Link::Received::kMessage:
        OnLinkMessage(message, file);
        break;
      case Link::Received::kEnd:
        Finish("The peer closed the connection.", LogLevel::kInfo);
        return;
      case Link::Received::kMalformed:
        Finish("The peer sent a malformed message beside the frames.", LogLevel::kWarning);
        return;
    }
  }
}

void ShmConnection::OnLinkMessage(const LinkMessage& message, const UniqueFd& file) {
  Status done = Fail(Code::kProtocol, "The peer sent a message (" +
                                          std::to_string(static_cast<uint32_t>(message.kind)) +
                                          ") out of place.");
  if (here_ == kServer && message.kind == LinkKind::kShare) {
    done = shares_.Add(message, file);
  } else if (here_ == kServer && message.kind == LinkKind::kUnshare) {
    done = shares_.Remove(message.id);
  }
  if (!done) Finish(done.error().message, LogLevel::kWarning);
}

void ShmConnection::StopSleeping() {
  if (!sleeping_) return;
  sleeping_ = false;
  segment_->words().to[here_].sleeping.store(0, std::memory_order_relaxed);
}

int ShmConnection::Poll(int budget, Handler& handler) {
  StopSleeping();
  link_->receiver().Clear();
  // Before looking for frames: what came before the end must be seen before the end is.
  bool ended = over();
  int handled = completions_.Report(budget, handler);
  handled += HandleFrames(budget - handled, handler);
  if (handled == 0 && !ended) {
    const int64_t now = NowNanoseconds();
    if (now - link_read_ns_ < kReadLinkNs) return 0;
    link_read_ns_ = now;
    ReadLink();
    ended = over();
    handled = HandleFrames(budget, handler);
  }
  return handled == 0 && ended ? -1 : handled;
}

int ShmConnection::Wait(int budget, Handler& handler, Deadline deadline) {
  // A peer that wakes us for nothing must not keep us: the last round is the first that begins
  // late.
  for (bool last = false;; last = deadline.expired()) {
    const int handled = Poll(budget, handler);
    if (handled != 0) return handled;
    if (last) return 0;
    if (interrupted_.load(std::memory_order_relaxed) && interrupted_.exchange(false)) return 0;
    if (Spin(deadline)) continue;
    segment_->words().to[here_].sleeping.store(1, std::memory_order_seq_cst);
    sleeping_ = true;
    if (frame_ready() || over() || !completions_.empty()) continue;
    epoll_event events[2];
    // After the end only our own thread's last completions are awaited.
    const int ready = SleepOn(event_fd_.get(), events, 2,
                              closed() ? Earlier(deadline, Deadline::After(10)) : deadline);
    for (int i = 0; i < ready; ++i) {
      if (events[i].data.fd == link_->fd()) ReadLink();
    }
    if (ready == 0 && deadline.expired()) {
      StopSleeping();
      return 0;
    }
  }
}

// See TcpConnection::Spin: looking pays when the answer comes sooner than a sleeper wakes.
bool ShmConnection::Spin(Deadline deadline) {
  if (closed() || (spin_credit_ == 0 && ++waits_without_spin_ < 32)) return false;
  waits_without_spin_ = 0;
  const Deadline end = Earlier(deadline, Deadline::AfterMicroseconds(kSpinUs));
  do {
    if (frame_ready() || link_->receiver().signalled()) {
      spin_credit_ = std::min(spin_credit_ + 1, kMostSpinCredit);
      return true;
    }
    sched_yield();
  } while (!end.expired());
  spin_credit_ = std::max(spin_credit_ - 1, 0);
  return false;
}

void ShmConnection::Interrupt() {
  interrupted_.store(true);
  link_->receiver().Signal();
}

bool ShmConnection::Arm() {
  link_->receiver().Clear();
  ReadLink();
  segment_->words().to[here_].sleeping.store(1, std::memory_order_seq_cst);
  sleeping_ = true;
  return !frame_ready() && completions_.empty() && !closed() && !interrupted_.exchange(false);
}

// --- bulk ---

Result<std::unique_ptr<MemoryRegion>> ShmConnection::Register(void* address, size_t bytes,
                                                              Access access) {
  auto region = regions_->Register(address, bytes, access);
  if (region && here_ == kClient) servant_.EnsureStarted();
  return region;
}

Result<std::unique_ptr<MemoryRegion>> ShmConnection::Allocate(size_t bytes, Access access) {
  if (here_ == kClient) {
    auto shared = maker_->Make(bytes, access);
    // Without sharing it is still memory for copies.
    if (shared || closed() || shared.error().code == Code::kInvalidArgument) return shared;
    LOG_DEBUG("transport", "Memory for copies (%zu bytes) is not shared: %s", bytes,
              shared.error().message.c_str());
  }
  return Connection::Allocate(bytes, access);
}

std::shared_ptr<Mapping> ShmConnection::FindShare(const MemoryKey& key, uint64_t offset,
                                                  uint64_t bytes, Access wanted) {
  KeyBlob blob;
  if (here_ != kServer || key.bytes != sizeof blob) return nullptr;
  std::memcpy(&blob, key.blob.data(), sizeof blob);
  if (blob.kind != kShareKeyKind) return nullptr;
  bool known = false;
  auto memory = shares_.Find(blob, offset, bytes, wanted, &known);
  // Its message came before the frame that named it, but may not have been read yet.
  for (int i = 0; !known && i < 8 && !closed(); ++i) {
    ReadLink();
    link_->receiver().Signal();  // its wake-up may have been read along, on another thread
    memory = shares_.Find(blob, offset, bytes, wanted, &known);
  }
  return memory;
}

bool ShmConnection::Reach(const MemoryKey& key, uint64_t offset, uint64_t bytes, Access wanted,
                          ReachedMemory* memory) {
  auto mapping = FindShare(key, offset, bytes, wanted);
  if (mapping == nullptr) return false;
  memory->address = mapping->address() + offset;
  memory->base = mapping->address();
  memory->bytes = mapping->bytes();
  memory->keep = std::move(mapping);
  return true;
}

Outcome ShmConnection::Submit(BulkOp op, MemoryRegion& local, uint64_t local_offset,
                              const MemoryKey& key, uint64_t remote_offset, uint64_t bytes,
                              uint64_t cookie) {
  if (closed()) return Outcome::kClosed;
  BulkMover::Move move;
  move.op = op;
  move.local = static_cast<RegisteredMemory&>(local).region();
  move.local_offset = local_offset;
  move.remote_offset = remote_offset;
  move.bytes = bytes;
  move.cookie = cookie;
  if (bytes > 0) {
    const Access wanted = op == kBulkGet ? Access::kPeerReads : Access::kPeerWrites;
    move.shared = FindShare(key, remote_offset, bytes, wanted);
    const bool sound = move.local->Contains(local_offset, bytes) && bytes <= caps_.max_bulk &&
                       remote_offset <= UINT64_MAX - bytes &&
                       (move.shared != nullptr || ParseKey(key, &move.key));
    if (!sound) move.status = BulkStatus::kRefused;
  }
  return mover_.Submit(std::move(move));
}

Outcome ShmConnection::Get(MemoryRegion& target, uint64_t target_offset, const MemoryKey& source,
                           uint64_t source_offset, uint64_t bytes, uint64_t cookie) {
  return Submit(kBulkGet, target, target_offset, source, source_offset, bytes, cookie);
}

Outcome ShmConnection::Put(MemoryRegion& source, uint64_t source_offset, const MemoryKey& target,
                           uint64_t target_offset, uint64_t bytes, uint64_t cookie) {
  return Submit(kBulkPut, source, source_offset, target, target_offset, bytes, cookie);
}

// --- the end ---

// What is committed lies where the peer finds it also after the end, so there is nothing to drain.
void ShmConnection::Close(int) {
  std::lock_guard lock(close_mutex_);
  Finish("The connection was closed by this side.", LogLevel::kDebug);
  mover_.Stop();
  servant_.Stop();
  regions_->CloseAll();
  shares_.Clear();
}

Counters ShmConnection::counters() const {
  Counters counters;
  counters.frames_sent = frames_sent_.load(std::memory_order_relaxed);
  counters.bytes_sent = bytes_sent_.load(std::memory_order_relaxed);
  counters.frames_received = frames_received_.load(std::memory_order_relaxed);
  counters.bytes_received = bytes_received_.load(std::memory_order_relaxed);
  counters.bulk_bytes_sent = mover_.bytes_sent() + servant_.bytes_sent();
  counters.bulk_bytes_received = mover_.bytes_received() + servant_.bytes_received();
  counters.bulk_copies = mover_.copied() + servant_.bytes_sent() + servant_.bytes_received();
  return counters;
}

void AbandonAfterFork(Connection& connection) {
  static_cast<ShmConnection&>(connection).AbandonAfterFork();
}

}  // namespace penstock::transport::shm
