#include "tests/transport/rdma_pair.h"

#include <thread>

namespace penstock::transport {

std::string ServerAddress(uint32_t rail) {
  return "10.99." + std::to_string(rail) + ".1";
}
std::string ClientAddress(uint32_t rail) {
  return "10.99." + std::to_string(rail) + ".2";
}

Ends ConnectEnds(std::shared_ptr<rdma::Verbs> server, const rdma::RdmaOptions& server_options,
                 const std::vector<std::string>& addresses, std::shared_ptr<rdma::Verbs> client,
                 const rdma::RdmaOptions& client_options) {
  auto listener = rdma::Listener::Open(std::move(server), server_options, addresses);
  if (!listener) FAIL(listener.error().message);
  const rdma::Token token{1, 2, 3};
  Result<std::unique_ptr<Connection>> far = Fail(Code::kInternal, "Not dialled.");
  std::thread dialler([&, offer = (*listener)->offer()] {
    far = rdma::Dial(std::move(client), client_options, offer, token, UniqueFd(),
                     Deadline::After(20'000));
  });
  auto near = (*listener)->Accept(token, UniqueFd(), Deadline::After(20'000));
  dialler.join();
  if (!near) FAIL(near.error().message);
  if (!far) FAIL(far.error().message);
  return {std::move(*near), std::move(*far)};
}

RdmaPair MakeRdmaPair(const RdmaPairOptions& options) {
  RdmaPair pair;
  pair.fabric = std::make_shared<rdma::fake::Fabric>(options.fabric);
  std::vector<rdma::fake::DeviceSpec> server_devices, client_devices;
  std::vector<std::string> server_addresses;
  rdma::RdmaOptions client_options = options.rdma;
  for (uint32_t r = 0; r < options.rails; ++r) {
    server_devices.push_back(
        {"server" + std::to_string(r), ServerAddress(r), 0, options.server_mtu});
    client_devices.push_back(
        {"client" + std::to_string(r), ClientAddress(r), options.client_reads, options.client_mtu});
    server_addresses.push_back(ServerAddress(r));
    client_options.local_addresses.push_back(ClientAddress(r));
  }
  pair.server = pair.fabric->AddHost(server_devices);
  pair.client = pair.fabric->AddHost(client_devices);
  if (options.prepare) options.prepare(pair);
  std::shared_ptr<rdma::Verbs> server_verbs = pair.server, client_verbs = pair.client;
  if (options.server_verbs) server_verbs = options.server_verbs(server_verbs);
  if (options.client_verbs) client_verbs = options.client_verbs(client_verbs);
  Ends ends =
      ConnectEnds(server_verbs, options.rdma, server_addresses, client_verbs, client_options);
  pair.near = std::move(ends.near);
  pair.far = std::move(ends.far);
  return pair;
}

void CheckClean(RdmaPair& pair) {
  pair.near.reset();
  pair.far.reset();
  for (const std::string& violation : pair.fabric->violations()) FAIL_CHECK(violation);
  for (const std::string& object : pair.fabric->objects()) FAIL_CHECK("Leaked: " << object);
}

Pair ConnectRdmaPair(const rdma::RdmaOptions& options, const std::vector<std::string>& servers) {
  auto verbs = rdma::LoadVerbs();
  if (!verbs) FAIL(verbs.error().message);
  Ends ends = ConnectEnds(*verbs, options, servers, *verbs, options);
  return {nullptr, std::move(ends.near), std::move(ends.far)};
}

Pair MakeRdmaConformancePair(const PairOptions& options, uint32_t rails) {
  RdmaPairOptions rdma;
  rdma.rails = rails;
  rdma.rdma.ring_bytes = options.ring_bytes;
  rdma.rdma.max_frame = options.max_frame;
  rdma.rdma.bulk_chunk = std::min(options.bulk_chunk, rdma.rdma.bulk_chunk);
  RdmaPair made = MakeRdmaPair(rdma);
  Pair pair;
  pair.near = std::move(made.near);
  pair.far = std::move(made.far);
  pair.world = std::shared_ptr<void>(nullptr, [fabric = made.fabric](void*) {
    for (const std::string& violation : fabric->violations()) FAIL_CHECK(violation);
    for (const std::string& object : fabric->objects()) FAIL_CHECK("Leaked: " << object);
  });
  return pair;
}

}  // namespace penstock::transport
