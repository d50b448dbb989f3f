// A bare queue pair over any table of verbs, for tests that look at the verbs themselves: one
// connection with its completion queues and one registered buffer at each end.
#pragma once

#include <arpa/inet.h>
#include <poll.h>

#include <catch2/catch.hpp>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "common/clock.h"
#include "transport/rdma/verbs.h"

namespace penstock::transport::rdma::fake {

inline sockaddr_in Address(const std::string& text, uint16_t port = 0) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  inet_pton(AF_INET, text.c_str(), &address.sin_addr);
  return address;
}

struct EndpointOptions {
  uint32_t send_depth = 16, receive_depth = 16;
  int entries = 64;  // of each completion queue
  uint32_t inline_bytes = 64;
  uint8_t initiator_depth = 16, responder_resources = 16;
  uint8_t retry_count = 3, rnr_retry = 7, timeout = 14;
  size_t memory = 64 << 10;
  int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE;
};

class Endpoint {
 public:
  Endpoint(Verbs& verbs, const EndpointOptions& options) : verbs(verbs), options(options) {
    events = verbs.CreateEventChannel();
    REQUIRE(events != nullptr);
  }
  ~Endpoint() {
    if (id != nullptr && id->qp != nullptr) verbs.DestroyQp(id);
    if (send_cq != nullptr) verbs.DestroyCq(send_cq);
    if (receive_cq != nullptr) verbs.DestroyCq(receive_cq);
    if (channel != nullptr) verbs.DestroyCompChannel(channel);
    if (mr != nullptr) verbs.DeregMr(mr);
    if (pd != nullptr) verbs.DeallocPd(pd);
    if (id != nullptr) verbs.DestroyId(id);
    if (listener != nullptr) verbs.DestroyId(listener);
    verbs.DestroyEventChannel(events);
  }

  // The next event if it comes in time, acknowledged; its private data and status are kept.
  rdma_cm_event_type Event(int timeout_ms = 5000) {
    pollfd entry = {events->fd, POLLIN, 0};
    if (poll(&entry, 1, timeout_ms) != 1) return RDMA_CM_EVENT_MULTICAST_ERROR;  // none
    rdma_cm_event* event = nullptr;
    REQUIRE(verbs.GetCmEvent(events, &event) == 0);
    const rdma_cm_event_type type = event->event;
    status = event->status;
    const auto* data = static_cast<const std::byte*>(event->param.conn.private_data);
    private_data.assign(data, data + event->param.conn.private_data_len);
    if (type == RDMA_CM_EVENT_CONNECT_REQUEST) id = event->id;
    verbs.AckCmEvent(event);
    return type;
  }

  void Resolve(const std::string& from, const std::string& to, uint16_t port) {
    REQUIRE(verbs.CreateId(events, &id, this) == 0);
    uint8_t timeout = options.timeout;
    verbs.SetOption(id, RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT, &timeout, 1);
    sockaddr_in source = Address(from), target = Address(to, port);
    REQUIRE(verbs.ResolveAddr(id, reinterpret_cast<sockaddr*>(&source),
                              reinterpret_cast<sockaddr*>(&target), 1000) == 0);
    REQUIRE(Event() == RDMA_CM_EVENT_ADDR_RESOLVED);
    REQUIRE(verbs.ResolveRoute(id, 1000) == 0);
    REQUIRE(Event() == RDMA_CM_EVENT_ROUTE_RESOLVED);
  }
  uint16_t Listen(const std::string& at) {
    REQUIRE(verbs.CreateId(events, &listener, this) == 0);
    sockaddr_in address = Address(at);
    REQUIRE(verbs.BindAddr(listener, reinterpret_cast<sockaddr*>(&address)) == 0);
    REQUIRE(verbs.Listen(listener, 8) == 0);
    return ntohs(verbs.GetSrcPort(listener));
  }
  void MakeQueuePair() {
    pd = verbs.AllocPd(id->verbs);
    REQUIRE(pd != nullptr);
    memory.resize(options.memory);
    mr = verbs.RegMr(pd, memory.data(), memory.size(), options.access);
    REQUIRE(mr != nullptr);
    channel = verbs.CreateCompChannel(id->verbs);
    REQUIRE(channel != nullptr);
    send_cq = verbs.CreateCq(id->verbs, options.entries, this, channel, 0);
    receive_cq = verbs.CreateCq(id->verbs, options.entries, this, channel, 0);
    REQUIRE(send_cq != nullptr);
    REQUIRE(receive_cq != nullptr);
    ibv_qp_init_attr attributes{};
    attributes.send_cq = send_cq;
    attributes.recv_cq = receive_cq;
    attributes.qp_type = IBV_QPT_RC;
    attributes.cap.max_send_wr = options.send_depth;
    attributes.cap.max_recv_wr = options.receive_depth;
    attributes.cap.max_send_sge = attributes.cap.max_recv_sge = 2;
    attributes.cap.max_inline_data = options.inline_bytes;
    REQUIRE(verbs.CreateQp(id, pd, &attributes) == 0);
  }
  rdma_conn_param Parameters() const {
    rdma_conn_param parameters{};
    parameters.initiator_depth = options.initiator_depth;
    parameters.responder_resources = options.responder_resources;
    parameters.retry_count = options.retry_count;
    parameters.rnr_retry_count = options.rnr_retry;
    return parameters;
  }

