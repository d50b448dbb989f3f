#include "control/client.h"

#include <capnp/rpc-twoparty.h>
#include <kj/async-io.h>

#include <functional>

#include "control/control.capnp.h"

namespace penstock::control {
namespace {

// Runs one request to its end on an event loop of its own. `ask` makes the promise.
template <typename Ask>
penstock::Status Exchange(UniqueFd socket, int64_t limit_ms, Ask ask) {
  try {
    auto io = kj::setupAsyncIo();
    auto stream = io.lowLevelProvider->wrapSocketFd(socket.release(),
                                                    kj::LowLevelAsyncIoProvider::TAKE_OWNERSHIP);
    capnp::TwoPartyClient client(*stream);
    auto daemon = client.bootstrap().castAs<wire::Daemon>();
    bool late = false;
    auto limit = io.provider->getTimer().afterDelay(limit_ms * kj::MILLISECONDS).then([&late] {
      late = true;
    });
    ask(daemon).exclusiveJoin(kj::mv(limit)).wait(io.waitScope);
    if (!late) return {};
    return Fail(Code::kTimeout,
                "The server does not answer within (" + std::to_string(limit_ms) + ") ms.");
  } catch (const kj::Exception& error) {
    return Fail(Code::kUnavailable,
                std::string("The server does not answer: ") + error.getDescription().cStr() + ".");
  }
}

Status Plain(wire::Status::Reader reader) {
  Status status;
  status.host = reader.getHost();
  status.version = reader.getVersion();
  status.driver_version = reader.getDriverVersion();
  status.driver_error = reader.getDriverError();
  status.draining = reader.getDraining();
  status.most_sessions = reader.getMostSessions();
  for (const auto& gpu : reader.getGpus()) {
    status.gpus.push_back({gpu.getOrdinal(), gpu.getName(), gpu.getUuid(), gpu.getMemory(),
                           gpu.getSlots(), gpu.getSlotsTaken(), gpu.getSlotMemory()});
  }
  for (const auto& session : reader.getSessions()) {
    Session& plain = status.sessions.emplace_back();
    plain.id = session.getId();
    plain.host = session.getHost();
    plain.pid = session.getPid();
    plain.program = session.getProgram();
    plain.peer = session.getPeer();
    for (const uint32_t gpu : session.getGpus()) plain.gpus.push_back(gpu);
    plain.path = session.getPath();
    plain.memory = session.getMemory();
    plain.calls = session.getCalls();
    plain.received = session.getReceived();
    plain.sent = session.getSent();
    plain.seconds = session.getSeconds();
  }
  return status;
}

}  // namespace

Result<Status> AskStatus(UniqueFd socket, int64_t limit_ms) {
  Status status;
  RETURN_IF_ERROR(Exchange(std::move(socket), limit_ms, [&](wire::Daemon::Client daemon) {
    return daemon.statusRequest().send().then(
        [&](auto response) { status = Plain(response.getStatus()); });
  }));
  return status;
}

Result<uint32_t> AskDrain(UniqueFd socket, int64_t limit_ms) {
  uint32_t sessions = 0;
  RETURN_IF_ERROR(Exchange(std::move(socket), limit_ms, [&](wire::Daemon::Client daemon) {
    return daemon.drainRequest().send().then(
        [&](auto response) { sessions = response.getSessions(); });
  }));
  return sessions;
}

penstock::Status AskResume(UniqueFd socket, int64_t limit_ms) {
  return Exchange(std::move(socket), limit_ms, [](wire::Daemon::Client daemon) {
    return daemon.resumeRequest().send().ignoreResult();
  });
}

}  // namespace penstock::control
