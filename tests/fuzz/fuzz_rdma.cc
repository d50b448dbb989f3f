// A session over RDMA one of whose ends is not honest, on the fake fabric: the private data of its
// connection requests and answers, its packets (header and frames) and the keys in its moves are
// changed as the input says, where they are handed to the NIC. The other end may end the session,
// and must come to a clean end in any case; so must the liar, who may learn of it in many ways.
//
// Input: a byte of switches, then edits {which message, where, width, value}.
#include <atomic>
#include <cstdlib>
#include <memory>
#include <thread>

#include "tests/fuzz/input.h"
#include "tests/transport/fake_verbs/fabric.h"
#include "tests/transport/fake_verbs/host.h"
#include "transport/rdma/rdma.h"
#include "transport/rdma/wire.h"

using namespace penstock;
using namespace penstock::transport;
using namespace penstock::transport::rdma;
using fuzz::Require;

namespace {

constexpr size_t kMemoryBytes = 64 << 10;
constexpr uint32_t kMaxFrame = 8192;

struct Edit {
  uint8_t message;  // counted by kind; the top bit: private data rather than a packet
  uint8_t width;    // 1, 2, 4 or 8 bytes, or the length itself
  uint16_t place;
  uint64_t value;
};

// Hands everything on to the host's own verbs, but for what is said above.
class Liar : public Verbs {
 public:
  Liar(std::shared_ptr<Verbs> honest, std::vector<Edit> edits)
      : honest_(std::move(honest)), edits_(std::move(edits)) {}

  int PostSend(ibv_qp* qp, ibv_send_wr* list, ibv_send_wr** bad) override {
    for (ibv_send_wr* request = list; request != nullptr; request = request->next) {
      if (request->opcode != IBV_WR_SEND || request->num_sge == 0) continue;
      const uint8_t number = packets_++ & 0x7f;
      for (const Edit& edit : edits_) {
        if (edit.message != number) continue;
        ibv_sge& part = request->sg_list[edit.place >> 8 < request->num_sge ? edit.place >> 8 : 0];
        if (edit.width % 5 == 4) {
          part.length = std::min<uint32_t>(part.length, edit.value & 0xfff);
        } else {
          Change(reinterpret_cast<std::byte*>(part.addr), part.length, edit, edit.place & 0xff);
        }
      }
    }
    return honest_->PostSend(qp, list, bad);
  }
  int Connect(rdma_cm_id* id, rdma_conn_param* parameters) override {
    return WithLies(parameters, [&] { return honest_->Connect(id, parameters); });
  }
  int Accept(rdma_cm_id* id, rdma_conn_param* parameters) override {
    return WithLies(parameters, [&] { return honest_->Accept(id, parameters); });
  }

