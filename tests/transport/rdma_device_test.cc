// Bulk moves straight to and from device memory, which here is a memory file: the provider reaches
// it through a mapping of its own, so only the dma-buf, the offset and the registration decide
// where bytes go. The test's own mapping stands for the GPU.
#include <sys/mman.h>

#include <catch2/catch.hpp>
#include <cstdlib>

#include "common/unique_fd.h"
#include "tests/transport/rdma_pair.h"

using namespace penstock;
using namespace penstock::transport;
using rdma::fake::DeviceMemory;

namespace {

constexpr size_t kPage = 4096;
constexpr uint64_t kDeviceBase = 0x7a0000200000;  // mapped by nobody

struct Gpu {
  explicit Gpu(size_t size) : bytes(size), file(memfd_create("gpu", MFD_CLOEXEC)) {
    REQUIRE(ftruncate(file.get(), static_cast<off_t>(size)) == 0);
    void* mapped = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
    REQUIRE(mapped != MAP_FAILED);
    memory = static_cast<std::byte*>(mapped);
  }
  ~Gpu() { munmap(memory, bytes); }
  std::vector<std::byte> Copy(size_t offset, size_t size) const {
    return {memory + offset, memory + offset + size};
  }
  const size_t bytes;
  UniqueFd file;
  std::byte* memory = nullptr;
};

RdmaPair MakePair(DeviceMemory kind, uint32_t rails = 1) {
  RdmaPairOptions options;
  options.rails = rails;
  options.fabric.device_memory = kind;
  return MakeRdmaPair(options);
}

struct Remote {
  explicit Remote(RdmaPair& pair, size_t bytes, uint64_t seed) : memory(Noise(bytes, seed)) {
    auto made = pair.far->Register(memory.data(), memory.size(), Access::kPeerReadsAndWrites);
    REQUIRE(made);
    region = std::move(*made);
  }
  std::vector<std::byte> memory;
  std::unique_ptr<MemoryRegion> region;
};

BulkStatus Await(RdmaPair& pair, uint64_t cookie) {
  Collector collector;
  ReceiveUntil(*pair.near, collector, [&] { return !collector.done.empty(); });
  REQUIRE(collector.done[0].cookie == cookie);
  return collector.done[0].status;
}

}  // namespace

TEST_CASE("moves reach exactly the named part of device memory", "[rdma][device]") {
  for (const uint32_t rails : {1u, 2u}) {
    RdmaPair pair = MakePair(DeviceMemory::kWorks, rails);
    Gpu gpu(4 << 20);
    std::memset(gpu.memory, 0x11, gpu.bytes);
    // The registered part begins inside the dma-buf, and ends before its end.
    constexpr size_t kBegin = 3 * kPage, kBytes = 3 << 20;
    {
      auto region = pair.near->RegisterDevice(kDeviceBase + kBegin, kBytes, gpu.file.get(), kBegin);
      REQUIRE(region);
      Remote remote(pair, 3 << 20, 7);
      const std::vector<std::byte> sent = remote.memory;
      constexpr size_t kAt = 777, kMove = (2 << 20) + 333;
      REQUIRE(pair.near->Get(**region, kAt, remote.region->key(), 55, kMove, 1) == Outcome::kOk);
      CHECK(Await(pair, 1) == BulkStatus::kOk);
      CHECK(Same(gpu.Copy(kBegin + kAt, kMove), {sent.begin() + 55, sent.begin() + 55 + kMove}));
      CHECK(AllAre(gpu.Copy(0, kBegin + kAt), std::byte{0x11}));
      CHECK(AllAre(gpu.Copy(kBegin + kAt + kMove, gpu.bytes - kBegin - kAt - kMove),
                   std::byte{0x11}));

      const auto noise = Noise(kMove, 8);
      std::memcpy(gpu.memory + kBegin + 5, noise.data(), kMove);
      std::vector<std::byte> expected = sent;
      std::copy(noise.begin(), noise.end(), expected.begin() + 91);
      REQUIRE(pair.near->Put(**region, 5, remote.region->key(), 91, kMove, 2) == Outcome::kOk);
      CHECK(Await(pair, 2) == BulkStatus::kOk);
      Settle(*pair.near, *pair.far);
      CHECK(Same(remote.memory, expected));
      CHECK(pair.fabric->device_bytes_written() == kMove);
      CHECK(pair.fabric->device_bytes_read() == kMove);

      // One byte past the registered part is refused before any device hears of it.
      REQUIRE(pair.near->Get(**region, kBytes - 9, remote.region->key(), 0, 10, 3) == Outcome::kOk);
      CHECK(Await(pair, 3) == BulkStatus::kRefused);
    }
    CheckClean(pair);
  }
}

