// Moves and notifications that a change of rails must not leave behind.
#include <unistd.h>

#include <catch2/catch.hpp>
#include <cstring>

#include "tests/transport/rdma_pair.h"
#include "transport/rdma/wire.h"

using namespace penstock;
using namespace penstock::transport;

namespace {

struct Field {
  explicit Field(RdmaPair& pair) : here(Noise(1 << 20, 1)), there(Noise(1 << 20, 2)) {
    auto near = pair.near->Register(here.data(), here.size(), Access::kPeerReadsAndWrites);
    auto far = pair.far->Register(there.data(), there.size(), Access::kPeerReadsAndWrites);
    REQUIRE(near);
    REQUIRE(far);
    local = std::move(*near);
    remote = std::move(*far);
  }
  void Reset() {
    local.reset();
    remote.reset();
  }
  std::vector<std::byte> here, there;
  std::unique_ptr<MemoryRegion> local, remote;
};

void Await(RdmaPair& pair, Collector& collector, size_t count) {
  const Deadline deadline = Deadline::After(20'000);
  while (collector.done.size() < count && !deadline.expired()) {
    if (pair.near->Wait(64, collector, Deadline::After(100)) < 0) break;
  }
  REQUIRE(collector.done.size() >= count);
}

// The same memory, as if registered on these rails alone.
MemoryKey OnRails(const MemoryKey& key, uint8_t rails) {
  rdma::RdmaKeyBlob blob;
  std::memcpy(&blob, key.blob.data(), sizeof blob);
  blob.rails = rails;
  MemoryKey changed = key;
  std::memcpy(changed.blob.data(), &blob, sizeof blob);
  return changed;
}

}  // namespace

TEST_CASE("a key of rails that cannot be is refused", "[rdma][rails]") {
  RdmaPair pair = MakeRdmaPair();
  Field field(pair);
  const std::vector<std::byte> there = field.there;
  uint64_t cookie = 0;
  for (const int rails : {0x10, 0x80, 0x11}) {
    const MemoryKey key = OnRails(field.remote->key(), static_cast<uint8_t>(rails));
    REQUIRE(pair.near->Put(*field.local, 0, key, 0, 4096, ++cookie) == Outcome::kOk);
  }
  Collector collector;
  Await(pair, collector, cookie);
  for (const Done& done : collector.done) CHECK(done.status == BulkStatus::kRefused);
  CHECK(Same(field.there, there));
  field.Reset();
  CheckClean(pair);
}

// As with memory that a new device would not register, when the other rail is gone for good.
TEST_CASE("a move that no live rail can take ends, and others go on", "[rdma][rails]") {
  RdmaPairOptions options;
  options.rails = 2;
  options.rdma.timeout = 12;
  options.rdma.peer_timeout_ms = 1'000;
  RdmaPair pair = MakeRdmaPair(options);
  usleep(50'000);  // until the server has heard that both rails are connected
  Field field(pair);
  pair.fabric->SetLink(ServerAddress(1), ClientAddress(1), false);
  const MemoryKey key = field.remote->key();
  REQUIRE(pair.near->Put(*field.local, 0, OnRails(key, 2), 0, 64 << 10, 1) == Outcome::kOk);
  REQUIRE(pair.near->Put(*field.local, 0, key, 0, 1 << 20, 2) == Outcome::kOk);
  Collector collector;
  Await(pair, collector, 2);
  for (const Done& done : collector.done) {
    CHECK(done.status == (done.cookie == 1 ? BulkStatus::kUnreachable : BulkStatus::kOk));
  }
  Settle(*pair.near, *pair.far);
  CHECK(Same(field.here, field.there));
  field.Reset();
  CheckClean(pair);
}

TEST_CASE("what was notified on a queue pair that never had its turn counts", "[rdma][rails]") {
  RdmaPairOptions options;
  options.rails = 2;
  RdmaPair pair = MakeRdmaPair(options);
  usleep(50'000);  // until the server has heard that both rails are connected
  Field field(pair);
  const MemoryKey key = OnRails(field.remote->key(), 2);
  // The client's queue pair waits for its receives, and the next one behind it.
  pair.fabric->HoldReceiveCompletions(true);
  pair.fabric->RaiseAsync(ClientAddress(1), IBV_EVENT_QP_FATAL);
  usleep(50'000);
  REQUIRE(pair.near->Put(*field.local, 0, key, 0, 1 << 20, 1) == Outcome::kOk);
  Collector near, far;
  Await(pair, near, 1);
  REQUIRE(near.done[0].status == BulkStatus::kOk);
  // It fails as well, before the client has looked at it.
  pair.fabric->RaiseAsync(ClientAddress(1), IBV_EVENT_QP_FATAL);
  usleep(200'000);
  pair.fabric->HoldReceiveCompletions(false);
  Send(*pair.near, 100, 7);
  for (const Deadline end = Deadline::After(5'000); far.frames.empty() && !end.expired();) {
    if (pair.far->Wait(64, far, Deadline::After(100)) < 0) break;
  }
  REQUIRE(far.frames.size() == 1);
  CHECK(Same(field.here, field.there));
  field.Reset();
  CheckClean(pair);
}
