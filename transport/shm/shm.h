// The shm backend, for two processes of one machine: frames go through rings in shared memory, and
// memory that the client makes for copies (Connection::Allocate) is mapped by the server as well,
// which then copies between it and the device without anything in between.
//
// The client and the server have spoken over tcp before (the hello). The server's worker opens a
// Listener, a unix socket with a random abstract name, and tells the client the name; the client
// dials and shows the session's token. The socket stays for as long as the connection lives. It
// carries descriptors, one-byte messages that wake a sleeping receiver, and by its end the news
// that the other process is gone.
//
// Neither side trusts the shared memory: what the peer can write is copied before it is checked,
// and used from the copy. The memory files are sealed against shrinking, so that no mapping can
// turn into a SIGBUS.
//
// Parts: layout.h (what lies where), SharedMemory (sealed memory files), Link (the socket), rings
// (frames), BulkMover and BulkServant (the server's and the client's half of copies from and to
// memory that is not shared), Shares (what the client has shared), ShmConnection.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "common/clock.h"
#include "common/result.h"
#include "transport/transport.h"

namespace penstock::transport::shm {

struct ShmOptions {
  size_t ring_bytes = 1 << 20;    // of each direction; the server's counts
  uint32_t max_frame = 64 << 10;  // both ends must agree (the hello says it)
  // Memory that is not shared is copied through slots of this size; the server's number counts.
  uint32_t slot_bytes = 256 << 10;
};

// Shown by the client; the same on both sides and known to nobody else.
using Token = std::array<uint8_t, 16>;

class Listener {
 public:
  virtual ~Listener() = default;
  static Result<std::unique_ptr<Listener>> Open(const ShmOptions& options);
  // Of the socket, without the leading NUL; plain characters.
  virtual const std::string& name() const = 0;
  // Waits for the client that shows the token. Others are hung up on. Gives up when `other` (a
  // descriptor, or -1) becomes readable first: the client says there that it does not come.
  virtual Result<std::unique_ptr<Connection>> Accept(const Token& token, Deadline deadline,
                                                     int other = -1) = 0;
};

Result<std::unique_ptr<Connection>> Dial(const ShmOptions& options, const std::string& name,
                                         const Token& token, Deadline deadline);

// As tcp::AbandonAfterFork. Memory from Allocate stays shared with the child, as pinned memory
// does.
void AbandonAfterFork(Connection& connection);

}  // namespace penstock::transport::shm
