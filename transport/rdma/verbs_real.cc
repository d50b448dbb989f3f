// The table over the machine's own rdma-core, opened at run time.
//
// rdma-core's headers are half of its interface: some calls are inline functions that go through
// the provider's table in the context (poll, post, notify), some are macros that choose between two
// symbols (ibv_reg_mr, ibv_query_port), and most symbols exist in two versions, the older of which
// takes other structs. So each call is resolved here by the symbol that the header would have
// linked, in the version that it would have got, and the inline ones are used as they are.
//
// ibv_fork_init is not called: it splits mappings until the process has no more of them, and
// kernels since 5.12 do not need it.
#include <dlfcn.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "transport/rdma/verbs.h"

// The symbols, not the macros of the headers.
#undef ibv_get_device_list
#undef ibv_query_port
#undef ibv_reg_mr

namespace penstock::transport::rdma {
namespace {

// Every symbol with its version. `needed` is false for what old releases do not have.
#define PENSTOCK_VERBS_SYMBOLS(X)                         \
  X(verbs, ibv_get_device_list, "IBVERBS_1.1", true)      \
  X(verbs, ibv_free_device_list, "IBVERBS_1.1", true)     \
  X(verbs, ibv_get_device_name, "IBVERBS_1.1", true)      \
  X(verbs, ibv_open_device, "IBVERBS_1.1", true)          \
  X(verbs, ibv_close_device, "IBVERBS_1.1", true)         \
  X(verbs, ibv_query_device, "IBVERBS_1.1", true)         \
  X(verbs, ibv_query_port, "IBVERBS_1.1", true)           \
  X(verbs, ibv_query_gid, "IBVERBS_1.1", true)            \
  X(verbs, ibv_alloc_pd, "IBVERBS_1.1", true)             \
  X(verbs, ibv_dealloc_pd, "IBVERBS_1.1", true)           \
  X(verbs, ibv_reg_mr, "IBVERBS_1.1", true)               \
  X(verbs, ibv_reg_mr_iova2, "IBVERBS_1.8", false)        \
  X(verbs, ibv_reg_dmabuf_mr, "IBVERBS_1.12", false)      \
  X(verbs, ibv_dereg_mr, "IBVERBS_1.1", true)             \
  X(verbs, ibv_create_comp_channel, "IBVERBS_1.0", true)  \
  X(verbs, ibv_destroy_comp_channel, "IBVERBS_1.0", true) \
  X(verbs, ibv_create_cq, "IBVERBS_1.1", true)            \
  X(verbs, ibv_destroy_cq, "IBVERBS_1.1", true)           \
  X(verbs, ibv_get_cq_event, "IBVERBS_1.1", true)         \
  X(verbs, ibv_ack_cq_events, "IBVERBS_1.1", true)        \
  X(verbs, ibv_modify_qp, "IBVERBS_1.1", true)            \
  X(verbs, ibv_query_qp, "IBVERBS_1.1", true)             \
  X(verbs, ibv_get_async_event, "IBVERBS_1.1", true)      \
  X(verbs, ibv_ack_async_event, "IBVERBS_1.1", true)      \
  X(cm, rdma_create_event_channel, "RDMACM_1.0", true)    \
  X(cm, rdma_destroy_event_channel, "RDMACM_1.0", true)   \
  X(cm, rdma_create_id, "RDMACM_1.0", true)               \
  X(cm, rdma_destroy_id, "RDMACM_1.0", true)              \
  X(cm, rdma_bind_addr, "RDMACM_1.0", true)               \
  X(cm, rdma_resolve_addr, "RDMACM_1.0", true)            \
  X(cm, rdma_resolve_route, "RDMACM_1.0", true)           \
  X(cm, rdma_create_qp, "RDMACM_1.0", true)               \
  X(cm, rdma_destroy_qp, "RDMACM_1.0", true)              \
  X(cm, rdma_listen, "RDMACM_1.0", true)                  \
  X(cm, rdma_connect, "RDMACM_1.0", true)                 \
  X(cm, rdma_accept, "RDMACM_1.0", true)                  \
  X(cm, rdma_reject, "RDMACM_1.0", true)                  \
  X(cm, rdma_disconnect, "RDMACM_1.0", true)              \
  X(cm, rdma_set_option, "RDMACM_1.0", true)              \
  X(cm, rdma_get_cm_event, "RDMACM_1.0", true)            \
  X(cm, rdma_ack_cm_event, "RDMACM_1.0", true)            \
  X(cm, rdma_get_src_port, "RDMACM_1.0", true)

struct Symbols {
#define PENSTOCK_MEMBER(library, name, version, needed) decltype(&::name) name##_ = nullptr;
  PENSTOCK_VERBS_SYMBOLS(PENSTOCK_MEMBER)
#undef PENSTOCK_MEMBER
};

class RealVerbs final : public Verbs {
 public:
  explicit RealVerbs(const Symbols& symbols) : s_(symbols) {}

