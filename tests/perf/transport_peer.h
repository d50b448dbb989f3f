// The other end of the transport baselines: a child process that plays the server of a tcp or shm
// Connection and pulls from, or pushes to, this process's registered memory. No frames but those
// that start and end a move, no CUDA.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "transport/transport.h"

namespace penstock::perf {

class TransportPeer {
 public:
  // Forks: make it before there are threads. `bytes`: of the largest move.
  TransportPeer(uint64_t bytes, bool through_memory);
  ~TransportPeer();
  TransportPeer(const TransportPeer&) = delete;
  TransportPeer& operator=(const TransportPeer&) = delete;

  // Starts the connection's threads: call when all peers have been made.
  void Connect(std::byte* memory, uint64_t bytes);
  void Pull(uint64_t bytes);  // the peer gets memory[0, bytes)
  void Push(uint64_t bytes);  // the peer puts it

 private:
  void Move(uint64_t bytes, uint64_t pull);

  int sockets_[2] = {-1, -1};  // of tcp
  std::string name_;           // of shm's socket
  pid_t child_ = -1;
  std::unique_ptr<transport::Connection> connection_;
  std::unique_ptr<transport::MemoryRegion> region_;
};

}  // namespace penstock::perf
