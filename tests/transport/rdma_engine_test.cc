// What the bulk engine refuses, bounds and gives up, over the fake fabric.
#include <unistd.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <cstdlib>
#include <new>
#include <thread>

#include "tests/transport/rdma_pair.h"

using namespace penstock;
using namespace penstock::transport;
using rdma::fake::FabricOptions;

namespace {

thread_local uint64_t allocations = 0;

// One page of registered memory for each of many moves, at both ends.
struct Field {
  explicit Field(RdmaPair& pair, size_t bytes = 1 << 20)
      : here(Noise(bytes, 1)), there(Noise(bytes, 2)) {
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
  const Deadline deadline = Deadline::After(60'000);  // thousands of moves on a busy machine
  while (collector.done.size() < count && !deadline.expired()) {
    if (pair.near->Wait(64, collector, Deadline::After(100)) < 0) break;
  }
  REQUIRE(collector.done.size() >= count);
}

}  // namespace

// Counts what a thread of this test allocates.
void* operator new(size_t bytes) {
  ++allocations;
  if (void* memory = std::malloc(bytes == 0 ? 1 : bytes)) return memory;
  throw std::bad_alloc();
}
void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
  ++allocations;
  return std::malloc(bytes == 0 ? 1 : bytes);
}
void operator delete(void* memory) noexcept {
  std::free(memory);
}
void operator delete(void* memory, size_t) noexcept {
  std::free(memory);
}

TEST_CASE("a move with memory that another connection registered is refused", "[rdma][bulk]") {
  RdmaPair pair = MakeRdmaPair(), other = MakeRdmaPair();
  Field field(pair), foreign(other);
  const std::vector<std::byte> here = foreign.here, there = field.there;
  REQUIRE(pair.near->Get(*foreign.local, 0, field.remote->key(), 0, 4096, 1) == Outcome::kOk);
  REQUIRE(pair.near->Put(*foreign.local, 0, field.remote->key(), 0, 4096, 2) == Outcome::kOk);
  Collector collector;
  Await(pair, collector, 2);
  for (const Done& done : collector.done) {
    CHECK(done.status == BulkStatus::kRefused);
    CHECK(done.bytes == 0);
  }
  Settle(*pair.near, *pair.far);
  CHECK(Same(foreign.here, here));
  CHECK(Same(field.there, there));
  field.Reset();
  foreign.Reset();
  CheckClean(pair);
  CheckClean(other);
}

TEST_CASE("moves beyond the limit have to wait for reports", "[rdma][bulk]") {
  constexpr uint64_t kLimit = 4096, kBytes = 64;
  RdmaPair pair = MakeRdmaPair();
  Field field(pair, (kLimit + 1) * kBytes);
  pair.fabric->HoldSendCompletions(true);
  uint64_t accepted = 0;
  const auto get = [&](uint64_t i) {
    return pair.near->Get(*field.local, i * kBytes, field.remote->key(), i * kBytes, kBytes, i);
  };
  while (accepted <= kLimit && get(accepted) == Outcome::kOk) ++accepted;
  CHECK(accepted == kLimit);
  CHECK(get(accepted) == Outcome::kAgain);
  CHECK(pair.near->Put(*field.local, 0, field.remote->key(), 0, 1, 1) == Outcome::kAgain);
  pair.fabric->HoldSendCompletions(false);
  Collector collector;
  Await(pair, collector, accepted);
  REQUIRE(get(accepted) == Outcome::kOk);
  Await(pair, collector, accepted + 1);
  CHECK(collector.done.size() == accepted + 1);
  for (const Done& done : collector.done) CHECK(done.status == BulkStatus::kOk);
  CHECK(Same(field.here, field.there));
  field.Reset();
  CheckClean(pair);
}

TEST_CASE("a move allocates nothing", "[rdma][bulk]") {
  RdmaPairOptions options;
  RdmaPair pair = MakeRdmaPair(options);
  Field field(pair);
  constexpr uint64_t kMoves = 48, kBytes = 4096;
  Collector collector;
  uint64_t cookie = 0;
  const auto move = [&] {
    const uint64_t at = cookie % kMoves * kBytes;
    return cookie % 2 == 0
               ? pair.near->Get(*field.local, at, field.remote->key(), at, kBytes, cookie++)
               : pair.near->Put(*field.local, at, field.remote->key(), at, kBytes, cookie++);
  };
  // The fabric allocates for what is posted. So the send queue is filled first, and what comes then
  // stays with the engine.
  pair.fabric->HoldSendCompletions(true);
  for (uint32_t i = 0; i < options.rdma.bulk_depth; ++i) REQUIRE(move() == Outcome::kOk);
  usleep(20'000);
  const uint64_t before = allocations;
  bool accepted = true;
  for (uint64_t i = 0; i < kMoves; ++i) accepted = move() == Outcome::kOk && accepted;
  CHECK(allocations == before);
  CHECK(accepted);
  pair.fabric->HoldSendCompletions(false);
  Await(pair, collector, cookie);
  field.Reset();
  CheckClean(pair);
}

TEST_CASE("nobody waits while a broken rail is drained", "[rdma][bulk][failover]") {
  RdmaPair pair = MakeRdmaPair();
  Field field(pair);
  MemoryKey gone;
  {
    std::vector<std::byte> memory(4096);
    auto region = pair.far->Register(memory.data(), memory.size(), Access::kPeerReads);
    REQUIRE(region);
    gone = (*region)->key();
  }
  // The client's queue pair breaks and is made anew, while the server's waits for completions.
  pair.fabric->HoldSendCompletions(true);
  REQUIRE(pair.near->Get(*field.local, 0, gone, 0, 4096, 0) == Outcome::kOk);
  int64_t longest_ms = 0;
  uint64_t cookie = 0;
  for (const Deadline end = Deadline::After(1'500); !end.expired(); usleep(20'000)) {
    const int64_t start = NowNanoseconds();
    REQUIRE(pair.near->Get(*field.local, 0, field.remote->key(), 0, 4096, ++cookie) ==
            Outcome::kOk);
    longest_ms = std::max(longest_ms, (NowNanoseconds() - start) / 1'000'000);
  }
  CHECK(longest_ms < 300);
  pair.fabric->HoldSendCompletions(false);
  Collector collector;
  Await(pair, collector, cookie + 1);
  for (const Done& done : collector.done) {
    CHECK(done.status == (done.cookie == 0 ? BulkStatus::kRefused : BulkStatus::kOk));
  }
  CHECK(std::memcmp(field.here.data(), field.there.data(), 4096) == 0);
  field.Reset();
  CheckClean(pair);
}

TEST_CASE("what this end's own device refuses is not tried for ever", "[rdma][bulk][failover]") {
  const auto check = [](const std::function<void(RdmaPair&)>& prepare, bool put,
                        const std::string& reason) {
    INFO(reason);
    RdmaPairOptions options;
    options.rails = 2;
    RdmaPair pair = MakeRdmaPair(options);
    Field field(pair);
    Collector collector;
    prepare(pair);
    const auto move = put ? &Connection::Put : &Connection::Get;
    REQUIRE((*pair.near.*move)(*field.local, 0, field.remote->key(), 0, 4096, 5) == Outcome::kOk);
    ReceiveToEnd(*pair.near, collector);
    REQUIRE(collector.done.size() == 1);
    CHECK(collector.done[0].cookie == 5);
    CHECK(collector.done[0].status == BulkStatus::kClosed);
    CHECK_THAT(pair.near->close_reason(), Catch::Contains(reason));
    Collector far;
    ReceiveToEnd(*pair.far, far);
    field.Reset();
    CheckClean(pair);
  };
  const auto status = [](ibv_wr_opcode opcode, ibv_wc_status status) {
    return [=](RdmaPair& pair) {
      pair.fabric->Fail({pair.server.get(), opcode, 1, status, false});
    };
  };
  check(status(IBV_WR_RDMA_READ, IBV_WC_LOC_PROT_ERR), false, "local protection error");
  check(status(IBV_WR_RDMA_WRITE, IBV_WC_LOC_LEN_ERR), true, "local length error");
  check(status(IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WC_REM_INV_REQ_ERR), true,
        "the peer calls the request invalid");
  check([](RdmaPair& pair) { pair.fabric->FailPost(*pair.server, IBV_WR_RDMA_READ, 1, EINVAL); },
        false, "Invalid argument");
}

// As soft-RoCE does with a READ that is repeated because its answer is late.
TEST_CASE("a move is refused when the peer calls it invalid again and again",
          "[rdma][bulk][failover]") {
  for (const int times : {1, 3, 4}) {
    INFO(times << " times");
    RdmaPairOptions options;
    options.rails = 2;
    RdmaPair pair = MakeRdmaPair(options);
    Field field(pair);
    for (int i = 0; i < times; ++i) {
      pair.fabric->Fail({pair.server.get(), IBV_WR_RDMA_READ, 1, IBV_WC_REM_INV_REQ_ERR, false});
    }
    Collector collector;
    REQUIRE(pair.near->Get(*field.local, 0, field.remote->key(), 0, 4096, 5) == Outcome::kOk);
    Await(pair, collector, 1);
    CHECK(collector.done[0].status == (times <= 3 ? BulkStatus::kOk : BulkStatus::kRefused));
    if (times <= 3) CHECK(std::memcmp(field.here.data(), field.there.data(), 4096) == 0);
    field.Reset();
    CheckClean(pair);
  }
}

// As soft-RoCE does when the interface goes down.
TEST_CASE("a rail whose queue pair cannot send is no reason to end", "[rdma][bulk][failover]") {
  RdmaPairOptions options;
  options.rails = 2;
  RdmaPair pair = MakeRdmaPair(options);
  Field field(pair);
  Collector collector;
  pair.fabric->Fail({pair.server.get(), IBV_WR_RDMA_WRITE, 1, IBV_WC_LOC_QP_OP_ERR, false});
  REQUIRE(pair.near->Put(*field.local, 0, field.remote->key(), 0, 1 << 20, 5) == Outcome::kOk);
  Await(pair, collector, 1);
  CHECK(collector.done[0].status == BulkStatus::kOk);
  Settle(*pair.near, *pair.far);
  CHECK(std::memcmp(field.here.data(), field.there.data(), 1 << 20) == 0);
  field.Reset();
  CheckClean(pair);
}

TEST_CASE("no more READs are under way than either end can have", "[rdma][bulk]") {
  for (const bool at_client : {false, true}) {
    RdmaPairOptions options;
    options.rdma.bulk_depth = 12;
    options.rdma.bulk_chunk = 16 << 10;
    (at_client ? options.client_reads : options.fabric.most_reads) = 3;
    RdmaPair pair = MakeRdmaPair(options);
    Field field(pair, 4 << 20);
    Collector collector;
    constexpr size_t kBytes = 1 << 20;
    for (uint64_t i = 0; i < 4; ++i) {
      const auto move = i == 3 ? &Connection::Put : &Connection::Get;
      REQUIRE((*pair.near.*move)(*field.local, i * kBytes, field.remote->key(), i * kBytes, kBytes,
                                 i) == Outcome::kOk);
    }
    Await(pair, collector, 4);
    for (const Done& done : collector.done) CHECK(done.status == BulkStatus::kOk);
    Settle(*pair.near, *pair.far);
    CHECK(Same(field.here, field.there));
    CHECK(pair.fabric->reads_held_up() == 0);
    field.Reset();
    CheckClean(pair);
  }
}

TEST_CASE("a late WRITE of a broken rail never comes over newer bytes", "[rdma][bulk][failover]") {
  RdmaPairOptions options;
  options.rails = 2;
  options.rdma.bulk_chunk = 256 << 10;
  options.rdma.timeout = 12;
  options.fabric.early_completion = options.fabric.slip = 0;
  RdmaPair pair = MakeRdmaPair(options);
  usleep(50'000);  // until the server has heard that both rails are connected
  Field field(pair);
  // Half of the Put is in the fabric of rail 1 when the server gives that up, and stays there.
  pair.fabric->HoldWrites(true);
  REQUIRE(pair.near->Put(*field.local, 0, field.remote->key(), 0, 1 << 20, 1) == Outcome::kOk);
  usleep(20'000);
  pair.fabric->HoldLateWrites(true);
  pair.fabric->HoldReceiveCompletions(true);  // the client does not hear of it for a while
  pair.fabric->SetLink(ServerAddress(1), ClientAddress(1), false);
  usleep(200'000);
  pair.fabric->HoldWrites(false);
  Collector near;
  pair.near->Wait(64, near, Deadline::After(150));
  CHECK(near.done.empty());
  pair.fabric->HoldReceiveCompletions(false);
  const int64_t start = NowNanoseconds();
  Await(pair, near, 1);
  CHECK((NowNanoseconds() - start) / 1'000'000 < 500);
  CHECK(near.done[0].status == BulkStatus::kOk);
  Settle(*pair.near, *pair.far);
  CHECK(Same(field.here, field.there));
  std::fill(field.there.begin(), field.there.end(), std::byte{7});
  pair.fabric->HoldLateWrites(false);
  usleep(50'000);
  CHECK(AllAre(field.there, std::byte{7}));
  field.Reset();
  CheckClean(pair);
}

TEST_CASE("a Put does not wait for a peer that says nothing longer than packets live",
          "[rdma][bulk][failover]") {
  RdmaPairOptions options;
  options.rails = 2;
  options.rdma.bulk_chunk = 256 << 10;
  options.rdma.timeout = 12;
  options.fabric.early_completion = options.fabric.slip = 0;
  RdmaPair pair = MakeRdmaPair(options);
  usleep(50'000);  // until the server has heard that both rails are connected
  Field field(pair);
  pair.fabric->HoldWrites(true);
  REQUIRE(pair.near->Put(*field.local, 0, field.remote->key(), 0, 1 << 20, 1) == Outcome::kOk);
  usleep(20'000);
  pair.fabric->HoldReceiveCompletions(true);
  pair.fabric->SetLink(ServerAddress(1), ClientAddress(1), false);
  const int64_t start = NowNanoseconds();
  usleep(200'000);
  pair.fabric->HoldWrites(false);
  Collector near;
  Await(pair, near, 1);
  const int64_t took_ms = (NowNanoseconds() - start) / 1'000'000;
  CHECK(took_ms >= 900);
  CHECK(took_ms < 3'000);
  pair.fabric->HoldReceiveCompletions(false);
  Settle(*pair.near, *pair.far);
  CHECK(Same(field.here, field.there));
  field.Reset();
  CheckClean(pair);
}

TEST_CASE("what a device says of itself ends its rail at once", "[rdma][bulk][failover]") {
  const auto check = [](const char* what, const std::function<void(rdma::fake::Fabric&)>& trouble) {
    INFO(what);
    RdmaPairOptions options;
    options.rails = 2;
    options.rdma.bulk_chunk = 64 << 10;
    options.rdma.timeout = 21;  // unanswered requests would fail after 6 s
    RdmaPair pair = MakeRdmaPair(options);
    usleep(50'000);  // until the server has heard that both rails are connected
    Field field(pair);
    pair.fabric->SetLink(ServerAddress(1), ClientAddress(1), false);
    REQUIRE(pair.near->Put(*field.local, 0, field.remote->key(), 0, 1 << 20, 1) == Outcome::kOk);
    usleep(20'000);
    const int64_t start = NowNanoseconds();
    // Behind events that say nothing.
    for (int i = 0; i < 100; ++i) {
      pair.fabric->RaiseAsync(ServerAddress(1), IBV_EVENT_COMM_EST);
    }
    trouble(*pair.fabric);
    Collector near;
    Await(pair, near, 1);
    CHECK((NowNanoseconds() - start) / 1'000'000 < 2'000);
    CHECK(near.done[0].status == BulkStatus::kOk);
    Settle(*pair.near, *pair.far);
    CHECK(Same(field.here, field.there));
    field.Reset();
    CheckClean(pair);
  };
  using rdma::fake::Fabric;
  check("port", [](Fabric& fabric) { fabric.SetPort(ServerAddress(1), false); });
  check("device",
        [](Fabric& fabric) { fabric.RaiseAsync(ServerAddress(1), IBV_EVENT_DEVICE_FATAL); });
  check("queue pair",
        [](Fabric& fabric) { fabric.RaiseAsync(ServerAddress(1), IBV_EVENT_QP_FATAL); });
}

TEST_CASE("a device's word reaches every connection that uses it", "[rdma][failover]") {
  rdma::fake::Fabric fabric;
  auto server = fabric.AddHost({{"server0", ServerAddress(0)}});
  auto client = fabric.AddHost({{"client0", ClientAddress(0)}});
  rdma::RdmaOptions options;
  options.timeout = 21;
  std::unique_ptr<Connection> near[2], far[2];
  for (int i = 0; i < 2; ++i) {
    auto listener = rdma::Listener::Open(server, options, {ServerAddress(0)});
    REQUIRE(listener);
    Result<std::unique_ptr<Connection>> dialled = Fail(Code::kInternal, "");
    std::thread dialler([&, offer = (*listener)->offer()] {
      dialled = rdma::Dial(client, options, offer, {}, UniqueFd(), Deadline::After(10'000));
    });
    auto accepted = (*listener)->Accept({}, UniqueFd(), Deadline::After(10'000));
    dialler.join();
    REQUIRE((accepted && dialled));
    near[i] = std::move(*accepted);
    far[i] = std::move(*dialled);
  }
  usleep(50'000);
  const size_t made_before = std::ranges::count(fabric.calls(*client), rdma::fake::Call::kCreateQp);
  fabric.RaiseAsync(ClientAddress(0), IBV_EVENT_DEVICE_FATAL);
  // Control and rail of both are made anew.
  const Deadline deadline = Deadline::After(5'000);
  const auto made = [&] {
    return std::ranges::count(fabric.calls(*client), rdma::fake::Call::kCreateQp) - made_before;
  };
  while (made() < 4 && !deadline.expired()) usleep(10'000);
  CHECK(made() >= 4);
  for (int i = 0; i < 2; ++i) Settle(*near[i], *far[i]);
  for (auto* end : {&near[0], &near[1], &far[0], &far[1]}) end->reset();
  for (const std::string& violation : fabric.violations()) FAIL_CHECK(violation);
  for (const std::string& object : fabric.objects()) FAIL_CHECK("Leaked: " << object);
}

TEST_CASE("memory that was registered while a rail was down moves by it later",
          "[rdma][bulk][failover]") {
  RdmaPairOptions options;
  options.rails = 2;
  options.rdma.timeout = 12;
  // The control queue pair finds a route, and rail 0; rail 1 not at first.
  options.prepare = [](RdmaPair& pair) {
    pair.fabric->FailCall(*pair.client, rdma::fake::Call::kResolveAddr, 3, EHOSTUNREACH);
  };
  RdmaPair pair = MakeRdmaPair(options);
  Field field(pair);
  const MemoryKey early = field.remote->key();
  usleep(500'000);  // until rail 1 is there
  pair.fabric->SetLink(ServerAddress(0), ClientAddress(0), false);
  REQUIRE(pair.near->Put(*field.local, 0, early, 0, 1 << 20, 1) == Outcome::kOk);
  Collector near;
  Await(pair, near, 1);
  CHECK(near.done[0].status == BulkStatus::kOk);
  Settle(*pair.near, *pair.far);
  CHECK(Same(field.here, field.there));
  field.Reset();
  CheckClean(pair);
}
