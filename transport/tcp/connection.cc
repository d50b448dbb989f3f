#include "transport/tcp/connection.h"

#include <sched.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "transport/sleep.h"

namespace penstock::transport::tcp {
namespace {

// Longer than it takes to wake a peer that sleeps on an idle core: else two ends that both went to
// sleep once would go on sleeping, each too late for the other's look.
constexpr int64_t kSpinUs = 80;
constexpr int kMostSpinCredit = 8;

}  // namespace
TcpConnection::TcpConnection(UniqueFd control, UniqueFd bulk, const TcpOptions& options)
    : caps_{"tcp", options.max_frame, uint64_t{1} << 40},
      life_(std::move(control), std::move(bulk)),
      completions_(life_.receiver()),
      regions_(std::make_shared<RegionTable>()),
      sender_(life_, options.ring_bytes, options.max_frame),
      bulk_(life_, completions_, regions_, options),
      capacity_(RoundUpTo8(std::max<size_t>(options.receive_bytes, 4ull * options.max_frame))),
      buffer_(new std::byte[capacity_]) {
  PrepareSocket(life_.control(), options.peer_timeout_ms);
  PrepareSocket(life_.bulk(), options.peer_timeout_ms);
  event_fd_.reset(epoll_create1(EPOLL_CLOEXEC));
  for (const int fd : {life_.control(), life_.receiver().fd()}) WatchReadable(event_fd_.get(), fd);
}

TcpConnection::~TcpConnection() {
  Close(0);
}

void TcpConnection::Start() {
  if (!event_fd_.valid() || !life_.receiver().valid() || !bulk_.valid()) {
    EndOfControl("The system has no descriptor for waiting.", LogLevel::kError);
  }
  sender_.Start();
  bulk_.Start();
}

void TcpConnection::AbandonAfterFork() {
  life_.AbandonAfterFork();
  bulk_.AbandonAfterFork();
  event_fd_.reset();
}

Outcome TcpConnection::Reserve(uint32_t bytes, std::byte** slot) {
  if (bytes > caps_.max_frame) {
    life_.Close("A frame to send (" + std::to_string(bytes) +
                    " bytes) exceeds the largest frame (" + std::to_string(caps_.max_frame) + ").",
                LogLevel::kError);
    return Outcome::kClosed;
  }
  return sender_.Reserve(bytes, slot);
}

// --- receiving ---

bool TcpConnection::frame_ready() const {
  if (control_over_ && end_ == begin_) return false;
  if (end_ - begin_ < sizeof(uint32_t)) return false;
  uint32_t length;
  std::memcpy(&length, buffer_.get() + begin_, sizeof length);
  return end_ - begin_ >= RoundUpTo8(length) || length > caps_.max_frame;
}

bool TcpConnection::over() const {
  return life_.closed() && control_over_ && bulk_.finished() && completions_.empty();
}

void TcpConnection::EndOfControl(const std::string& reason, LogLevel level) {
  life_.Close(reason, level);
  control_over_ = true;
  epoll_ctl(event_fd_.get(), EPOLL_CTL_DEL, life_.control(), nullptr);
}

int TcpConnection::HandleFrames(int budget, Handler& handler) {
  int handled = 0;
  while (handled < budget && end_ - begin_ >= sizeof(uint32_t)) {
    uint32_t length;
    std::memcpy(&length, buffer_.get() + begin_, sizeof length);
    if (length < 8 || length > caps_.max_frame) {
      EndOfControl("The peer sent a frame with a bad length (" + std::to_string(length) + ").",
                   LogLevel::kWarning);
      begin_ = end_ = 0;
      break;
    }
    const size_t padded = RoundUpTo8(length);
    if (end_ - begin_ < padded) break;
    const std::byte* frame = buffer_.get() + begin_;
    begin_ += padded;
    frames_received_.store(frames_received_.load(std::memory_order_relaxed) + 1,
                           std::memory_order_relaxed);
    bytes_received_.store(bytes_received_.load(std::memory_order_relaxed) + length,
                          std::memory_order_relaxed);
    ++handled;
    if (!handler.OnFrame({frame, length})) {
      EndOfControl("The peer sent a malformed frame (" + std::to_string(length) + " bytes).",
                   LogLevel::kWarning);
      begin_ = end_ = 0;
      break;
    }
  }
  if (begin_ == end_) begin_ = end_ = 0;
  return handled;
}

int TcpConnection::Handle(int budget, Handler& handler) {
  life_.receiver().Clear();
  const int reported = completions_.Report(budget, handler);
  return reported + HandleFrames(budget - reported, handler);
}

bool TcpConnection::Receive() {
  if (control_over_) return false;
  // Room for a whole frame behind begin_, always: else a frame could never become complete.
  if (capacity_ - begin_ < RoundUpTo8(caps_.max_frame)) {
    std::memmove(buffer_.get(), buffer_.get() + begin_, end_ - begin_);
    end_ -= begin_;
    begin_ = 0;
  }
  if (end_ == capacity_) return false;  // full of frames that the budget left unhandled
  const ssize_t got = recv(life_.control(), buffer_.get() + end_, capacity_ - end_, MSG_DONTWAIT);
  if (got > 0) {
    end_ += got;
    bulk_.AcquireReceived();
    return true;
  }
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) {
    if (life_.read_on_expired()) EndOfControl("", LogLevel::kDebug);
    return false;
  }
  if (got < 0) {
    char text[128];
    EndOfControl(std::string("The connection broke: ") + strerror_r(errno, text, sizeof text) + ".",
                 LogLevel::kInfo);
  } else if (end_ > begin_ && !frame_ready()) {
    EndOfControl("The peer closed the connection in the middle of a frame.", LogLevel::kInfo);
  } else {
    EndOfControl("The peer closed the connection.", LogLevel::kInfo);
  }
  return false;
}

