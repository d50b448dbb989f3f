// A table of verbs that hands every call to another one: tests derive from it to look at calls, to
// change what they give, or to do something at a moment that only the caller's code decides.
#pragma once

#include <atomic>
#include <memory>
#include <utility>

#include "transport/rdma/verbs.h"

namespace penstock::transport::rdma {

class Tap : public Verbs {
 public:
  explicit Tap(std::shared_ptr<Verbs> verbs) : verbs_(std::move(verbs)) {}

  ibv_device** GetDeviceList(int* count) override { return verbs_->GetDeviceList(count); }
  void FreeDeviceList(ibv_device** list) override { verbs_->FreeDeviceList(list); }
  const char* GetDeviceName(ibv_device* device) override { return verbs_->GetDeviceName(device); }
  ibv_context* OpenDevice(ibv_device* device) override { return verbs_->OpenDevice(device); }
  int CloseDevice(ibv_context* context) override { return verbs_->CloseDevice(context); }
  int QueryDevice(ibv_context* context, ibv_device_attr* attributes) override {
    return verbs_->QueryDevice(context, attributes);
  }
  int QueryPort(ibv_context* context, uint8_t port, ibv_port_attr* attributes) override {
    return verbs_->QueryPort(context, port, attributes);
  }
  int QueryGid(ibv_context* context, uint8_t port, int index, ibv_gid* gid) override {
    return verbs_->QueryGid(context, port, index, gid);
  }
  ibv_pd* AllocPd(ibv_context* context) override { return verbs_->AllocPd(context); }
  int DeallocPd(ibv_pd* pd) override { return verbs_->DeallocPd(pd); }
  ibv_mr* RegMr(ibv_pd* pd, void* address, size_t bytes, int access) override {
    return verbs_->RegMr(pd, address, bytes, access);
  }
  ibv_mr* RegDmabufMr(ibv_pd* pd, uint64_t offset, size_t bytes, uint64_t iova, int fd,
                      int access) override {
    return verbs_->RegDmabufMr(pd, offset, bytes, iova, fd, access);
  }
  int DeregMr(ibv_mr* mr) override { return verbs_->DeregMr(mr); }
  ibv_comp_channel* CreateCompChannel(ibv_context* context) override {
    return verbs_->CreateCompChannel(context);
  }
  int DestroyCompChannel(ibv_comp_channel* channel) override {
    return verbs_->DestroyCompChannel(channel);
  }
  ibv_cq* CreateCq(ibv_context* context, int entries, void* cq_context, ibv_comp_channel* channel,
                   int vector) override {
    return verbs_->CreateCq(context, entries, cq_context, channel, vector);
  }
  int DestroyCq(ibv_cq* cq) override { return verbs_->DestroyCq(cq); }
  int PollCq(ibv_cq* cq, int entries, ibv_wc* completions) override {
    return verbs_->PollCq(cq, entries, completions);
  }
  int ReqNotifyCq(ibv_cq* cq, int solicited_only) override {
    return verbs_->ReqNotifyCq(cq, solicited_only);
  }
  int GetCqEvent(ibv_comp_channel* channel, ibv_cq** cq, void** cq_context) override {
    return verbs_->GetCqEvent(channel, cq, cq_context);
  }
  void AckCqEvents(ibv_cq* cq, unsigned int count) override { verbs_->AckCqEvents(cq, count); }
  int PostSend(ibv_qp* qp, ibv_send_wr* list, ibv_send_wr** bad) override {
    return verbs_->PostSend(qp, list, bad);
  }
  int PostRecv(ibv_qp* qp, ibv_recv_wr* list, ibv_recv_wr** bad) override {
    return verbs_->PostRecv(qp, list, bad);
  }
  int ModifyQp(ibv_qp* qp, ibv_qp_attr* attributes, int mask) override {
    return verbs_->ModifyQp(qp, attributes, mask);
  }
  int QueryQp(ibv_qp* qp, ibv_qp_attr* attributes, int mask, ibv_qp_init_attr* init) override {
    return verbs_->QueryQp(qp, attributes, mask, init);
  }
  int GetAsyncEvent(ibv_context* context, ibv_async_event* event) override {
    return verbs_->GetAsyncEvent(context, event);
  }
  void AckAsyncEvent(ibv_async_event* event) override { verbs_->AckAsyncEvent(event); }

