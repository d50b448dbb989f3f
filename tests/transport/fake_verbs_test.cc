// The fake fabric itself: it keeps the promises of verbs, and each awkwardness is real.
#include "tests/transport/fake_verbs/bench.h"

namespace penstock::transport::rdma::fake {
namespace {

TEST_CASE("a SEND arrives with its bytes, in order", "[fake][verbs]") {
  for (const auto& options : {FabricOptions::Calm(), FabricOptions{}}) {
    Bench bench(options);
    Fill(bench.near, 1);
    for (uint64_t i = 0; i < 16; ++i) {
      REQUIRE(bench.far.Receive(i, 32768 + i * 1024, 1024) == 0);
    }
    for (uint64_t i = 0; i < 16; ++i) REQUIRE(bench.near.Send(100 + i, i * 1000, 1000) == 0);
    const auto received = bench.far.Await(bench.far.receive_cq, 16);
    REQUIRE(received.size() == 16);
    for (uint64_t i = 0; i < 16; ++i) {
      CHECK(received[i].status == IBV_WC_SUCCESS);
      CHECK(received[i].opcode == IBV_WC_RECV);
      CHECK(received[i].wr_id == i);
      CHECK(received[i].byte_len == 1000);
      CHECK(SameBytes(bench.far, 32768 + i * 1024, bench.near, i * 1000, 1000));
    }
    const auto sent = bench.near.Await(bench.near.send_cq, 16);
    REQUIRE(sent.size() == 16);
    CHECK(sent[15].wr_id == 115);
    bench.End();
  }
}

TEST_CASE("READ, WRITE and WRITE_WITH_IMM move exactly their bytes", "[fake][verbs]") {
  for (const auto& options : {FabricOptions::Calm(), FabricOptions{}}) {
    Bench bench(options);
    Fill(bench.near, 1);
    Fill(bench.far, 2);
    const auto near_before = bench.near.memory, far_before = bench.far.memory;
    REQUIRE(bench.far.Receive(7, 0, 0) == 0);
    REQUIRE(bench.near.Move(IBV_WR_RDMA_READ, 1, bench.far, 1, 20'001) == 0);
    REQUIRE(bench.near.Await(bench.near.send_cq, 1).at(0).opcode == IBV_WC_RDMA_READ);
    CHECK(SameBytes(bench.near, 1, bench.far, 1, 20'001));
    CHECK(bench.near.at(0) == near_before[0]);
    CHECK(bench.near.at(20'002) == near_before[20'002]);
    REQUIRE(bench.near.Move(IBV_WR_RDMA_WRITE, 2, bench.far, 30'000, 20'003) == 0);
    REQUIRE(bench.near.Move(IBV_WR_RDMA_WRITE_WITH_IMM, 3, bench.far, 0, 0) == 0);
    const auto received = bench.far.Await(bench.far.receive_cq, 1);
    REQUIRE(received.size() == 1);
    CHECK(received[0].opcode == IBV_WC_RECV_RDMA_WITH_IMM);
    CHECK(received[0].wc_flags == IBV_WC_WITH_IMM);
    CHECK(ntohl(received[0].imm_data) == 3);
    CHECK(SameBytes(bench.far, 30'000, bench.near, 30'000, 20'003));
    CHECK(bench.far.at(29'999) == far_before[29'999]);
    CHECK(bench.far.at(50'003) == far_before[50'003]);
    bench.End();
  }
}

TEST_CASE("a 0-byte WRITE needs no key", "[fake][verbs]") {
  Bench bench;
  REQUIRE(bench.near.Move(IBV_WR_RDMA_WRITE, 5, bench.far, 0, 0) == 0);
  CHECK(bench.near.Await(bench.near.send_cq, 1).at(0).status == IBV_WC_SUCCESS);
  bench.End();
}

TEST_CASE("inline data is copied at the post, and its key is not looked at", "[fake][verbs]") {
  Bench bench;
  REQUIRE(bench.far.Receive(1, 0, 64) == 0);
  std::byte outside[8];
  std::memcpy(outside, "abcdefg", 8);
  ibv_sge sge = {reinterpret_cast<uint64_t>(outside), 8, 0xdead};
  ibv_send_wr wr{}, *bad = nullptr;
  wr.opcode = IBV_WR_SEND;
  wr.send_flags = IBV_SEND_INLINE | IBV_SEND_SIGNALED;
  wr.sg_list = &sge;
  wr.num_sge = 1;
  REQUIRE(bench.a->PostSend(bench.near.id->qp, &wr, &bad) == 0);
  std::memset(outside, 0, sizeof outside);
  REQUIRE(bench.far.Await(bench.far.receive_cq, 1).size() == 1);
  CHECK(std::memcmp(&bench.far.at(0), "abcdefg", 8) == 0);
  REQUIRE(bench.near.Await(bench.near.send_cq, 1).size() == 1);
  // One byte more than was granted.
  CHECK(bench.near.Send(2, 0, 65, IBV_SEND_INLINE) == ENOMEM);
  bench.End();
}

TEST_CASE("private data is padded, and its limits are those of rdma_cm", "[fake][verbs]") {
  Fabric fabric;
  auto host = fabric.AddHost({{"fake0", kNear}});
  {
    Endpoint near(*host, {}), far(*host, {});
    near.Resolve(kNear, kNear, far.Listen("0.0.0.0"));
    near.MakeQueuePair();
    rdma_conn_param parameters = near.Parameters();
    std::vector<std::byte> data(57, std::byte{9});
    parameters.private_data = data.data();
    parameters.private_data_len = 57;
    CHECK(host->Connect(near.id, &parameters) == -1);
    CHECK(errno == EINVAL);
    parameters.private_data_len = 3;
    REQUIRE(host->Connect(near.id, &parameters) == 0);
    REQUIRE(far.Event() == RDMA_CM_EVENT_CONNECT_REQUEST);
    REQUIRE(far.private_data.size() == 56);
    CHECK(far.private_data[2] == std::byte{9});
    CHECK(far.private_data[3] == std::byte{0});
    CHECK(host->Reject(far.id, data.data(), 149) == -1);
    REQUIRE(host->Reject(far.id, data.data(), 2) == 0);
    REQUIRE(near.Event() == RDMA_CM_EVENT_REJECTED);
    CHECK(near.status == 28);
    REQUIRE(near.private_data.size() == 148);
    CHECK(near.private_data[1] == std::byte{9});
    CHECK(near.private_data[2] == std::byte{0});
  }
  CHECK(fabric.violations().empty());
  CHECK(fabric.objects().empty());
}

TEST_CASE("a request to nobody is rejected with status 8, to nowhere with an address error",
          "[fake][verbs]") {
  Fabric fabric;
  auto host = fabric.AddHost({{"fake0", kNear}});
  Endpoint near(*host, {});
  near.Resolve(kNear, kNear, 1);
  near.MakeQueuePair();
  rdma_conn_param parameters = near.Parameters();
  REQUIRE(host->Connect(near.id, &parameters) == 0);
  REQUIRE(near.Event() == RDMA_CM_EVENT_REJECTED);
  CHECK(near.status == 8);
  Endpoint lost(*host, {});
  REQUIRE(host->CreateId(lost.events, &lost.id, nullptr) == 0);
  sockaddr_in target = Address("10.1.1.1", 1);
  REQUIRE(host->ResolveAddr(lost.id, nullptr, reinterpret_cast<sockaddr*>(&target), 100) == 0);
  CHECK(lost.Event() == RDMA_CM_EVENT_ADDR_ERROR);
}

TEST_CASE("a disconnect is seen by both ends and flushes what is posted", "[fake][verbs]") {
  Bench bench;
  REQUIRE(bench.near.Receive(1, 0, 64) == 0);
  REQUIRE(bench.a->Disconnect(bench.near.id) == 0);
  CHECK(bench.far.Event() == RDMA_CM_EVENT_DISCONNECTED);
  CHECK(bench.near.Event() == RDMA_CM_EVENT_DISCONNECTED);
  CHECK(bench.near.Await(bench.near.receive_cq, 1).at(0).status == IBV_WC_WR_FLUSH_ERR);
  CHECK(bench.near.Event() == RDMA_CM_EVENT_TIMEWAIT_EXIT);
  CHECK(bench.a->Disconnect(bench.near.id) == -1);
  bench.End();
}

}  // namespace
}  // namespace penstock::transport::rdma::fake