  ibv_device** GetDeviceList(int* count) override { return honest_->GetDeviceList(count); }
  void FreeDeviceList(ibv_device** list) override { honest_->FreeDeviceList(list); }
  const char* GetDeviceName(ibv_device* device) override { return honest_->GetDeviceName(device); }
  ibv_context* OpenDevice(ibv_device* device) override { return honest_->OpenDevice(device); }
  int CloseDevice(ibv_context* context) override { return honest_->CloseDevice(context); }
  int QueryDevice(ibv_context* context, ibv_device_attr* attributes) override {
    return honest_->QueryDevice(context, attributes);
  }
  int QueryPort(ibv_context* context, uint8_t port, ibv_port_attr* attributes) override {
    return honest_->QueryPort(context, port, attributes);
  }
  int QueryGid(ibv_context* context, uint8_t port, int index, ibv_gid* gid) override {
    return honest_->QueryGid(context, port, index, gid);
  }
  ibv_pd* AllocPd(ibv_context* context) override { return honest_->AllocPd(context); }
  int DeallocPd(ibv_pd* pd) override { return honest_->DeallocPd(pd); }
  ibv_mr* RegMr(ibv_pd* pd, void* address, size_t bytes, int access) override {
    return honest_->RegMr(pd, address, bytes, access);
  }
  ibv_mr* RegDmabufMr(ibv_pd* pd, uint64_t offset, size_t bytes, uint64_t iova, int fd,
                      int access) override {
    return honest_->RegDmabufMr(pd, offset, bytes, iova, fd, access);
  }
  int DeregMr(ibv_mr* mr) override { return honest_->DeregMr(mr); }
  ibv_comp_channel* CreateCompChannel(ibv_context* context) override {
    return honest_->CreateCompChannel(context);
  }
  int DestroyCompChannel(ibv_comp_channel* channel) override {
    return honest_->DestroyCompChannel(channel);
  }
  ibv_cq* CreateCq(ibv_context* context, int entries, void* cq_context, ibv_comp_channel* channel,
                   int vector) override {
    return honest_->CreateCq(context, entries, cq_context, channel, vector);
  }
  int DestroyCq(ibv_cq* cq) override { return honest_->DestroyCq(cq); }
  int PollCq(ibv_cq* cq, int entries, ibv_wc* completions) override {
    return honest_->PollCq(cq, entries, completions);
  }
  int ReqNotifyCq(ibv_cq* cq, int solicited_only) override {
    return honest_->ReqNotifyCq(cq, solicited_only);
  }
  int GetCqEvent(ibv_comp_channel* channel, ibv_cq** cq, void** cq_context) override {
    return honest_->GetCqEvent(channel, cq, cq_context);
  }
  void AckCqEvents(ibv_cq* cq, unsigned int count) override { honest_->AckCqEvents(cq, count); }
  int PostRecv(ibv_qp* qp, ibv_recv_wr* list, ibv_recv_wr** bad) override {
    return honest_->PostRecv(qp, list, bad);
  }
  int ModifyQp(ibv_qp* qp, ibv_qp_attr* attributes, int mask) override {
    return honest_->ModifyQp(qp, attributes, mask);
  }
  int QueryQp(ibv_qp* qp, ibv_qp_attr* attributes, int mask, ibv_qp_init_attr* init) override {
    return honest_->QueryQp(qp, attributes, mask, init);
  }
  int GetAsyncEvent(ibv_context* context, ibv_async_event* event) override {
    return honest_->GetAsyncEvent(context, event);
  }
  void AckAsyncEvent(ibv_async_event* event) override { honest_->AckAsyncEvent(event); }
  rdma_event_channel* CreateEventChannel() override { return honest_->CreateEventChannel(); }
  void DestroyEventChannel(rdma_event_channel* channel) override {
    honest_->DestroyEventChannel(channel);
  }
  int CreateId(rdma_event_channel* channel, rdma_cm_id** id, void* id_context) override {
    return honest_->CreateId(channel, id, id_context);
  }
  int DestroyId(rdma_cm_id* id) override { return honest_->DestroyId(id); }
  int BindAddr(rdma_cm_id* id, sockaddr* address) override {
    return honest_->BindAddr(id, address);
  }
  int ResolveAddr(rdma_cm_id* id, sockaddr* source, sockaddr* target, int timeout_ms) override {
    return honest_->ResolveAddr(id, source, target, timeout_ms);
  }
  int ResolveRoute(rdma_cm_id* id, int timeout_ms) override {
    return honest_->ResolveRoute(id, timeout_ms);
  }
  int CreateQp(rdma_cm_id* id, ibv_pd* pd, ibv_qp_init_attr* attributes) override {
    return honest_->CreateQp(id, pd, attributes);
  }
  void DestroyQp(rdma_cm_id* id) override { honest_->DestroyQp(id); }
  int Listen(rdma_cm_id* id, int backlog) override { return honest_->Listen(id, backlog); }
  int Reject(rdma_cm_id* id, const void* private_data, uint8_t bytes) override {
    return honest_->Reject(id, private_data, bytes);
  }
  int Disconnect(rdma_cm_id* id) override { return honest_->Disconnect(id); }
  int SetOption(rdma_cm_id* id, int level, int option, void* value, size_t bytes) override {
    return honest_->SetOption(id, level, option, value, bytes);
  }
  int GetCmEvent(rdma_event_channel* channel, rdma_cm_event** event) override {
    return honest_->GetCmEvent(channel, event);
  }
  int AckCmEvent(rdma_cm_event* event) override { return honest_->AckCmEvent(event); }
  uint16_t GetSrcPort(rdma_cm_id* id) override { return honest_->GetSrcPort(id); }

 private:
  static void Change(std::byte* bytes, size_t count, const Edit& edit, size_t place) {
    const size_t width = size_t{1} << edit.width % 5 % 4;
    if (count >= width) memcpy(bytes + place % (count - width + 1), &edit.value, width);
  }
  template <typename Call>
  int WithLies(rdma_conn_param* parameters, const Call& call) {
    std::vector<std::byte> data(parameters->private_data_len);
    if (data.empty()) return call();
    memcpy(data.data(), parameters->private_data, data.size());
    const uint8_t number = 0x80 | (requests_++ & 0x7f);
    for (const Edit& edit : edits_) {
      if (edit.message != number) continue;
      if (edit.width % 5 == 4) {
        parameters->private_data_len = std::min<size_t>(data.size(), edit.value & 0xff);
      } else {
        Change(data.data(), data.size(), edit, edit.place);
      }
    }
    parameters->private_data = data.data();
    return call();
  }

