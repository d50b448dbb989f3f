// The rdma backend: control by SEND/RECV, bulk by READ and WRITE that the server starts.
//
// The client and the server have spoken over tcp before (the hello). The server's worker opens a
// Listener and tells the client its port and addresses; the client dials. The tcp control socket
// goes into the connection as its lifeline: nothing is sent on it any more, but its end (FIN, RST)
// says at once that the peer process is gone, which a fabric does not always tell.
//
// Parts: Domain (devices, protection domain, memory regions), QueuePair (one connected queue pair
// with its two completion queues and its ledger), ControlChannel (packets, credits, replay),
// BulkEngine (rails, chunks, failover), RdmaConnection (puts them together; its keeper thread
// handles everything that no caller waits for).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "common/clock.h"
#include "common/result.h"
#include "common/unique_fd.h"
#include "transport/rdma/verbs.h"
#include "transport/rdma/wire.h"
#include "transport/transport.h"

namespace penstock::transport::rdma {

struct RdmaOptions {
  size_t ring_bytes = 1 << 20;      // committed frames that are not acknowledged yet
  uint32_t max_frame = 64 << 10;    // both ends must agree
  uint32_t slot_bytes = 4096;       // of one packet, header included; both ends must agree
  uint32_t slots = 128;             // receive slots of the control queue pair
  uint32_t send_depth = 128;        // work requests of the control send queue
  uint32_t inline_bytes = 220;      // asked for; what the device grants is used
  uint32_t packets_at_once = 4;     // in flight before frames are gathered into fuller packets
  uint64_t bulk_chunk = 512 << 10;  // at most 1 MiB: larger READs collapse on soft-RoCE
  uint32_t bulk_depth = 8;          // chunks under way per rail
  // A packet unacknowledged by the peer's NIC is repeated `retry_count` times, 4.096 us * 2^timeout
  // apart: about 0.9 s with 14 and 6 on soft-RoCE. Never 7: it means for ever on some devices.
  uint8_t timeout = 14;
  uint8_t retry_count = 6;
  int keepalive_ms = 1000;       // a 0-byte WRITE when nothing else is under way
  int peer_timeout_ms = 10'000;  // without any usable control queue pair the connection ends
  int spin_us = -1;              // of Wait; -1: 20 us, none where there are fewer than 4 cores
  uint8_t control_traffic_class = 0, bulk_traffic_class = 0;  // RoCE: TOS; 0: the system's
  // Rail r goes from local_addresses[r] (empty: the system chooses) to the server's address r.
  std::vector<std::string> local_addresses;
  uint32_t most_rails = kMaxRails;
};

// The RDMA devices of this machine that have an address, for offers, messages and `penstock-perf`.
struct LocalRail {
  std::string device;   // "mlx5_0", "rxe0"
  std::string address;  // IPv4 or IPv6, textual
};
Result<std::vector<LocalRail>> FindLocalRails(Verbs& verbs);

// What the server tells the client over tcp.
struct Offer {
  uint16_t port = 0;
  std::vector<std::string> addresses;  // one per rail, at most kMaxRails
};

class Listener {
 public:
  virtual ~Listener() = default;
  // Listens on every address of `addresses`, or of every RDMA device when it is empty, at one port.
  static Result<std::unique_ptr<Listener>> Open(std::shared_ptr<Verbs> verbs,
                                                const RdmaOptions& options,
                                                const std::vector<std::string>& addresses);
  virtual const Offer& offer() const = 0;
  // Waits for the client that knows the token: its control queue pair and each rail that it can
  // connect. The connection takes the listener's place (later queue pairs of the session come
  // through it), so this works once. `lifeline` may be empty.
  virtual Result<std::unique_ptr<Connection>> Accept(const Token& token, UniqueFd lifeline,
                                                     Deadline deadline) = 0;
};

Result<std::unique_ptr<Connection>> Dial(std::shared_ptr<Verbs> verbs, const RdmaOptions& options,
                                         const Offer& offer, const Token& token, UniqueFd lifeline,
                                         Deadline deadline);

// As tcp::AbandonAfterFork: closes this process's copies of the descriptors (uverbs, rdma_cm,
// channels, lifeline) so that the parent's death is seen. No lock, no free.
void AbandonAfterFork(Connection& connection);

}  // namespace penstock::transport::rdma
