#include "transport/tcp/socket.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>

namespace penstock::transport::tcp {
namespace {

using AddressList = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

Result<AddressList> Lookup(const std::string& host, uint16_t port, int flags) {
  addrinfo hints = {};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags | AI_NUMERICSERV;
  addrinfo* list = nullptr;
  const std::string service = std::to_string(port);
  const int error =
      getaddrinfo(host.empty() ? nullptr : host.c_str(), service.c_str(), &hints, &list);
  if (error != 0) {
    return Fail(Code::kUnavailable,
                "Cannot resolve the host (" + host + "): " + gai_strerror(error) + ".");
  }
  return AddressList(list, &freeaddrinfo);
}

std::string Name(const sockaddr* address, socklen_t length) {
  char host[NI_MAXHOST], service[NI_MAXSERV];
  if (getnameinfo(address, length, host, sizeof host, service, sizeof service,
                  NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
    return "unknown";
  }
  const bool six = address->sa_family == AF_INET6;
  return (six ? "[" : "") + std::string(host) + (six ? "]:" : ":") + service;
}

// Waits for `events`. False when the deadline passes first.
Result<bool> WaitFor(int fd, short events, Deadline deadline) {
  for (;;) {
    pollfd entry = {fd, events, 0};
    const int ready = poll(&entry, 1, deadline.poll_timeout_ms());
    if (ready > 0) return true;
    if (ready == 0) return false;
    if (errno != EINTR) return FailErrno("Cannot wait for a socket");
  }
}

Result<UniqueFd> ConnectTo(const addrinfo& address, Deadline deadline) {
  const std::string name = Name(address.ai_addr, address.ai_addrlen);
  UniqueFd fd(socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.valid()) return FailErrno("Cannot make a socket for (" + name + ")");
  int error = 0;
  if (connect(fd.get(), address.ai_addr, address.ai_addrlen) != 0) {
    if (errno != EINPROGRESS) return FailErrno("Cannot connect to (" + name + ")");
    ASSIGN_OR_RETURN(const bool ready, WaitFor(fd.get(), POLLOUT, deadline));
    if (!ready) return Fail(Code::kTimeout, "The server (" + name + ") does not answer in time.");
    socklen_t size = sizeof error;
    getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &size);
  }
  if (error != 0) {
    errno = error;
    return FailErrno("Cannot connect to (" + name + ")");
  }
  fcntl(fd.get(), F_SETFL, fcntl(fd.get(), F_GETFL) & ~O_NONBLOCK);
  PrepareSocket(fd.get());
  return fd;
}

void Set(int fd, int level, int option, int value) {
  setsockopt(fd, level, option, &value, sizeof value);
}

Result<UniqueFd> ListenOn(const addrinfo& address) {
  const std::string name = Name(address.ai_addr, address.ai_addrlen);
  UniqueFd fd(socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.valid()) return FailErrno("Cannot make a socket for (" + name + ")");
  Set(fd.get(), SOL_SOCKET, SO_REUSEADDR, 1);
  if (address.ai_family == AF_INET6) Set(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, 0);
  if (bind(fd.get(), address.ai_addr, address.ai_addrlen) != 0 || listen(fd.get(), 128) != 0) {
    return FailErrno("Cannot listen on (" + name + ")");
  }
  return fd;
}

uint16_t BoundPort(int fd) {
  sockaddr_storage address = {};
  socklen_t length = sizeof address;
  getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length);
  return ntohs(address.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&address)->sin6_port
                                             : reinterpret_cast<sockaddr_in*>(&address)->sin_port);
}

Status SendAll(int fd, const std::byte* data, size_t bytes, Deadline deadline) {
  while (bytes > 0) {
    const ssize_t sent = send(fd, data, bytes, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent > 0) {
      data += sent;
      bytes -= sent;
    } else if (errno == EAGAIN) {
      ASSIGN_OR_RETURN(const bool ready, WaitFor(fd, POLLOUT, deadline));
      if (!ready) return Fail(Code::kTimeout, "The peer takes no handshake data in time.");
    } else if (errno != EINTR) {
      return FailErrno("Cannot send handshake data");
    }
  }
  return {};
}

Status ReceiveAll(int fd, std::byte* data, size_t bytes, Deadline deadline) {
  while (bytes > 0) {
    // The deadline is checked before each read: a peer that trickles bytes gets no extra time.
    ASSIGN_OR_RETURN(const bool ready, WaitFor(fd, POLLIN, deadline));
    if (!ready || deadline.expired()) {
      return Fail(Code::kTimeout, "The peer sends no complete handshake data in time.");
    }
    const ssize_t got = recv(fd, data, bytes, MSG_DONTWAIT);
    if (got > 0) {
      data += got;
      bytes -= got;
    } else if (got == 0) {
      return Fail(Code::kUnavailable, "The peer closed the connection during the handshake.");
    } else if (errno != EINTR && errno != EAGAIN) {
      return FailErrno("Cannot receive handshake data");
    }
  }
  return {};
}

}  // namespace

