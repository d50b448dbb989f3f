// The verbs and rdma_cm calls that Penstock makes, as a table, so that the same code runs on a real
// NIC, on soft-RoCE and on the adversarial provider of the tests.
//
// Each method is the libibverbs or librdmacm function of its name: same arguments, same return
// value (0, or an errno value, or -1 with errno set, as the man page says), same blocking. The
// structs are rdma-core's own; a provider other than the real one makes its own derived structs and
// may not rely on anything behind their public fields. Price: one virtual call per verb, about 2 ns
// next to the 40 ns of a doorbell.
#pragma once

#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>

#include <memory>

#include "common/result.h"

namespace penstock::transport::rdma {

class Verbs {
 public:
  virtual ~Verbs() = default;

  // libibverbs
  virtual ibv_device** GetDeviceList(int* count) = 0;
  virtual void FreeDeviceList(ibv_device** list) = 0;
  virtual const char* GetDeviceName(ibv_device* device) = 0;
  virtual ibv_context* OpenDevice(ibv_device* device) = 0;
  virtual int CloseDevice(ibv_context* context) = 0;
  virtual int QueryDevice(ibv_context* context, ibv_device_attr* attributes) = 0;
  virtual int QueryPort(ibv_context* context, uint8_t port, ibv_port_attr* attributes) = 0;
  virtual int QueryGid(ibv_context* context, uint8_t port, int index, ibv_gid* gid) = 0;
  virtual ibv_pd* AllocPd(ibv_context* context) = 0;
  virtual int DeallocPd(ibv_pd* pd) = 0;
  virtual ibv_mr* RegMr(ibv_pd* pd, void* address, size_t bytes, int access) = 0;
  virtual ibv_mr* RegDmabufMr(ibv_pd* pd, uint64_t offset, size_t bytes, uint64_t iova, int fd,
                              int access) = 0;
  virtual int DeregMr(ibv_mr* mr) = 0;
  virtual ibv_comp_channel* CreateCompChannel(ibv_context* context) = 0;
  virtual int DestroyCompChannel(ibv_comp_channel* channel) = 0;
  virtual ibv_cq* CreateCq(ibv_context* context, int entries, void* cq_context,
                           ibv_comp_channel* channel, int vector) = 0;
  virtual int DestroyCq(ibv_cq* cq) = 0;
  virtual int PollCq(ibv_cq* cq, int entries, ibv_wc* completions) = 0;
  virtual int ReqNotifyCq(ibv_cq* cq, int solicited_only) = 0;
  virtual int GetCqEvent(ibv_comp_channel* channel, ibv_cq** cq, void** cq_context) = 0;
  virtual void AckCqEvents(ibv_cq* cq, unsigned int count) = 0;
  virtual int PostSend(ibv_qp* qp, ibv_send_wr* list, ibv_send_wr** bad) = 0;
  virtual int PostRecv(ibv_qp* qp, ibv_recv_wr* list, ibv_recv_wr** bad) = 0;
  virtual int ModifyQp(ibv_qp* qp, ibv_qp_attr* attributes, int mask) = 0;
  virtual int QueryQp(ibv_qp* qp, ibv_qp_attr* attributes, int mask, ibv_qp_init_attr* init) = 0;
  virtual int GetAsyncEvent(ibv_context* context, ibv_async_event* event) = 0;
  virtual void AckAsyncEvent(ibv_async_event* event) = 0;

  // librdmacm
  virtual rdma_event_channel* CreateEventChannel() = 0;
  virtual void DestroyEventChannel(rdma_event_channel* channel) = 0;
  virtual int CreateId(rdma_event_channel* channel, rdma_cm_id** id, void* id_context) = 0;
  virtual int DestroyId(rdma_cm_id* id) = 0;
  virtual int BindAddr(rdma_cm_id* id, sockaddr* address) = 0;
  virtual int ResolveAddr(rdma_cm_id* id, sockaddr* source, sockaddr* target, int timeout_ms) = 0;
  virtual int ResolveRoute(rdma_cm_id* id, int timeout_ms) = 0;
  virtual int CreateQp(rdma_cm_id* id, ibv_pd* pd, ibv_qp_init_attr* attributes) = 0;
  virtual void DestroyQp(rdma_cm_id* id) = 0;  // rdma_destroy_qp
  virtual int Listen(rdma_cm_id* id, int backlog) = 0;
  virtual int Connect(rdma_cm_id* id, rdma_conn_param* parameters) = 0;
  virtual int Accept(rdma_cm_id* id, rdma_conn_param* parameters) = 0;
  virtual int Reject(rdma_cm_id* id, const void* private_data, uint8_t bytes) = 0;
  virtual int Disconnect(rdma_cm_id* id) = 0;
  virtual int SetOption(rdma_cm_id* id, int level, int option, void* value, size_t bytes) = 0;
  virtual int GetCmEvent(rdma_event_channel* channel, rdma_cm_event** event) = 0;
  virtual int AckCmEvent(rdma_cm_event* event) = 0;
  virtual uint16_t GetSrcPort(rdma_cm_id* id) = 0;  // network order, as rdma_get_src_port
};

// Opens libibverbs.so.1 and librdmacm.so.1. kUnsupported where rdma-core is not installed; the
// message names the library. Nothing is linked, so a host without them loses nothing but this.
Result<std::shared_ptr<Verbs>> LoadVerbs();

}  // namespace penstock::transport::rdma
