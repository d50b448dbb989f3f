// The client's half of choosing what carries a session: shared memory, RDMA or tcp.
//
// What this host can do is found out before the hello (PrepareRdma), so that a host without RDMA
// says nothing of it and loses no time. After the hello, AgreeOnPath talks with the session's
// worker and dials. Whatever goes wrong up to there ends in tcp and one warning, unless the program
// demands RDMA; then it is the error of the connection.
//
// Shared memory is simpler: whether both are on one machine shows when the client finds the
// worker's unix socket, and where it does not, the session goes on over the sockets that are there.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "common/result.h"
#include "protocol/hello.h"
#include "transport/choice.h"
#include "transport/rdma/verbs.h"
#include "transport/transport.h"

namespace penstock::interposer {

struct PathOptions {
  transport::Choice choice = transport::Choice::kAuto;  // PENSTOCK_TRANSPORT
  // PENSTOCK_RDMA_RAILS: rail r leaves from local_addresses[r]. Empty: the system's routes decide.
  std::vector<std::string> local_addresses;
  int64_t timeout_ms = 5000;        // PENSTOCK_RDMA_TIMEOUT, to make the RDMA connection
  int64_t peer_timeout_ms = 10000;  // PENSTOCK_RDMA_PEER_TIMEOUT, without a way to the server
};
Result<PathOptions> PathOptionsFromEnvironment();

// Null verbs: the session goes over tcp, and if `why` is not empty, a person should know why.
struct LocalRdma {
  std::shared_ptr<transport::rdma::Verbs> verbs;
  std::string devices;  // for messages: "mlx5_0 (192.0.2.7), mlx5_1 (192.0.2.8)"
  std::string why;
};
// `control` is connected to the server. An error if RDMA is demanded and cannot be.
Result<LocalRdma> PrepareRdma(const PathOptions& options, int control);

// True if this side wants to share memory with the server.
bool WantsShm(const PathOptions& options, int control);

struct PathTaken {
  std::unique_ptr<transport::Connection> connection;  // null: tcp, and `why`
  std::string why;
  bool begin_again = false;  // the sockets cannot be used any more
  uint64_t round_trips = 0;
};
// Both sides have kFeatureShm. The socket stays the caller's.
Result<PathTaken> AgreeOnShm(int control, const Welcome& welcome);
// Both sides have kFeatureRdma. The sockets stay the caller's.
Result<PathTaken> AgreeOnPath(const PathOptions& options, const LocalRdma& local, int control,
                              int bulk, const Welcome& welcome);

}  // namespace penstock::interposer