TEST_CASE("device memory is registered by the server alone, where devices can", "[rdma][device]") {
  Gpu gpu(1 << 20);
  RdmaPair pair = MakePair(DeviceMemory::kWorks);
  CHECK(pair.near->caps().device_memory);
  CHECK_FALSE(pair.far->caps().device_memory);
  CHECK(pair.far->RegisterDevice(kDeviceBase, kPage, gpu.file.get(), 0).error().code ==
        Code::kUnsupported);
  // As ibv_reg_dmabuf_mr has it: the offsets within a page must agree.
  CHECK_FALSE(pair.near->RegisterDevice(kDeviceBase + 512, kPage, gpu.file.get(), 0));
  CHECK_FALSE(pair.near->RegisterDevice(kDeviceBase, gpu.bytes + 1, gpu.file.get(), 0));
  // A key of device memory opens nothing to the peer.
  auto region = pair.near->RegisterDevice(kDeviceBase, kPage, gpu.file.get(), 0);
  REQUIRE(region);
  rdma::RdmaKeyBlob blob;
  std::memcpy(&blob, (*region)->key().blob.data(), sizeof blob);
  CHECK(blob.rails == 0);
  region->reset();

  rdma::fake::FabricOptions options;
  options.device_memory = DeviceMemory::kWorks;
  pair.fabric->FailCall(*pair.server, rdma::fake::Call::kRegDmabufMr, 1, ENOMEM);
  const auto refused = pair.near->RegisterDevice(kDeviceBase, kPage, gpu.file.get(), 0);
  REQUIRE_FALSE(refused);
  CHECK(refused.error().code == Code::kResourceExhausted);
  options.device_memory = DeviceMemory::kNone;
  pair.fabric->SetOptions(options);
  CHECK(pair.near->RegisterDevice(kDeviceBase, kPage, gpu.file.get(), 0).error().code ==
        Code::kUnsupported);
  CheckClean(pair);
}

TEST_CASE("a loopback moves bytes through each NIC to device memory and back", "[rdma][device]") {
  RdmaPair pair = MakePair(DeviceMemory::kWorks, 2);
  Gpu gpu(1 << 20);
  {
    auto region = pair.near->RegisterDevice(kDeviceBase, gpu.bytes, gpu.file.get(), 0);
    REQUIRE(region);
    auto loopbacks = pair.near->OpenLoopbacks(Deadline::After(5000));
    if (!loopbacks) FAIL(loopbacks.error().message);
    REQUIRE(loopbacks->size() == 2);
    CHECK((*loopbacks)[0]->name() == "server0");
    CHECK((*loopbacks)[1]->name() == "server1");
    for (size_t nic = 0; nic < 2; ++nic) {
      Loopback& loopback = *(*loopbacks)[nic];
      const auto there = Noise(Loopback::kMostBytes, 3 + nic);
      REQUIRE(loopback.Write(**region, kPage + 3, there, Deadline::After(2000)));
      CHECK(Same(gpu.Copy(kPage + 3, there.size()), there));
      const auto back = Noise(Loopback::kMostBytes, 30 + nic);
      std::memcpy(gpu.memory + 9, back.data(), back.size());
      std::vector<std::byte> got(back.size());
      REQUIRE(loopback.Read(**region, 9, got, Deadline::After(2000)));
      CHECK(Same(got, back));
      CHECK_FALSE(
          loopback.Read(**region, gpu.bytes - 5, std::span(got).first(6), Deadline::Never()));
    }
  }
  CheckClean(pair);
}

