// The tcp backend. Dialling and the handshake are in tcp/socket.h; this makes a Connection out of
// two connected sockets.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "common/unique_fd.h"
#include "transport/tcp/socket.h"
#include "transport/transport.h"

namespace penstock::transport::tcp {

struct TcpOptions {
  size_t ring_bytes = 1 << 20;       // committed frames that wait for the socket
  uint32_t max_frame = 64 << 10;     // both ends must agree (the hello says it)
  size_t receive_bytes = 256 << 10;  // at least four frames of the largest size
  // A bulk move is cut into chunks, of which a window is under way at any time. The chunk bounds
  // how long a small move waits behind a large one; the window must cover the line's delay.
  uint64_t bulk_chunk = 1 << 20;  // at most kMaxBulkChunk
  uint64_t bulk_window = 16 << 20;
  // A host that acknowledges nothing for this long is dead. A peer that merely does not read (it
  // computes, or stands in a debugger) is not.
  int peer_timeout_ms = kDefaultPeerTimeoutMs;
};

// Both sockets must be connected to the same peer, and nothing of the handshake may be unread.
// Always returns a connection; one that could not be set up is closed from the start.
std::unique_ptr<Connection> Adopt(UniqueFd control, UniqueFd bulk, const TcpOptions& options);

// For the child of a fork: closes the child's copies of the descriptors, so that the parent alone
// decides when the connection ends. Takes no lock and joins no thread (they exist only in the
// parent), so it may be called from a pthread_atfork handler. The object must not be used or
// destroyed afterwards: it leaks in the child, deliberately. `connection` must come from Adopt.
void AbandonAfterFork(Connection& connection);

}  // namespace penstock::transport::tcp
