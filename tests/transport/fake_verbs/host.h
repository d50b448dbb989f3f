// One process of the fabric: the table of verbs as it sees it. See fabric.h.
#pragma once

#include <list>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "tests/transport/fake_verbs/fabric.h"

namespace penstock::transport::rdma::fake {

struct FakeDevice;

class Host final : public Verbs {
 public:
  Host(std::shared_ptr<State> state, const std::vector<DeviceSpec>& devices);
  ~Host() override;

  ibv_device** GetDeviceList(int* count) override;
  void FreeDeviceList(ibv_device** list) override;
  const char* GetDeviceName(ibv_device* device) override;
  ibv_context* OpenDevice(ibv_device* device) override;
  int CloseDevice(ibv_context* context) override;
  int QueryDevice(ibv_context* context, ibv_device_attr* attributes) override;
  int QueryPort(ibv_context* context, uint8_t port, ibv_port_attr* attributes) override;
  int QueryGid(ibv_context* context, uint8_t port, int index, ibv_gid* gid) override;
  ibv_pd* AllocPd(ibv_context* context) override;
  int DeallocPd(ibv_pd* pd) override;
  ibv_mr* RegMr(ibv_pd* pd, void* address, size_t bytes, int access) override;
  ibv_mr* RegDmabufMr(ibv_pd* pd, uint64_t offset, size_t bytes, uint64_t iova, int fd,
                      int access) override;
  int DeregMr(ibv_mr* mr) override;
  ibv_comp_channel* CreateCompChannel(ibv_context* context) override;
  int DestroyCompChannel(ibv_comp_channel* channel) override;
  ibv_cq* CreateCq(ibv_context* context, int entries, void* cq_context, ibv_comp_channel* channel,
                   int vector) override;
  int DestroyCq(ibv_cq* cq) override;
  int PollCq(ibv_cq* cq, int entries, ibv_wc* completions) override;
  int ReqNotifyCq(ibv_cq* cq, int solicited_only) override;
  int GetCqEvent(ibv_comp_channel* channel, ibv_cq** cq, void** cq_context) override;
  void AckCqEvents(ibv_cq* cq, unsigned int count) override;
  int PostSend(ibv_qp* qp, ibv_send_wr* list, ibv_send_wr** bad) override;
  int PostRecv(ibv_qp* qp, ibv_recv_wr* list, ibv_recv_wr** bad) override;
  int ModifyQp(ibv_qp* qp, ibv_qp_attr* attributes, int mask) override;
  int QueryQp(ibv_qp* qp, ibv_qp_attr* attributes, int mask, ibv_qp_init_attr* init) override;
  int GetAsyncEvent(ibv_context* context, ibv_async_event* event) override;
  void AckAsyncEvent(ibv_async_event* event) override;

  rdma_event_channel* CreateEventChannel() override;
  void DestroyEventChannel(rdma_event_channel* channel) override;
  int CreateId(rdma_event_channel* channel, rdma_cm_id** id, void* id_context) override;
  int DestroyId(rdma_cm_id* id) override;
  int BindAddr(rdma_cm_id* id, sockaddr* address) override;
  int ResolveAddr(rdma_cm_id* id, sockaddr* source, sockaddr* target, int timeout_ms) override;
  int ResolveRoute(rdma_cm_id* id, int timeout_ms) override;
  int CreateQp(rdma_cm_id* id, ibv_pd* pd, ibv_qp_init_attr* attributes) override;
  void DestroyQp(rdma_cm_id* id) override;
  int Listen(rdma_cm_id* id, int backlog) override;
  int Connect(rdma_cm_id* id, rdma_conn_param* parameters) override;
  int Accept(rdma_cm_id* id, rdma_conn_param* parameters) override;
  int Reject(rdma_cm_id* id, const void* private_data, uint8_t bytes) override;
  int Disconnect(rdma_cm_id* id) override;
  int SetOption(rdma_cm_id* id, int level, int option, void* value, size_t bytes) override;
  int GetCmEvent(rdma_event_channel* channel, rdma_cm_event** event) override;
  int AckCmEvent(rdma_cm_event* event) override;
  uint16_t GetSrcPort(rdma_cm_id* id) override;

 private:
  friend class Fabric;
  friend struct State;
  // Counts a fallible call. The errno with which it must fail, or 0. Lock held.
  int Enter(Call call, std::optional<ibv_wr_opcode> opcode = {});

  const std::shared_ptr<State> state_;
  const int number_;
  std::list<std::unique_ptr<FakeDevice>> devices_;
  bool dead_ = false;
  int async_unacknowledged_ = 0;
  std::vector<Call> calls_;
  struct CallFault {
    bool any;
    Call call;
    int left;
    int error;
    std::optional<ibv_wr_opcode> opcode = {};  // kPostSend: only such requests count
  };
  std::vector<CallFault> faults_;
  uint16_t next_port_ = 40000;
};

}  // namespace penstock::transport::rdma::fake
