// The server's half of making queue pairs, and the addresses of this machine.
//
// A request is checked wholly before anything is made for it: a stranger, who does not know the
// token, costs a rejection and nothing else.
#include <ifaddrs.h>
#include <net/if.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "transport/rdma/connection.h"

namespace penstock::transport::rdma {
namespace {

constexpr int kBacklog = 16;

bool SameToken(const Token& a, const Token& b) {
  uint8_t difference = 0;
  for (size_t i = 0; i < a.size(); ++i) difference |= static_cast<uint8_t>(a[i] ^ b[i]);
  return difference == 0;
}

}  // namespace

Result<Rejection> RdmaConnection::CheckRequest(const CmEvent& event, ConnectRequest* request) {
  if (event.private_bytes < sizeof *request) return Rejection::kMalformed;
  std::memcpy(request, event.private_data.data(), sizeof *request);
  if (request->magic != kRequestMagic) return Rejection::kMalformed;
  if (request->version != 1) return Rejection::kVersion;
  if (!SameToken(request->token, token_)) return Rejection::kToken;
  if (closed()) return Rejection::kClosing;
  if (request->rail >= kMaxRails || request->rail_count > kMaxRails || request->generation == 0) {
    return Rejection::kMalformed;
  }
  if (request->slot_bytes != options_.slot_bytes || request->max_frame != options_.max_frame ||
      request->slots < 2 * kReservedCredits || request->slots > 512) {
    return Rejection::kShape;
  }
  std::lock_guard lock(links_mutex_);
  if (request->role == QueuePairRole::kControl) {
    return request->generation > control_generation_ ? Rejection::kNone : Rejection::kStale;
  }
  if (request->role != QueuePairRole::kBulk) return Rejection::kMalformed;
  return request->generation > rails_[request->rail].generation ? Rejection::kNone
                                                                : Rejection::kStale;
}

void RdmaConnection::OnRequest(const CmEvent& event) {
  ConnectRequest request;
  const auto reject = [&](Rejection why) {
    ConnectReply reply;
    reply.rejection = why;
    (void)verbs_->Reject(event.request, &reply, sizeof reply);
    verbs_->DestroyId(event.request);
  };
  const Rejection why = *CheckRequest(event, &request);
  if (why == Rejection::kClosing) return reject(why);
  if (why != Rejection::kNone) {
    LOG_WARNING("transport", "A request for a queue pair is rejected (reason %u).",
                static_cast<unsigned>(why));
    return reject(why);
  }
  if (Status accepted = AcceptQueuePair(event.request, request, event.peer_reads); !accepted) {
    LOG_WARNING("transport", "A queue pair of the client cannot be accepted: %s",
                accepted.error().message.c_str());
  }
}

// Has the id, whatever happens.
Status RdmaConnection::AcceptQueuePair(rdma_cm_id* id, const ConnectRequest& request,
                                       uint8_t peer_reads) {
  const bool control = request.role == QueuePairRole::kControl;
  Pending pending;
  pending.request = request;
  pending.tag = cm_->Adopt(id);
  const auto refuse = [&](Error error) {
    ConnectReply reply;
    reply.rejection = Rejection::kResources;
    (void)verbs_->Reject(id, &reply, sizeof reply);
    if (pending.queue_pair != nullptr) {
      pending.queue_pair.reset();  // with the id
    } else {
      verbs_->DestroyId(id);
    }
    if (control) control_->TakeBackReceives();
    cm_->Forget(pending.tag);
    return tl::unexpected<Error>(std::move(error));
  };
  if (control) {
    // The old one must be over before we say what has been received.
    std::erase_if(pending_,
                  [](const Pending& each) { return each.request.role == QueuePairRole::kControl; });
    control_->Remove();
    control_->TakeBackReceives();
    if (lost_since_ns_.load() == 0) lost_since_ns_.store(NowNanoseconds());
  }
  auto device = domain_->Use(id->verbs);
  if (!device) return refuse(device.error());
  device_events_->Watch((*device)->context);
  if (!control) domain_->AssignRail(request.rail, *device);
  auto shape = control ? control_->ShapeFor(**device) : bulk_->ShapeFor(**device);
  if (!shape) return refuse(shape.error());
  auto queue_pair = QueuePair::Make(*verbs_, id, *shape);
  if (!queue_pair) return refuse(queue_pair.error());
  pending.queue_pair = std::move(*queue_pair);
  Status posted = control ? control_->PostReceives(*pending.queue_pair, **device)
                          : bulk_->PostReceives(*pending.queue_pair);
  if (!posted) return refuse(posted.error());

  ConnectReply reply;
  reply.slots = static_cast<uint16_t>(options_.slots);
  reply.received = control ? control_->received() : 0;
  uint8_t timeout = options_.timeout;
  (void)verbs_->SetOption(id, RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT, &timeout, sizeof timeout);
  // rdma_cm leaves it to us to stay below what the peer can answer; iWARP may not say.
  if (!control) {
    pending.reads = ReadDepth(*verbs_, id->verbs, ReadSide::kStarts);
    if (peer_reads != 0) pending.reads = std::min(pending.reads, peer_reads);
  }
  rdma_conn_param parameters = {};
  parameters.private_data = &reply;
  parameters.private_data_len = sizeof reply;
  parameters.responder_resources = 0;  // nobody reads from the server
  parameters.initiator_depth = pending.reads;
  parameters.retry_count = options_.retry_count;
  parameters.rnr_retry_count = 7;
  if (verbs_->Accept(id, &parameters) != 0) {
    return refuse(FailErrno("Cannot accept a queue pair").value());
  }
  {
    std::lock_guard lock(links_mutex_);
    if (control) {
      control_generation_ = request.generation;
    } else {
      rails_[request.rail].generation = request.generation;
      rails_[request.rail].tag = pending.tag;
    }
  }
  pending_.push_back(std::move(pending));
  return {};
}

void RdmaConnection::OnEstablished(Pending pending) {
  if (Status settled = pending.queue_pair->Settle(options_, pending.reads); !settled) {
    LOG_WARNING("transport", "%s", settled.error().message.c_str());
    pending.queue_pair.reset();
    if (pending.request.role == QueuePairRole::kControl) control_->TakeBackReceives();
    return;
  }
  if (pending.request.role == QueuePairRole::kBulk) {
    {
      std::lock_guard lock(links_mutex_);
      rails_[pending.request.rail].since_ns = NowNanoseconds();
    }
    bulk_->Admit(pending.request.rail, pending.request.generation, std::move(pending.queue_pair));
    return;
  }
  {
    std::lock_guard lock(links_mutex_);
    control_tag_ = pending.tag;
  }
  if (!control_->Install(std::move(pending.queue_pair), pending.request.slots,
                         pending.request.received)) {
    Fail("The client says that it has received packets that were never sent.", LogLevel::kWarning);
    return;
  }
  lost_since_ns_.store(0);
}

// Until the client's control queue pair is there; what comes later is the keeper's.
Status RdmaConnection::AwaitPeer(Deadline deadline) {
  while (!control_->up()) {
    HandleCm();
    CheckLifeline();
    if (closed()) return penstock::Fail(Code::kUnavailable, close_reason());
    if (deadline.expired()) {
      return penstock::Fail(Code::kTimeout, "The client does not connect over RDMA in time.");
    }
    usleep(500);
  }
  return {};
}

namespace {

class RdmaListener : public Listener {
 public:
  RdmaListener(std::shared_ptr<Verbs> verbs, const RdmaOptions& options)
      : verbs_(std::move(verbs)), options_(options) {}
  ~RdmaListener() override {
    for (rdma_cm_id* id : ids_) verbs_->DestroyId(id);
  }