void PrepareSocket(int fd, int peer_timeout_ms) {
  // Four probes after a first silence: idle time and four intervals make up the timeout.
  const int step_s = std::max(1, peer_timeout_ms / 5000);
  Set(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  Set(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  Set(fd, IPPROTO_TCP, TCP_KEEPIDLE, step_s);
  Set(fd, IPPROTO_TCP, TCP_KEEPINTVL, step_s);
  Set(fd, IPPROTO_TCP, TCP_KEEPCNT, 4);
}

Result<UniqueFd> Dial(const std::string& host, uint16_t port, Deadline deadline) {
  ASSIGN_OR_RETURN(const AddressList list, Lookup(host, port, 0));
  int left = 0;
  for (const addrinfo* at = list.get(); at != nullptr; at = at->ai_next) ++left;
  Result<UniqueFd> result = Fail(Code::kUnavailable, "The host (" + host + ") has no address.");
  for (const addrinfo* at = list.get(); at != nullptr; at = at->ai_next, --left) {
    // One address that swallows packets must not use up the time of the others.
    const int remaining = deadline.poll_timeout_ms();
    result = ConnectTo(*at, remaining < 0 ? deadline : Deadline::After(remaining / left));
    if (result) break;
  }
  return result;
}

Result<Listener> Listener::Bind(const std::string& host, uint16_t port) {
  ASSIGN_OR_RETURN(const AddressList list, Lookup(host, port, AI_PASSIVE));
  // For every address, IPv6 first: a socket on :: also takes IPv4. For a name such as localhost,
  // IPv4 first: that is what a client most likely dials.
  const int families[] = {host.empty() ? AF_INET6 : AF_INET, host.empty() ? AF_INET : AF_INET6};
  Result<UniqueFd> fd = Fail(Code::kUnavailable, "The host (" + host + ") has no address.");
  for (const int family : families) {
    for (const addrinfo* at = list.get(); at != nullptr; at = at->ai_next) {
      if (at->ai_family != family) continue;
      fd = ListenOn(*at);
      if (fd) {
        const uint16_t bound = BoundPort(fd->get());
        return Listener(std::move(*fd), bound);
      }
    }
  }
  return tl::unexpected<Error>(std::move(fd).error());
}

Result<UniqueFd> Listener::Accept(Deadline deadline) {
  for (;;) {
    UniqueFd fd(accept4(fd_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (fd.valid()) {
      PrepareSocket(fd.get());
      return fd;
    }
    if (errno == EINTR || errno == ECONNABORTED) continue;
    if (errno != EAGAIN) return FailErrno("Cannot accept a connection");
    ASSIGN_OR_RETURN(const bool ready, WaitFor(fd_.get(), POLLIN, deadline));
    if (!ready) return Fail(Code::kTimeout, "Nobody connects in time.");
  }
}

std::string PeerName(int fd) {
  sockaddr_storage address = {};
  socklen_t length = sizeof address;
  if (getpeername(fd, reinterpret_cast<sockaddr*>(&address), &length) != 0) return "unknown";
  return Name(reinterpret_cast<sockaddr*>(&address), length);
}

Status SendBlob(int fd, std::span<const std::byte> blob, size_t max_bytes, Deadline deadline) {
  if (blob.size() > max_bytes || blob.size() > UINT32_MAX) {
    return Fail(Code::kInvalidArgument, "Handshake data (" + std::to_string(blob.size()) +
                                            " bytes) exceed the limit (" +
                                            std::to_string(max_bytes) + ").");
  }
  // One send: with Nagle off, a length of its own would be a packet of its own.
  const uint32_t length = static_cast<uint32_t>(blob.size());
  std::vector<std::byte> message(sizeof length + blob.size());
  std::memcpy(message.data(), &length, sizeof length);
  std::copy(blob.begin(), blob.end(), message.begin() + sizeof length);
  return SendAll(fd, message.data(), message.size(), deadline);
}

Result<std::vector<std::byte>> ReceiveBlob(int fd, size_t max_bytes, Deadline deadline) {
  uint32_t length = 0;
  RETURN_IF_ERROR(ReceiveAll(fd, reinterpret_cast<std::byte*>(&length), sizeof length, deadline));
  if (length > max_bytes) {
    return Fail(Code::kProtocol, "Handshake data (" + std::to_string(length) +
                                     " bytes) exceed the limit (" + std::to_string(max_bytes) +
                                     ").");
  }
  // Memory is taken as the bytes arrive, not as the peer announces them.
  constexpr size_t kStep = 64 << 10;
  std::vector<std::byte> blob;
  while (blob.size() < length) {
    const size_t at = blob.size();
    blob.resize(std::min<size_t>(length, at + kStep));
    RETURN_IF_ERROR(ReceiveAll(fd, blob.data() + at, blob.size() - at, deadline));
  }
  return blob;
}

}  // namespace penstock::transport::tcp
