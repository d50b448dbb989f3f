// The supervisor's side of the control plane: who gets there, and what it is told. The answers are
// made on the control plane's thread, under the lock that the supervisor holds while it works.
#include <unistd.h>

#include "server/supervisor_state.h"

namespace penstock::server {

void Supervisor::WelcomeManager(Peer& peer) {
  Welcome welcome;
  welcome.offered = Offered();
  welcome.mac = ServerMac(key_, peer.hello, peer.challenge, 0, welcome.ticket);
  peer.state = Peer::State::kManaging;
  Queue(peer, SerializeWelcome(welcome, {}));
}

control::Status Supervisor::Report() {
  std::lock_guard lock(state_mutex_);
  control::Status status;
  char host[256] = {};
  gethostname(host, sizeof host - 1);
  status.host = host;
  status.version = PENSTOCK_VERSION;
  status.driver_version = inventory_.driver_version;
  status.driver_error = driver_error_;
  status.draining = draining_;
  status.most_sessions = options_.max_sessions;
  for (uint32_t ordinal = 0; ordinal < inventory_.devices.size(); ++ordinal) {
    if (slots_ && !slots_->offers(ordinal)) continue;
    const DeviceInfo& device = inventory_.devices[ordinal];
    control::Gpu& gpu = status.gpus.emplace_back();
    gpu.ordinal = ordinal;
    gpu.name = device.name;
    gpu.uuid = UuidText(device);
    gpu.memory = device.total_memory;
    if (!slots_) continue;
    gpu.slots = slots_->plan().slots_per_gpu;
    gpu.slots_taken = slots_->taken(ordinal);
    gpu.slot_memory = slots_->plan().memory_per_slot;
  }
  const int64_t now = NowNanoseconds();
  for (const Session& session : sessions_) {
    control::Session& told = status.sessions.emplace_back();
    told.id = session.id;
    told.host = Plain(session.hello.host);
    told.pid = session.hello.pid;
    told.program = Plain(session.hello.program);
    told.peer = session.peer;
    told.gpus = session.gpus;
    told.seconds = static_cast<double>(now - session.started_ns) * 1e-9;
    const SessionMeter* const meter = session.meter.get();
    if (meter == nullptr) continue;
    const auto path = static_cast<Path>(meter->path.load(std::memory_order_relaxed));
    told.path = path == Path{} ? "" : PathName(path);
    told.memory = meter->memory.load(std::memory_order_relaxed);
    told.calls = meter->calls.load(std::memory_order_relaxed);
    told.received = meter->received.load(std::memory_order_relaxed);
    told.sent = meter->sent.load(std::memory_order_relaxed);
  }
  return status;
}

uint32_t Supervisor::Drain() {
  std::lock_guard lock(state_mutex_);
  if (!draining_) LOG_WARNING("daemon", "The server is drained: it takes no new programs.");
  draining_ = true;
  return static_cast<uint32_t>(sessions_.size());
}

void Supervisor::Resume() {
  std::lock_guard lock(state_mutex_);
  if (ending_) return;  // a signal has said more
  if (draining_) LOG_WARNING("daemon", "The server takes new programs again.");
  draining_ = false;
}

}  // namespace penstock::server
