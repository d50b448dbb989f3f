#include "control/server.h"

#include <capnp/rpc-twoparty.h>
#include <kj/async-io.h>

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <future>
#include <mutex>
#include <thread>
#include <vector>

#include "common/log.h"
#include "control/control.capnp.h"

namespace penstock::control {
namespace {

constexpr int64_t kConnectionMs = 60'000;
constexpr uint32_t kMostConnections = 32;

void Fill(wire::Status::Builder builder, const Status& status) {
  builder.setHost(status.host);
  builder.setVersion(status.version);
  builder.setDriverVersion(status.driver_version);
  builder.setDriverError(status.driver_error);
  builder.setDraining(status.draining);
  builder.setMostSessions(status.most_sessions);
  auto gpus = builder.initGpus(static_cast<unsigned>(status.gpus.size()));
  for (unsigned i = 0; i < gpus.size(); ++i) {
    const Gpu& gpu = status.gpus[i];
    gpus[i].setOrdinal(gpu.ordinal);
    gpus[i].setName(gpu.name);
    gpus[i].setUuid(gpu.uuid);
    gpus[i].setMemory(gpu.memory);
    gpus[i].setSlots(gpu.slots);
    gpus[i].setSlotsTaken(gpu.slots_taken);
    gpus[i].setSlotMemory(gpu.slot_memory);
  }
  auto sessions = builder.initSessions(static_cast<unsigned>(status.sessions.size()));
  for (unsigned i = 0; i < sessions.size(); ++i) {
    const Session& session = status.sessions[i];
    sessions[i].setId(session.id);
    sessions[i].setHost(session.host);
    sessions[i].setPid(session.pid);
    sessions[i].setProgram(session.program);
    sessions[i].setPeer(session.peer);
    auto ordinals = sessions[i].initGpus(static_cast<unsigned>(session.gpus.size()));
    for (unsigned gpu = 0; gpu < ordinals.size(); ++gpu) ordinals.set(gpu, session.gpus[gpu]);
    sessions[i].setPath(session.path);
    sessions[i].setMemory(session.memory);
    sessions[i].setCalls(session.calls);
    sessions[i].setReceived(session.received);
    sessions[i].setSent(session.sent);
    sessions[i].setSeconds(session.seconds);
  }
}

class DaemonImpl final : public wire::Daemon::Server {
 public:
  explicit DaemonImpl(Answers& answers) : answers_(answers) {}

  kj::Promise<void> status(StatusContext context) override {
    Fill(context.getResults().initStatus(), answers_.Report());
    return kj::READY_NOW;
  }
  kj::Promise<void> drain(DrainContext context) override {
    context.getResults().setSessions(answers_.Drain());
    return kj::READY_NOW;
  }
  kj::Promise<void> resume(ResumeContext) override {
    answers_.Resume();
    return kj::READY_NOW;
  }

 private:
  Answers& answers_;
};

// One caller: its socket, and what answers on it. What a stranger sends is bounded by Cap'n Proto's
// reader limits, which are far above a request of ours.
struct Connection {
  Connection(kj::Own<kj::AsyncIoStream> its_stream, Answers& answers)
      : stream(kj::mv(its_stream)),
        network(*stream, capnp::rpc::twoparty::Side::SERVER, Limits()),
        rpc(capnp::makeRpcServer(network,
                                 capnp::Capability::Client(kj::heap<DaemonImpl>(answers)))) {}

  static capnp::ReaderOptions Limits() {
    capnp::ReaderOptions options;
    options.traversalLimitInWords = 64 * 1024;
    options.nestingLimit = 16;
    return options;
  }

  kj::Own<kj::AsyncIoStream> stream;
  capnp::TwoPartyVatNetwork network;
  capnp::RpcSystem<capnp::rpc::twoparty::VatId> rpc;
};

}  // namespace

// Sockets come through a queue, and a byte in a pipe says that one is there; that the pipe closes,
// says that it is over.
struct Server::Loop final : kj::TaskSet::ErrorHandler {
  explicit Loop(Answers& its_answers) : answers(its_answers) {}

  void taskFailed(kj::Exception&& error) override {
    LOG_DEBUG("control", "A control connection fails: %s", error.getDescription().cStr());
  }

  void Accept(kj::AsyncIoContext& io, kj::TaskSet& tasks, UniqueFd socket) {
    if (connections == kMostConnections) {
      if (!crowded) {
        LOG_WARNING("control", "There are (%u) control connections; new ones are closed.",
                    connections);
      }
      crowded = true;
      return;
    }
    crowded = false;
    ++connections;
    auto stream = io.lowLevelProvider->wrapSocketFd(socket.release(),
                                                    kj::LowLevelAsyncIoProvider::TAKE_OWNERSHIP);
    auto connection = kj::heap<Connection>(kj::mv(stream), answers);
    auto over = connection->network.onDisconnect().exclusiveJoin(
        io.provider->getTimer().afterDelay(kConnectionMs * kj::MILLISECONDS));
    tasks.add(over.attach(kj::mv(connection), kj::defer([this] { --connections; })));
  }

  void Run(bool* is_running) {
    auto io = kj::setupAsyncIo();
    kj::TaskSet tasks(*this);
    auto bell = io.lowLevelProvider->wrapInputFd(bell_out.get());
    *is_running = true;
    running.set_value(true);
    char rings[64];
    while (bell->tryRead(rings, 1, sizeof rings).wait(io.waitScope) > 0) {
      std::vector<UniqueFd> sockets;
      {
        std::lock_guard lock(mutex);
        sockets.swap(queue);
      }
      for (UniqueFd& socket : sockets) Accept(io, tasks, std::move(socket));
    }
  }

  Answers& answers;
  UniqueFd bell_in, bell_out;
  std::promise<bool> running;  // whether it does
  std::mutex mutex;
  std::vector<UniqueFd> queue;  // guarded by mutex
  uint32_t connections = 0;     // of the loop's thread, as the next one
  bool crowded = false;         // it was said that there are too many
  std::thread thread;
};

Result<std::unique_ptr<Server>> Server::Start(Answers& answers) {
  std::unique_ptr<Server> server(new Server);
  server->loop_ = std::make_unique<Loop>(answers);
  Loop& loop = *server->loop_;
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return FailErrno("Cannot make a pipe");
  loop.bell_out = UniqueFd(ends[0]);
  loop.bell_in = UniqueFd(ends[1]);
  // Signals are the supervisor's.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, &before);
  loop.thread = std::thread([&loop] {
    bool running = false;
    try {
      loop.Run(&running);
    } catch (const kj::Exception& error) {
      LOG_ERROR("control", "The control plane ends: %s", error.getDescription().cStr());
      if (!running) loop.running.set_value(false);
    }
  });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  // What the daemon has and holds is complete when it says that it is ready.
  if (loop.running.get_future().get()) return server;
  return Fail(Code::kSystem, "The control plane does not start.");
}

Server::~Server() {
  loop_->bell_in.reset();
  if (loop_->thread.joinable()) loop_->thread.join();
}

void Server::Serve(UniqueFd socket) {
  {
    std::lock_guard lock(loop_->mutex);
    loop_->queue.push_back(std::move(socket));
  }
  const char ring = 1;
  if (write(loop_->bell_in.get(), &ring, 1) != 1) {
    LOG_WARNING("control", "The control plane does not hear of a connection: %s.", strerror(errno));
  }
}

}  // namespace penstock::control
