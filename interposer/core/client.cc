#include "interposer/core/client.h"

#include <pthread.h>
#include <sysexits.h>
#include <unistd.h>

#include <new>

#include "commands.gen.h"
#include "common/env.h"
#include "common/log.h"
#include "interop/export_tables.h"
#include "interposer/core/acquire.h"

namespace penstock::interposer {
namespace {

constinit std::mutex g_initialise_mutex;

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

SessionOptions SessionOptionsFromEnvironment() {
  SessionOptions options;
  options.synchronous = EnvFlag("PENSTOCK_SYNC") || EnvListContains("PENSTOCK_DISABLE", "post");
  options.inline_copies = !EnvListContains("PENSTOCK_DISABLE", "inline");
  options.staging = !EnvListContains("PENSTOCK_DISABLE", "staging");
  options.window = !EnvListContains("PENSTOCK_DISABLE", "window");
  options.reserve_addresses = !EnvListContains("PENSTOCK_DISABLE", "reserve");
  return options;
}

std::vector<std::unique_ptr<Session>> MakeSessions(std::vector<Connected> acquired) {
  const SessionOptions common = SessionOptionsFromEnvironment();
  auto objects = std::make_shared<Objects>(common.reserve_addresses);
  std::vector<std::unique_ptr<Session>> sessions;
  for (Connected& connected : acquired) {
    SessionOptions options = common;
    options.server = connected.server;
    options.index = static_cast<uint32_t>(sessions.size());
    options.host_functions = connected.host_functions;
    options.bounce = connected.bounce;
    options.volumes = connected.volumes;
    options.abandon = connected.abandon;
    sessions.push_back(std::make_unique<Session>(std::move(connected.connection),
                                                 std::move(connected.welcome), std::move(options),
                                                 objects));
    sessions.back()->counters().hello_round_trips = connected.round_trips;
  }
  return sessions;
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
      return "Set PENSTOCK_SERVER to HOST:PORT of a penstockd, write a pool file, or start the "
             "program with "
             "'penstock run'.";
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
Result<std::vector<Connected>> AcquireWhenFree(const Pool& pool) {
  constexpr useconds_t kShortestUs = 100'000, kLongestUs = 2'000'000;
  const std::string when_full = EnvString("PENSTOCK_WHEN_FULL");
  Result<std::vector<Connected>> acquired = Acquire(pool);
  const auto full = [&] { return !acquired && acquired.error().code == Code::kResourceExhausted; };
  for (useconds_t pause = kShortestUs; full() && when_full == "wait";
       pause = std::min(pause * 2, kLongestUs)) {
    if (pause == kShortestUs) {
      LOG_WARNING("session", "Waiting for a GPU (%s): %s", pool.source.c_str(),
                  acquired.error().message.c_str());
    }
    usleep(pause);
    acquired = Acquire(pool);
  }
  if (full() && when_full == "exit") {
    LOG_ERROR("session", "The program ends with status %d: %s %s", EX_TEMPFAIL,
              acquired.error().message.c_str(), Advice(Code::kResourceExhausted));
    fflush(nullptr);
    _exit(EX_TEMPFAIL);
  }
  return acquired;
}

// The devices of all sessions, one after the other.
std::vector<Device> Offered(const std::vector<std::unique_ptr<Session>>& sessions) {
  std::vector<Device> devices;
  for (const auto& session : sessions) {
    for (const DeviceInfo& info : session->offered_devices()) {
      if (devices.size() == kMaxDevices) return devices;
      const auto wire = static_cast<uint32_t>(&info - session->offered_devices().data());
      devices.push_back({session.get(), wire, info});
    }
  }
  MakeDistinct(&devices);
  return devices;
}

}  // namespace

constinit std::atomic<Client*> Client::current_{nullptr};

Client::Client(std::vector<std::unique_ptr<Session>> sessions, ClientOptions options)
    : sessions_(std::move(sessions)),
      objects_(sessions_.front()->shared_objects()),
      options_(std::move(options)),
      devices_(
          VisibleDevices(Offered(sessions_), options_.visible_devices, options_.device_order)) {
  for (uint32_t i = 0; i < devices_.size(); ++i) {
    ContextRecord& primary = devices_[i].session->primary_contexts[devices_[i].wire];
    primary.device = i;
    primary.handle = PrimaryContext(i);
    primary.id = primary.legacy.id = i + 1;
  }
}

CUresult Client::Initialise() {
  std::lock_guard lock(g_initialise_mutex);
  if (Client* client = Get(); client != nullptr) return client->state();
  Result<Pool> pool = PoolFromEnvironment();
  if (!pool) {
    LOG_ERROR("session", "Cannot open a session: %s %s", pool.error().message.c_str(),
              Advice(pool.error().code));
    return InitError(pool.error());
  }
  Result<std::vector<Connected>> acquired = AcquireWhenFree(*pool);
  if (!acquired) {
    const char* const advice = Advice(acquired.error().code);
    LOG_ERROR("session", "Cannot open a session with the server (%s): %s%s%s", pool->source.c_str(),
              acquired.error().message.c_str(), *advice == '\0' ? "" : " ", advice);
    return InitError(acquired.error());
  }
  auto client =
      std::make_unique<Client>(MakeSessions(std::move(*acquired)), ClientOptionsFromEnvironment());
  if (client->devices().empty()) {
    if (client->session().offered_devices().empty()) {
      LOG_ERROR("session", "The server (%s) offers no device.", pool->source.c_str());
    }
    for (const auto& session : client->sessions()) session->End();
    return CUDA_ERROR_NO_DEVICE;
  }
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
      for (const auto& session : parents->sessions()) session->AbandonAfterFork();
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
  for (const auto& session : client->sessions_) session->End();
  if (client->options_.statistics_file.empty()) return;
  SessionTotals totals;
  for (const auto& session : client->sessions_)
    totals.Add(session->connection(), session->counters());
  WriteStatistics(client->options_.statistics_file, totals);
}

CUresult Client::state() const {
  for (const auto& session : sessions_) {
    if (session->state() == CUDA_SUCCESS) return CUDA_SUCCESS;
  }
  return sessions_.front()->state();
}

const Device* Client::FindDevice(CUdevice ordinal) const {
  if (ordinal < 0 || static_cast<size_t>(ordinal) >= devices_.size()) return nullptr;
  return &devices_[ordinal];
}

ContextRecord* Client::FindContext(Handle handle) {
  if (!IsPrimaryContext(handle)) return objects_->contexts.Find(handle);
  if (handle.id() >= devices_.size()) return nullptr;
  const Device& device = devices_[handle.id()];
  return &device.session->primary_contexts[device.wire];
}

int Client::driver_version() const {
  int least = kDriverVersion;
  for (const auto& session : sessions_) {
    least = std::min(least, static_cast<int>(session->server().driver_version));
  }
  return least;
}

StreamRecord* Client::PerThreadStream(ThreadState& thread, ContextRecord& context) {
  for (auto place = thread.streams.begin(); place != thread.streams.end(); ++place) {
    if (place->context != context.handle) continue;
    if (StreamRecord* stream = objects_->streams.Find(place->stream)) return stream;
    thread.streams.erase(place);  // the context was reset meanwhile
    break;
  }
  StreamRecord* const stream = MakeStream(thread, context, CU_STREAM_DEFAULT);
  if (stream != nullptr) thread.streams.push_back({context.handle, stream->handle});
  return stream;
}

StreamRecord* Client::MakeStream(ThreadState& thread, ContextRecord& context, unsigned flags) {
  StreamRecord* const stream = objects_->streams.Mint([&](StreamRecord& record, Handle handle) {
    record.context = &context;
    record.flags = flags;
    record.id = handle.id() + kMaxDevices;
  });
  if (stream == nullptr) return nullptr;
  commands::CuStreamCreateWithPriority command{};
  command.phStream = stream->handle.bits;
  command.flags = flags;
  OutgoingCall call;
  call.function = commands::CuStreamCreateWithPriority::kFunction;
  call.context = context.wire.bits;
  call.thread = thread.index;
  call.command = &command;
  call.command_bytes = sizeof command;
  if (context.session->Post(call, nullptr) == CUDA_SUCCESS) return stream;
  objects_->streams.Remove(stream->handle);
  return nullptr;
}

void Client::DropStream(ThreadState& thread, StreamRecord& stream) {
  const ContextRecord& context = *stream.context;
  commands::CuStreamDestroy command{};
  command.hStream = stream.handle.bits;
  OutgoingCall call;
  call.function = commands::CuStreamDestroy::kFunction;
  call.context = context.wire.bits;
  call.thread = thread.index;
  call.command = &command;
  call.command_bytes = sizeof command;
  objects_->plan.OrphanUses(stream);
  objects_->streams.Remove(stream.handle);
  context.session->Post(call, nullptr);
}

void Client::OnThreadExit(ThreadState& thread) {
  Client* const client = Get();
  if (client == nullptr) return;
  for (const ThreadState::PerThreadStream& owned : thread.streams) {
    StreamRecord* const stream = client->objects().streams.Find(owned.stream);
    if (stream != nullptr) client->DropStream(thread, *stream);
  }
}

void Client::DropContext(ContextRecord& context) {
  const auto lives_here = [&](const auto& record) { return record.context == &context; };
  objects_->streams.RemoveIf(lives_here);
  objects_->events.RemoveIf(lives_here);
  objects_->modules.RemoveIf(lives_here);
  objects_->functions.RemoveIf(lives_here);
  objects_->links.RemoveIf(lives_here);
  objects_->libraries.ForEach([&](ModuleRecord& library) {
    std::lock_guard lock(library.mutex);
    std::erase_if(library.globals,
                  [&](const auto& entry) { return entry.first.first == &context; });
  });
  objects_->plan.DropContext(&context);
  context.session->host_functions().DropContext(context);
  interop::DropContext(reinterpret_cast<CUcontext>(context.handle.bits));
}

}  // namespace penstock::interposer