  ibv_device** GetDeviceList(int* count) override { return s_.ibv_get_device_list_(count); }
  void FreeDeviceList(ibv_device** list) override { s_.ibv_free_device_list_(list); }
  const char* GetDeviceName(ibv_device* device) override { return s_.ibv_get_device_name_(device); }
  ibv_context* OpenDevice(ibv_device* device) override { return s_.ibv_open_device_(device); }
  int CloseDevice(ibv_context* context) override { return s_.ibv_close_device_(context); }
  int QueryDevice(ibv_context* context, ibv_device_attr* attributes) override {
    return s_.ibv_query_device_(context, attributes);
  }
  int QueryPort(ibv_context* context, uint8_t port, ibv_port_attr* attributes) override {
    // As the header does: the provider's own call knows the newer fields.
    verbs_context* extended = verbs_get_ctx_op(context, query_port);
    if (extended != nullptr) {
      return extended->query_port(context, port, attributes, sizeof *attributes);
    }
    std::memset(attributes, 0, sizeof *attributes);
    return s_.ibv_query_port_(context, port, reinterpret_cast<_compat_ibv_port_attr*>(attributes));
  }
  int QueryGid(ibv_context* context, uint8_t port, int index, ibv_gid* gid) override {
    return s_.ibv_query_gid_(context, port, index, gid);
  }
  ibv_pd* AllocPd(ibv_context* context) override { return s_.ibv_alloc_pd_(context); }
  int DeallocPd(ibv_pd* pd) override { return s_.ibv_dealloc_pd_(pd); }
  ibv_mr* RegMr(ibv_pd* pd, void* address, size_t bytes, int access) override {
    // ibv_reg_mr_iova2 drops optional flags (relaxed ordering) that the kernel does not know.
    if (s_.ibv_reg_mr_iova2_ == nullptr) {
      return s_.ibv_reg_mr_(pd, address, bytes, access & ~IBV_ACCESS_OPTIONAL_RANGE);
    }
    return s_.ibv_reg_mr_iova2_(pd, address, bytes, reinterpret_cast<uintptr_t>(address),
                                static_cast<unsigned>(access));
  }
  ibv_mr* RegDmabufMr(ibv_pd* pd, uint64_t offset, size_t bytes, uint64_t iova, int fd,
                      int access) override {
    if (s_.ibv_reg_dmabuf_mr_ == nullptr) {
      errno = EOPNOTSUPP;
      return nullptr;
    }
    return s_.ibv_reg_dmabuf_mr_(pd, offset, bytes, iova, fd, access);
  }
  int DeregMr(ibv_mr* mr) override { return s_.ibv_dereg_mr_(mr); }
  ibv_comp_channel* CreateCompChannel(ibv_context* context) override {
    return s_.ibv_create_comp_channel_(context);
  }
  int DestroyCompChannel(ibv_comp_channel* channel) override {
    return s_.ibv_destroy_comp_channel_(channel);
  }
  ibv_cq* CreateCq(ibv_context* context, int entries, void* cq_context, ibv_comp_channel* channel,
                   int vector) override {
    return s_.ibv_create_cq_(context, entries, cq_context, channel, vector);
  }
  int DestroyCq(ibv_cq* cq) override { return s_.ibv_destroy_cq_(cq); }
  int PollCq(ibv_cq* cq, int entries, ibv_wc* completions) override {
    return ibv_poll_cq(cq, entries, completions);
  }
  int ReqNotifyCq(ibv_cq* cq, int solicited_only) override {
    return ibv_req_notify_cq(cq, solicited_only);
  }
  int GetCqEvent(ibv_comp_channel* channel, ibv_cq** cq, void** cq_context) override {
    return s_.ibv_get_cq_event_(channel, cq, cq_context);
  }
  void AckCqEvents(ibv_cq* cq, unsigned int count) override { s_.ibv_ack_cq_events_(cq, count); }
  int PostSend(ibv_qp* qp, ibv_send_wr* list, ibv_send_wr** bad) override {
    return ibv_post_send(qp, list, bad);
  }
  int PostRecv(ibv_qp* qp, ibv_recv_wr* list, ibv_recv_wr** bad) override {
    return ibv_post_recv(qp, list, bad);
  }
  int ModifyQp(ibv_qp* qp, ibv_qp_attr* attributes, int mask) override {
    return s_.ibv_modify_qp_(qp, attributes, mask);
  }
  int QueryQp(ibv_qp* qp, ibv_qp_attr* attributes, int mask, ibv_qp_init_attr* init) override {
    return s_.ibv_query_qp_(qp, attributes, mask, init);
  }
  int GetAsyncEvent(ibv_context* context, ibv_async_event* event) override {
    return s_.ibv_get_async_event_(context, event);
  }
  void AckAsyncEvent(ibv_async_event* event) override { s_.ibv_ack_async_event_(event); }

