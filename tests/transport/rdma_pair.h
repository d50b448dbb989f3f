// Connected pairs of the rdma backend over a fake fabric, for the conformance suite and for tests
// that break the fabric under a connection. `near` is the server's end, which starts bulk moves.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tests/transport/fake_verbs/fabric.h"
#include "tests/transport/fake_verbs/host.h"
#include "tests/transport/harness.h"
#include "transport/rdma/rdma.h"

namespace penstock::transport {

struct RdmaPair;

struct RdmaPairOptions {
  rdma::RdmaOptions rdma;
  rdma::fake::FabricOptions fabric;
  uint32_t rails = 1;
  std::function<void(RdmaPair&)> prepare;  // when there are hosts, but no connection
  uint32_t client_reads = 0;  // that the client's devices answer at a time; 0: as the fabric's
  uint32_t server_mtu = 4096, client_mtu = 4096;
  // Each end's own table of verbs around its host's, for tests that look at calls or change them.
  std::function<std::shared_ptr<rdma::Verbs>(std::shared_ptr<rdma::Verbs>)> server_verbs,
      client_verbs;
};

// The server's device r has address 10.99.r.1, the client's 10.99.r.2.
std::string ServerAddress(uint32_t rail);
std::string ClientAddress(uint32_t rail);

struct RdmaPair {
  std::shared_ptr<rdma::fake::Fabric> fabric;
  std::shared_ptr<rdma::fake::Host> server, client;
  std::unique_ptr<Connection> near, far;
};

struct Ends {
  std::unique_ptr<Connection> near, far;
};
// A session from `client` to a listener of `server` at these addresses. `near` is the server's end.
Ends ConnectEnds(std::shared_ptr<rdma::Verbs> server, const rdma::RdmaOptions& server_options,
                 const std::vector<std::string>& addresses, std::shared_ptr<rdma::Verbs> client,
                 const rdma::RdmaOptions& client_options);
RdmaPair MakeRdmaPair(const RdmaPairOptions& options = {});
// Ends both; the fabric must have noted no misuse and no leak.
void CheckClean(RdmaPair& pair);
// For the conformance suite. When the pair goes, the fabric must have noted no misuse and no leak.
Pair MakeRdmaConformancePair(const PairOptions& options, uint32_t rails);
// Over the devices of this machine: rail r of the server is at servers[r].
Pair ConnectRdmaPair(const rdma::RdmaOptions& options, const std::vector<std::string>& servers);

}  // namespace penstock::transport
