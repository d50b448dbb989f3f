#include "interposer/core/client.h"

#include <pthread.h>
#include <sysexits.h>
#include <unistd.h>

#include <new>

#include "commands.gen.h"
#include "common/env.h"
#include "common/log.h"
#include "interop/export_tables.h"
#include "interposer/core/connect.h"

namespace penstock::interposer {
namespace {

constinit std::mutex g_initialise_mutex;
// Of the connection that a forked child must let go of; null when there is none.
void (*g_abandon)(transport::Connection&) = nullptr;

std::optional<std::string> OptionalEnv(const char* name) {
  const char* value = getenv(name);
  if (value == nullptr) return std::nullopt;
  return std::string(value);
}

ClientOptions ClientOptionsFromEnvironment() {
  ClientOptions options;
  options.statistics_file = EnvString("PENSTOCK_STATS");
  options.visible_devices = OptionalEnv("CUDA_VISIBLE_DEVICES");
  options.device_order = EnvString("CUDA_DEVICE_ORDER");
  options.launch_blocking = EnvFlag("CUDA_LAUNCH_BLOCKING");
  options.lazy_loading = EnvString("CUDA_MODULE_LOADING", "LAZY") != "EAGER";
  return options;
}

SessionOptions SessionOptionsFromEnvironment(const std::string& server) {
  SessionOptions options;
  options.server = server;
  options.synchronous = EnvFlag("PENSTOCK_SYNC") || EnvListContains("PENSTOCK_DISABLE", "post");
  options.inline_copies = !EnvListContains("PENSTOCK_DISABLE", "inline");
  options.staging = !EnvListContains("PENSTOCK_DISABLE", "staging");
  options.window = !EnvListContains("PENSTOCK_DISABLE", "window");
  options.reserve_addresses = !EnvListContains("PENSTOCK_DISABLE", "reserve");
  return options;
}

CUresult InitError(const Error& error) {
  switch (error.code) {
    case Code::kUnauthenticated:
      return CUDA_ERROR_NOT_PERMITTED;
    case Code::kResourceExhausted:
      return CUDA_ERROR_DEVICE_UNAVAILABLE;
    case Code::kInvalidArgument:
      return CUDA_ERROR_NO_DEVICE;
    case Code::kProtocol:
      return CUDA_ERROR_SYSTEM_DRIVER_MISMATCH;
    default:
      return CUDA_ERROR_SYSTEM_NOT_READY;
  }
}

const char* Advice(Code code) {
  switch (code) {
    case Code::kInvalidArgument:
      return "Set PENSTOCK_SERVER to HOST:PORT of a penstockd.";
    case Code::kUnauthenticated:
      return "Give both sides the same key file (here with PENSTOCK_KEY_FILE or penstock run "
             "--key).";
    case Code::kProtocol:
      return "Check that a penstockd of this version listens there.";
    case Code::kResourceExhausted:
      return "Try again when one is free, wait for it (penstock run --wait), or ask for fewer "
             "(PENSTOCK_GPUS or penstock run -n).";
    case Code::kUnsupported:
      return "";  // the message says what to do
    default:
      return "Check that penstockd runs there and can be reached from here.";
  }
}

// What PENSTOCK_WHEN_FULL says when every slot is taken: `error` (the default), cuInit fails and
// the program may go on without a GPU; `wait`, until one is free; `exit`, for `penstock run`: the
// program ends with EX_TEMPFAIL, so that a batch system tries again.
Result<Connected> ConnectWhenFree(const ConnectOptions& options) {
  constexpr useconds_t kShortestUs = 100'000, kLongestUs = 2'000'000;
  const std::string when_full = EnvString("PENSTOCK_WHEN_FULL");
  Result<Connected> connected = Connect(options);
  useconds_t pause = kShortestUs;
  while (!connected && connected.error().code == Code::kResourceExhausted && when_full == "wait") {
    if (pause == kShortestUs) {
      LOG_WARNING("session", "Waiting for a GPU of the server (%s): %s", options.server.c_str(),
                  connected.error().message.c_str());
    }
    usleep(pause);
    pause = std::min(pause * 2, kLongestUs);
    connected = Connect(options);
  }
  if (!connected && connected.error().code == Code::kResourceExhausted && when_full == "exit") {
    LOG_ERROR("session", "The program ends with status %d: %s %s", EX_TEMPFAIL,
              connected.error().message.c_str(), Advice(Code::kResourceExhausted));
    fflush(nullptr);
    _exit(EX_TEMPFAIL);
  }
  return connected;
}

}  // namespace

constinit std::atomic<Client*> Client::current_{nullptr};

Client::Client(std::unique_ptr<Session> session, ClientOptions options)
    : session_(std::move(session)),
      options_(std::move(options)),
      devices_(VisibleDevices(session_->offered_devices(), options_.visible_devices,
                              options_.device_order)) {
  for (size_t i = 0; i < devices_.size(); ++i) {
    session_->primary_contexts[devices_[i].wire].device = static_cast<uint32_t>(i);
  }
}

CUresult Client::Initialise() {
  std::lock_guard lock(g_initialise_mutex);
  if (Client* client = Get(); client != nullptr) return client->session().state();
  ConnectOptions connect;
  connect.server = EnvString("PENSTOCK_SERVER");
  connect.key_file = EnvString("PENSTOCK_KEY_FILE");
  connect.gpus = static_cast<uint32_t>(EnvInteger("PENSTOCK_GPUS", 0));
  if (connect.server.empty()) {
    LOG_ERROR("session",
              "No GPU server is named: PENSTOCK_SERVER is not set. Set it to HOST:PORT of a "
              "penstockd, or start the program with 'penstock run'.");
    return CUDA_ERROR_NO_DEVICE;
  }
  Result<PathOptions> path = PathOptionsFromEnvironment();
  if (!path) {
    LOG_ERROR("session", "Cannot open a session: %s", path.error().message.c_str());
    return InitError(path.error());
  }
  connect.path = std::move(*path);
  Result<Connected> connected = ConnectWhenFree(connect);
  if (!connected) {
    const char* const advice = Advice(connected.error().code);
    LOG_ERROR("session", "Cannot open a session with the server (PENSTOCK_SERVER=%s): %s%s%s",
              connect.server.c_str(), connected.error().message.c_str(), *advice == '\0' ? "" : " ",
              advice);
    return InitError(connected.error());
  }
  SessionOptions session_options = SessionOptionsFromEnvironment(connect.server);
  session_options.host_functions = connected->host_functions;
  session_options.bounce = connected->bounce;
  session_options.volumes = connected->volumes;
  auto session = std::make_unique<Session>(
      std::move(connected->connection), std::move(connected->welcome), std::move(session_options));
  session->counters().hello_round_trips = connected->round_trips;
  auto client = std::make_unique<Client>(std::move(session), ClientOptionsFromEnvironment());
  if (client->devices().empty()) {
    if (client->session().offered_devices().empty()) {
      LOG_ERROR("session", "The server (PENSTOCK_SERVER=%s) offers no device.",
                connect.server.c_str());
    }
    client->session().End();
    return CUDA_ERROR_NO_DEVICE;
  }
  g_abandon = connected->abandon;
  Install(std::move(client));
  return CUDA_SUCCESS;
}

void Client::Install(std::unique_ptr<Client> client) {
  static const bool registered = [] {
    pthread_atfork(nullptr, nullptr, [] {
      // One thread, and any lock may be held by one that is not here: touch only atomics and what
      // was made for this.
      Client* const parents = current_.exchange(nullptr);
      if (parents == nullptr) return;
      if (g_abandon != nullptr) g_abandon(parents->session().connection());
      g_abandon = nullptr;
      new (&g_initialise_mutex) std::mutex;
      ForgetThreadStates();
      ForgetStatistics();
    });
    SetThreadExitHook(&OnThreadExit);
    return true;
  }();
  static_cast<void>(registered);
  current_.store(client.release(), std::memory_order_release);
}

void Client::Finish() {
  Client* const client = Get();
  if (client == nullptr) return;
  Session& session = client->session();
  session.End();
  if (!client->options_.statistics_file.empty()) {
    transport::Counters counters = session.connection().counters();
    if (!session.connection().caps().sees_bulk) {
      counters.bulk_bytes_sent = session.counters().bulk_sent;
      counters.bulk_bytes_received = session.counters().bulk_received;
    }
    WriteStatistics(client->options_.statistics_file, session.connection().caps().name, counters,
                    session.counters());
  }
}

const Device* Client::FindDevice(CUdevice ordinal) const {
  if (ordinal < 0 || static_cast<size_t>(ordinal) >= devices_.size()) return nullptr;
  return &devices_[ordinal];
}

CUdevice Client::OrdinalOf(uint32_t wire) const {
  for (size_t i = 0; i < devices_.size(); ++i) {
    if (devices_[i].wire == wire) return static_cast<CUdevice>(i);
  }
  return -1;
}

int Client::driver_version() const {
  return std::min(kDriverVersion, static_cast<int>(session_->server().driver_version));
}

StreamRecord* Client::PerThreadStream(ThreadState& thread, ContextRecord& context) {
  for (auto place = thread.streams.begin(); place != thread.streams.end(); ++place) {
    if (place->context != context.handle) continue;
    if (StreamRecord* stream = session_->streams.Find(place->stream)) return stream;
    thread.streams.erase(place);  // the context was reset meanwhile
    break;
  }
  StreamRecord* const stream = session_->streams.Mint([&](StreamRecord& record, Handle handle) {
    record.context = &context;
    record.id = handle.id() + kMaxDevices;
  });
  if (stream == nullptr) return nullptr;
  commands::CuStreamCreateWithPriority command{};
  command.phStream = stream->handle.bits;
  OutgoingCall call;
  call.function = commands::CuStreamCreateWithPriority::kFunction;
  call.context = context.handle.bits;
  call.thread = thread.index;
  call.command = &command;
  call.command_bytes = sizeof command;
  if (session_->Post(call, nullptr) != CUDA_SUCCESS) return nullptr;
  thread.streams.push_back({context.handle, stream->handle});
  return stream;
}

void Client::OnThreadExit(ThreadState& thread) {
  Client* const client = Get();
  if (client == nullptr) return;
  Session& session = client->session();
  for (const ThreadState::PerThreadStream& owned : thread.streams) {
    StreamRecord* const stream = session.streams.Find(owned.stream);
    if (stream == nullptr) continue;
    commands::CuStreamDestroy command{};
    command.hStream = owned.stream.bits;
    OutgoingCall call;
    call.function = commands::CuStreamDestroy::kFunction;
    call.context = owned.context.bits;
    call.thread = thread.index;
    call.command = &command;
    call.command_bytes = sizeof command;
    session.plan.OrphanUses(*stream);
    session.streams.Remove(owned.stream);
    session.Post(call, nullptr);
  }
}

void Client::DropContext(ContextRecord& context) {
  const auto lives_here = [&](const auto& record) { return record.context == &context; };
  session_->streams.RemoveIf(lives_here);
  session_->events.RemoveIf(lives_here);
  session_->modules.RemoveIf(lives_here);
  session_->functions.RemoveIf(lives_here);
  session_->libraries.ForEach([&](ModuleRecord& library) {
    std::lock_guard lock(library.mutex);
    std::erase_if(library.globals,
                  [&](const auto& entry) { return entry.first.first == &context; });
  });
  session_->plan.DropContext(&context);
  session_->host_functions().DropContext(context);
  interop::DropContext(reinterpret_cast<CUcontext>(context.handle.bits));
}

}  // namespace penstock::interposer