  int Post(ibv_send_wr wr, size_t offset, size_t bytes) {
    ibv_sge sge = {reinterpret_cast<uint64_t>(memory.data()) + offset, static_cast<uint32_t>(bytes),
                   mr->lkey};
    wr.sg_list = &sge;
    wr.num_sge = bytes == 0 ? 0 : 1;
    ibv_send_wr* bad = nullptr;
    return verbs.PostSend(id->qp, &wr, &bad);
  }
  int Send(uint64_t wr_id, size_t offset, size_t bytes, unsigned flags = IBV_SEND_SIGNALED) {
    ibv_send_wr wr{};
    wr.wr_id = wr_id;
    wr.opcode = IBV_WR_SEND;
    wr.send_flags = flags;
    return Post(wr, offset, bytes);
  }
  // READ, WRITE or WRITE_WITH_IMM between the same offsets of both buffers.
  int Move(ibv_wr_opcode opcode, uint64_t wr_id, const Endpoint& peer, size_t offset, size_t bytes,
           unsigned flags = IBV_SEND_SIGNALED) {
    ibv_send_wr wr{};
    wr.wr_id = wr_id;
    wr.opcode = opcode;
    wr.send_flags = flags;
    wr.imm_data = htonl(static_cast<uint32_t>(wr_id));
    wr.wr.rdma.remote_addr = reinterpret_cast<uint64_t>(peer.memory.data()) + offset;
    wr.wr.rdma.rkey = bytes == 0 ? 0 : peer.mr->rkey;
    return Post(wr, offset, bytes);
  }
  int Receive(uint64_t wr_id, size_t offset, size_t bytes) {
    ibv_sge sge = {reinterpret_cast<uint64_t>(memory.data()) + offset, static_cast<uint32_t>(bytes),
                   mr->lkey};
    ibv_recv_wr wr{};
    wr.wr_id = wr_id;
    wr.sg_list = &sge;
    wr.num_sge = bytes == 0 ? 0 : 1;
    ibv_recv_wr* bad = nullptr;
    return verbs.PostRecv(id->qp, &wr, &bad);
  }
  // Polls until n completions have come; fewer after the time.
  std::vector<ibv_wc> Await(ibv_cq* cq, size_t n, int timeout_ms = 5000) {
    std::vector<ibv_wc> all;
    const Deadline deadline = Deadline::After(timeout_ms);
    while (all.size() < n && !deadline.expired()) {
      ibv_wc wc{};
      const int got = verbs.PollCq(cq, 1, &wc);
      if (got < 0) break;
      if (got == 1) {
        all.push_back(wc);
      } else {
        poll(nullptr, 0, 0);
        timespec nap = {0, 50'000};
        nanosleep(&nap, nullptr);
      }
    }
    return all;
  }
  std::byte& at(size_t offset) { return memory[offset]; }

  Verbs& verbs;
  const EndpointOptions options;
  rdma_event_channel* events = nullptr;
  rdma_cm_id *id = nullptr, *listener = nullptr;
  ibv_pd* pd = nullptr;
  ibv_mr* mr = nullptr;
  ibv_comp_channel* channel = nullptr;
  ibv_cq *send_cq = nullptr, *receive_cq = nullptr;
  std::vector<std::byte> memory;
  std::vector<std::byte> private_data;
  int status = 0;
};

// `near` dials `far`. Receives may be posted by `prepare`, before anything can arrive.
struct EndpointPair {
  EndpointPair(Verbs& a, const std::string& from, Verbs& b, const std::string& to,
               const EndpointOptions& near_options = {}, const EndpointOptions& far_options = {})
      : near(std::make_unique<Endpoint>(a, near_options)),
        far(std::make_unique<Endpoint>(b, far_options)) {
    const uint16_t port = far->Listen(to);
    near->Resolve(from, to, port);
    near->MakeQueuePair();
    rdma_conn_param parameters = near->Parameters();
    REQUIRE(near->verbs.Connect(near->id, &parameters) == 0);
    REQUIRE(far->Event() == RDMA_CM_EVENT_CONNECT_REQUEST);
    far->MakeQueuePair();
    parameters = far->Parameters();
    REQUIRE(far->verbs.Accept(far->id, &parameters) == 0);
    REQUIRE(near->Event() == RDMA_CM_EVENT_ESTABLISHED);
    REQUIRE(far->Event() == RDMA_CM_EVENT_ESTABLISHED);
  }
  std::unique_ptr<Endpoint> near, far;
};

}  // namespace penstock::transport::rdma::fake
