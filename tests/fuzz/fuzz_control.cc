// The control plane's answering half: what a caller sends on a socket that has gone through the
// hello. One server for all inputs, as in a daemon; after each one it must have hung up or
// answered, and the next one must find it alive.
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <memory>

#include "control/server.h"
#include "tests/fuzz/input.h"

using namespace penstock;

namespace {

class Daemon final : public control::Answers {
 public:
  control::Status Report() override {
    control::Status status;
    status.host = "host";
    status.gpus.resize(2);
    status.sessions.resize(3);
    return status;
  }
  uint32_t Drain() override { return 1; }
  void Resume() override {}
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static Daemon daemon;
  static const std::unique_ptr<control::Server> server = std::move(*control::Server::Start(daemon));
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) return 0;
  server->Serve(UniqueFd(ends[0]));
  const UniqueFd socket(ends[1]);
  (void)!send(socket.get(), data, size, MSG_NOSIGNAL);
  shutdown(socket.get(), SHUT_WR);
  char answer[4096];
  pollfd ready = {socket.get(), POLLIN, 0};
  do {
    int seen;
    do {
      seen = poll(&ready, 1, 10'000);
    } while (seen < 0 && errno == EINTR);  // libFuzzer's own timer
    fuzz::Require(seen == 1);              // else it neither answers nor hangs up
  } while (read(socket.get(), answer, sizeof answer) > 0);
  return 0;
}