  rdma_event_channel* CreateEventChannel() override { return s_.rdma_create_event_channel_(); }
  void DestroyEventChannel(rdma_event_channel* channel) override {
    s_.rdma_destroy_event_channel_(channel);
  }
  int CreateId(rdma_event_channel* channel, rdma_cm_id** id, void* id_context) override {
    return s_.rdma_create_id_(channel, id, id_context, RDMA_PS_TCP);
  }
  int DestroyId(rdma_cm_id* id) override { return s_.rdma_destroy_id_(id); }
  int BindAddr(rdma_cm_id* id, sockaddr* address) override {
    return s_.rdma_bind_addr_(id, address);
  }
  int ResolveAddr(rdma_cm_id* id, sockaddr* source, sockaddr* target, int timeout_ms) override {
    return s_.rdma_resolve_addr_(id, source, target, timeout_ms);
  }
  int ResolveRoute(rdma_cm_id* id, int timeout_ms) override {
    return s_.rdma_resolve_route_(id, timeout_ms);
  }
  int CreateQp(rdma_cm_id* id, ibv_pd* pd, ibv_qp_init_attr* attributes) override {
    return s_.rdma_create_qp_(id, pd, attributes);
  }
  void DestroyQp(rdma_cm_id* id) override { s_.rdma_destroy_qp_(id); }
  int Listen(rdma_cm_id* id, int backlog) override { return s_.rdma_listen_(id, backlog); }
  int Connect(rdma_cm_id* id, rdma_conn_param* parameters) override {
    return s_.rdma_connect_(id, parameters);
  }
  int Accept(rdma_cm_id* id, rdma_conn_param* parameters) override {
    return s_.rdma_accept_(id, parameters);
  }
  int Reject(rdma_cm_id* id, const void* private_data, uint8_t bytes) override {
    return s_.rdma_reject_(id, private_data, bytes);
  }
  int Disconnect(rdma_cm_id* id) override { return s_.rdma_disconnect_(id); }
  int SetOption(rdma_cm_id* id, int level, int option, void* value, size_t bytes) override {
    return s_.rdma_set_option_(id, level, option, value, bytes);
  }
  int GetCmEvent(rdma_event_channel* channel, rdma_cm_event** event) override {
    return s_.rdma_get_cm_event_(channel, event);
  }
  int AckCmEvent(rdma_cm_event* event) override { return s_.rdma_ack_cm_event_(event); }
  uint16_t GetSrcPort(rdma_cm_id* id) override { return s_.rdma_get_src_port_(id); }

 private:
  const Symbols s_;
};

// dlsym without a version would also do today; the version says which struct layout is meant.
void* Find(void* library, const char* name, const char* version) {
  void* symbol = dlvsym(library, name, version);
  return symbol != nullptr ? symbol : dlsym(library, name);
}

Result<void*> Open(const char* name, const char* package) {
  void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  if (library != nullptr) return library;
  const char* reason = dlerror();
  return Fail(Code::kUnsupported, "RDMA needs the library (" + std::string(name) + ", package " +
                                      package + "), which cannot be opened: " +
                                      (reason != nullptr ? reason : "unknown reason") + ".");
}

}  // namespace

Result<std::shared_ptr<Verbs>> LoadVerbs() {
  // Never closed: providers keep threads and fork handlers.
  ASSIGN_OR_RETURN(void* const verbs, Open("libibverbs.so.1", "libibverbs1"));
  ASSIGN_OR_RETURN(void* const cm, Open("librdmacm.so.1", "librdmacm1"));
  Symbols symbols;
#define PENSTOCK_RESOLVE(library, name, version, needed)                                \
  symbols.name##_ = reinterpret_cast<decltype(&::name)>(Find(library, #name, version)); \
  if (needed && symbols.name##_ == nullptr) {                                           \
    return Fail(Code::kUnsupported,                                                     \
                "The installed rdma-core has no symbol (" #name ", " version ").");     \
  }
  PENSTOCK_VERBS_SYMBOLS(PENSTOCK_RESOLVE)
#undef PENSTOCK_RESOLVE
  return std::make_shared<RealVerbs>(symbols);
}

}  // namespace penstock::transport::rdma