  rdma_event_channel* CreateEventChannel() override { return verbs_->CreateEventChannel(); }
  void DestroyEventChannel(rdma_event_channel* channel) override {
    verbs_->DestroyEventChannel(channel);
  }
  int CreateId(rdma_event_channel* channel, rdma_cm_id** id, void* id_context) override {
    return verbs_->CreateId(channel, id, id_context);
  }
  int DestroyId(rdma_cm_id* id) override { return verbs_->DestroyId(id); }
  int BindAddr(rdma_cm_id* id, sockaddr* address) override { return verbs_->BindAddr(id, address); }
  int ResolveAddr(rdma_cm_id* id, sockaddr* source, sockaddr* target, int timeout_ms) override {
    return verbs_->ResolveAddr(id, source, target, timeout_ms);
  }
  int ResolveRoute(rdma_cm_id* id, int timeout_ms) override {
    return verbs_->ResolveRoute(id, timeout_ms);
  }
  int CreateQp(rdma_cm_id* id, ibv_pd* pd, ibv_qp_init_attr* attributes) override {
    return verbs_->CreateQp(id, pd, attributes);
  }
  void DestroyQp(rdma_cm_id* id) override { verbs_->DestroyQp(id); }
  int Listen(rdma_cm_id* id, int backlog) override { return verbs_->Listen(id, backlog); }
  int Connect(rdma_cm_id* id, rdma_conn_param* parameters) override {
    return verbs_->Connect(id, parameters);
  }
  int Accept(rdma_cm_id* id, rdma_conn_param* parameters) override {
    return verbs_->Accept(id, parameters);
  }
  int Reject(rdma_cm_id* id, const void* private_data, uint8_t bytes) override {
    return verbs_->Reject(id, private_data, bytes);
  }
  int Disconnect(rdma_cm_id* id) override { return verbs_->Disconnect(id); }
  int SetOption(rdma_cm_id* id, int level, int option, void* value, size_t bytes) override {
    return verbs_->SetOption(id, level, option, value, bytes);
  }
  int GetCmEvent(rdma_event_channel* channel, rdma_cm_event** event) override {
    return verbs_->GetCmEvent(channel, event);
  }
  int AckCmEvent(rdma_cm_event* event) override { return verbs_->AckCmEvent(event); }
  uint16_t GetSrcPort(rdma_cm_id* id) override { return verbs_->GetSrcPort(id); }

 private:
  const std::shared_ptr<Verbs> verbs_;
};

// Does not see what has been received while it is blind.
class Blind : public Tap {
 public:
  using Tap::Tap;
  int CreateQp(rdma_cm_id* id, ibv_pd* pd, ibv_qp_init_attr* attributes) override {
    if (attributes->cap.max_send_sge == 2) receive_cq = attributes->recv_cq;  // control
    return Tap::CreateQp(id, pd, attributes);
  }
  int PollCq(ibv_cq* cq, int entries, ibv_wc* completions) override {
    if (blind && cq == receive_cq.load()) return 0;
    return Tap::PollCq(cq, entries, completions);
  }
  std::atomic<ibv_cq*> receive_cq{nullptr};
  std::atomic<bool> blind{false};
};

// For RdmaPairOptions: puts a Tap around an end's verbs and remembers it.
template <typename T>
auto Tapped(std::shared_ptr<T>* tap) {
  return [tap](std::shared_ptr<Verbs> verbs) -> std::shared_ptr<Verbs> {
    *tap = std::make_shared<T>(std::move(verbs));
    return *tap;
  };
}

}  // namespace penstock::transport::rdma
