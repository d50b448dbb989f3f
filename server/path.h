// The worker's half of choosing what carries its session: shared memory, RDMA or tcp.
//
// A worker owns all of its RDMA objects, also the rdma_cm listener. When they are made matters:
//   - after the change of user: the kernel refuses writes to /dev/infiniband/* from a process whose
//     credentials differ from those that opened them;
//   - before the system call filter: librdmacm and libibverbs look for devices and addresses
//     through netlink and inet sockets, which the filter forbids. What comes later (accepting,
//     queue pairs, memory) goes through descriptors that are open by then.
// A session whose client has not asked for RDMA makes none of this.
//
// A unix socket and memory files, all that shared memory needs, are allowed at any time.
#pragma once

#include <memory>
#include <string>

#include "common/result.h"
#include "common/unique_fd.h"
#include "server/session_parameters.h"
#include "transport/rdma/rdma.h"

namespace penstock::server {

struct RdmaPort {
  std::unique_ptr<transport::rdma::Listener> listener;
  std::string why;  // there is none
};
RdmaPort OpenRdmaPort(const SessionParameters& parameters);

// Talks with the client, if it has asked for RDMA or shared memory, and makes the session's
// connection out of its two sockets. An error ends the session.
Result<std::unique_ptr<transport::Connection>> MakeConnection(const SessionParameters& parameters,
                                                              RdmaPort port, UniqueFd control,
                                                              UniqueFd bulk);

}  // namespace penstock::server
