#include "tests/perf/shared_peer.h"

#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstring>

#include "common/clock.h"

namespace penstock::perf {
namespace {

constexpr uint32_t kMostMessageBytes = 4096;
constexpr int64_t kLookUs = 80;

struct Direction {
  alignas(64) std::atomic<uint32_t> sent;
  alignas(64) std::atomic<uint32_t> sleeping;
  uint32_t bytes, wanted_reply;
  char message[kMostMessageBytes];
};

[[noreturn]] void Die(const char* what) {
  perror(what);
  _exit(1);
}

void Say(Direction& to, int socket, const void* message, uint32_t bytes, uint32_t wanted_reply) {
  memcpy(to.message, message, bytes);
  to.bytes = bytes;
  to.wanted_reply = wanted_reply;
  to.sent.fetch_add(1, std::memory_order_seq_cst);
  if (to.sleeping.load(std::memory_order_seq_cst) != 0 && to.sleeping.exchange(0) != 0) {
    const char byte = 1;
    (void)!send(socket, &byte, 1, MSG_DONTWAIT | MSG_NOSIGNAL);
  }
}

// False if the other end is gone.
bool Await(Direction& from, int socket, uint32_t number) {
  for (;;) {
    const Deadline until = Deadline::AfterMicroseconds(kLookUs);
    do {
      if (from.sent.load(std::memory_order_acquire) == number) return true;
      sched_yield();
    } while (!until.expired());
    from.sleeping.store(1, std::memory_order_seq_cst);
    if (from.sent.load(std::memory_order_seq_cst) == number) return true;
    pollfd entry = {socket, POLLIN, 0};
    if (poll(&entry, 1, -1) < 0) return false;
    char bytes[16];
    if (recv(socket, bytes, sizeof bytes, MSG_DONTWAIT) == 0) return false;
  }
}

}  // namespace

struct SharedPeer::Page {
  Direction there, back;
};

SharedPeer::SharedPeer() {
  void* const memory =
      mmap(nullptr, sizeof(Page), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  int pair[2];
  if (memory == MAP_FAILED || socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) != 0) {
    Die("Cannot make the shared peer");
  }
  page_ = static_cast<Page*>(memory);
  child_ = fork();
  if (child_ < 0) Die("Cannot fork");
  if (child_ == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    close(pair[0]);
    char message[kMostMessageBytes];
    for (uint32_t number = 1; Await(page_->there, pair[1], number); ++number) {
      memcpy(message, page_->there.message, page_->there.bytes);
      Say(page_->back, pair[1], message, page_->there.wanted_reply, 0);
    }
    _exit(0);
  }
  close(pair[1]);
  socket_ = pair[0];
}

SharedPeer::~SharedPeer() {
  close(socket_);
  waitpid(child_, nullptr, 0);
  munmap(page_, sizeof(Page));
}

void SharedPeer::PingPong(uint32_t request_bytes, uint32_t reply_bytes) {
  char message[kMostMessageBytes] = {};
  const uint32_t number = page_->back.sent.load(std::memory_order_relaxed) + 1;
  Say(page_->there, socket_, message, request_bytes, reply_bytes);
  if (!Await(page_->back, socket_, number)) Die("The shared peer is gone");
  memcpy(message, page_->back.message, page_->back.bytes);
}

}  // namespace penstock::perf
