// The unix socket between the two ends, and the one fact that all parts of a connection share:
// whether it lives, and why not any more.
//
// Messages are whole (SOCK_SEQPACKET): one byte wakes a receiver, a LinkMessage says something and
// may carry one descriptor. The socket rather than an eventfd wakes, because a peer that shares the
// description of an eventfd can make a write to it block.
#pragma once

#include <atomic>
#include <mutex>
#include <string>

#include "common/clock.h"
#include "common/log.h"
#include "common/result.h"
#include "common/unique_fd.h"
#include "transport/shm/layout.h"
#include "transport/waker.h"

namespace penstock::transport::shm {

class Link {
 public:
  enum class Received { kNone, kWake, kMessage, kEnd, kMalformed };

  explicit Link(UniqueFd socket) : socket_(std::move(socket)) {}

  int fd() const { return socket_.get(); }
  // Wakes the thread of this process that polls the connection.
  Waker& receiver() { return receiver_; }

  // Waits for room until the deadline. The descriptor stays the caller's.
  Status Send(const LinkMessage& message, int descriptor, Deadline deadline);
  // Never waits: a peer with a full socket has something to read.
  void SendWake();
  // What has come, without waiting. A message's magic is right; `descriptor` may be invalid.
  Received Receive(LinkMessage* message, UniqueFd* descriptor);

  bool closed() const { return closed_.load(std::memory_order_acquire); }
  std::string reason() const;
  // The first reason stays. The socket is shut down, and closed with the object.
  void Close(const std::string& reason, LogLevel level);
  void AbandonAfterFork();
  // The socket, for another Link.
  UniqueFd Release() { return std::move(socket_); }

 private:
  UniqueFd socket_;
  Waker receiver_;
  std::atomic<bool> closed_{false};
  mutable std::mutex mutex_;
  std::string reason_;  // under mutex_
};

// Abstract names belong to no file system and vanish with their socket.
Result<UniqueFd> ListenAt(const std::string& name);
Result<UniqueFd> ConnectTo(const std::string& name);
// "user 1000, process 4711" as the kernel says, for log lines.
std::string PeerCredentials(int socket);

}  // namespace penstock::transport::shm
