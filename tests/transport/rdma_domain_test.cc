// Devices, rails and registered memory of one session, over the fake fabric's devices.
#include "transport/rdma/domain.h"

#include <sys/resource.h>

#include <catch2/catch.hpp>
#include <cstring>
#include <set>
#include <thread>

#include "tests/transport/fake_verbs/fabric.h"
#include "tests/transport/fake_verbs/host.h"
#include "transport/rdma/region.h"

namespace penstock::transport::rdma {
namespace {

using fake::Call;

// Two devices of one host, opened.
struct Bench {
  Bench() : host(fabric.AddHost({{"one", "10.99.0.1"}, {"two", "10.99.0.2"}})) {
    int count = 0;
    ibv_device** list = host->GetDeviceList(&count);
    REQUIRE(count == 2);
    for (int i = 0; i < 2; ++i) contexts[i] = host->OpenDevice(list[i]);
    host->FreeDeviceList(list);
  }
  ~Bench() {
    for (const std::string& violation : fabric.violations()) FAIL_CHECK(violation);
    for (const std::string& object : fabric.objects()) FAIL_CHECK("Leaked: " << object);
    for (ibv_context* context : contexts) host->CloseDevice(context);
  }
  std::shared_ptr<Domain> Make(bool peer_access) {
    return std::make_shared<Domain>(host, peer_access);
  }
  fake::Fabric fabric{fake::FabricOptions::Calm()};
  std::shared_ptr<fake::Host> host;
  ibv_context* contexts[2];
};

RdmaKeyBlob BlobOf(const MemoryRegion& region) {
  RdmaKeyBlob blob;
  REQUIRE(region.key().bytes == sizeof blob);
  std::memcpy(&blob, region.key().blob.data(), sizeof blob);
  return blob;
}

alignas(4096) std::byte memory[1 << 16];

}  // namespace

TEST_CASE("a key names the rails that have a device, and what the peer may do", "[rdma][domain]") {
  Bench bench;
  auto domain = bench.Make(true);
  auto one = domain->Use(bench.contexts[0]), two = domain->Use(bench.contexts[1]);
  REQUIRE((one && two));
  CHECK(*domain->Use(bench.contexts[0]) == *one);
  CHECK((*one)->name == "one");
  domain->AssignRail(0, *one);
  domain->AssignRail(2, *two);
  domain->AssignRail(kMaxRails, *two);  // no such rail
  auto region = domain->Register(memory, sizeof memory, Access::kPeerReads);
  REQUIRE(region);
  CHECK((*region)->address() == memory);
  CHECK((*region)->size() == sizeof memory);
  CHECK(domain->registered_bytes() == sizeof memory);
  const RdmaKeyBlob blob = BlobOf(**region);
  CHECK(blob.kind == kRdmaKeyKind);
  CHECK(blob.rails == 0b101);
  CHECK(blob.access == static_cast<uint8_t>(Access::kPeerReads));
  CHECK(blob.address == reinterpret_cast<uintptr_t>(memory));
  CHECK(blob.bytes == sizeof memory);
  CHECK(blob.rkey[0] != blob.rkey[2]);
  CHECK(blob.rkey[1] == 0);
  const RdmaRegion* own = domain->Own(**region);
  REQUIRE(own != nullptr);
  uint32_t lkeys[kMaxRails];
  for (uint32_t rail = 0; rail < kMaxRails; ++rail) {
    CHECK(own->LocalKey(rail, &lkeys[rail]) == (rail == 0 || rail == 2));
  }
  CHECK(lkeys[0] != lkeys[2]);
  region->reset();
  CHECK(domain->registered_bytes() == 0);
}

TEST_CASE("memory follows rails to devices that come later", "[rdma][domain]") {
  Bench bench;
  auto domain = bench.Make(true);
  auto one = domain->Use(bench.contexts[0]);
  REQUIRE(one);
  domain->AssignRail(0, *one);
  auto region = domain->Register(memory, sizeof memory, Access::kPeerReadsAndWrites);
  REQUIRE(region);
  const MemoryKey& before = (*region)->key();
  const RdmaKeyBlob first = BlobOf(**region);
  CHECK(first.rails == 0b1);
  auto two = domain->Use(bench.contexts[1]);
  REQUIRE(two);
  CHECK(BlobOf(**region).rails == 0b1);
  domain->AssignRail(1, *two);
  const RdmaKeyBlob second = BlobOf(**region);
  CHECK(second.rails == 0b11);
  CHECK(second.rkey[0] == first.rkey[0]);
  CHECK(second.rkey[1] != first.rkey[0]);
  // A rail that moves to another device takes that one's key.
  domain->AssignRail(0, *two);
  CHECK(BlobOf(**region).rkey[0] == second.rkey[1]);
  // Whoever holds the older text may still read it.
  RdmaKeyBlob held;
  std::memcpy(&held, before.blob.data(), sizeof held);
  CHECK(held.rails == 0b1);
  CHECK(held.rkey[0] == first.rkey[0]);
}

TEST_CASE("a device that cannot register memory later leaves it out", "[rdma][domain]") {
  Bench bench;
  auto domain = bench.Make(true);
  domain->AssignRail(0, domain->Use(bench.contexts[0]).value());
  auto region = domain->Register(memory, sizeof memory, Access::kPeerWrites);
  REQUIRE(region);
  bench.fabric.FailCall(*bench.host, Call::kRegMr, 1, ENOMEM);
  auto two = domain->Use(bench.contexts[1]);
  REQUIRE(two);
  domain->AssignRail(1, *two);
  CHECK(BlobOf(**region).rails == 0b1);
  uint32_t lkey;
  CHECK(domain->Own(**region)->LocalKey(0, &lkey));
  CHECK_FALSE(domain->Own(**region)->LocalKey(1, &lkey));
  // The next region is on both.
  auto other = domain->Register(memory, 4096, Access::kPeerWrites);
  REQUIRE(other);
  CHECK(BlobOf(**other).rails == 0b11);
}

TEST_CASE("a server's memory is reachable for nobody", "[rdma][domain]") {
  Bench bench;
  auto server = bench.Make(false), other = bench.Make(false);
  server->AssignRail(0, server->Use(bench.contexts[0]).value());
  auto region = server->Register(memory, sizeof memory, Access::kPeerReadsAndWrites);
  REQUIRE(region);
  const RdmaKeyBlob blob = BlobOf(**region);
  CHECK(blob.rails == 0);
  for (const uint32_t rkey : blob.rkey) CHECK(rkey == 0);
  uint32_t lkey;
  CHECK(server->Own(**region)->LocalKey(0, &lkey));
  CHECK(other->Own(**region) == nullptr);
}

TEST_CASE("impossible registrations are refused", "[rdma][domain]") {
  Bench bench;
  auto domain = bench.Make(true);
  REQUIRE(domain->Use(bench.contexts[0]));
  const auto code = [&](void* address, size_t bytes, Access access) {
    auto region = domain->Register(address, bytes, access);
    REQUIRE_FALSE(region);
    return region.error().code;
  };
  CHECK(code(nullptr, 4096, Access::kPeerReads) == Code::kInvalidArgument);
  CHECK(code(memory, 0, Access::kPeerReads) == Code::kInvalidArgument);
  CHECK(code(memory, SIZE_MAX, Access::kPeerReads) == Code::kInvalidArgument);
  CHECK(code(memory, 4096, static_cast<Access>(0)) == Code::kInvalidArgument);
  CHECK(code(memory, 4096, static_cast<Access>(4)) == Code::kInvalidArgument);
  auto device_memory = domain->RegisterDevice(1 << 20, 4096, 0, 0);
  REQUIRE_FALSE(device_memory);
  CHECK(device_memory.error().code == Code::kUnsupported);
  CHECK(domain->registered_bytes() == 0);
}

TEST_CASE("a registration that fails says why and leaves nothing", "[rdma][domain]") {
  Bench bench;
  auto domain = bench.Make(true);
  REQUIRE(domain->Use(bench.contexts[0]));
  REQUIRE(domain->Use(bench.contexts[1]));
  rlimit before, limit;
  REQUIRE(getrlimit(RLIMIT_MEMLOCK, &before) == 0);
  limit = before;
  limit.rlim_cur = 64 << 10;
  REQUIRE(setrlimit(RLIMIT_MEMLOCK, &limit) == 0);
  // On the second device, when the first one has it already.
  bench.fabric.FailCall(*bench.host, Call::kRegMr, 2, ENOMEM);
  auto region = domain->Register(memory, sizeof memory, Access::kPeerReads);
  setrlimit(RLIMIT_MEMLOCK, &before);
  REQUIRE_FALSE(region);
  CHECK(region.error().code == Code::kResourceExhausted);
  CHECK_THAT(region.error().message, Catch::Contains("65536 bytes") &&
                                         Catch::Contains("RLIMIT_MEMLOCK is 64 KiB") &&
                                         Catch::Contains("ulimit -l"));
  bench.fabric.FailCall(*bench.host, Call::kRegMr, 1, EFAULT);
  region = domain->Register(memory, sizeof memory, Access::kPeerReads);
  REQUIRE_FALSE(region);
  CHECK(region.error().code == Code::kInvalidArgument);
  CHECK_THAT(region.error().message, Catch::Contains("not mapped"));
  CHECK(domain->registered_bytes() == 0);
}

TEST_CASE("a region may outlive whoever made its domain", "[rdma][domain]") {
  Bench bench;
  auto domain = bench.Make(true);
  domain->AssignRail(0, domain->Use(bench.contexts[0]).value());
  auto region = domain->Register(memory, 4096, Access::kPeerReads);
  REQUIRE(region);
  domain.reset();
  CHECK(BlobOf(**region).rails == 0b1);
  region->reset();
}

TEST_CASE("memory that is registered while devices come is on all of them", "[rdma][domain]") {
  for (int round = 0; round < 20; ++round) {
    Bench bench;
    auto domain = bench.Make(true);
    std::vector<std::unique_ptr<MemoryRegion>> regions;
    bool fine = true;
    std::thread registering([&] {
      for (int i = 0; i < 20; ++i) {
        auto region = domain->Register(memory + i * 64, 64, Access::kPeerReads);
        fine = fine && region.has_value();
        if (region) regions.push_back(std::move(*region));
      }
    });
    for (uint32_t i = 0; i < 2; ++i) domain->AssignRail(i, domain->Use(bench.contexts[i]).value());
    registering.join();
    CHECK(fine);
    std::set<uint32_t> rkeys;
    for (const auto& region : regions) {
      const RdmaKeyBlob blob = BlobOf(*region);
      CHECK(blob.rails == 0b11);
      rkeys.insert({blob.rkey[0], blob.rkey[1]});
    }
    CHECK(rkeys.size() == 2 * regions.size());
  }
}

}  // namespace penstock::transport::rdma