// Host memory will do to see that the loopback itself works; with PENSTOCK_TEST_RDMA on real
// devices.
TEST_CASE("a loopback goes through the devices of this machine", "[rdma][device][loopback]") {
  Pair pair = getenv("PENSTOCK_TEST_RDMA") != nullptr ? Backends().front().make({})
                                                      : MakeRdmaConformancePair({}, 2);
  std::vector<std::byte> memory(1 << 20);
  auto region = pair.near->Register(memory.data(), memory.size(), Access::kPeerReadsAndWrites);
  REQUIRE(region);
  auto loopbacks = pair.near->OpenLoopbacks(Deadline::After(10'000));
  if (!loopbacks) FAIL(loopbacks.error().message);
  REQUIRE_FALSE(loopbacks->empty());
  for (const auto& loopback : *loopbacks) {
    const auto there = Noise(Loopback::kMostBytes, 3);
    const auto written = loopback->Write(**region, 4099, there, Deadline::After(5000));
    if (!written) FAIL(written.error().message);
    CHECK(Same({memory.begin() + 4099, memory.begin() + 4099 + there.size()}, there));
    const auto back = Noise(memory.size(), 4);
    std::copy(back.begin(), back.end(), memory.begin());
    std::vector<std::byte> got(Loopback::kMostBytes);
    const auto read = loopback->Read(**region, 77, got, Deadline::After(5000));
    if (!read) FAIL(read.error().message);
    CHECK(Same(got, {back.begin() + 77, back.begin() + 77 + got.size()}));
  }
}

TEST_CASE("a loopback tells a NIC that does not reach the memory", "[rdma][device]") {
  const auto [kind, words] = GENERATE(std::pair(DeviceMemory::kFaults, "local protection error"),
                                      std::pair(DeviceMemory::kStuck, "does not end"));
  RdmaPair pair = MakePair(kind);
  Gpu gpu(1 << 20);
  {
    auto region = pair.near->RegisterDevice(kDeviceBase, gpu.bytes, gpu.file.get(), 0);
    REQUIRE(region);
    auto loopbacks = pair.near->OpenLoopbacks(Deadline::After(5000));
    REQUIRE(loopbacks);
    const auto bytes = Noise(kPage, 1);
    const auto moved = loopbacks->front()->Write(**region, 0, bytes, Deadline::After(100));
    REQUIRE_FALSE(moved);
    CHECK_THAT(moved.error().message, Catch::Contains(words));
  }
  CHECK_FALSE(pair.near->closed());
  CheckClean(pair);
}

TEST_CASE("a move that a NIC cannot make is reported once, and the session goes on",
          "[rdma][device]") {
  for (const bool put : {false, true}) {
    RdmaPair pair = MakePair(DeviceMemory::kFaults, 2);
    Gpu gpu(8 << 20);
    {
      auto region = pair.near->RegisterDevice(kDeviceBase, gpu.bytes, gpu.file.get(), 0);
      REQUIRE(region);
      Remote remote(pair, 8 << 20, 4);
      std::vector<std::byte> here(1 << 20);
      auto local = pair.near->Register(here.data(), here.size(), Access::kPeerReadsAndWrites);
      REQUIRE(local);
      REQUIRE((put ? pair.near->Put(**region, 0, remote.region->key(), 0, 8 << 20, 1)
                   : pair.near->Get(**region, 0, remote.region->key(), 0, 8 << 20, 1)) ==
              Outcome::kOk);
      CHECK(Await(pair, 1) == BulkStatus::kUnreachable);
      // The queue pairs that it broke come back.
      REQUIRE(pair.near->Get(**local, 0, remote.region->key(), 0, here.size(), 2) == Outcome::kOk);
      CHECK(Await(pair, 2) == BulkStatus::kOk);
      CHECK(Same(here, {remote.memory.begin(), remote.memory.begin() + (1 << 20)}));
    }
    CheckClean(pair);
  }
}

TEST_CASE("what a device has written late is seen after a flush", "[rdma][device]") {
  RdmaPair pair = MakePair(DeviceMemory::kLate);
  Gpu gpu(1 << 20);
  {
    auto region = pair.near->RegisterDevice(kDeviceBase, gpu.bytes, gpu.file.get(), 0);
    REQUIRE(region);
    Remote remote(pair, 1 << 20, 6);
    REQUIRE(pair.near->Get(**region, 0, remote.region->key(), 0, 1 << 20, 1) == Outcome::kOk);
    CHECK(Await(pair, 1) == BulkStatus::kOk);
    CHECK(AllAre(gpu.Copy(0, gpu.bytes), std::byte{0}));
    pair.fabric->FlushDeviceWrites();
    CHECK(Same(gpu.Copy(0, gpu.bytes), remote.memory));
  }
  CheckClean(pair);
}
