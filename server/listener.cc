#include "server/listener.h"

#include "server/supervisor_state.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <csignal>
#include <cstdlib>
#include <cstring>

#include <algorithm>
#include <map>
#include <numeric>

#include "common/log.h"
#include "server/session_parameters.h"

namespace penstock::server {
namespace {

constexpr size_t kMaxPeers = 128;       // connections that have not proved who they are
constexpr int kHelloMs = 5'000;         // for each message of a hello
constexpr int kWorkerStartMs = 60'000;  // a real driver on a machine with many GPUs is slow
constexpr int kProbeMs = 60'000;
constexpr uint32_t kPrefixBytes = 4;

// True if every address of the host is one that only this machine can reach.
bool IsLoopback(const std::string& host) {
  if (host.empty()) return false;
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (getaddrinfo(host.c_str(), nullptr, &hints, &found) != 0) return false;
  bool all = found != nullptr;
  for (addrinfo* entry = found; entry != nullptr; entry = entry->ai_next) {
    if (entry->ai_family == AF_INET) {
      const auto* address = reinterpret_cast<const sockaddr_in*>(entry->ai_addr);
      all = all && (ntohl(address->sin_addr.s_addr) >> 24) == 127;
    } else if (entry->ai_family == AF_INET6) {
      const auto* address = reinterpret_cast<const sockaddr_in6*>(entry->ai_addr);
      all = all && IN6_IS_ADDR_LOOPBACK(&address->sin6_addr);
    } else {
      all = false;
    }
  }
  freeaddrinfo(found);
  return all;
}

void SetBlocking(int fd, bool blocking) {
  const int flags = fcntl(fd, F_GETFL);
  fcntl(fd, F_SETFL, blocking ? flags & ~O_NONBLOCK : flags | O_NONBLOCK);
}

// Each session costs two descriptors, and the usual soft limit is 1,024.
void RaiseDescriptorLimit() {
  constexpr rlim_t kWanted = 65'536;
  rlimit limit;
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= kWanted) return;
  limit.rlim_cur = std::min(limit.rlim_max, kWanted);
  setrlimit(RLIMIT_NOFILE, &limit);
}

template <typename T>
std::span<const std::byte> AsBytes(const T& value) {
  return std::as_bytes(std::span(&value, 1));
}

}  // namespace