  Status Listen(const std::vector<std::string>& addresses) {
    ASSIGN_OR_RETURN(cm_, CmChannel::Open(verbs_));
    offer_.addresses = addresses;
    if (offer_.addresses.empty()) {
      ASSIGN_OR_RETURN(const auto rails, FindLocalRails(*verbs_));
      for (const LocalRail& rail : rails) offer_.addresses.push_back(rail.address);
    }
    if (offer_.addresses.size() > options_.most_rails) offer_.addresses.resize(options_.most_rails);
    if (offer_.addresses.size() > kMaxRails) offer_.addresses.resize(kMaxRails);
    if (offer_.addresses.empty()) {
      return Fail(Code::kUnsupported, "No RDMA device of this host has an address.");
    }
    for (const std::string& address : offer_.addresses) {
      ASSIGN_OR_RETURN(sockaddr_storage local, ParseAddress(address, offer_.port));
      uint64_t tag = 0;
      ASSIGN_OR_RETURN(rdma_cm_id * id, cm_->MakeId(&tag));
      ids_.push_back(id);
      if (verbs_->BindAddr(id, reinterpret_cast<sockaddr*>(&local)) != 0 ||
          verbs_->Listen(id, kBacklog) != 0) {
        return FailErrno("Cannot listen for RDMA connections on " + address);
      }
      if (offer_.port == 0) offer_.port = ntohs(verbs_->GetSrcPort(id));
    }
    return {};
  }

