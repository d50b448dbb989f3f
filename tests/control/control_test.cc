#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <catch2/catch.hpp>
#include <cstring>
#include <random>
#include <thread>

#include "control/client.h"
#include "control/server.h"

using namespace penstock;
using namespace penstock::control;

namespace {

class FixedAnswers final : public Answers {
 public:
  control::Status Report() override {
    control::Status status;
    status.host = "gpu7";
    status.version = "1.2.3";
    status.driver_version = 13000;
    status.draining = drained;
    status.most_sessions = 64;
    status.gpus.push_back({1, "A GPU", "GPU-1234", 80ull << 30, 4, 2, 16ull << 30});
    control::Session session;
    session.id = 9;
    session.host = "login";
    session.pid = 4711;
    session.program = "python3";
    session.peer = "192.0.2.1:999";
    session.gpus = {1, 5};
    session.path = "rdma";
    session.memory = 1ull << 40;
    session.calls = 3;
    session.received = 4;
    session.sent = 5;
    session.seconds = 1.5;
    status.sessions.push_back(session);
    return status;
  }
  uint32_t Drain() override {
    drained = true;
    return 7;
  }
  void Resume() override { drained = false; }

  std::atomic<bool> drained{false};
};

struct Bench {
  FixedAnswers answers;
  std::unique_ptr<Server> server = std::move(*Server::Start(answers));

  // The caller's end.
  UniqueFd Connect() {
    int ends[2];
    REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
    server->Serve(UniqueFd(ends[0]));
    return UniqueFd(ends[1]);
  }
};

// Once those who have hung up are noticed.
bool IsHeard(Bench& bench) {
  for (int i = 0; i < 200; ++i) {
    const auto status = AskStatus(bench.Connect(), 5000);
    if (status) return status->host == "gpu7";
    usleep(20'000);
  }
  return false;
}

}  // namespace

TEST_CASE("what a daemon tells arrives as it was told", "[control]") {
  Bench bench;
  const auto status = AskStatus(bench.Connect(), 5000);
  REQUIRE(status);
  CHECK(status->host == "gpu7");
  CHECK(status->version == "1.2.3");
  CHECK(status->driver_version == 13000);
  CHECK_FALSE(status->draining);
  CHECK(status->most_sessions == 64);
  REQUIRE(status->gpus.size() == 1);
  CHECK(status->gpus[0].ordinal == 1);
  CHECK(status->gpus[0].name == "A GPU");
  CHECK(status->gpus[0].uuid == "GPU-1234");
  CHECK(status->gpus[0].memory == 80ull << 30);
  CHECK(status->gpus[0].slots == 4);
  CHECK(status->gpus[0].slots_taken == 2);
  CHECK(status->gpus[0].slot_memory == 16ull << 30);
  REQUIRE(status->sessions.size() == 1);
  const control::Session& session = status->sessions[0];
  CHECK(session.id == 9);
  CHECK(session.host == "login");
  CHECK(session.pid == 4711);
  CHECK(session.program == "python3");
  CHECK(session.peer == "192.0.2.1:999");
  CHECK(session.gpus == std::vector<uint32_t>{1, 5});
  CHECK(session.path == "rdma");
  CHECK(session.memory == 1ull << 40);
  CHECK(session.calls == 3);
  CHECK(session.received == 4);
  CHECK(session.sent == 5);
  CHECK(session.seconds == 1.5);
}

TEST_CASE("a daemon is drained and resumed", "[control]") {
  Bench bench;
  CHECK(*AskDrain(bench.Connect(), 5000) == 7);
  CHECK(bench.answers.drained);
  CHECK(AskStatus(bench.Connect(), 5000)->draining);
  CHECK(AskResume(bench.Connect(), 5000));
  CHECK_FALSE(bench.answers.drained);
}

TEST_CASE("a daemon that does not answer is given up", "[control]") {
  int ends[2];
  REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
  UniqueFd silent(ends[0]);
  const auto status = AskStatus(UniqueFd(ends[1]), 100);
  REQUIRE_FALSE(status);
  CHECK(status.error().code == Code::kTimeout);
  UniqueFd closed(dup(silent.get()));
  REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
  close(ends[0]);
  CHECK(AskStatus(UniqueFd(ends[1]), 5000).error().code == Code::kUnavailable);
}

// Whoever holds the key may still be mad: the others' answers come all the same.
TEST_CASE("rubbish costs its sender the connection and nobody else anything", "[control]") {
  Bench bench;
  std::mt19937 random(3);
  for (int i = 0; i < 200; ++i) {
    UniqueFd socket = bench.Connect();
    std::vector<unsigned char> rubbish(random() % 300);
    for (unsigned char& byte : rubbish) byte = static_cast<unsigned char>(random());
    // Often what begins as a message of one small segment.
    if (i % 2 == 0 && rubbish.size() >= 8) {
      const uint32_t head[2] = {0, static_cast<uint32_t>(random() % 20)};
      memcpy(rubbish.data(), head, sizeof head);
    }
    (void)send(socket.get(), rubbish.data(), rubbish.size(), MSG_NOSIGNAL);
  }
  CHECK(IsHeard(bench));
}

TEST_CASE("there are only so many callers at once", "[control]") {
  Bench bench;
  std::vector<UniqueFd> held;
  for (int i = 0; i < 40; ++i) held.push_back(bench.Connect());
  CHECK(AskStatus(bench.Connect(), 5000).error().code == Code::kUnavailable);
  held.clear();
  CHECK(IsHeard(bench));
}
