// The other end of the raw baselines: a child process at a loopback TCP connection, with nothing
// between it and the socket but send and recv.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>

namespace penstock::perf {

class RawPeer {
 public:
  // Forks: make it before there are threads.
  RawPeer();
  ~RawPeer();
  RawPeer(const RawPeer&) = delete;
  RawPeer& operator=(const RawPeer&) = delete;

  // One message of request_bytes there, one of reply_bytes back. Both at least 16.
  // `looking`: both ends look at their socket for a while before they sleep on it.
  void PingPong(uint32_t request_bytes, uint32_t reply_bytes, bool looking);
  // Moves the bytes there (ends when the peer says that it has them all), or from there.
  void Send(const std::byte* source, uint64_t bytes);
  void Receive(std::byte* target, uint64_t bytes);

 private:
  int socket_ = -1;
  pid_t child_ = -1;
};

}  // namespace penstock::perf
