#include "transport/rdma/connection.h"

#include <sched.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "transport/rdma/loopback.h"
#include "transport/sleep.h"

namespace penstock::transport::rdma {
namespace {

constexpr int64_t kMillisecond = 1'000'000;
constexpr int64_t kLongestSleepMs = 100;  // a device may lose a notification

}  // namespace

RdmaConnection::RdmaConnection(std::shared_ptr<Verbs> verbs, const RdmaOptions& options,
                               const Token& token, bool client, std::unique_ptr<CmChannel> cm,
                               UniqueFd lifeline)
    : caps_{},
      verbs_(std::move(verbs)),
      options_(options),
      token_(token),
      client_(client),
      receiver_epoll_(epoll_create1(EPOLL_CLOEXEC)),
      keeper_epoll_(epoll_create1(EPOLL_CLOEXEC)),
      cm_(std::move(cm)),
      lifeline_(std::move(lifeline)),
      completions_(receiver_) {
  caps_.name = "rdma";
  caps_.max_frame = options.max_frame;
  caps_.max_bulk = uint64_t{1} << 40;
  caps_.registration_is_dear = true;
  caps_.device_memory = !client;
  caps_.sees_bulk = false;
}

RdmaConnection::~RdmaConnection() {
  Close(0);
  control_.reset();
  bulk_.reset();
  for (rdma_cm_id* id : listening_) verbs_->DestroyId(id);
  cm_.reset();
}

Status RdmaConnection::Prepare() {
  if (!receiver_epoll_.valid() || !keeper_epoll_.valid() || !receiver_.valid() ||
      !keeper_.valid()) {
    return penstock::Fail(Code::kSystem, "The system has no descriptor for waiting.");
  }
  domain_ = std::make_shared<Domain>(verbs_, client_);
  bulk_ = std::make_unique<BulkEngine>(
      domain_, options_, !client_, completions_, [this] { keeper_.Signal(); },
      [this] {
        announce_.store(true);
        keeper_.Signal();
      });
  control_ = std::make_unique<ControlChannel>(domain_, *bulk_, options_, receiver_, keeper_,
                                              receiver_epoll_.get(), keeper_epoll_.get());
  device_events_ = std::make_unique<DeviceEvents>(*verbs_, keeper_, keeper_epoll_.get());
  RETURN_IF_ERROR(control_->Start());
  WatchReadable(receiver_epoll_.get(), receiver_.fd());
  WatchReadable(keeper_epoll_.get(), keeper_.fd());
  WatchReadable(keeper_epoll_.get(), cm_->fd());
  WatchReadable(keeper_epoll_.get(), bulk_->event_fd());
  if (lifeline_.valid()) WatchReadable(keeper_epoll_.get(), lifeline_.get());
  return {};
}

void RdmaConnection::Start() {
  if (!StartThread(keeper_thread_, "penstock-keeper", [this] { Keep(); }) ||
      (client_ && !StartThread(mender_thread_, "penstock-mender", [this] { Mend(); }))) {
    Fail("The system has no thread for the connection.", LogLevel::kError);
  }
}

void RdmaConnection::AbandonAfterFork() {
  control_->AbandonAfterFork();
  close(bulk_->event_fd());
  close(cm_->fd());
  device_events_->AbandonAfterFork();
  lifeline_.reset();
  receiver_.AbandonAfterFork();
  keeper_.AbandonAfterFork();
  receiver_epoll_.reset();
  keeper_epoll_.reset();
}

// --- sending ---

Outcome RdmaConnection::Reserve(uint32_t bytes, std::byte** slot) {
  if (bytes > options_.max_frame) {
    Fail("A frame to send (" + std::to_string(bytes) + " bytes) exceeds the largest frame (" +
             std::to_string(options_.max_frame) + ").",
         LogLevel::kError);
    return Outcome::kClosed;
  }
  if (closed()) return Outcome::kClosed;
  return control_->Reserve(bytes, slot);
}

void RdmaConnection::Commit(uint32_t used, uint32_t flags) {
  const uint32_t length = control_->Commit(used, flags);
  if (length == used && used >= 8 && used <= control_->reserved_bytes()) return;
  Fail("A frame to send has a bad length (" + std::to_string(length) + "; committed " +
           std::to_string(used) + " of " + std::to_string(control_->reserved_bytes()) +
           " reserved bytes).",
       LogLevel::kError);
}

Outcome RdmaConnection::Flush() {
  if (closed()) return Outcome::kClosed;
  control_->Flush();
  return Outcome::kOk;
}

// --- receiving ---

bool RdmaConnection::over() {
  return closed() && bulk_closed_.load(std::memory_order_acquire) && completions_.empty() &&
         (control_->is_malformed() || !control_->deliverable());
}

int RdmaConnection::Handle(int budget, Handler& handler) {
  int handled = completions_.Report(budget, handler);
  control_->Receive();
  bool fine = true;
  handled += control_->Deliver(budget - handled, handler, &fine);
  if (!fine && !closed()) Fail(control_->malformed(), LogLevel::kWarning);
  if (control_->goodbye() && !closed() && control_->all_delivered()) {
    Fail("The peer closed the connection.", LogLevel::kInfo);
  }
  return handled;
}

int RdmaConnection::Poll(int budget, Handler& handler) {
  const int handled = Handle(budget, handler);
  return handled == 0 && over() ? -1 : handled;
}

int RdmaConnection::spin_us() const {
  static const bool few_cores = sysconf(_SC_NPROCESSORS_ONLN) < 4;
  return options_.spin_us >= 0 ? options_.spin_us : (few_cores ? 0 : 20);
}

bool RdmaConnection::Spin(Deadline deadline) {
  const int64_t microseconds = spin_us();
  if (microseconds == 0) return false;
  const Deadline end = Earlier(deadline, Deadline::AfterMicroseconds(microseconds));
  do {
    if (control_->Receive() || receiver_.signalled()) return true;
    sched_yield();
  } while (!end.expired());
  return false;
}

int RdmaConnection::Wait(int budget, Handler& handler, Deadline deadline) {
  for (bool last = false;; last = deadline.expired()) {  // the first round that begins late
    receiver_.Clear();
    const int handled = Handle(budget, handler);
    if (handled > 0) return handled;
    if (over()) return -1;
    if (last) return 0;
    if (interrupted_.load(std::memory_order_relaxed) && interrupted_.exchange(false)) return 0;
    if (Spin(deadline)) continue;
    if (!control_->Arm() || !completions_.empty()) continue;
    epoll_event events[4];
    const int64_t longest = closed() ? 5 : kLongestSleepMs;
    const int ready =
        SleepOn(receiver_epoll_.get(), events, 4, Earlier(deadline, Deadline::After(longest)));
    if (ready > 0) control_->OnReceiveEvent();
    if (ready <= 0 && deadline.expired()) return 0;
  }
}

void RdmaConnection::Interrupt() {
  interrupted_.store(true);
  receiver_.Signal();
}

bool RdmaConnection::Arm() {
  control_->OnReceiveEvent();
  receiver_.Clear();
  if (closed() || !completions_.empty() || interrupted_.exchange(false)) return false;
  return control_->Arm() && completions_.empty();
}

// --- bulk ---

Result<std::unique_ptr<MemoryRegion>> RdmaConnection::Register(void* address, size_t bytes,
                                                               Access access) {
  if (closed()) return penstock::Fail(Code::kUnavailable, close_reason());
  return domain_->Register(address, bytes, access);
}

Result<std::unique_ptr<MemoryRegion>> RdmaConnection::RegisterDevice(uint64_t device_address,
                                                                     size_t bytes, int dmabuf,
                                                                     uint64_t offset) {
  if (closed()) return penstock::Fail(Code::kUnavailable, close_reason());
  return domain_->RegisterDevice(device_address, bytes, dmabuf, offset);
}

Result<std::vector<std::unique_ptr<Loopback>>> RdmaConnection::OpenLoopbacks(Deadline deadline) {
  if (client_) return Connection::OpenLoopbacks(deadline);
  std::vector<std::unique_ptr<Loopback>> loopbacks;
  for (const std::string& address : offer_.addresses) {
    ASSIGN_OR_RETURN(auto loopback, OpenLoopback(domain_, address, deadline));
    loopbacks.push_back(std::move(loopback));
  }
  return loopbacks;
}

Outcome RdmaConnection::Get(MemoryRegion& target, uint64_t target_offset, const MemoryKey& source,
                            uint64_t source_offset, uint64_t bytes, uint64_t cookie) {
  if (closed() || client_) return Outcome::kClosed;
  return bulk_->Get(target, target_offset, source, source_offset, bytes, cookie);
}

Outcome RdmaConnection::Put(MemoryRegion& source, uint64_t source_offset, const MemoryKey& target,
                            uint64_t target_offset, uint64_t bytes, uint64_t cookie) {
  if (closed() || client_) return Outcome::kClosed;
  return bulk_->Put(source, source_offset, target, target_offset, bytes, cookie);
}

// --- the end ---

std::string RdmaConnection::close_reason() const {
  std::lock_guard lock(reason_mutex_);
  return reason_;
}

void RdmaConnection::Fail(const std::string& reason, LogLevel level) {
  {
    std::lock_guard lock(reason_mutex_);
    if (closed()) return;
    reason_ = reason;
    closed_.store(true, std::memory_order_release);
  }
  PENSTOCK_LOG_AT(level, "transport", "%s", reason.c_str());
  control_->Close();
  keeper_.Signal();
  receiver_.Signal();
}

void RdmaConnection::Drain(int milliseconds) {
  const Deadline deadline = Deadline::After(milliseconds);
  while (control_->up() && !control_->drained() && !deadline.expired()) usleep(50);
}

void RdmaConnection::SayGoodbye(int drain_ms) {
  leaving_.store(true);
  control_->SendGoodbye();
  Drain(drain_ms);
}

void RdmaConnection::Close(int drain_ms) {
  std::lock_guard lock(close_mutex_);
  if (control_ == nullptr) return;  // Prepare failed
  if (!closed()) {
    if (drain_ms > 0) Drain(drain_ms);
    SayGoodbye(std::max(drain_ms, 20));
    Fail("The connection was closed by this side.", LogLevel::kDebug);
  }
  stop_.store(true);
  keeper_.Signal();
  {
    std::lock_guard mend(mender_mutex_);
    mender_wake_.notify_all();
  }
  if (mender_thread_.joinable()) mender_thread_.join();
  if (keeper_thread_.joinable()) keeper_thread_.join();
  bulk_->Close(0);
  bulk_closed_.store(true, std::memory_order_release);
  control_->Remove();
  pending_.clear();
  receiver_.Signal();
}

Counters RdmaConnection::counters() const {
  Counters counters;
  counters.frames_sent = control_->frames_sent();
  counters.frames_received = control_->frames_received();
  counters.bytes_sent = control_->bytes_sent();
  counters.bytes_received = control_->bytes_received();
  counters.packets_sent = control_->packets_sent();
  counters.packets_received = control_->packets_received();
  counters.bulk_bytes_sent = bulk_->bytes_sent();
  counters.bulk_bytes_received = bulk_->bytes_received();
  return counters;
}

// --- the keeper ---

void RdmaConnection::Keep() {
  int64_t kept_alive = NowNanoseconds(), looked = kept_alive;
  std::array<uint32_t, kMaxRails> told{};
  while (!stop_.load()) {
    Deadline next = Earlier(Deadline::After(kLongestSleepMs), bulk_->next_tick());
    next = Earlier(next, control_->next_pump());
    if (!bulk_->Arm()) next = Deadline::After(0);
    epoll_event events[16];
    SleepOn(keeper_epoll_.get(), events, 16, next);
    keeper_.Clear();
    HandleCm();
    HandleDeviceEvents();
    CheckLifeline();
    control_->OnSendEvent();
    control_->Pump();
    bool moved = false;
    while (bulk_->Poll()) moved = true;
    if (bulk_->failed()) Fail(bulk_->failure(), LogLevel::kError);
    if (moved && control_->waiting()) receiver_.Signal();  // a fence may be reached
    // With several rails the server may wait to hear which notifications are through.
    if (client_ && offer_.addresses.size() > 1 && bulk_->fence() != told) {
      told = bulk_->fence();
      announce_.store(true);
    }
    if (announce_.exchange(false)) control_->Announce();
    const int64_t now = NowNanoseconds();
    if (now - kept_alive >= options_.keepalive_ms * kMillisecond) {
      kept_alive = now;
      control_->Keepalive();
    }
    // A peer says in packets what becomes of its rails, and nobody else may be looking for them.
    if (now - looked >= kLongestSleepMs * kMillisecond) {
      looked = now;
      if (control_->Receive() && control_->waiting()) receiver_.Signal();
    }
    CheckLinks();
    if (closed() && !bulk_closed_.load()) {
      control_->Receive();  // what arrived before the end is still delivered
      bulk_->Close(0);
      bulk_closed_.store(true, std::memory_order_release);
      receiver_.Signal();
      SayGoodbye(20);  // it knows, if it was the peer's
      control_->Remove();
      if (lifeline_.valid()) shutdown(lifeline_.get(), SHUT_RDWR);
    }
  }
}

void RdmaConnection::CheckLifeline() {
  if (!lifeline_.valid() || lifeline_over_.load(std::memory_order_relaxed)) return;
  char byte;
  const ssize_t got = recv(lifeline_.get(), &byte, 1, MSG_DONTWAIT | MSG_PEEK);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
  lifeline_over_.store(true);
  epoll_ctl(keeper_epoll_.get(), EPOLL_CTL_DEL, lifeline_.get(), nullptr);
  if (closed()) return;
  if (got < 0 && errno == ETIMEDOUT) {
    LOG_WARNING("transport",
                "The tcp connection beside rdma has timed out; the session goes on without it.");
    return;
  }
  control_->Receive();
  if (got > 0) {
    Fail("The peer sends on the tcp connection that belongs to an rdma session.",
         LogLevel::kWarning);
  } else {
    Fail("The peer closed the connection.", LogLevel::kInfo);
  }
}

void RdmaConnection::CheckLinks() {
  if (closed() || control_->goodbye()) return;
  const int64_t now = NowNanoseconds();
  if (control_->installed() && !control_->up()) {
    control_->Receive();
    if (control_->goodbye()) return receiver_.Signal();
    LOG_WARNING("transport", "The control queue pair has failed: %s Another one is awaited.",
                control_->down_reason().c_str());
    control_->Remove();
    {
      std::lock_guard lock(links_mutex_);
      if (control_tag_ != 0) cm_->Forget(control_tag_);
      control_tag_ = 0;
    }
    lost_since_ns_.store(now);
  }
  const int64_t lost = lost_since_ns_.load();
  if (lost != 0 && now - lost > options_.peer_timeout_ms * kMillisecond) {
    Fail("The peer is out of reach (for " + std::to_string(options_.peer_timeout_ms) +
             " ms, over every rail): " + control_->down_reason(),
         LogLevel::kWarning);
    return;
  }
  if (!client_) return;
  // A rail that the server has given up is dead, whatever it looks like from here.
  const auto peer = control_->peer_live();
  const auto live = bulk_->live();
  bool mend = lost != 0;
  for (uint32_t rail = 0; rail < offer_.addresses.size(); ++rail) {
    RailLink link;
    {
      std::lock_guard lock(links_mutex_);
      link = rails_[rail];
    }
    if (live[rail] != 0 && peer[rail] != live[rail] && now - link.since_ns > 1000 * kMillisecond) {
      bulk_->Drop(rail, live[rail], "The server uses the rail no more.");
      mend = true;
    }
    mend = mend || live[rail] == 0;
  }
  if (mend) {
    std::lock_guard lock(mender_mutex_);
    mend_now_ = true;
    mender_wake_.notify_all();
  }
}

void RdmaConnection::HandleDeviceEvents() {
  for (const DeviceEvent& event : device_events_->Take()) {
    // Where there is no other way, the device's own repetitions may outlast a short outage.
    if (event.type == IBV_EVENT_PORT_ERR && !bulk_->LivesWithout(event)) continue;
    bulk_->OnDeviceEvent(event);
    control_->OnDeviceEvent(event);
    if (!client_ || !event.GivesHope()) continue;
    hopeful_.store(true);
    std::lock_guard lock(mender_mutex_);
    mend_now_ = true;
    mender_wake_.notify_all();
  }
}

void RdmaConnection::HandleCm() {
  while (const auto event = cm_->TakeAny()) {
    if (event->type == RDMA_CM_EVENT_CONNECT_REQUEST) {
      OnRequest(*event);
      continue;
    }
    const auto pending = std::find_if(pending_.begin(), pending_.end(),
                                      [&](const Pending& each) { return each.tag == event->tag; });
    if (pending != pending_.end()) {
      Pending taken = std::move(*pending);
      pending_.erase(pending);
      if (event->type == RDMA_CM_EVENT_ESTABLISHED) {
        OnEstablished(std::move(taken));
      } else if (taken.request.role == QueuePairRole::kControl) {
        taken.queue_pair.reset();
        control_->TakeBackReceives();
      }
      continue;
    }
    if (event->type == RDMA_CM_EVENT_DEVICE_REMOVAL) {
      // The kernel keeps the device until its last id is gone, and that one may be listening.
      std::erase_if(listening_, [&](rdma_cm_id* id) {
        return reinterpret_cast<uintptr_t>(id->context) == event->tag && verbs_->DestroyId(id) == 0;
      });
    }
    const bool lost =
        event->type == RDMA_CM_EVENT_DISCONNECTED || event->type == RDMA_CM_EVENT_DEVICE_REMOVAL;
    if (!lost) continue;
    uint64_t control_tag;
    std::array<RailLink, kMaxRails> rails;
    {
      std::lock_guard lock(links_mutex_);
      control_tag = control_tag_;
      rails = rails_;
    }
    if (event->tag == control_tag) control_->ReportDown(EventName(event->type));
    for (uint32_t rail = 0; rail < kMaxRails; ++rail) {
      if (rails[rail].tag != event->tag) continue;
      bulk_->Drop(rail, rails[rail].generation, EventName(event->type));
    }
  }
}

}  // namespace penstock::transport::rdma