  const Offer& offer() const override { return offer_; }

  Result<std::unique_ptr<Connection>> Accept(const Token& token, UniqueFd lifeline,
                                             Deadline deadline) override {
    if (cm_ == nullptr) return Fail(Code::kInvalidArgument, "The listener has been used.");
    auto connection = std::make_unique<RdmaConnection>(verbs_, options_, token, false,
                                                       std::move(cm_), std::move(lifeline));
    connection->KeepListening(std::move(ids_), offer_);
    ids_.clear();
    RETURN_IF_ERROR(connection->Prepare());
    RETURN_IF_ERROR(connection->AwaitPeer(deadline));
    connection->Start();
    return std::unique_ptr<Connection>(std::move(connection));
  }

 private:
  const std::shared_ptr<Verbs> verbs_;
  const RdmaOptions options_;
  std::unique_ptr<CmChannel> cm_;
  std::vector<rdma_cm_id*> ids_;
  Offer offer_;
};

}  // namespace

Result<std::unique_ptr<Listener>> Listener::Open(std::shared_ptr<Verbs> verbs,
                                                 const RdmaOptions& options,
                                                 const std::vector<std::string>& addresses) {
  auto listener = std::make_unique<RdmaListener>(std::move(verbs), options);
  RETURN_IF_ERROR(listener->Listen(addresses));
  return std::unique_ptr<Listener>(std::move(listener));
}

// Asks the connection manager about each address of each interface: it knows which device serves
// it, whatever the fabric.
Result<std::vector<LocalRail>> FindLocalRails(Verbs& verbs) {
  std::vector<LocalRail> rails;
  rdma_event_channel* channel = verbs.CreateEventChannel();
  if (channel == nullptr) {
    return FailErrno("Cannot open the RDMA connection manager (/dev/infiniband/rdma_cm)");
  }
  ifaddrs* interfaces = nullptr;
  if (getifaddrs(&interfaces) != 0) {
    verbs.DestroyEventChannel(channel);
    return FailErrno("Cannot list the network interfaces");
  }
  for (const ifaddrs* each = interfaces; each != nullptr; each = each->ifa_next) {
    if (each->ifa_addr == nullptr || (each->ifa_flags & IFF_UP) == 0 ||
        (each->ifa_flags & IFF_LOOPBACK) != 0) {
      continue;
    }
    sockaddr_storage address = {};
    if (each->ifa_addr->sa_family == AF_INET) {
      std::memcpy(&address, each->ifa_addr, sizeof(sockaddr_in));
    } else if (each->ifa_addr->sa_family == AF_INET6) {
      std::memcpy(&address, each->ifa_addr, sizeof(sockaddr_in6));
      if (IN6_IS_ADDR_LINKLOCAL(&reinterpret_cast<sockaddr_in6*>(&address)->sin6_addr)) continue;
    } else {
      continue;
    }
    rdma_cm_id* id = nullptr;
    if (verbs.CreateId(channel, &id, nullptr) != 0) continue;
    if (verbs.BindAddr(id, reinterpret_cast<sockaddr*>(&address)) == 0 && id->verbs != nullptr) {
      rails.push_back({verbs.GetDeviceName(id->verbs->device),
                       FormatAddress(reinterpret_cast<sockaddr*>(&address))});
    }
    verbs.DestroyId(id);
  }
  freeifaddrs(interfaces);
  verbs.DestroyEventChannel(channel);
  return rails;
}

}  // namespace penstock::transport::rdma
