// TCP sockets up to the point where a Connection takes over: dialling, listening, and
// length-prefixed blobs for the handshake. Everything has a deadline, so a silent or slow peer
// costs a bounded time; only the name lookup in Dial is as slow as the resolver is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "common/clock.h"
#include "common/result.h"
#include "common/unique_fd.h"

namespace penstock::transport::tcp {

constexpr int kDefaultPeerTimeoutMs = 10'000;

// Connects to the first address of `host` (a name, IPv4 or IPv6 address) that answers. The socket
// blocks, is close-on-exec and prepared by PrepareSocket.
Result<UniqueFd> Dial(const std::string& host, uint16_t port, Deadline deadline);

// No Nagle, and keepalive such that an idle connection to a dead host ends after peer_timeout_ms.
// (Unsent or unacknowledged bytes are watched by the Connection: see bulk.cc.) Options that the
// socket's family lacks are passed over.
void PrepareSocket(int fd, int peer_timeout_ms = kDefaultPeerTimeoutMs);

class Listener {
 public:
  // Host "" is every address, IPv4 and IPv6. Port 0 picks a free one.
  static Result<Listener> Bind(const std::string& host, uint16_t port);

  uint16_t port() const { return port_; }
  int fd() const { return fd_.get(); }  // readable when Accept will not wait
  Result<UniqueFd> Accept(Deadline deadline);

 private:
  Listener(UniqueFd fd, uint16_t port) : fd_(std::move(fd)), port_(port) {}
  UniqueFd fd_;
  uint16_t port_;
};

// "192.0.2.1:4711" or "[2001:db8::1]:4711"; "unknown" for a socket without such a name.
std::string PeerName(int fd);

// A u32 little-endian length, then the bytes. ReceiveBlob reads not one byte beyond the blob.
Status SendBlob(int fd, std::span<const std::byte> blob, size_t max_bytes, Deadline deadline);
Result<std::vector<std::byte>> ReceiveBlob(int fd, size_t max_bytes, Deadline deadline);

}  // namespace penstock::transport::tcp
