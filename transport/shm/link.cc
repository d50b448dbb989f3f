#include "transport/shm/link.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <cerrno>
#include <cstddef>
#include <cstring>

namespace penstock::transport::shm {
namespace {

// The address of an abstract name, and its length.
Result<socklen_t> MakeAddress(const std::string& name, sockaddr_un* address) {
  if (name.empty() || name.size() >= sizeof address->sun_path) {
    return Fail(Code::kInvalidArgument, "A socket name has an impossible length.");
  }
  *address = {};
  address->sun_family = AF_UNIX;
  std::memcpy(address->sun_path + 1, name.data(), name.size());
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

}  // namespace

Status Link::Send(const LinkMessage& message, int descriptor, Deadline deadline) {
  iovec part = {const_cast<LinkMessage*>(&message), sizeof message};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr request = {};
  request.msg_iov = &part;
  request.msg_iovlen = 1;
  if (descriptor >= 0) {
    request.msg_control = control;
    request.msg_controllen = CMSG_LEN(sizeof descriptor);
    cmsghdr* const header = CMSG_FIRSTHDR(&request);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof descriptor);
    std::memcpy(CMSG_DATA(header), &descriptor, sizeof descriptor);
  }
  for (;;) {
    if (sendmsg(socket_.get(), &request, MSG_DONTWAIT | MSG_NOSIGNAL) >= 0) return {};
    if (errno == EINTR) continue;
    // ETOOMANYREFS: so many descriptors are under way that the kernel allows no more.
    const bool full = errno == EAGAIN || errno == ETOOMANYREFS;
    if (!full) return FailErrno("Cannot send to the peer");
    if (deadline.expired()) return Fail(Code::kTimeout, "The peer takes no message.");
    pollfd entry = {socket_.get(), POLLOUT, 0};
    poll(&entry, 1, errno == EAGAIN ? deadline.poll_timeout_ms() : 1);
  }
}

void Link::SendWake() {
  const char byte = 1;
  (void)send(socket_.get(), &byte, sizeof byte, MSG_DONTWAIT | MSG_NOSIGNAL);
}

Link::Received Link::Receive(LinkMessage* message, UniqueFd* descriptor) {
  iovec part = {message, sizeof *message};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr request = {};
  ssize_t got;
  do {
    request.msg_iov = &part;
    request.msg_iovlen = 1;
    request.msg_control = control;
    request.msg_controllen = CMSG_LEN(sizeof(int));  // the space of one has room for two
    got = recvmsg(socket_.get(), &request, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    // A peer that closed with something unread resets; what it had sent before can still be read.
  } while (got < 0 && (errno == EINTR || errno == ECONNRESET));
  if (got < 0) return errno == EAGAIN ? Received::kNone : Received::kEnd;
  const cmsghdr* const header = CMSG_FIRSTHDR(&request);
  if (header != nullptr && header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS &&
      header->cmsg_len == CMSG_LEN(sizeof(int))) {
    int fd;
    std::memcpy(&fd, CMSG_DATA(header), sizeof fd);
    descriptor->reset(fd);
  }
  if (got == 0) return Received::kEnd;
  // The kernel has closed the descriptors that the buffer had no room for.
  if ((request.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0) return Received::kMalformed;
  if (got == 1 && !descriptor->valid()) return Received::kWake;
  if (got != sizeof *message || message->magic != LinkMessage::kMagic) {
    return Received::kMalformed;
  }
  return Received::kMessage;
}

std::string Link::reason() const {
  std::lock_guard lock(mutex_);
  return reason_;
}

void Link::Close(const std::string& reason, LogLevel level) {
  {
    std::lock_guard lock(mutex_);
    if (closed_.load(std::memory_order_relaxed)) return;
    reason_ = reason;
    closed_.store(true, std::memory_order_seq_cst);
  }
  PENSTOCK_LOG_AT(level, "transport", "%s", reason.c_str());
  shutdown(socket_.get(), SHUT_RDWR);
  receiver_.Signal();
}

void Link::AbandonAfterFork() {
  socket_.reset();
  receiver_.AbandonAfterFork();
}

Result<UniqueFd> ListenAt(const std::string& name) {
  sockaddr_un address;
  ASSIGN_OR_RETURN(const socklen_t length, MakeAddress(name, &address));
  UniqueFd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket.valid()) return FailErrno("Cannot make a unix socket");
  if (bind(socket.get(), reinterpret_cast<sockaddr*>(&address), length) != 0 ||
      listen(socket.get(), 16) != 0) {
    return FailErrno("Cannot listen on a unix socket");
  }
  return socket;
}

Result<UniqueFd> ConnectTo(const std::string& name) {
  sockaddr_un address;
  ASSIGN_OR_RETURN(const socklen_t length, MakeAddress(name, &address));
  // Not blocking: a backlog that others fill must not hold us.
  UniqueFd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket.valid()) return FailErrno("Cannot make a unix socket");
  if (connect(socket.get(), reinterpret_cast<sockaddr*>(&address), length) != 0) {
    return FailErrno("Cannot connect to the server's unix socket");
  }
  return socket;
}

std::string PeerCredentials(int socket) {
  ucred credentials = {};
  socklen_t bytes = sizeof credentials;
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &bytes) != 0) return "unknown";
  return "user " + std::to_string(credentials.uid) + ", process " + std::to_string(credentials.pid);
}

}  // namespace penstock::transport::shm
