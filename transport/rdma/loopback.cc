#include "transport/rdma/loopback.h"

#include <arpa/inet.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/random.h>

#include <array>
#include <cerrno>
#include <cstring>

#include "transport/rdma/cm.h"
#include "transport/rdma/queue_pair.h"

namespace penstock::transport::rdma {
namespace {

constexpr uint32_t kDepth = 4;
constexpr int kStepMs = 2000;

using Secret = std::array<std::byte, 16>;

class RdmaLoopback : public Loopback {
 public:
  RdmaLoopback(std::shared_ptr<Domain> domain, const std::string& address)
      : domain_(std::move(domain)), verbs_(domain_->verbs()), address_(address), name_(address) {}

  ~RdmaLoopback() override {
    near_.reset();
    far_.reset();
    if (near_id_ != nullptr) verbs_.DestroyId(near_id_);
    if (listening_ != nullptr) verbs_.DestroyId(listening_);
    if (registration_ != nullptr) verbs_.DeregMr(registration_);
    if (far_pd_ != nullptr) verbs_.DeallocPd(far_pd_);
    if (buffer_ != nullptr) munmap(buffer_, kMostBytes);
    cm_.reset();
  }

  Status Connect(std::shared_ptr<Verbs> verbs, Deadline deadline) {
    void* memory =
        mmap(nullptr, kMostBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return FailErrno("Cannot map memory for a loopback");
    buffer_ = static_cast<std::byte*>(memory);
    if (getrandom(secret_.data(), secret_.size(), 0) != static_cast<ssize_t>(secret_.size())) {
      return FailErrno("Cannot get random bytes");
    }
    ASSIGN_OR_RETURN(cm_, CmChannel::Open(std::move(verbs)));
    RETURN_IF_ERROR(Listen());
    RETURN_IF_ERROR(Dial(deadline));
    RETURN_IF_ERROR(Accept(deadline));
    ASSIGN_OR_RETURN([[maybe_unused]] const CmEvent event,
                     Expect(near_tag_, RDMA_CM_EVENT_ESTABLISHED, deadline));
    return {};
  }

  const std::string& name() const override { return name_; }

  Status Write(MemoryRegion& device, uint64_t offset, std::span<const std::byte> bytes,
               Deadline deadline) override {
    RETURN_IF_ERROR(Check(device, offset, bytes.size()));
    std::memcpy(buffer_, bytes.data(), bytes.size());
    return Move(device, offset, bytes.size(), IBV_WR_RDMA_READ, deadline);
  }

  Status Read(MemoryRegion& device, uint64_t offset, std::span<std::byte> bytes,
              Deadline deadline) override {
    RETURN_IF_ERROR(Check(device, offset, bytes.size()));
    ibv_recv_wr receive = {};
    ibv_recv_wr* bad = nullptr;
    if (const int error = verbs_.PostRecv(far_->qp(), &receive, &bad)) {
      errno = error;
      return FailErrno("Cannot post a receive on " + name_);
    }
    RETURN_IF_ERROR(Move(device, offset, bytes.size(), IBV_WR_RDMA_WRITE_WITH_IMM, deadline));
    // Only the receiver's completion says that the bytes are in place.
    RETURN_IF_ERROR(Await(far_->receive_cq(), deadline));
    std::memcpy(bytes.data(), buffer_, bytes.size());
    return {};
  }

 private:
  Result<CmEvent> Expect(uint64_t tag, rdma_cm_event_type wanted, Deadline deadline) {
    ASSIGN_OR_RETURN(const CmEvent event,
                     cm_->Wait(tag, Earlier(deadline, Deadline::After(kStepMs))));
    if (event.type == wanted) return event;
    return Fail(Code::kUnavailable, "A NIC (" + name_ +
                                        ") has no way to itself: " + EventName(event.type) +
                                        " (status " + std::to_string(event.status) + ").");
  }

  Status Listen() {
    ASSIGN_OR_RETURN(sockaddr_storage local, ParseAddress(address_, 0));
    ASSIGN_OR_RETURN(listening_, cm_->MakeId(&listening_tag_));
    if (verbs_.BindAddr(listening_, reinterpret_cast<sockaddr*>(&local)) != 0 ||
        verbs_.Listen(listening_, 1) != 0) {
      return FailErrno("Cannot listen for a loopback on " + address_);
    }
    return {};
  }

  Status Dial(Deadline deadline) {
    ASSIGN_OR_RETURN(sockaddr_storage source, ParseAddress(address_, 0));
    ASSIGN_OR_RETURN(sockaddr_storage target,
                     ParseAddress(address_, ntohs(verbs_.GetSrcPort(listening_))));
    ASSIGN_OR_RETURN(near_id_, cm_->MakeId(&near_tag_));
    if (verbs_.ResolveAddr(near_id_, reinterpret_cast<sockaddr*>(&source),
                           reinterpret_cast<sockaddr*>(&target), kStepMs) != 0) {
      return FailErrno("Cannot resolve " + address_);
    }
    RETURN_IF_ERROR(Expect(near_tag_, RDMA_CM_EVENT_ADDR_RESOLVED, deadline));
    if (verbs_.ResolveRoute(near_id_, kStepMs) != 0) {
      return FailErrno("Cannot find a route to " + address_);
    }
    RETURN_IF_ERROR(Expect(near_tag_, RDMA_CM_EVENT_ROUTE_RESOLVED, deadline));
    ASSIGN_OR_RETURN(device_, domain_->Use(near_id_->verbs));
    name_ = device_->name;
    QueuePairShape shape;
    shape.pd = device_->pd;
    shape.send_depth = shape.receive_depth = kDepth;
    shape.send_sge = 1;
    shape.reads = true;
    ASSIGN_OR_RETURN(near_, QueuePair::Make(verbs_, std::exchange(near_id_, nullptr), shape));
    rdma_conn_param parameters = {};
    parameters.private_data = secret_.data();
    parameters.private_data_len = static_cast<uint8_t>(secret_.size());
    parameters.initiator_depth = 1;
    parameters.retry_count = 6;
    parameters.rnr_retry_count = 7;
    if (verbs_.Connect(near_->id(), &parameters) != 0) {
      return FailErrno("Cannot connect a loopback on " + name_);
    }
    return {};
  }

  // Strangers are sent away; ours comes before the deadline.
  Result<rdma_cm_id*> AwaitRequest(Deadline deadline) {
    for (;;) {
      ASSIGN_OR_RETURN(const CmEvent event,
                       Expect(listening_tag_, RDMA_CM_EVENT_CONNECT_REQUEST, deadline));
      if (event.private_bytes >= secret_.size() &&
          std::memcmp(event.private_data.data(), secret_.data(), secret_.size()) == 0) {
        return event.request;
      }
      (void)verbs_.Reject(event.request, nullptr, 0);
      verbs_.DestroyId(event.request);
    }
  }

  Status Accept(Deadline deadline) {
    ASSIGN_OR_RETURN(rdma_cm_id * id, AwaitRequest(deadline));
    const auto drop = [&](tl::unexpected<Error> error) {
      verbs_.DestroyId(id);
      return error;
    };
    const uint64_t tag = cm_->Adopt(id);
    errno = ENOMEM;
    far_pd_ = verbs_.AllocPd(id->verbs);
    if (far_pd_ == nullptr) return drop(FailErrno("Cannot make a protection domain on " + name_));
    registration_ =
        verbs_.RegMr(far_pd_, buffer_, kMostBytes,
                     IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE);
    if (registration_ == nullptr) {
      return drop(FailErrno("Cannot register memory for a loopback on " + name_));
    }
    QueuePairShape shape;
    shape.pd = far_pd_;
    shape.send_depth = shape.receive_depth = kDepth;
    shape.send_sge = 1;
    ASSIGN_OR_RETURN(far_, QueuePair::Make(verbs_, id, shape));
    rdma_conn_param parameters = {};
    parameters.responder_resources = 1;
    parameters.retry_count = 6;
    parameters.rnr_retry_count = 7;
    if (verbs_.Accept(id, &parameters) != 0) {
      return FailErrno("Cannot accept a loopback on " + name_);
    }
    RETURN_IF_ERROR(Expect(tag, RDMA_CM_EVENT_ESTABLISHED, deadline));
    return {};
  }

  Status Check(const MemoryRegion& device, uint64_t offset, size_t bytes) const {
    if (bytes == 0 || bytes > kMostBytes || offset > device.size() ||
        bytes > device.size() - offset) {
      return Fail(Code::kInvalidArgument, "A move through a loopback has an impossible size (" +
                                              std::to_string(bytes) + ").");
    }
    return {};
  }

  Status Move(MemoryRegion& device, uint64_t offset, size_t bytes, ibv_wr_opcode opcode,
              Deadline deadline) {
    ibv_sge part = {};
    if (!domain_->LocalKeyOn(device, *device_, &part.lkey)) {
      return Fail(Code::kUnsupported, "A NIC (" + name_ + ") does not know the memory.");
    }
    part.addr = reinterpret_cast<uintptr_t>(device.address()) + offset;
    part.length = static_cast<uint32_t>(bytes);
    ibv_send_wr request = {};
    request.wr_id = near_->ledger().Take();
    request.sg_list = &part;
    request.num_sge = 1;
    request.opcode = opcode;
    request.send_flags = IBV_SEND_SIGNALED;
    request.wr.rdma.remote_addr = reinterpret_cast<uintptr_t>(buffer_);
    request.wr.rdma.rkey = registration_->rkey;
    ibv_send_wr* bad = nullptr;
    if (const int error = verbs_.PostSend(near_->qp(), &request, &bad)) {
      errno = error;
      return FailErrno("Cannot post a request on " + name_);
    }
    RETURN_IF_ERROR(Await(near_->send_cq(), deadline));
    near_->ledger().Complete(request.wr_id);
    return {};
  }

  Status Await(ibv_cq* queue, Deadline deadline) {
    ibv_wc completion = {};
    int got;
    while ((got = verbs_.PollCq(queue, 1, &completion)) == 0) {
      if (deadline.expired()) {
        return Fail(Code::kTimeout, "A move through a NIC (" + name_ + ") does not end.");
      }
      sched_yield();
    }
    if (got == 1 && completion.status == IBV_WC_SUCCESS) return {};
    return Fail(
        Code::kUnavailable,
        "A move through a NIC (" + name_ + ") fails: " +
            (got == 1 ? CompletionName(completion.status) : "its completion queue is lost") + ".");
  }

  const std::shared_ptr<Domain> domain_;
  Verbs& verbs_;
  const std::string address_;
  std::string name_;  // the address until the device is known
  Secret secret_{};
  std::unique_ptr<CmChannel> cm_;
  rdma_cm_id* listening_ = nullptr;
  rdma_cm_id* near_id_ = nullptr;  // until near_ has it
  uint64_t listening_tag_ = 0, near_tag_ = 0;
  Domain::Device* device_ = nullptr;
  ibv_pd* far_pd_ = nullptr;
  ibv_mr* registration_ = nullptr;
  std::byte* buffer_ = nullptr;
  std::unique_ptr<QueuePair> near_, far_;
};

}  // namespace

Result<std::unique_ptr<Loopback>> OpenLoopback(std::shared_ptr<Domain> domain,
                                               const std::string& address, Deadline deadline) {
  auto verbs = domain->shared_verbs();
  auto loopback = std::make_unique<RdmaLoopback>(std::move(domain), address);
  RETURN_IF_ERROR(loopback->Connect(std::move(verbs), deadline));
  return std::unique_ptr<Loopback>(std::move(loopback));
}

}  // namespace penstock::transport::rdma
