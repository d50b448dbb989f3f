// Each awkwardness of the fake fabric is real: code that does not expect it would notice.
#include <thread>

#include "tests/transport/fake_verbs/bench.h"

namespace penstock::transport::rdma::fake {
namespace {

bool Mentions(const std::vector<std::string>& lines, const std::string& what) {
  for (const std::string& line : lines) {
    if (line.find(what) != std::string::npos) return true;
  }
  return false;
}

bool Readable(int fd, int timeout_ms) {
  pollfd entry = {fd, POLLIN, 0};
  return poll(&entry, 1, timeout_ms) == 1;
}

// Takes one completion event of the endpoint and acknowledges it.
ibv_cq* TakeEvent(Endpoint& end) {
  ibv_cq* cq = nullptr;
  void* context = nullptr;
  if (!Readable(end.channel->fd, 2000)) return nullptr;
  REQUIRE(end.verbs.GetCqEvent(end.channel, &cq, &context) == 0);
  end.verbs.AckCqEvents(cq, 1);
  return cq;
}

TEST_CASE("a WRITE may complete before its bytes are visible; a later message brings them",
          "[fake][placement]") {
  FabricOptions options = FabricOptions::Calm();
  options.early_completion = 1;
  Bench bench(options);
  Fill(bench.near, 1);
  bench.fabric.HoldWrites(true);
  REQUIRE(bench.far.Receive(1, 0, 0) == 0);
  REQUIRE(bench.near.Move(IBV_WR_RDMA_WRITE, 1, bench.far, 1000, 5000) == 0);
  REQUIRE(bench.near.Await(bench.near.send_cq, 1).size() == 1);
  CHECK_FALSE(SameBytes(bench.far, 1000, bench.near, 1000, 5000));
  REQUIRE(bench.near.Send(2, 0, 0) == 0);
  CHECK(bench.far.Await(bench.far.receive_cq, 1, 50).empty());
  bench.fabric.HoldWrites(false);
  CHECK(bench.far.Await(bench.far.receive_cq, 1).size() == 1);
  CHECK(SameBytes(bench.far, 1000, bench.near, 1000, 5000));
  bench.End();
}

TEST_CASE("WRITEs of one queue pair overtake each other", "[fake][placement]") {
  FabricOptions options;
  options.delay = options.slip = 0;
  Bench bench(options);
  // Two WRITEs to the same place, over and over: sometimes the older one is placed last.
  int older_last = 0;
  for (int round = 0; round < 200 && older_last == 0; ++round) {
    REQUIRE(bench.far.Receive(1, 0, 0) == 0);
    std::memset(&bench.near.at(0), 1, 4096);
    std::memset(&bench.near.at(4096), 2, 4096);
    ibv_sge sges[2] = {
        {reinterpret_cast<uint64_t>(&bench.near.at(0)), 4096, bench.near.mr->lkey},
        {reinterpret_cast<uint64_t>(&bench.near.at(4096)), 4096, bench.near.mr->lkey}};
    ibv_send_wr wrs[3] = {}, *bad = nullptr;
    for (int i = 0; i < 3; ++i) {
      wrs[i].next = i < 2 ? &wrs[i + 1] : nullptr;
      wrs[i].opcode = i < 2 ? IBV_WR_RDMA_WRITE : IBV_WR_SEND;
      wrs[i].sg_list = &sges[i % 2];
      wrs[i].num_sge = i < 2;
      wrs[i].wr.rdma.remote_addr = reinterpret_cast<uint64_t>(&bench.far.at(0));
      wrs[i].wr.rdma.rkey = bench.far.mr->rkey;
    }
    wrs[2].send_flags = IBV_SEND_SIGNALED;
    REQUIRE(bench.a->PostSend(bench.near.id->qp, wrs, &bad) == 0);
    REQUIRE(bench.far.Await(bench.far.receive_cq, 1).size() == 1);
    REQUIRE(bench.near.Await(bench.near.send_cq, 1).size() == 1);
    older_last += bench.far.at(0) == std::byte{1};
  }
  CHECK(older_last > 0);
  bench.End();
}

TEST_CASE("a READ sees the WRITEs before it, also those that are not in place yet",
          "[fake][placement]") {
  FabricOptions options;
  options.early_completion = 1;
  Bench bench(options);
  for (uint64_t round = 1; round <= 20; ++round) {
    Fill(bench.near, round);
    const auto sent = bench.near.memory;
    REQUIRE(bench.near.Move(IBV_WR_RDMA_WRITE, 1, bench.far, 0, 64'000) == 0);
    REQUIRE(bench.near.Await(bench.near.send_cq, 1).size() == 1);
    std::memset(&bench.near.at(0), 0, bench.near.memory.size());
    REQUIRE(bench.near.Move(IBV_WR_RDMA_READ, 2, bench.far, 0, 64'000) == 0);
    REQUIRE(bench.near.Await(bench.near.send_cq, 1).size() == 1);
    REQUIRE(std::memcmp(sent.data(), &bench.near.at(0), 64'000) == 0);
  }
  bench.End();
}

TEST_CASE("a send slot is free only when a completion that covers it has been polled",
          "[fake][queues]") {
  EndpointOptions small;
  small.send_depth = 4;
  Bench bench(FabricOptions::Calm(), small);
  for (uint64_t i = 1; i <= 3; ++i) {
    REQUIRE(bench.near.Move(IBV_WR_RDMA_WRITE, i, bench.far, 0, 0, 0) == 0);
  }
  REQUIRE(bench.near.Move(IBV_WR_RDMA_WRITE, 4, bench.far, 0, 0) == 0);
  poll(nullptr, 0, 20);  // all are long done, but nobody has polled
  CHECK(bench.near.Move(IBV_WR_RDMA_WRITE, 5, bench.far, 0, 0) == ENOMEM);
  CHECK(Mentions(bench.fabric.TakeViolations(), "send queue overflows (4 slots)"));
  CHECK(bench.near.Await(bench.near.send_cq, 1).at(0).wr_id == 4);
  for (uint64_t i = 5; i <= 8; ++i) {
    CHECK(bench.near.Move(IBV_WR_RDMA_WRITE, i, bench.far, 0, 0) == 0);
  }
  CHECK(bench.near.Await(bench.near.send_cq, 4).size() == 4);
  bench.End();
}

TEST_CASE("receive and completion queues overflow too", "[fake][queues]") {
  EndpointOptions small;
  small.receive_depth = 2;
  small.entries = 2;
  Bench bench(FabricOptions::Calm(), small);
  REQUIRE(bench.near.Receive(1, 0, 8) == 0);
  REQUIRE(bench.near.Receive(2, 8, 8) == 0);
  CHECK(bench.near.Receive(3, 16, 8) == ENOMEM);
  CHECK(Mentions(bench.fabric.TakeViolations(), "receive queue overflows"));
  for (uint64_t i = 0; i < 3; ++i) {
    REQUIRE(bench.near.Move(IBV_WR_RDMA_WRITE, i, bench.far, 0, 0) == 0);
  }
  ibv_async_event event{};
  REQUIRE(Readable(bench.near.id->verbs->async_fd, 2000));
  REQUIRE(bench.a->GetAsyncEvent(bench.near.id->verbs, &event) == 0);
  CHECK(event.event_type == IBV_EVENT_CQ_ERR);
  bench.a->AckAsyncEvent(&event);
  ibv_wc wc{};
  CHECK(bench.a->PollCq(bench.near.send_cq, 1, &wc) == -1);
  CHECK(Mentions(bench.fabric.TakeViolations(), "completion queue overflows"));
}

TEST_CASE("the peer's answer can be seen before one's own completion", "[fake][queues]") {
  Bench bench;
  bench.fabric.HoldSendCompletions(true);
  REQUIRE(bench.far.Receive(1, 0, 8) == 0);
  REQUIRE(bench.near.Receive(1, 0, 8) == 0);
  REQUIRE(bench.near.Send(1, 8, 8) == 0);
  REQUIRE(bench.far.Await(bench.far.receive_cq, 1).size() == 1);
  REQUIRE(bench.far.Send(1, 8, 8) == 0);
  CHECK(bench.near.Await(bench.near.receive_cq, 1).size() == 1);
  CHECK(bench.near.Await(bench.near.send_cq, 1, 20).empty());
  bench.fabric.HoldSendCompletions(false);
  CHECK(bench.near.Await(bench.near.send_cq, 1).size() == 1);
  CHECK(bench.far.Await(bench.far.send_cq, 1).size() == 1);
  bench.End();
}

TEST_CASE("a completion slips in between the last poll and the request for events",
          "[fake][events]") {
  FabricOptions options = FabricOptions::Calm();
  options.slip = 1;
  Bench bench(options);
  int slipped = 0;
  for (int round = 0; round < 20; ++round) {
    REQUIRE(bench.near.Move(IBV_WR_RDMA_WRITE, 1, bench.far, 0, 0) == 0);
    timespec nap = {0, 100'000};
    nanosleep(&nap, nullptr);
    ibv_wc wc{};
    const bool seen_before = bench.a->PollCq(bench.near.send_cq, 1, &wc) == 1;
    REQUIRE(bench.a->ReqNotifyCq(bench.near.send_cq, 0) == 0);
    const bool seen_after = bench.a->PollCq(bench.near.send_cq, 1, &wc) == 1;
    slipped += !seen_before && seen_after && !Readable(bench.near.channel->fd, 0);
    if (!seen_before && !seen_after) bench.near.Await(bench.near.send_cq, 1);
    while (Readable(bench.near.channel->fd, 0)) TakeEvent(bench.near);
  }
  CHECK(slipped > 0);
  bench.End();
}

TEST_CASE("an event comes once per request, and only for solicited messages if so asked",
          "[fake][events]") {
  Bench bench;
  for (uint64_t i = 0; i < 4; ++i) REQUIRE(bench.far.Receive(i, 0, 8) == 0);
  REQUIRE(bench.b->ReqNotifyCq(bench.far.receive_cq, 1) == 0);
  REQUIRE(bench.near.Send(1, 0, 8) == 0);
  CHECK_FALSE(Readable(bench.far.channel->fd, 30));
  REQUIRE(bench.near.Send(2, 0, 8, IBV_SEND_SIGNALED | IBV_SEND_SOLICITED) == 0);
  CHECK(TakeEvent(bench.far) == bench.far.receive_cq);
  REQUIRE(bench.near.Send(3, 0, 8, IBV_SEND_SIGNALED | IBV_SEND_SOLICITED) == 0);
  CHECK_FALSE(Readable(bench.far.channel->fd, 30));  // not armed
  CHECK(bench.far.Await(bench.far.receive_cq, 3).size() == 3);
  bench.End();
}

TEST_CASE("a lost notification never comes", "[fake][events]") {
  Bench bench;
  bench.fabric.LoseNotifications(1);
  REQUIRE(bench.a->ReqNotifyCq(bench.near.send_cq, 0) == 0);
  REQUIRE(bench.near.Move(IBV_WR_RDMA_WRITE, 1, bench.far, 0, 0) == 0);
  CHECK_FALSE(Readable(bench.near.channel->fd, 50));
  CHECK(bench.near.Await(bench.near.send_cq, 1).size() == 1);
  bench.End();
}

TEST_CASE("unacknowledged events and wrong orders of freeing are noted", "[fake][misuse]") {
  Bench bench;
  REQUIRE(bench.a->ReqNotifyCq(bench.near.send_cq, 0) == 0);
  REQUIRE(bench.near.Move(IBV_WR_RDMA_WRITE, 1, bench.far, 0, 0) == 0);
  ibv_cq* cq = nullptr;
  void* context = nullptr;
  REQUIRE(bench.a->GetCqEvent(bench.near.channel, &cq, &context) == 0);
  CHECK(bench.a->DestroyCq(bench.near.send_cq) == EBUSY);
  CHECK(bench.a->DeallocPd(bench.near.pd) == EBUSY);
  CHECK(bench.a->DestroyCompChannel(bench.near.channel) == EBUSY);
  CHECK(bench.fabric.TakeViolations().size() == 3);
  rdma_cm_event* event = nullptr;
  REQUIRE(bench.b->Disconnect(bench.far.id) == 0);
  REQUIRE(bench.a->GetCmEvent(bench.near.events, &event) == 0);
  bench.pair.reset();
  const auto violations = bench.fabric.TakeViolations();
  CHECK(Mentions(violations, "freed with unacknowledged events (1)"));
  CHECK(Mentions(violations, "id is destroyed with unacknowledged events (1)"));
  bench.a->AckCmEvent(event);
  CHECK(bench.fabric.objects().empty());
}

TEST_CASE("a buffer changed before its completion is noted", "[fake][misuse]") {
  Bench bench;
  bench.fabric.SetLink(kNear, kFar, false);
  REQUIRE(bench.near.Move(IBV_WR_RDMA_WRITE, 77, bench.far, 0, 64) == 0);
  bench.near.at(5) ^= std::byte{1};
  bench.fabric.SetLink(kNear, kFar, true);
  REQUIRE(bench.near.Await(bench.near.send_cq, 1).size() == 1);
  CHECK(Mentions(bench.fabric.TakeViolations(), "wr_id 77"));
  bench.End();
}

TEST_CASE("memory is checked at both ends, by key, bounds, access and domain", "[fake][memory]") {
  SECTION("bounds") {
    Bench bench;
    const auto before = bench.far.memory;
    ibv_send_wr wr{};
    wr.opcode = IBV_WR_RDMA_WRITE;
    wr.wr.rdma.remote_addr =
        reinterpret_cast<uint64_t>(bench.far.memory.data() + bench.far.memory.size()) - 7;
    wr.wr.rdma.rkey = bench.far.mr->rkey;
    REQUIRE(bench.near.Post(wr, 0, 8) == 0);
    const ibv_wc wc = bench.near.Await(bench.near.send_cq, 1).at(0);  // an error is always told
    CHECK(wc.status == IBV_WC_REM_ACCESS_ERR);
    CHECK(Same(bench.far.memory, before));
    bench.End();
  }
  SECTION("the local key in place of the remote one") {
    Bench bench;
    ibv_send_wr wr{};
    wr.opcode = IBV_WR_RDMA_READ;
    wr.wr.rdma.remote_addr = reinterpret_cast<uint64_t>(bench.far.memory.data());
    wr.wr.rdma.rkey = bench.far.mr->lkey;
    REQUIRE(bench.near.Post(wr, 0, 8) == 0);
    CHECK(bench.near.Await(bench.near.send_cq, 1).at(0).status == IBV_WC_REM_ACCESS_ERR);
  }
  SECTION("access") {
    EndpointOptions read_only;
    read_only.access = IBV_ACCESS_REMOTE_READ;
    Bench bench(FabricOptions::Calm(), {}, read_only);
    REQUIRE(bench.near.Move(IBV_WR_RDMA_READ, 1, bench.far, 0, 8) == 0);
    CHECK(bench.near.Await(bench.near.send_cq, 1).at(0).status == IBV_WC_SUCCESS);
    REQUIRE(bench.near.Move(IBV_WR_RDMA_WRITE, 1, bench.far, 0, 8) == 0);
    CHECK(bench.near.Await(bench.near.send_cq, 1).at(0).status == IBV_WC_REM_ACCESS_ERR);
  }
  SECTION("another session's key") {
    Bench bench;
    EndpointPair other(*bench.a, kNear, *bench.b, kFar);
    REQUIRE(bench.near.Move(IBV_WR_RDMA_WRITE, 1, *other.far, 0, 8) == 0);
    CHECK(bench.near.Await(bench.near.send_cq, 1).at(0).status == IBV_WC_REM_ACCESS_ERR);
  }
  SECTION("registration") {
    Bench bench;
    CHECK(bench.a->RegMr(bench.near.pd, nullptr, 8, 0) == nullptr);
    CHECK(errno == EFAULT);
    CHECK(bench.a->RegMr(bench.near.pd, bench.near.memory.data(), SIZE_MAX, 0) == nullptr);
    CHECK(bench.a->RegMr(bench.near.pd, bench.near.memory.data(), 8, IBV_ACCESS_REMOTE_WRITE) ==
          nullptr);
  }
}

TEST_CASE("after deregistration nothing is written, and an acknowledged WRITE is in place",
          "[fake][memory]") {
  for (const double early : {0.0, 1.0}) {
    FabricOptions options;
    options.early_completion = early;
    options.delay = options.slip = 0;
    Bench bench(options);
    Fill(bench.near, 1);
    bench.fabric.HoldWrites(true);
    REQUIRE(bench.near.Move(IBV_WR_RDMA_WRITE, 1, bench.far, 0, 60'000) == 0);
    const bool told = !bench.near.Await(bench.near.send_cq, 1, 30).empty();
    CHECK(told == (early == 1.0));
    REQUIRE(bench.b->DeregMr(bench.far.mr) == 0);
    CHECK(SameBytes(bench.far, 0, bench.near, 0, 60'000) == told);
    bench.fabric.HoldWrites(false);
    if (!told) {
      CHECK(bench.near.Await(bench.near.send_cq, 1).at(0).status == IBV_WC_REM_ACCESS_ERR);
      CHECK(AllAre(bench.far.memory, std::byte{0}));
    }
    bench.far.mr = nullptr;
    bench.End();
  }
}

TEST_CASE("an error breaks the queue pair and flushes everything, also what is unsignalled",
          "[fake][errors]") {
  Bench bench;
  bench.fabric.Fail({bench.a.get(), IBV_WR_RDMA_WRITE, 2, IBV_WC_REM_OP_ERR});
  REQUIRE(bench.near.Receive(50, 0, 8) == 0);
  for (uint64_t i = 1; i <= 4; ++i) {
    REQUIRE(bench.near.Move(IBV_WR_RDMA_WRITE, i, bench.far, 0, 8, 0) == 0);
  }
  const auto done = bench.near.Await(bench.near.send_cq, 3);
  REQUIRE(done.size() == 3);
  CHECK(done[0].wr_id == 2);
  CHECK(done[0].status == IBV_WC_REM_OP_ERR);
  CHECK(done[1].wr_id == 3);
  CHECK(done[1].status == IBV_WC_WR_FLUSH_ERR);
  CHECK(done[2].wr_id == 4);
  CHECK(bench.near.Await(bench.near.receive_cq, 1).at(0).wr_id == 50);
  REQUIRE(bench.near.Move(IBV_WR_RDMA_WRITE, 5, bench.far, 0, 8) == 0);
  CHECK(bench.near.Await(bench.near.send_cq, 1).at(0).status == IBV_WC_WR_FLUSH_ERR);
  bench.End();
}

TEST_CASE("a request can arrive and fail all the same", "[fake][errors]") {
  Bench bench;
  Fill(bench.near, 1);
  bench.fabric.Fail({bench.a.get(), IBV_WR_SEND, 1, IBV_WC_RETRY_EXC_ERR, true});
  REQUIRE(bench.far.Receive(1, 0, 64) == 0);
  REQUIRE(bench.near.Send(1, 0, 64) == 0);
  CHECK(bench.near.Await(bench.near.send_cq, 1).at(0).status == IBV_WC_RETRY_EXC_ERR);
  CHECK(bench.far.Await(bench.far.receive_cq, 1).at(0).status == IBV_WC_SUCCESS);
  CHECK(SameBytes(bench.far, 0, bench.near, 0, 64));
  bench.End();
}

TEST_CASE("a message longer than its receive breaks both ends", "[fake][errors]") {
  Bench bench;
  REQUIRE(bench.far.Receive(9, 0, 8) == 0);
  REQUIRE(bench.near.Send(1, 0, 9) == 0);
  CHECK(bench.far.Await(bench.far.receive_cq, 1).at(0).status == IBV_WC_LOC_LEN_ERR);
  CHECK(bench.near.Await(bench.near.send_cq, 1).at(0).status == IBV_WC_REM_INV_REQ_ERR);
  bench.End();
}

TEST_CASE("a list that fails in its middle says where", "[fake][errors]") {
  Bench bench;
  bench.fabric.FailCall(*bench.a, Call::kPostSend, 3, ENOMEM);
  ibv_send_wr wrs[4] = {}, *bad = nullptr;
  for (int i = 0; i < 4; ++i) {
    wrs[i].wr_id = static_cast<uint64_t>(i);
    wrs[i].opcode = IBV_WR_RDMA_WRITE;
    wrs[i].send_flags = IBV_SEND_SIGNALED;
    wrs[i].next = i < 3 ? &wrs[i + 1] : nullptr;
  }
  CHECK(bench.a->PostSend(bench.near.id->qp, wrs, &bad) == ENOMEM);
  CHECK(bad == &wrs[2]);
  CHECK(bench.near.Await(bench.near.send_cq, 3, 50).size() == 2);
  bench.End();
}

TEST_CASE("every fallible call fails when it is told to", "[fake][errors]") {
  Fabric fabric;
  auto host = fabric.AddHost({{"fake0", kNear}});
  fabric.FailCall(*host, Call::kCreateId, 2, ENOMEM);
  fabric.FailAnyCall(*host, 4, EIO);
  rdma_event_channel* events = host->CreateEventChannel();
  rdma_cm_id *first = nullptr, *second = nullptr;
  CHECK(host->CreateId(events, &first, nullptr) == 0);
  CHECK(host->CreateId(events, &second, nullptr) == -1);
  CHECK(errno == ENOMEM);
  CHECK(host->CreateId(events, &second, nullptr) == -1);
  CHECK(errno == EIO);
  CHECK(fabric.calls(*host).size() == 4);
  host->DestroyId(first);
  host->DestroyEventChannel(events);
}

TEST_CASE("a receiver that is not ready is tried again, at its own pace, or not at all",
          "[fake][errors]") {
  EndpointOptions few;
  few.rnr_retry = 1;
  Bench bench(FabricOptions::Calm(), {}, few);  // what the far end says bounds the near end
  ibv_qp_attr attributes{};
  attributes.min_rnr_timer = 14;  // 1.28 ms
  REQUIRE(bench.b->ModifyQp(bench.far.id->qp, &attributes, IBV_QP_MIN_RNR_TIMER) == 0);
  const int64_t start = NowNanoseconds();
  REQUIRE(bench.near.Send(1, 0, 8) == 0);
  CHECK(bench.near.Await(bench.near.send_cq, 1).at(0).status == IBV_WC_RNR_RETRY_EXC_ERR);
  CHECK(NowNanoseconds() - start >= 1'280'000);
  CHECK(bench.fabric.receiver_not_ready() == 2);
  bench.End();
}

TEST_CASE("a cut link is found by whoever sends, within the timeout, and by nobody else",
          "[fake][links]") {
  EndpointOptions options;
  options.retry_count = 6;  // 67 ms * 7 * the time scale of 0.1 = 47 ms
  Bench bench(FabricOptions::Calm(), options);
  bench.fabric.SetLink(kNear, kFar, false);
  const int64_t start = NowNanoseconds();
  REQUIRE(bench.near.Move(IBV_WR_RDMA_WRITE, 1, bench.far, 0, 0) == 0);
  CHECK(bench.near.Await(bench.near.send_cq, 1).at(0).status == IBV_WC_RETRY_EXC_ERR);
  CHECK(NowNanoseconds() - start >= 40'000'000);
  CHECK(bench.far.Event(50) == RDMA_CM_EVENT_MULTICAST_ERROR);  // none
  CHECK(bench.far.Await(bench.far.receive_cq, 1, 0).empty());
  REQUIRE(bench.a->Disconnect(bench.near.id) == 0);
  CHECK(bench.far.Event(50) == RDMA_CM_EVENT_MULTICAST_ERROR);
  bench.End();
}

TEST_CASE("a short cut is survived, and an old WRITE is placed late", "[fake][links]") {
  EndpointOptions options;
  options.timeout = 18;  // 1 s * 4 * 0.1
  Bench bench(FabricOptions::Calm(), options);
  Fill(bench.near, 1);
  bench.fabric.SetLink(kNear, kFar, false);
  REQUIRE(bench.near.Move(IBV_WR_RDMA_WRITE, 1, bench.far, 0, 4096) == 0);
  CHECK(bench.near.Await(bench.near.send_cq, 1, 30).empty());
  CHECK_FALSE(SameBytes(bench.far, 0, bench.near, 0, 4096));
  bench.fabric.SetLink(kNear, kFar, true);
  CHECK(bench.near.Await(bench.near.send_cq, 1).at(0).status == IBV_WC_SUCCESS);
  bench.pair->far.reset();
  bench.pair->near.reset();
  CHECK(bench.fabric.violations().empty());
}

TEST_CASE("nothing of a broken queue pair is placed any more", "[fake][links]") {
  FabricOptions calm = FabricOptions::Calm();
  Bench bench(calm);
  Fill(bench.near, 1);
  bench.fabric.SetLink(kNear, kFar, false);
  REQUIRE(bench.near.Move(IBV_WR_RDMA_WRITE, 1, bench.far, 0, 4096) == 0);
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_ERR;
  REQUIRE(bench.a->ModifyQp(bench.near.id->qp, &attributes, IBV_QP_STATE) == 0);
  bench.fabric.SetLink(kNear, kFar, true);
  CHECK(bench.near.Await(bench.near.send_cq, 1).at(0).status == IBV_WC_WR_FLUSH_ERR);
  poll(nullptr, 0, 10);
  CHECK(AllAre(bench.far.memory, std::byte{0}));
  bench.End();
}

TEST_CASE("a port that fails is told to its owner only", "[fake][links]") {
  Bench bench;
  bench.fabric.SetPort(kNear, false);
  ibv_async_event event{};
  REQUIRE(Readable(bench.near.id->verbs->async_fd, 1000));
  REQUIRE(bench.a->GetAsyncEvent(bench.near.id->verbs, &event) == 0);
  CHECK(event.event_type == IBV_EVENT_PORT_ERR);
  bench.a->AckAsyncEvent(&event);
  CHECK_FALSE(Readable(bench.far.id->verbs->async_fd, 20));
  ibv_port_attr port{};
  REQUIRE(bench.a->QueryPort(bench.near.id->verbs, 1, &port) == 0);
  CHECK(port.state == IBV_PORT_DOWN);
  bench.fabric.SetPort(kNear, true);
  REQUIRE(bench.a->GetAsyncEvent(bench.near.id->verbs, &event) == 0);
  CHECK(event.event_type == IBV_EVENT_PORT_ACTIVE);
  bench.a->AckAsyncEvent(&event);
  bench.End();
}

TEST_CASE("a removed device is told to every id, and its calls fail", "[fake][links]") {
  Bench bench;
  bench.fabric.RemoveDevice(kFar);
  CHECK(bench.far.Event() == RDMA_CM_EVENT_DEVICE_REMOVAL);
  CHECK(bench.b->Disconnect(bench.far.id) == -1);
  CHECK(errno == ENXIO);
  CHECK(bench.b->AllocPd(bench.far.id->verbs) == nullptr);
  bench.End();
}

TEST_CASE("a killed peer says goodbye or not", "[fake][links]") {
  for (const bool announced : {true, false}) {
    Bench bench;
    bench.fabric.Kill(*bench.b, announced);
    CHECK(bench.near.Event(100) ==
          (announced ? RDMA_CM_EVENT_DISCONNECTED : RDMA_CM_EVENT_MULTICAST_ERROR));
    REQUIRE(bench.near.Move(IBV_WR_RDMA_WRITE, 1, bench.far, 0, 8) == 0);
    CHECK(bench.near.Await(bench.near.send_cq, 1).at(0).status == IBV_WC_RETRY_EXC_ERR);
    bench.End();
  }
}

TEST_CASE("READs wait for their turn, and none may be started where none are allowed",
          "[fake][queues]") {
  EndpointOptions one, none;
  one.initiator_depth = 1;
  none.initiator_depth = 0;
  {
    Bench bench(FabricOptions{}, one);
    Fill(bench.far, 1);
    for (uint64_t i = 0; i < 8; ++i) {
      REQUIRE(bench.near.Move(IBV_WR_RDMA_READ, i, bench.far, i * 8000, 8000) == 0);
    }
    REQUIRE(bench.near.Await(bench.near.send_cq, 8).size() == 8);
    CHECK(SameBytes(bench.near, 0, bench.far, 0, 64'000));
    bench.End();
  }
  Bench bench(FabricOptions::Calm(), none);
  REQUIRE(bench.near.Move(IBV_WR_RDMA_READ, 1, bench.far, 0, 8) == 0);
  CHECK(bench.near.Await(bench.near.send_cq, 1).at(0).status == IBV_WC_LOC_QP_OP_ERR);
  bench.End();
}

TEST_CASE("a receive buffer is rubbish until it is filled", "[fake][misuse]") {
  Bench bench;
  REQUIRE(bench.far.Receive(1, 100, 64) == 0);
  CHECK(bench.far.at(99) == std::byte{0});
  CHECK(bench.far.at(100) == std::byte{0xb5});
  CHECK(bench.far.at(163) == std::byte{0xb5});
  CHECK(bench.far.at(164) == std::byte{0});
  bench.End();
}

}  // namespace
}  // namespace penstock::transport::rdma::fake