Result<std::unique_ptr<Supervisor>> Supervisor::Start(const Options& options) {
  Key key;
  if (!options.key_file.empty()) {
    ASSIGN_OR_RETURN(key, ReadKeyFile(options.key_file));
  } else if (!IsLoopback(options.listen_host)) {
    return Fail(Code::kInvalidArgument,
                "Listen address (" + options.listen_host +
                    ") can be reached from other machines, and there is no key. Give --key-file, "
                    "or listen on 127.0.0.1.");
  }
  const std::string library = DriverLibrary(options.driver, ExecutablePath());
  auto inventory = ProbeDriver(library, kProbeMs);
  if (!inventory && options.driver != "auto" && access(library.c_str(), R_OK) != 0) {
    return Fail(Code::kInvalidArgument,
                "Driver library (" + library + ") cannot be read: " + strerror(errno) + ".");
  }
  if (!inventory && inventory.error().message.find("cannot be opened") != std::string::npos) {
    return tl::unexpected<Error>(inventory.error());
  }
  ASSIGN_OR_RETURN(auto listener,
                   transport::tcp::Listener::Bind(options.listen_host, options.listen_port));
  std::unique_ptr<Supervisor> self(new Supervisor(std::move(listener)));
  self->options_ = options;
  self->key_ = std::move(key);
  self->library_ = library;
  if (options.driver == "sim" && getenv("SIMGPU_SHARED") == nullptr) {
    UniqueFd& file = self->simulated_memory_;
    file = UniqueFd(memfd_create("penstock-simulated-memory", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    // The first worker gives it its size, and none can take that from the others again.
    if (!file.valid() || fcntl(file.get(), F_ADD_SEALS, F_SEAL_SHRINK) != 0) {
      return FailErrno("Cannot make a memory file");
    }
  }
  if (inventory) {
    self->inventory_ = std::move(*inventory);
    if (self->inventory_.devices.empty()) self->driver_error_ = "The server has no GPU.";
  } else {
    self->driver_error_ = inventory.error().message;
  }
  if (!self->driver_error_.empty()) {
    LOG_ERROR("daemon", "Every client will be refused: %s", self->driver_error_.c_str());
  }
  if (self->driver_error_.empty()) RETURN_IF_ERROR(self->PlanSlots());
  sigset_t wanted;
  sigemptyset(&wanted);
  sigaddset(&wanted, SIGTERM);
  sigaddset(&wanted, SIGINT);
  sigprocmask(SIG_BLOCK, &wanted, nullptr);
  signal(SIGPIPE, SIG_IGN);
  RaiseDescriptorLimit();
  self->signals_ = UniqueFd(signalfd(-1, &wanted, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!self->signals_.valid()) return FailErrno("Cannot watch for signals");
  SetBlocking(self->listener_.fd(), false);
  ASSIGN_OR_RETURN(self->control_, control::Server::Start(*self));
  return self;
}

Status Supervisor::PlanSlots() {
  if (!options_.pool.given) return {};
  pool::SlotPlan plan;
  plan.gpus = options_.pool.gpus;
  plan.slots_per_gpu = options_.pool.slots_per_gpu;
  plan.memory_per_slot = options_.pool.memory_per_slot;
  std::vector<pool::GpuMemory> memory;
  for (size_t gpu = 0; gpu < inventory_.devices.size(); ++gpu) {
    if (options_.pool.gpus.empty()) plan.gpus.push_back(static_cast<uint32_t>(gpu));
    memory.push_back({inventory_.devices[gpu].total_memory, inventory_.reserved_memory[gpu]});
  }
  RETURN_IF_ERROR(pool::CheckPlan(plan, memory));
  slots_.emplace(std::move(plan));
  return {};
}

Supervisor::Supervisor(transport::tcp::Listener listener) : listener_(std::move(listener)) {}

Supervisor::~Supervisor() {
  control_.reset();  // it may ask for the state of what follows
  for (Session& session : sessions_) {
    kill(session.child.pid, SIGKILL);
    while (waitpid(session.child.pid, nullptr, 0) < 0 && errno == EINTR) {
    }
  }
}

Status Supervisor::Run() {
  std::vector<pollfd> fds;
  while (true) {
    fds.clear();
    fds.push_back({signals_.get(), POLLIN, 0});
    fds.push_back({listener_.fd(), POLLIN, 0});
    Deadline next = Deadline::After(60'000);
    for (Peer& peer : peers_) {
      short events = peer.out.empty() ? 0 : POLLOUT;
      // A welcomed client may already send frames, which are the worker's: only its end is watched.
      const bool reads = peer.state == Peer::State::kHello || peer.state == Peer::State::kProof;
      events |= reads ? POLLIN : POLLRDHUP;
      fds.push_back({peer.fd.get(), events, 0});
      if (peer.deadline.poll_timeout_ms() >= 0 &&
          peer.deadline.poll_timeout_ms() < next.poll_timeout_ms()) {
        next = peer.deadline;
      }
    }
    const size_t first_session = fds.size();
    for (Session& session : sessions_) {
      fds.push_back({session.child.pidfd.get(), POLLIN, 0});
      fds.push_back({session.handed_over ? -1 : session.socket.get(), POLLIN, 0});
    }
    if (patience_.poll_timeout_ms() >= 0 && patience_.poll_timeout_ms() < next.poll_timeout_ms()) {
      next = patience_;
    }
    if (poll(fds.data(), fds.size(), next.poll_timeout_ms()) < 0 && errno != EINTR) {
      return FailErrno("Cannot poll");
    }
    std::lock_guard lock(state_mutex_);
    if (fds[0].revents != 0 && !OnSignal()) return {};
    size_t at = first_session;
    for (Session& session : sessions_) {
      // The message first: a worker that failed has said why before it ended.
      if (fds[at + 1].revents & POLLIN) OnWorkerMessage(session);
      if (fds[at].revents != 0) OnWorkerEnd(session);
      at += 2;
    }
    at = 2;
    for (Peer& peer : peers_) {
      const short events = fds[at++].revents;
      if (events & POLLOUT) Flush(peer);
      if (events & POLLIN) OnReadable(peer);
      if ((events & (POLLHUP | POLLERR | POLLRDHUP)) && !(events & POLLIN)) {
        peer.state = Peer::State::kGone;
      }
    }
    if (fds[1].revents != 0) Accept();  // last: it adds peers that fds does not know
    CheckDeadlines();
    Sweep();
    if (ending_ && (sessions_.empty() || patience_.expired())) {
      LOG_INFO("daemon", "The daemon ends; %zu sessions end with it.", sessions_.size());
      return {};
    }
  }
}

// SIGTERM lets the sessions finish, within bounds; a second one, and SIGINT, do not. False: now.
bool Supervisor::OnSignal() {
  signalfd_siginfo signal{};
  if (read(signals_.get(), &signal, sizeof signal) != sizeof signal) return true;
  if (signal.ssi_signo == SIGTERM && !ending_ && options_.drain_seconds > 0) {
    ending_ = draining_ = true;
    patience_ = Deadline::After(int64_t{options_.drain_seconds} * 1000);
    if (!sessions_.empty()) {
      LOG_WARNING("daemon",
                  "SIGTERM: no new programs; %zu sessions have %u s to end. A second one ends them "
                  "at once.",
                  sessions_.size(), options_.drain_seconds);
    }
    return true;
  }
  LOG_INFO("daemon", "A signal ends the daemon; %zu sessions end with it.", sessions_.size());
  return false;
}

void Supervisor::Accept() {
  for (size_t taken = 0; taken < kMaxPeers; ++taken) {
    auto socket = listener_.Accept(Deadline::After(0));
    if (!socket) return;
    MakeRoom();
    SetBlocking(socket->get(), false);
    Peer& peer = peers_.emplace_back();
    peer.name = transport::tcp::PeerName(socket->get());
    peer.fd = std::move(*socket);
    peer.deadline = Deadline::After(kHelloMs);
    LOG_DEBUG("daemon", "A connection comes from %s.", peer.name.c_str());
  }
}

// Strangers cannot keep others out by keeping connections open: when there are too many, the host
// that has most of them loses its oldest. A hello takes milliseconds, so a client of another host
// is through before it could be its turn. Waiting for the deadlines instead would let one host stop
// everybody for seconds, and refusing the newest would stop the honest.
void Supervisor::MakeRoom() {
  std::map<std::string, size_t> per_host;
  size_t unproven = 0;
  for (const Peer& peer : peers_) {
    if (peer.proven() || peer.state == Peer::State::kGone) continue;
    ++unproven;
    ++per_host[peer.Host()];
  }
  if (unproven < kMaxPeers) return;
  const auto most = std::max_element(per_host.begin(), per_host.end(),
                                     [](auto& a, auto& b) { return a.second < b.second; });
  for (Peer& peer : peers_) {  // oldest first
    if (peer.proven() || peer.state == Peer::State::kGone || peer.Host() != most->first) continue;
    const int64_t now = NowNanoseconds();
    if (now - crowded_ns_ > 1'000'000'000) {
      LOG_WARNING(
          "daemon",
          "Too many connections (%zu) have not finished their hello, most from %s (%zu); its "
          "oldest is closed.",
          unproven, most->first.c_str(), most->second);
      crowded_ns_ = now;
    }
    peer.state = Peer::State::kGone;
    peer.fd.reset();
    return;
  }
}

// Reads no byte beyond the message, because what follows the hello belongs to the worker.
bool Supervisor::TakeBlob(Peer& peer, std::vector<std::byte>* blob) {
  while (true) {
    uint32_t wanted = kPrefixBytes;
    if (peer.in.size() >= kPrefixBytes) {
      uint32_t length;
      memcpy(&length, peer.in.data(), sizeof length);
      if (length > kMaxHelloBytes) {
        Refuse(peer, Refusal::kMalformed,
               "Hello message size (" + std::to_string(length) + ") exceeds the limit.");
        return false;
      }
      wanted += length;
      if (peer.in.size() == wanted) {
        blob->assign(peer.in.begin() + kPrefixBytes, peer.in.end());
        peer.in.clear();
        return true;
      }
    }
    const size_t have = peer.in.size();
    peer.in.resize(wanted);
    const ssize_t got = recv(peer.fd.get(), peer.in.data() + have, wanted - have, 0);
    peer.in.resize(have + (got > 0 ? got : 0));
    if (got > 0) continue;
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return false;
    LOG_DEBUG("daemon", "The connection of %s closes during the hello.", peer.Who().c_str());
    peer.state = Peer::State::kGone;
    return false;
  }
}

void Supervisor::OnReadable(Peer& peer) {
  std::vector<std::byte> blob;
  while ((peer.state == Peer::State::kHello || peer.state == Peer::State::kProof) &&
         TakeBlob(peer, &blob)) {
    OnBlob(peer, blob);
  }
}

void Supervisor::OnBlob(Peer& peer, std::span<const std::byte> blob) {
  peer.deadline = Deadline::After(kHelloMs);
  if (peer.state == Peer::State::kProof) return OnProof(peer, blob);
  auto role = PeekRole(blob);
  if (!role) return Refuse(peer, Refusal::kMalformed, role.error().message);
  if (*role == Role::kBulk) return OnBulkHello(peer, blob);
  OnHello(peer, blob);
}

void Supervisor::OnHello(Peer& peer, std::span<const std::byte> blob) {
  auto hello = ParseClientHello(blob);
  if (!hello) return Refuse(peer, Refusal::kMalformed, hello.error().message);
  peer.hello = *hello;
  peer.challenge.version = ChooseVersion(hello->oldest_version, hello->newest_version);
  if (peer.challenge.version == 0) {
    return Refuse(peer, Refusal::kVersion,
                  "Client protocol versions (" + std::to_string(hello->oldest_version) + " to " +
                      std::to_string(hello->newest_version) +
                      ") do not overlap with the server's (" +
                      std::to_string(kOldestProtocolVersion) + " to " +
                      std::to_string(kProtocolVersion) + ").");
  }
  if (!FillRandom(peer.challenge.nonce)) {
    return Refuse(peer, Refusal::kInternal, "The server has no random numbers.");
  }
  peer.challenge.key_needed = key_.empty() ? 0 : 1;
  peer.challenge.features = peer.hello.features & (kFeatureHostFunctions | kFeatureBounce |
                                                   kFeatureVolumes | kFeatureFewer);
  const bool client_has_rdma = (peer.hello.features & kFeatureRdma) != 0;
  if (options_.transport.choice == transport::Choice::kRdma && !client_has_rdma) {
    return Refuse(peer, Refusal::kPath,
                  "This server serves over RDMA only (--transport rdma); the client has no RDMA "
                  "device or is told not to use it.");
  }
  if (client_has_rdma && RdmaIsOffered()) peer.challenge.features |= kFeatureRdma;
  const bool client_shares = (peer.hello.features & kFeatureShm) != 0;
  if (options_.transport.choice == transport::Choice::kShm && !client_shares) {
    return Refuse(peer, Refusal::kPath,
                  "This server serves through shared memory only (--transport shm); the client is "
                  "on another machine or is told not to use it.");
  }
  if (client_shares && ShmIsOffered()) {
    peer.challenge.features |= kFeatureShm;
    peer.challenge.features &= ~uint64_t{kFeatureRdma};
  }
  peer.state = Peer::State::kProof;
  Queue(peer, AsBytes(peer.challenge));
}

// Devices may come and go while the daemon runs. Told to use nothing else, the worker tries and
// says what is wrong.
bool Supervisor::RdmaIsOffered() const {
  if (options_.transport.choice == transport::Choice::kTcp ||
      options_.transport.choice == transport::Choice::kShm) {
    return false;
  }
  return options_.transport.choice == transport::Choice::kRdma ||
         !transport::RdmaDeviceNames().empty();
}

// Whoever asks may try. Whether the client is on this machine shows when it connects to the
// worker's socket.
bool Supervisor::ShmIsOffered() const {
  return options_.transport.choice == transport::Choice::kAuto ||
         options_.transport.choice == transport::Choice::kShm;
}

uint32_t Supervisor::Offered() const {
  return slots_ ? slots_->offered() : static_cast<uint32_t>(inventory_.devices.size());
}

void Supervisor::OnProof(Peer& peer, std::span<const std::byte> blob) {
  auto proof = ParseProof(blob);
  if (!proof) return Refuse(peer, Refusal::kMalformed, proof.error().message);
  if (!key_.empty() && !SameMac(proof->mac, ClientMac(key_, peer.hello, peer.challenge))) {
    return Refuse(peer, Refusal::kKey,
                  "The client does not hold the server's key. Both need the same key file.");
  }
  if (peer.hello.role == Role::kManagement) return WelcomeManager(peer);
  if (draining_) {
    return Refuse(peer, Refusal::kDraining,
                  "This server is being drained: it takes no new programs.");
  }
  if (!driver_error_.empty()) return Refuse(peer, Refusal::kDriver, driver_error_);
  if (sessions_.size() >= options_.max_sessions) {
    return Refuse(
        peer, Refusal::kFull,
        "All sessions of this server (" + std::to_string(options_.max_sessions) + ") are taken.");
  }
  const uint32_t offered = Offered();
  uint32_t wanted = peer.hello.gpus;
  if ((peer.challenge.features & kFeatureFewer) != 0) {
    const uint32_t free = slots_ ? slots_->free_gpus() : offered;
    wanted = std::clamp(wanted == 0 ? offered : wanted, 1u, std::max(1u, free));
  } else if (wanted == 0) {
    wanted = slots_ ? 1 : offered;  // who shares takes one GPU unless it asks for more
  }
  if (wanted > offered) {
    return Refuse(peer, Refusal::kTooMany,
                  "The program asks for more GPUs (" + std::to_string(wanted) +
                      ") than this server offers (" + std::to_string(offered) + ").");
  }
  std::vector<uint32_t> gpus(wanted);
  if (slots_) {
    auto taken = slots_->Take(wanted);
    if (!taken) {
      return Refuse(peer, Refusal::kFull,
                    "No slot is free on " +
                        (wanted == 1 ? "any GPU" : std::to_string(wanted) + " GPUs") +
                        " of this server (" + std::to_string(slots_->offered()) + " GPUs of " +
                        std::to_string(slots_->plan().slots_per_gpu) + " slots).");
    }
    gpus = std::move(*taken);
  } else {
    std::iota(gpus.begin(), gpus.end(), 0u);
  }
  if (auto started = StartSession(peer, gpus); !started) {
    if (slots_) slots_->Release(gpus);
    LOG_ERROR("daemon", "%s", started.error().message.c_str());
    return Refuse(peer, Refusal::kInternal, "The server cannot start a worker process.");
  }
}

Status Supervisor::StartSession(Peer& peer, const std::vector<uint32_t>& gpus) {
  SessionParameters parameters;
  parameters.session = next_session_;
  RETURN_IF_ERROR(FillRandom(parameters.ticket));
  parameters.device_count = static_cast<uint32_t>(gpus.size());
  parameters.slotted = slots_ ? 1 : 0;
  parameters.memory_limit = slots_ ? slots_->plan().memory_per_slot : 0;
  for (size_t device = 0; device < gpus.size(); ++device) {
    parameters.context_bytes[device] = inventory_.reserved_memory[gpus[device]];
    CopyText(parameters.uuids[device], UuidText(inventory_.devices[gpus[device]]));
  }
  parameters.silence_seconds = options_.silence_seconds;
  parameters.isolate = options_.isolate ? 1 : 0;
  uint32_t slot = 0;
  while (std::any_of(sessions_.begin(), sessions_.end(),
                     [slot](const Session& other) { return other.slot == slot; })) {
    ++slot;
  }
  if (geteuid() == 0 && options_.isolate && options_.first_worker_uid != 0) {
    parameters.uid = options_.first_worker_uid + slot;
    parameters.gid = options_.device_gid != 0 ? options_.device_gid : parameters.uid;
  }
  parameters.client_pid = peer.hello.pid;
  parameters.supervisor_pid = getpid();
  parameters.simulated = simulated_memory_.valid() ? 1 : 0;
  const TransportSettings& settings = options_.transport;
  RdmaSettings& rdma = parameters.rdma;
  rdma.asked = (peer.challenge.features & kFeatureRdma) != 0 ? 1 : 0;
  parameters.shm.asked = (peer.challenge.features & kFeatureShm) != 0 ? 1 : 0;
  parameters.shm.only = settings.choice == transport::Choice::kShm ? 1 : 0;
  rdma.only = settings.choice == transport::Choice::kRdma ? 1 : 0;
  rdma.most_rails = settings.rails;
  rdma.keepalive_ms = settings.keepalive_ms;
  rdma.peer_timeout_ms = settings.peer_timeout_ms;
  rdma.gpu_direct = static_cast<uint32_t>(settings.gpu_direct);
  rdma.timeout = static_cast<uint8_t>(settings.timeout);
  rdma.retry_count = static_cast<uint8_t>(settings.retry_count);
  rdma.control_traffic_class = static_cast<uint8_t>(settings.control_traffic_class);
  rdma.bulk_traffic_class = static_cast<uint8_t>(settings.bulk_traffic_class);
  for (size_t rail = 0; rail < settings.rdma_addresses.size(); ++rail) {
    CopyText(rdma.addresses[rail], settings.rdma_addresses[rail]);
  }
  CopyText(parameters.client_host, Plain(peer.hello.host));
  CopyText(parameters.program, Plain(peer.hello.program));
  CopyText(parameters.peer, peer.name);
  CopyText(parameters.driver, library_);
  CopyText(parameters.log, options_.log);
  ASSIGN_OR_RETURN(UniqueFd file, SealedFile("penstock-session", AsBytes(parameters)));
  int pair[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) != 0) {
    return FailErrno("Cannot make a socket pair");
  }
  UniqueFd ours(pair[0]), theirs(pair[1]);
  ASSIGN_OR_RETURN(UniqueFd meter, MakeMeterFile());
  const int given[] = {file.get(), theirs.get(), meter.get(), simulated_memory_.get()};
  const std::span<const int> all(given);
  const bool simulated = simulated_memory_.valid();
  ASSIGN_OR_RETURN(Child child, SpawnSelf("--worker", simulated ? all : all.first(3)));

  Session& session = sessions_.emplace_back();
  session.id = next_session_++;
  session.ticket = parameters.ticket;
  session.child = std::move(child);
  session.socket = std::move(ours);
  session.hello = peer.hello;
  session.challenge = peer.challenge;
  session.who = peer.Who();
  session.peer = peer.name;
  session.slot = slot;
  session.gpus = gpus;
  session.meter.reset(MapMeter(meter.get()));
  session.started_ns = NowNanoseconds();
  peer.session = session.id;
  peer.state = Peer::State::kStarting;
  peer.deadline = Deadline::After(kWorkerStartMs);
  return {};
}

void Supervisor::OnWorkerMessage(Session& session) {
  WorkerReady ready;
  const ssize_t got = recv(session.socket.get(), &ready, sizeof ready, MSG_DONTWAIT);
  if (got <= 0) return;  // its end is seen by the pidfd
  auto peer = std::find_if(peers_.begin(), peers_.end(), [&](const Peer& candidate) {
    return candidate.session == session.id && candidate.state == Peer::State::kStarting;
  });
  if (peer == peers_.end()) return;
  if (got != sizeof ready || ready.ok == 0) {
    ready.error[sizeof ready.error - 1] = '\0';
    return Refuse(*peer, Refusal::kDriver, ready.error);
  }
  Welcome welcome;
  welcome.session = session.id;
  welcome.offered = Offered();
  welcome.ticket = session.ticket;
  welcome.mac = ServerMac(key_, session.hello, session.challenge, session.id, session.ticket);
  ServerInfo& info = welcome.server;
  info.driver_version = inventory_.driver_version;
  std::vector<DeviceInfo> devices;
  for (const uint32_t gpu : session.gpus) {
    devices.push_back(inventory_.devices[gpu]);
    // A slot is all that the program sees of the GPU's memory.
    if (slots_ && slots_->plan().memory_per_slot != 0) {
      devices.back().total_memory = slots_->plan().memory_per_slot;
    }
  }
  info.device_count = static_cast<uint32_t>(devices.size());
  info.stream_window = kStreamWindow;
  info.max_frame_bytes = kMaxFrameBytes;
  memset(info.functions, 0xff, sizeof info.functions);
  char host[64] = {};
  gethostname(host, sizeof host - 1);
  CopyText(info.server_name, host);
  peer->state = Peer::State::kWelcomed;
  peer->deadline = Deadline::After(kHelloMs);
  Queue(*peer, SerializeWelcome(welcome, devices));
}

void Supervisor::OnBulkHello(Peer& peer, std::span<const std::byte> blob) {
  peer.state = Peer::State::kBulk;
  auto hello = ParseBulkHello(blob);
  if (!hello) return Refuse(peer, Refusal::kMalformed, hello.error().message);
  for (Session& session : sessions_) {
    if (session.id != hello->session || session.handed_over || session.ended) continue;
    const Mac wanted =
        BulkMac(key_, session.hello, session.challenge, session.ticket, session.id, hello->epoch);
    if (!SameMac(wanted, hello->mac)) break;
    peer.session = session.id;
    Queue(peer, AsBytes(BulkWelcome{}));
    if (peer.out.empty() && peer.state == Peer::State::kBulk) HandOver(session, peer);
    return;
  }
  // The same words for an unknown session and a wrong MAC: nothing to learn by trying.
  Refuse(peer, Refusal::kUnknownSession, "The server knows no such session.");
}

void Supervisor::HandOver(Session& session, Peer& bulk) {
  auto control = std::find_if(peers_.begin(), peers_.end(), [&](const Peer& candidate) {
    return candidate.session == session.id && candidate.state == Peer::State::kWelcomed;
  });
  bulk.state = Peer::State::kGone;
  if (control == peers_.end() || !control->out.empty()) {
    LOG_WARNING("daemon", "Session %lu loses its control socket before the bulk socket arrives.",
                session.id);
    kill(session.child.pid, SIGKILL);
    return;
  }
  control->state = Peer::State::kGone;
  SetBlocking(control->fd.get(), true);
  SetBlocking(bulk.fd.get(), true);
  const int sockets[] = {control->fd.get(), bulk.fd.get()};
  if (auto sent = SendDescriptors(session.socket.get(), sockets); !sent) {
    LOG_ERROR("daemon", "%s", sent.error().message.c_str());
    kill(session.child.pid, SIGKILL);
    return;
  }
  session.handed_over = true;
  LOG_INFO("daemon", "Session %lu begins: %s (worker %d).", session.id, session.who.c_str(),
           session.child.pid);
}

void Supervisor::OnWorkerEnd(Session& session) {
  int status = 0;
  if (waitpid(session.child.pid, &status, WNOHANG) != session.child.pid) return;
  session.ended = true;
  if (slots_) slots_->Release(session.gpus);
  const double seconds = (NowNanoseconds() - session.started_ns) * 1e-9;
  if (WIFSIGNALED(status)) {
    LOG_WARNING("daemon", "Session %lu (%s) ends after %.1f s: its worker is killed by signal %d.",
                session.id, session.who.c_str(), seconds, WTERMSIG(status));
  } else {
    LOG_INFO("daemon", "Session %lu (%s) ends after %.1f s with status %d.", session.id,
             session.who.c_str(), seconds, WEXITSTATUS(status));
  }
  for (Peer& peer : peers_) {
    if (peer.session != session.id) continue;
    if (peer.state == Peer::State::kStarting) {
      Refuse(peer, Refusal::kInternal, "The worker process ends while it starts.");
    } else if (peer.state != Peer::State::kLeaving) {
      peer.state = Peer::State::kGone;
    }
  }
}

void Supervisor::Queue(Peer& peer, std::span<const std::byte> blob) {
  const uint32_t length = static_cast<uint32_t>(blob.size());
  const auto prefix = AsBytes(length);
  peer.out.insert(peer.out.end(), prefix.begin(), prefix.end());
  peer.out.insert(peer.out.end(), blob.begin(), blob.end());
  Flush(peer);
}

void Supervisor::Flush(Peer& peer) {
  while (!peer.out.empty()) {
    const ssize_t sent = send(peer.fd.get(), peer.out.data(), peer.out.size(), MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0 && errno == EAGAIN) return;
    if (sent < 0) {
      peer.state = Peer::State::kGone;
      return;
    }
    peer.out.erase(peer.out.begin(), peer.out.begin() + sent);
  }
  if (peer.state == Peer::State::kLeaving) {
    shutdown(peer.fd.get(), SHUT_WR);
    peer.state = Peer::State::kGone;
  }
}

// Strangers cannot fill the disk by being refused: beyond kMostLines at once, kLinesPerSecond are
// written, and how many were not.
bool Supervisor::MayLog() {
  constexpr int64_t kMostLines = 100, kLinesPerSecond = 10;
  const int64_t now = NowNanoseconds();
  const int64_t earned = (now - log_budget_ns_) / (1'000'000'000 / kLinesPerSecond);
  if (earned > 0) {
    log_budget_ = std::min(kMostLines, log_budget_ + earned);
    log_budget_ns_ = now;
  }
  if (log_budget_ == 0) {
    ++unlogged_;
    return false;
  }
  --log_budget_;
  if (unlogged_ > 0) {
    LOG_WARNING("daemon", "%lu lines about strangers were left out.", unlogged_);
    unlogged_ = 0;
  }
  return true;
}

void Supervisor::Refuse(Peer& peer, Refusal refusal, const std::string& text) {
  if (MayLog()) {
    LOG_WARNING("daemon", "Refused %s (%s): %s", peer.Who().c_str(), RefusalName(refusal),
                text.c_str());
  }
  const Peer::State state = peer.state;
  peer.state = Peer::State::kLeaving;
  if (state == Peer::State::kHello) {
    Challenge message = peer.challenge;
    message.refusal = refusal;
    CopyText(message.text, text);
    Queue(peer, AsBytes(message));
  } else if (state == Peer::State::kBulk) {
    BulkWelcome message;
    message.refusal = refusal;
    CopyText(message.text, text);
    Queue(peer, AsBytes(message));
  } else {
    Welcome message;
    message.refusal = refusal;
    CopyText(message.text, text);
    Queue(peer, AsBytes(message));
  }
}

void Supervisor::CheckDeadlines() {
  for (Peer& peer : peers_) {
    if (!peer.deadline.expired() || peer.state == Peer::State::kGone) continue;
    if (MayLog()) {
      LOG_WARNING("daemon", "The hello of %s takes too long.", peer.Who().c_str());
    }
    peer.state = Peer::State::kGone;
  }
}

void Supervisor::Sweep() {
  for (Peer& peer : peers_) {
    if (peer.state == Peer::State::kManaging && peer.out.empty()) {
      peer.state = Peer::State::kGone;
      control_->Serve(std::move(peer.fd));
    }
    if (peer.state == Peer::State::kBulk && peer.out.empty()) {
      for (Session& session : sessions_) {
        if (session.id == peer.session && !session.ended) HandOver(session, peer);
      }
    }
  }
  // A session whose client went away before the hand-over has no reason to live.
  for (Session& session : sessions_) {
    if (session.handed_over || session.ended) continue;
    const bool alive = std::any_of(peers_.begin(), peers_.end(), [&](const Peer& peer) {
      return peer.session == session.id &&
             (peer.state == Peer::State::kStarting || peer.state == Peer::State::kWelcomed);
    });
    if (!alive) kill(session.child.pid, SIGKILL);
  }
  peers_.remove_if([](const Peer& peer) { return peer.state == Peer::State::kGone; });
  sessions_.remove_if([](const Session& session) { return session.ended; });
}

}  // namespace penstock::server
