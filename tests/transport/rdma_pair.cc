#include "tests/transport/rdma_pair.h"

#include <thread>

namespace penstock::transport {

std::string ServerAddress(uint32_t rail) {
  return "10.99." + std::to_string(rail) + ".1";
}
std::string ClientAddress(uint32_t rail) {
  return "10.99." + std::to_string(rail) + ".2";
}

RdmaPair MakeRdmaPair(const RdmaPairOptions& options) {
  RdmaPair pair;
  pair.fabric = std::make_shared<rdma::fake::Fabric>(options.fabric);
  std::vector<rdma::fake::DeviceSpec> server_devices, client_devices;
  std::vector<std::string> server_addresses;
  rdma::RdmaOptions client_options = options.rdma;
  for (uint32_t r = 0; r < options.rails; ++r) {
    server_devices.push_back({"server" + std::to_string(r), ServerAddress(r)});
    client_devices.push_back(
        {"client" + std::to_string(r), ClientAddress(r), options.client_reads});
    server_addresses.push_back(ServerAddress(r));
    client_options.local_addresses.push_back(ClientAddress(r));
  }
  pair.server = pair.fabric->AddHost(server_devices);
  pair.client = pair.fabric->AddHost(client_devices);
  auto listener = rdma::Listener::Open(pair.server, options.rdma, server_addresses);
  if (!listener) FAIL(listener.error().message);
  rdma::Token token{};
  token[3] = 7;
  Result<std::unique_ptr<Connection>> far = Fail(Code::kInternal, "Not dialled.");
  std::thread dialler([&, offer = (*listener)->offer()] {
    far =
        rdma::Dial(pair.client, client_options, offer, token, UniqueFd(), Deadline::After(10'000));
  });
  auto near = (*listener)->Accept(token, UniqueFd(), Deadline::After(10'000));
  dialler.join();
  if (!near) FAIL(near.error().message);
  if (!far) FAIL(far.error().message);
  pair.near = std::move(*near);
  pair.far = std::move(*far);
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
  auto listener = rdma::Listener::Open(*verbs, options, servers);
  if (!listener) FAIL(listener.error().message);
  const rdma::Token token{1, 2, 3};
  Result<std::unique_ptr<Connection>> far = Fail(Code::kInternal, "Not dialled.");
  std::thread dialler([&, offer = (*listener)->offer()] {
    far = rdma::Dial(*verbs, options, offer, token, UniqueFd(), Deadline::After(20'000));
  });
  auto near = (*listener)->Accept(token, UniqueFd(), Deadline::After(20'000));
  dialler.join();
  if (!near) FAIL(near.error().message);
  if (!far) FAIL(far.error().message);
  return {nullptr, std::move(*near), std::move(*far)};
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