int TcpConnection::Poll(int budget, Handler& handler) {
  int handled = Handle(budget, handler);
  if (handled == 0 && Receive()) handled = Handle(budget, handler);
  return handled == 0 && over() ? -1 : handled;
}

int TcpConnection::Wait(int budget, Handler& handler, Deadline deadline) {
  // A peer that sends a frame byte by byte must not keep us: the last round is the first that
  // begins late.
  for (bool last = false;; last = deadline.expired()) {
    const int handled = Handle(budget, handler);
    if (handled > 0) return handled;
    if (over()) return -1;
    if (last) return 0;
    if (interrupted_.load(std::memory_order_relaxed) && interrupted_.exchange(false)) return 0;
    if (Spin(deadline)) continue;
    epoll_event events[2];
    // After the end only stragglers of the peer are awaited, and not for long.
    const bool ending = life_.closed() && !control_over_;
    const int ready = SleepOn(event_fd_.get(), events, 2,
                              ending ? Earlier(deadline, Deadline::After(50)) : deadline);
    for (int i = 0; i < ready; ++i) {
      if (events[i].data.fd == life_.control()) Receive();
    }
    if (ending && ready == 0) Receive();
    if (ready == 0 && deadline.expired()) return 0;
  }
}

// To sleep and be woken can cost far more than the peer needs to answer a short call (on a virtual
// machine with idle cores: 80 us against 6), so the receiver first looks for a few microseconds,
// but only as long as looking pays: each success earns an attempt, each failure costs one, and
// without any left only every 32nd Wait tries. A program that waits for long kernels soon stops,
// one that asks short questions never sleeps. Yielding in between leaves the core to whoever needs
// it, such as the peer on a small machine.
bool TcpConnection::Spin(Deadline deadline) {
  if (control_over_ || (spin_credit_ == 0 && ++waits_without_spin_ < 32)) return false;
  waits_without_spin_ = 0;
  const Deadline end = Earlier(deadline, Deadline::AfterMicroseconds(kSpinUs));
  do {
    if (Receive() || control_over_ || life_.receiver().signalled()) {
      spin_credit_ = std::min(spin_credit_ + 1, kMostSpinCredit);
      return true;
    }
    sched_yield();
  } while (!end.expired());
  spin_credit_ = std::max(spin_credit_ - 1, 0);
  return false;
}

void TcpConnection::Interrupt() {
  interrupted_.store(true);
  life_.receiver().Signal();
}

bool TcpConnection::Arm() {
  life_.receiver().Clear();
  // Once closed, the caller polls until the end, which is near: nothing announces it.
  if (life_.closed() || !completions_.empty() || interrupted_.exchange(false)) return false;
  if (!frame_ready()) Receive();
  return !frame_ready() && !life_.closed();
}

// --- bulk ---

Result<std::unique_ptr<MemoryRegion>> TcpConnection::Register(void* address, size_t bytes,
                                                              Access access) {
  return regions_->Register(address, bytes, access);
}

Outcome TcpConnection::Get(MemoryRegion& target, uint64_t target_offset, const MemoryKey& source,
                           uint64_t source_offset, uint64_t bytes, uint64_t cookie) {
  return bulk_.Submit(kGet, static_cast<RegisteredMemory&>(target).region(), target_offset, source,
                      source_offset, bytes, cookie);
}

Outcome TcpConnection::Put(MemoryRegion& source, uint64_t source_offset, const MemoryKey& target,
                           uint64_t target_offset, uint64_t bytes, uint64_t cookie) {
  return bulk_.Submit(kPut, static_cast<RegisteredMemory&>(source).region(), source_offset, target,
                      target_offset, bytes, cookie);
}

// --- the end ---

void TcpConnection::Close(int drain_ms) {
  std::lock_guard lock(close_mutex_);
  if (!life_.closed()) {
    if (drain_ms > 0) sender_.Drain(Deadline::After(drain_ms));
    life_.Close("The connection was closed by this side.", LogLevel::kDebug);
  }
  sender_.Stop();
  bulk_.Stop();
  regions_->CloseAll();
}

Counters TcpConnection::counters() const {
  Counters counters;
  counters.frames_sent = sender_.frames_sent();
  counters.bytes_sent = sender_.bytes_sent();
  counters.frames_received = frames_received_.load(std::memory_order_relaxed);
  counters.bytes_received = bytes_received_.load(std::memory_order_relaxed);
  counters.bulk_bytes_sent = bulk_.bytes_sent();
  counters.bulk_bytes_received = bulk_.bytes_received();
  return counters;
}

std::unique_ptr<Connection> Adopt(UniqueFd control, UniqueFd bulk, const TcpOptions& options) {
  auto connection = std::make_unique<TcpConnection>(std::move(control), std::move(bulk), options);
  connection->Start();
  return connection;
}

void AbandonAfterFork(Connection& connection) {
  static_cast<TcpConnection&>(connection).AbandonAfterFork();
}

}  // namespace penstock::transport::tcp
