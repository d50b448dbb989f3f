#include "tests/perf/raw_peer.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "common/clock.h"
#include "tests/perf/random_bytes.h"

namespace penstock::perf {
namespace {

enum class Order : uint32_t { kReply = 1, kTake = 2, kGive = 3, kReplyAndLook = 4 };
struct Request {
  Order order;
  uint32_t bytes_of_request;  // with this struct
  uint64_t bytes;             // of the reply, or to be moved
};
static_assert(sizeof(Request) == 16);
constexpr uint32_t kMostMessageBytes = 4096;
constexpr int64_t kLookNs = 100'000;
constexpr uint64_t kPiece = 1 << 20;  // of one send or recv

[[noreturn]] void Die(const char* what) {
  perror(what);
  _exit(1);
}

bool SendAll(int fd, const void* data, uint64_t bytes) {
  const char* next = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t sent = send(fd, next, std::min(bytes, kPiece), MSG_NOSIGNAL);
    if (sent <= 0) return false;
    next += sent;
    bytes -= sent;
  }
  return true;
}

bool ReceiveAll(int fd, void* data, uint64_t bytes, bool looking = false) {
  char* next = static_cast<char*>(data);
  const int64_t until = looking ? NowNanoseconds() + kLookNs : 0;
  while (bytes > 0) {
    const bool look = looking && NowNanoseconds() < until;
    const ssize_t received = recv(fd, next, std::min(bytes, kPiece), look ? MSG_DONTWAIT : 0);
    if (received < 0 && look && errno == EAGAIN) continue;
    if (received <= 0) return false;
    next += received;
    bytes -= received;
  }
  return true;
}

void NoDelay(int fd) {
  const int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

void Serve(int fd) {
  std::vector<std::byte> memory;
  char message[kMostMessageBytes] = {};
  Request request;
  bool looking = false;
  while (ReceiveAll(fd, &request, sizeof request, looking)) {
    looking = request.order == Order::kReplyAndLook;
    const uint64_t more = request.bytes_of_request - sizeof request;
    if (more > sizeof message || !ReceiveAll(fd, message, more)) return;
    const bool moves = request.order == Order::kTake || request.order == Order::kGive;
    if (moves && memory.size() < request.bytes) {
      memory.resize(request.bytes);
      FillRandom(memory.data(), memory.size());
    }
    switch (request.order) {
      case Order::kReply:
      case Order::kReplyAndLook:
        if (!SendAll(fd, message, request.bytes)) return;
        break;
      case Order::kTake:
        if (!ReceiveAll(fd, memory.data(), request.bytes) || !SendAll(fd, message, 1)) return;
        break;
      case Order::kGive:
        if (!SendAll(fd, memory.data(), request.bytes)) return;
        break;
    }
  }
}

}  // namespace

RawPeer::RawPeer() {
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  sockaddr* generic = reinterpret_cast<sockaddr*>(&address);
  if (bind(listener, generic, length) != 0 || listen(listener, 1) != 0 ||
      getsockname(listener, generic, &length) != 0) {
    Die("Cannot listen on the loopback address");
  }
  child_ = fork();
  if (child_ < 0) Die("Cannot fork");
  if (child_ == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    const int fd = accept(listener, nullptr, nullptr);
    if (fd < 0) Die("Cannot accept");
    NoDelay(fd);
    Serve(fd);
    _exit(0);
  }
  socket_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (connect(socket_, generic, length) != 0) Die("Cannot connect");
  NoDelay(socket_);
  close(listener);
}

RawPeer::~RawPeer() {
  close(socket_);
  waitpid(child_, nullptr, 0);
}

void RawPeer::PingPong(uint32_t request_bytes, uint32_t reply_bytes, bool looking) {
  char message[kMostMessageBytes] = {};
  const Request request = {looking ? Order::kReplyAndLook : Order::kReply, request_bytes,
                           reply_bytes};
  memcpy(message, &request, sizeof request);
  if (!SendAll(socket_, message, request_bytes) ||
      !ReceiveAll(socket_, message, reply_bytes, looking)) {
    Die("The raw peer is gone");
  }
}

void RawPeer::Send(const std::byte* source, uint64_t bytes) {
  const Request request = {Order::kTake, sizeof request, bytes};
  char done;
  if (!SendAll(socket_, &request, sizeof request) || !SendAll(socket_, source, bytes) ||
      !ReceiveAll(socket_, &done, 1)) {
    Die("The raw peer is gone");
  }
}

void RawPeer::Receive(std::byte* target, uint64_t bytes) {
  const Request request = {Order::kGive, sizeof request, bytes};
  if (!SendAll(socket_, &request, sizeof request) || !ReceiveAll(socket_, target, bytes)) {
    Die("The raw peer is gone");
  }
}

}  // namespace penstock::perf
