#include "tests/transport/fake_verbs/fabric.h"

#include <fcntl.h>
#include <poll.h>
#include <sched.h>

#include "tests/transport/fake_verbs/state.h"

namespace penstock::transport::rdma::fake {

FabricOptions FabricOptions::Calm() {
  FabricOptions calm;
  calm.reorder = false;
  calm.early_completion = calm.delay = calm.slip = 0;
  return calm;
}

const char* CallName(Call call) {
  static const char* const kNames[] = {"GetDeviceList",
                                       "OpenDevice",
                                       "QueryDevice",
                                       "QueryPort",
                                       "QueryGid",
                                       "AllocPd",
                                       "RegMr",
                                       "RegDmabufMr",
                                       "CreateCompChannel",
                                       "CreateCq",
                                       "PollCq",
                                       "ReqNotifyCq",
                                       "PostSend",
                                       "PostRecv",
                                       "ModifyQp",
                                       "QueryQp",
                                       "CreateEventChannel",
                                       "CreateId",
                                       "BindAddr",
                                       "ResolveAddr",
                                       "ResolveRoute",
                                       "CreateQp",
                                       "Listen",
                                       "Connect",
                                       "Accept",
                                       "Reject",
                                       "Disconnect",
                                       "SetOption"};
  return kNames[static_cast<int>(call)];
}

bool AwaitReadable(int fd) {
  pollfd entry = {fd, POLLIN, 0};
  for (;;) {
    const int flags = fcntl(fd, F_GETFL);
    const bool waits = flags >= 0 && (flags & O_NONBLOCK) == 0;
    const int ready = poll(&entry, 1, waits ? -1 : 0);
    if (ready > 0 && (entry.revents & POLLIN) != 0) return true;
    if (ready < 0 && errno == EINTR && waits) continue;
    errno = EAGAIN;
    return false;
  }
}

State::~State() {
  {
    std::lock_guard lock(mutex);
    stop = true;
    wake.notify_all();
  }
  if (thread.joinable()) thread.join();
}

void State::Violate(std::string what) {
  violations.push_back(std::move(what));
}

void State::At(int64_t when, std::function<void()> action) {
  timers.emplace(when, std::move(action));
  wake.notify_all();
}

void State::Start() {
  thread = std::thread([this] { Run(); });
}

// Moves everything: due timers first, then one step of a queue pair chosen at random. The lock is
// given up between steps, so that users see every state in between.
void State::Run() {
  std::unique_lock lock(mutex);
  while (!stop) {
    while (!timers.empty() && timers.begin()->first <= NowNanoseconds()) {
      auto action = std::move(timers.begin()->second);
      timers.erase(timers.begin());
      action();
    }
    if (!active.empty()) {
      if (options.reorder) std::swap(active[0], active[Below(active.size())]);
      FakeQp* qp = active[0];
      active.erase(active.begin());
      qp->active = false;
      if (Step(*qp)) Wake(*qp);
      lock.unlock();
      sched_yield();
      lock.lock();
    } else if (timers.empty()) {
      wake.wait(lock);
    } else {
      const int64_t left = timers.begin()->first - NowNanoseconds();
      if (left > 0) wake.wait_for(lock, std::chrono::nanoseconds(left));
    }
  }
}

FakeDevice* State::FindDevice(const std::string& address) const {
  for (Host* host : hosts) {
    for (auto& device : host->devices_) {
      if (device->address_text == address) return device.get();
    }
  }
  return nullptr;
}

bool State::Reachable(const FakeDevice* a, const FakeDevice* b) const {
  if (a == nullptr || b == nullptr || a->removed || b->removed) return false;
  if (!a->port_up || !b->port_up || a->host->dead_ || b->host->dead_) return false;
  if (!a->addressed || !b->addressed) return false;
  return cut.count(std::minmax(a->address_text, b->address_text)) == 0;
}

void State::Async(FakeDevice& device, ibv_event_type type, void* element) {
  for (auto& context : device.contexts) {
    ibv_async_event event{};
    event.event_type = type;
    if (type == IBV_EVENT_PORT_ERR || type == IBV_EVENT_PORT_ACTIVE) {
      event.element.port_num = 1;
    } else {
      event.element.qp = static_cast<ibv_qp*>(element);
    }
    context->async.Push(event);
  }
}

Fabric::Fabric(FabricOptions options) : state_(std::make_shared<State>(options)) {
  state_->Start();
}

Fabric::~Fabric() = default;

std::shared_ptr<Host> Fabric::AddHost(const std::vector<DeviceSpec>& devices) {
  return std::make_shared<Host>(state_, devices);
}

void Fabric::SetLink(const std::string& a, const std::string& b, bool up) {
  std::lock_guard lock(state_->mutex);
  if (up) {
    state_->cut.erase(std::minmax(a, b));
  } else {
    state_->cut.insert(std::minmax(a, b));
  }
  for (auto& [number, qp] : state_->qps) state_->Wake(*qp);
}

void Fabric::SetPort(const std::string& address, bool up) {
  std::lock_guard lock(state_->mutex);
  FakeDevice* device = state_->FindDevice(address);
  if (device == nullptr || device->port_up == up) return;
  device->port_up = up;
  state_->Async(*device, up ? IBV_EVENT_PORT_ACTIVE : IBV_EVENT_PORT_ERR);
  for (auto& [number, qp] : state_->qps) state_->Wake(*qp);
}

void Fabric::RemoveDevice(const std::string& address) {
  std::lock_guard lock(state_->mutex);
  FakeDevice* device = state_->FindDevice(address);
  if (device != nullptr && !device->removed) state_->RemoveDevice(*device);
}

void Fabric::SetAddress(const std::string& address, bool present) {
  std::lock_guard lock(state_->mutex);
  FakeDevice* device = state_->FindDevice(address);
  if (device == nullptr || device->addressed == present) return;
  device->addressed = present;
  ++device->address_epoch;
  state_->Async(*device, IBV_EVENT_GID_CHANGE);
  for (auto& [number, qp] : state_->qps) state_->Wake(*qp);
}

void Fabric::Kill(Host& host, bool announced) {
  std::lock_guard lock(state_->mutex);
  if (announced) {
    for (auto& [number, id] : state_->ids) {
      if (id->host == &host) state_->HangUp(*id);
    }
  }
  host.dead_ = true;
  for (auto& [number, qp] : state_->qps) {
    if (qp->host == &host) state_->FailQp(*qp, IBV_WC_WR_FLUSH_ERR);
    state_->Wake(*qp);
  }
}

void Fabric::Fail(const RequestFault& fault) {
  std::lock_guard lock(state_->mutex);
  state_->faults.push_back(fault);
}

void Fabric::FailCall(Host& host, Call call, int nth, int error) {
  std::lock_guard lock(state_->mutex);
  host.faults_.push_back({false, call, nth, error});
}

void Fabric::FailPost(Host& host, ibv_wr_opcode opcode, int nth, int error) {
  std::lock_guard lock(state_->mutex);
  host.faults_.push_back({false, Call::kPostSend, nth, error, opcode});
}

void Fabric::FailAnyCall(Host& host, int nth, int error) {
  std::lock_guard lock(state_->mutex);
  host.faults_.push_back({true, Call::kGetDeviceList, nth, error});
}

std::vector<Call> Fabric::calls(Host& host) {
  std::lock_guard lock(state_->mutex);
  return host.calls_;
}

void Fabric::HoldSendCompletions(bool hold) {
  std::lock_guard lock(state_->mutex);
  state_->holds_sends = hold;
  for (FakeCq* cq : state_->cqs) state_->Release(*cq);
}

void Fabric::HoldReceiveCompletions(bool hold) {
  std::lock_guard lock(state_->mutex);
  state_->holds_receives = hold;
  for (FakeCq* cq : state_->cqs) state_->Release(*cq);
}

void Fabric::HoldWrites(bool hold) {
  std::lock_guard lock(state_->mutex);
  state_->holds_writes = hold;
  for (auto& [number, qp] : state_->qps) state_->Wake(*qp);
}

void Fabric::HoldLateWrites(bool hold) {
  std::lock_guard lock(state_->mutex);
  state_->holds_late_writes = hold;
  for (auto& [number, qp] : state_->qps) state_->Wake(*qp);
}

void Fabric::FlushDeviceWrites() {
  std::lock_guard lock(state_->mutex);
  for (auto& [key, mr] : state_->mrs) mr->Flush();
}

uint64_t Fabric::device_bytes_written() {
  std::lock_guard lock(state_->mutex);
  return state_->device_written;
}

uint64_t Fabric::device_bytes_read() {
  std::lock_guard lock(state_->mutex);
  return state_->device_read;
}

void Fabric::HoldWritesFrom(const std::string& address, bool hold) {
  std::lock_guard lock(state_->mutex);
  if (hold) {
    state_->held_from.insert(address);
  } else {
    state_->held_from.erase(address);
  }
  for (auto& [number, qp] : state_->qps) state_->Wake(*qp);
}

bool Fabric::AwaitQuiet() {
  const Deadline deadline = Deadline::After(10'000);
  while (!deadline.expired()) {
    {
      std::lock_guard lock(state_->mutex);
      bool quiet = true;
      for (auto& [number, qp] : state_->qps) {
        quiet = quiet && qp->queue.empty() && qp->flight.empty() && qp->inbound.empty();
      }
      for (FakeCq* cq : state_->cqs) quiet = quiet && cq->held.empty();
      if (quiet) return true;
    }
    timespec nap = {0, 100'000};
    nanosleep(&nap, nullptr);
  }
  return false;
}

void Fabric::LoseNotifications(int n) {
  std::lock_guard lock(state_->mutex);
  state_->lose = n;
}

void Fabric::SetOptions(const FabricOptions& options) {
  std::lock_guard lock(state_->mutex);
  state_->options = options;
  for (auto& [number, qp] : state_->qps) state_->Wake(*qp);
}

void Fabric::RaiseAsync(const std::string& address, ibv_event_type type) {
  std::lock_guard lock(state_->mutex);
  FakeDevice* device = state_->FindDevice(address);
  if (device == nullptr) return;
  if (type != IBV_EVENT_QP_FATAL) return state_->Async(*device, type);
  for (auto& [number, qp] : state_->qps) {
    if (qp->device == device) state_->Async(*device, type, qp);
  }
}

std::vector<std::string> Fabric::violations() {
  std::lock_guard lock(state_->mutex);
  return state_->violations;
}

std::vector<std::string> Fabric::TakeViolations() {
  std::lock_guard lock(state_->mutex);
  return std::exchange(state_->violations, {});
}

std::vector<std::string> Fabric::objects() {
  std::lock_guard lock(state_->mutex);
  std::vector<std::string> lines;
  auto add = [&](const char* what, size_t n) {
    if (n != 0) lines.push_back(std::string(what) + " (" + std::to_string(n) + ")");
  };
  add("protection domains", state_->pds.size());
  add("memory registrations", state_->mrs.size() / 2);
  add("completion channels", state_->channels.size());
  add("completion queues", state_->cqs.size());
  add("queue pairs", state_->qps.size());
  add("event channels", state_->event_channels.size());
  // Requests that nobody has read yet belong to nobody.
  size_t ids = 0;
  for (auto& [number, id] : state_->ids) ids += !(id->phase == IdPhase::kRequested && id->zombie);
  add("ids", ids);
  int events = 0;
  for (const Host* host : state_->hosts) events += host->async_unacknowledged_;
  add("unacknowledged asynchronous events", static_cast<size_t>(events));
  return lines;
}

uint64_t Fabric::reads_held_up() {
  std::lock_guard lock(state_->mutex);
  return state_->reads_held_up;
}

size_t Fabric::ids_at(const std::string& address) {
  std::lock_guard lock(state_->mutex);
  const FakeDevice* device = state_->FindDevice(address);
  size_t count = 0;
  for (auto& [number, id] : state_->ids) count += !id->zombie && id->device == device;
  return count;
}

uint64_t Fabric::receiver_not_ready() {
  std::lock_guard lock(state_->mutex);
  return state_->receiver_not_ready;
}

}  // namespace penstock::transport::rdma::fake
