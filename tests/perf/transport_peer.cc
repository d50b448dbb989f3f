#include "tests/perf/transport_peer.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

#include "tests/perf/random_bytes.h"
#include "transport/shm/shm.h"
#include "transport/tcp/socket.h"
#include "transport/tcp/tcp.h"

namespace penstock::perf {
namespace {

using namespace penstock::transport;

struct MoveFrame {
  uint32_t frame_bytes;
  uint32_t pull;
  uint64_t bytes;
  MemoryKey key;
};

[[noreturn]] void Die(const std::string& message) {
  fprintf(stderr, "penstock_bench: %s\n", message.c_str());
  _exit(1);
}

template <typename T>
T Must(Result<T> result) {
  if (!result) Die(result.error().message);
  return std::move(*result);
}

void SendMove(Connection& connection, const MoveFrame& frame) {
  std::byte* slot = nullptr;
  if (connection.Reserve(sizeof frame, &slot) != Outcome::kOk) Die("There is no room for a frame.");
  std::memcpy(slot, &frame, sizeof frame);
  connection.Commit(sizeof frame, kFlush);
}

class Ends final : public Handler {
 public:
  bool OnFrame(std::span<const std::byte> frame) override {
    if (frame.size() != sizeof(MoveFrame)) return false;
    std::memcpy(&move, frame.data(), sizeof move);
    arrived = true;
    return true;
  }
  void OnBulkDone(uint64_t, BulkStatus status, uint64_t) override {
    if (status != BulkStatus::kOk) Die("A bulk move fails.");
    done = true;
  }
  MoveFrame move{};
  bool arrived = false, done = false;
};

void Serve(Connection& connection, uint64_t bytes) {
  std::vector<std::byte> memory(bytes);
  FillRandom(memory.data(), bytes);
  const auto region = Must(connection.Register(memory.data(), bytes, Access::kPeerReadsAndWrites));
  Ends ends;
  for (;;) {
    ends.arrived = ends.done = false;
    while (!ends.arrived) {
      if (connection.Wait(16, ends, Deadline::Never()) < 0) return;
    }
    const Outcome outcome = ends.move.pull
                                ? connection.Get(*region, 0, ends.move.key, 0, ends.move.bytes, 1)
                                : connection.Put(*region, 0, ends.move.key, 0, ends.move.bytes, 1);
    if (outcome != Outcome::kOk) Die("A bulk move cannot start.");
    while (!ends.done) {
      if (connection.Wait(16, ends, Deadline::Never()) < 0) return;
    }
    SendMove(connection, ends.move);
  }
}

}  // namespace

constexpr shm::Token kToken = {1};  // nobody else is to find the socket within the moment

TransportPeer::TransportPeer(uint64_t bytes, bool through_memory) {
  const Deadline deadline = Deadline::After(20'000);
  if (through_memory) {
    auto listener = Must(shm::Listener::Open({}));
    name_ = listener->name();
    child_ = fork();
    if (child_ < 0) Die("Cannot fork.");
    if (child_ > 0) return;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    Serve(*Must(listener->Accept(kToken, Deadline::After(600'000))), bytes);
    _exit(0);
  }
  auto listener = Must(tcp::Listener::Bind("127.0.0.1", 0));
  child_ = fork();
  if (child_ < 0) Die("Cannot fork.");
  if (child_ == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    UniqueFd control = Must(listener.Accept(deadline));
    UniqueFd bulk = Must(listener.Accept(deadline));
    const auto connection = tcp::Adopt(std::move(control), std::move(bulk), {});
    Serve(*connection, bytes);
    _exit(0);
  }
  for (int& socket : sockets_) {
    socket = Must(tcp::Dial("127.0.0.1", listener.port(), deadline)).release();
  }
}

void TransportPeer::Connect(std::byte* memory, uint64_t bytes) {
  connection_ = name_.empty() ? tcp::Adopt(UniqueFd(sockets_[0]), UniqueFd(sockets_[1]), {})
                              : Must(shm::Dial({}, name_, kToken, Deadline::After(20'000)));
  region_ = Must(connection_->Register(memory, bytes, Access::kPeerReadsAndWrites));
}

TransportPeer::~TransportPeer() {
  region_.reset();
  if (connection_ != nullptr) connection_->Close(1000);
  connection_.reset();
  kill(child_, SIGKILL);
  waitpid(child_, nullptr, 0);
}

void TransportPeer::Pull(uint64_t bytes) {
  Move(bytes, 1);
}

void TransportPeer::Push(uint64_t bytes) {
  Move(bytes, 0);
}

void TransportPeer::Move(uint64_t bytes, uint64_t pull) {
  MoveFrame frame = {sizeof frame, static_cast<uint32_t>(pull), bytes, region_->key()};
  SendMove(*connection_, frame);
  Ends ends;
  while (!ends.arrived) {
    if (connection_->Wait(16, ends, Deadline::Never()) < 0) Die("The transport peer is gone.");
  }
}

}  // namespace penstock::perf
