// Registered memory: what a registration must not outlive, and what it must not do to a process.
#include <dlfcn.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include <catch2/catch.hpp>
#include <cstdlib>
#include <fstream>
#include <random>

#include "tests/transport/rdma_bugs/tools.h"

using namespace penstock;
using namespace penstock::transport;

TEST_CASE("a recycled address answers only to its new registration", "[bug][memory]") {
  RdmaPair pair = MakeRdmaPair(Quiet());
  constexpr size_t kBytes = 1 << 20;
  Area area(*pair.near, *pair.far, kBytes);
  void* place = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  REQUIRE(place != MAP_FAILED);
  Collector near;
  uint64_t cookie = 0;
  const auto get = [&](const MemoryKey& key) {
    std::fill(area.here.begin(), area.here.end(), std::byte{0});
    pair.near->Get(*area.local, 0, key, 0, kBytes, cookie++);
    ReceiveUntil(*pair.near, near, [&] { return near.done.size() == cookie; });
    return near.done.back().status;
  };
  std::vector<MemoryKey> old;
  for (uint64_t life = 0; life < 6; ++life) {
    const auto noise = Noise(kBytes, 100 + life);
    std::memcpy(place, noise.data(), kBytes);
    auto region = pair.far->Register(place, kBytes, Access::kPeerReads);
    REQUIRE(region);
    REQUIRE(get((*region)->key()) == BulkStatus::kOk);
    CHECK(Same(area.here, noise));
    for (const MemoryKey& key : old) {
      REQUIRE(get(key) == BulkStatus::kRefused);
      CHECK(AllAre(area.here, std::byte{0}));
    }
    // A refusal breaks the queue pair; what is registered now is still there.
    REQUIRE(get((*region)->key()) == BulkStatus::kOk);
    CHECK(Same(area.here, noise));
    old.push_back((*region)->key());
    if (old.size() > 2) old.erase(old.begin());
    region->reset();  // before the memory goes, and the same address comes again
    REQUIRE(munmap(place, kBytes) == 0);
    REQUIRE(mmap(place, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1,
                 0) == place);
  }
  munmap(place, kBytes);
  area.local.reset();
  area.remote.reset();
  CheckClean(pair);
}

namespace {

int Mappings() {
  std::ifstream maps("/proc/self/maps");
  int lines = 0;
  for (std::string line; std::getline(maps, line);) ++lines;
  return lines;
}

}  // namespace

TEST_CASE("registering memory does not split the mappings of the process", "[bug][memory]") {
  SECTION("by the backend") {
    RdmaPair pair = MakeRdmaPair(Quiet());
    constexpr size_t kPage = 4096, kPages = 4000;
    void* place =
        mmap(nullptr, kPages * kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    REQUIRE(place != MAP_FAILED);
    std::mt19937 random(1);
    std::vector<std::unique_ptr<MemoryRegion>> live(200);
    const int before = Mappings();
    int most = before;
    for (int i = 0; i < 20'000; ++i) {
      auto& region = live[random() % live.size()];
      region.reset();
      const size_t page = random() % (kPages - 8), at = random() % kPage;
      auto made = pair.far->Register(static_cast<std::byte*>(place) + page * kPage + at,
                                     1 + random() % (6 * kPage), Access::kPeerReadsAndWrites);
      REQUIRE(made);
      region = std::move(*made);
      if (i % 100 == 99) most = std::max(most, Mappings());
    }
    CHECK(most < before + 20);
    live.clear();
    CHECK(Mappings() < before + 20);
    munmap(place, kPages * kPage);
    CheckClean(pair);
  }
  SECTION("by rdma-core, which would if it were asked to be safe for fork") {
    auto verbs = rdma::LoadVerbs();
    if (!verbs || getenv("RDMAV_FORK_SAFE") != nullptr || getenv("IBV_FORK_SAFE") != nullptr)
      return;
    void* library = dlopen("libibverbs.so.1", RTLD_NOW | RTLD_NOLOAD);
    REQUIRE(library != nullptr);
    using Status = int (*)();
    const auto status = reinterpret_cast<Status>(dlsym(library, "ibv_is_fork_initialized"));
    constexpr int kEnabled = 1;  // IBV_FORK_ENABLED
    if (status != nullptr) CHECK(status() != kEnabled);
    dlclose(library);
  }
}

#ifndef __SANITIZE_THREAD__  // tsan does not follow a multi-threaded program through fork
TEST_CASE("a forked child may touch what lies beside registered memory", "[bug][memory][fork]") {
  RdmaPair pair = MakeRdmaPair(Quiet());
  std::vector<std::byte> heap(3 * 4096);
  const size_t begin = 1000, bytes = 5000;  // neighbours in the same pages
  auto region = pair.far->Register(&heap[begin], bytes, Access::kPeerReadsAndWrites);
  REQUIRE(region);
  const int event_fd = pair.far->event_fd();
  const pid_t child = fork();
  if (child == 0) {
    rdma::AbandonAfterFork(*pair.near);
    rdma::AbandonAfterFork(*pair.far);
    for (std::byte& each : heap) each = std::byte{7};
    // Nothing of the connection stays open here: the parent's death must be seen by its peer.
    const bool closed = fcntl(event_fd, F_GETFD) == -1;
    _exit(heap[begin - 1] == std::byte{7} && heap[begin] == std::byte{7} && closed ? 0 : 1);
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(status == 0);
  CHECK(AllAre(heap, std::byte{0}));
  // The parent's connection is none the worse.
  AwaitRails(pair);
  region->reset();
  CheckClean(pair);
}
#endif