  const std::shared_ptr<Verbs> honest_;
  const std::vector<Edit> edits_;
  std::atomic<uint8_t> packets_{0}, requests_{0};
};

struct Checker : Handler {
  bool OnFrame(std::span<const std::byte> frame) override {
    uint32_t length;
    memcpy(&length, frame.data(), sizeof length);
    Require(length == frame.size() && length >= 8 && length <= kMaxFrame);
    unsigned sum = 0;
    for (std::byte byte : frame) sum += static_cast<unsigned>(byte);
    sink = sum;
    return true;
  }
  void OnBulkDone(uint64_t cookie, BulkStatus, uint64_t bytes) override {
    Require((cookie == 1 || cookie == 2) && bytes <= kMemoryBytes);
    ++done;
  }
  void Started(Outcome outcome) { started += outcome == Outcome::kOk ? 1 : 0; }
  uint64_t started = 0, done = 0;
  volatile unsigned sink = 0;
};

struct Pair {
  std::unique_ptr<Connection> server, client;
};

Pair Join(std::shared_ptr<Verbs> server, std::shared_ptr<Verbs> client,
          const RdmaOptions& options) {
  const Token token = {1, 2, 3};
  auto listener = Listener::Open(std::move(server), options, {"10.99.0.1"});
  if (!listener) abort();
  const Offer offer = (*listener)->offer();
  Pair pair;
  std::thread dialler([&] {
    auto dialled = Dial(std::move(client), options, offer, token, {}, Deadline::After(1000));
    if (dialled) pair.client = std::move(*dialled);
  });
  auto accepted = (*listener)->Accept(token, {}, Deadline::After(300));
  if (accepted) pair.server = std::move(*accepted);
  dialler.join();
  return pair;
}

void Send(Connection& connection, uint32_t bytes) {
  std::byte* slot = nullptr;
  if (connection.Reserve(bytes, &slot) != Outcome::kOk) return;
  memset(slot, 3, bytes);
  memcpy(slot, &bytes, sizeof bytes);
  connection.Commit(bytes, kFlush);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const bool quiet = fuzz::Silence();
  (void)quiet;
  fuzz::Input input(data, size);
  const auto switches = input.Take<uint8_t>();
  std::vector<Edit> edits;
  while (!input.empty() && edits.size() < 64) edits.push_back(input.Take<Edit>());

  fake::FabricOptions calm = fake::FabricOptions::Calm();
  calm.time_scale = 0.01;
  calm.unreachable_ms = 20;
  fake::Fabric fabric(calm);
  auto server_host = fabric.AddHost({{"server0", "10.99.0.1"}});
  auto client_host = fabric.AddHost({{"client0", "10.99.0.2"}});
  RdmaOptions options;
  options.max_frame = kMaxFrame;
  options.ring_bytes = 64 << 10;
  options.slots = options.send_depth = 32;
  options.keepalive_ms = 20;
  options.peer_timeout_ms = 100;
  options.spin_us = 0;
  options.timeout = 1;
  options.retry_count = 1;
  std::shared_ptr<Verbs> server = server_host, client = client_host;
  if ((switches & 1) != 0) {
    server = std::make_shared<Liar>(server, edits);
  } else {
    client = std::make_shared<Liar>(client, edits);
  }
  std::vector<std::byte> near(kMemoryBytes), far(kMemoryBytes);
  Checker near_checker, far_checker;
  {
    Pair pair = Join(server, client, options);
    std::unique_ptr<MemoryRegion> near_region, far_region;
    if (pair.server != nullptr && pair.client != nullptr) {
      auto local = pair.server->Register(near.data(), near.size(), Access::kPeerReadsAndWrites);
      auto remote = pair.client->Register(far.data(), far.size(), Access::kPeerReadsAndWrites);
      if (local && remote) {
        near_region = std::move(*local);
        far_region = std::move(*remote);
        MemoryKey key = far_region->key();
        // What stands in frames is the peer's word.
        for (const Edit& edit : edits) {
          if (edit.message == 0x7f) memcpy(key.blob.data() + edit.place % 48, &edit.value, 8);
        }
        for (int round = 0; round < 3; ++round) {
          Send(*pair.client, 8 + switches % 64 * 100);
          Send(*pair.server, 64);
          near_checker.Started(pair.server->Get(*near_region, 0, key, 0, 5000, 1));
          near_checker.Started(pair.server->Put(*near_region, 0, key, 100, 300, 2));
          (void)pair.server->Wait(16, near_checker, Deadline::After(1));
          (void)pair.client->Wait(16, far_checker, Deadline::After(1));
        }
      }
    }
    for (auto* connection : {pair.client.get(), pair.server.get()}) {
      if (connection == nullptr) continue;
      connection->Close(5);
      Checker& checker = connection == pair.client.get() ? far_checker : near_checker;
      const Deadline deadline = Deadline::After(15'000);
      while (connection->Wait(64, checker, Deadline::After(20)) >= 0) Require(!deadline.expired());
    }
    Require(near_checker.done == near_checker.started);
    near_region.reset();
    far_region.reset();
  }
  return 0;
}
