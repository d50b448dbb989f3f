// The client's half of making queue pairs: dialling the control queue pair and the rails, at first
// and whenever one has failed.
#include <algorithm>
#include <cerrno>
#include <cstring>

#include "transport/rdma/connection.h"

namespace penstock::transport::rdma {
namespace {

constexpr int64_t kFirstPauseMs = 10, kLastPauseMs = 1'000;

const char* RejectionText(Rejection rejection) {
  switch (rejection) {
    case Rejection::kVersion:
      return "it speaks another version of the protocol";
    case Rejection::kToken:
      return "the session's token is wrong";
    case Rejection::kStale:
      return "a newer connection of this session is there";
    case Rejection::kShape:
      return "the two ends are configured with different packet or frame sizes";
    case Rejection::kResources:
      return "it cannot make a queue pair; its log says why";
    case Rejection::kClosing:
      return "the session is ending";
    default:
      return "it calls the request malformed";
  }
}

}  // namespace

Result<CmEvent> RdmaConnection::Expect(uint64_t tag, rdma_cm_event_type wanted,
                                       const std::string& what, Deadline deadline) {
  auto event = cm_->Wait(tag, deadline, &stop_);
  if (!event) {
    return penstock::Fail(Code::kTimeout, what + " takes too long.");
  }
  if (event->type == wanted) return *event;
  std::string text = what + " fails: " + EventName(event->type);
  if (event->type == RDMA_CM_EVENT_REJECTED) {
    ConnectReply reply;
    if (event->private_bytes >= sizeof reply) {
      std::memcpy(&reply, event->private_data.data(), sizeof reply);
    }
    if (event->private_bytes >= sizeof reply && reply.magic == kReplyMagic) {
      if (reply.rejection == Rejection::kClosing)
        Fail("The peer closed the connection.", LogLevel::kInfo);
      text += std::string(" because ") + RejectionText(reply.rejection);
    } else {
      text += " (status " + std::to_string(event->status) + "; nobody listens there)";
    }
  } else if (event->status != 0) {
    text += std::string(" (") + strerror(std::abs(event->status)) + ")";
  }
  return penstock::Fail(Code::kUnavailable, text + ".");
}

Result<ConnectReply> RdmaConnection::FinishDial(rdma_cm_id* id, uint64_t tag,
                                                const ConnectRequest& request, Deadline deadline) {
  uint8_t timeout = options_.timeout;
  // Older kernels do not know it; then the system's value holds.
  (void)verbs_->SetOption(id, RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT, &timeout, sizeof timeout);
  rdma_conn_param parameters = {};
  parameters.private_data = &request;
  parameters.private_data_len = sizeof request;
  parameters.responder_resources =
      request.role == QueuePairRole::kBulk ? ReadDepth(*verbs_, id->verbs, ReadSide::kAnswers) : 0;
  parameters.initiator_depth = 0;
  parameters.retry_count = options_.retry_count;
  parameters.rnr_retry_count = 7;
  if (verbs_->Connect(id, &parameters) != 0) return FailErrno("Cannot connect a queue pair");
  ASSIGN_OR_RETURN(const CmEvent event,
                   Expect(tag, RDMA_CM_EVENT_ESTABLISHED, "Connecting a queue pair", deadline));
  ConnectReply reply;
  if (event.private_bytes < sizeof reply) {
    return penstock::Fail(Code::kProtocol, "The server accepts a queue pair without a reply.");
  }
  std::memcpy(&reply, event.private_data.data(), sizeof reply);
  if (reply.magic != kReplyMagic || reply.rejection != Rejection::kNone) {
    return penstock::Fail(Code::kProtocol, "The server accepts a queue pair with a bad reply.");
  }
  return reply;
}

// The next number of a role and rail. They are 16 bits wide and compared by size, so there is none
// after the last: a rail then stays down, and a session whose control queue pair has used all ends.
// One is taken for each queue pair that the server hears of, so this takes weeks of a fabric that
// comes and goes every few seconds.
Result<uint16_t> RdmaConnection::NextGeneration(QueuePairRole role, uint32_t rail) {
  std::lock_guard lock(links_mutex_);
  uint16_t& newest =
      role == QueuePairRole::kControl ? control_generation_ : rails_[rail].generation;
  if (newest + 1 == kRailRefused) {
    return penstock::Fail(Code::kResourceExhausted,
                          "A session has made as many queue pairs as it can number (" +
                              std::to_string(newest) + ").");
  }
  return ++newest;
}

Result<RdmaConnection::Dialled> RdmaConnection::DialQueuePair(QueuePairRole role, uint32_t rail,
                                                              Deadline deadline) {
  deadline = Earlier(deadline, Deadline::After(dial_ms_));
  ASSIGN_OR_RETURN(sockaddr_storage target, ParseAddress(offer_.addresses[rail], offer_.port));
  sockaddr_storage local = {};
  const bool bound =
      rail < options_.local_addresses.size() && !options_.local_addresses[rail].empty();
  if (bound) {
    ASSIGN_OR_RETURN(local, ParseAddress(options_.local_addresses[rail], 0));
  }
  uint64_t tag = 0;
  ASSIGN_OR_RETURN(rdma_cm_id * id, cm_->MakeId(&tag));
  const Dialling dialling(*cm_, tag);
  const auto give_up = [&](Error error) {
    verbs_->DestroyId(id);
    cm_->Forget(tag);
    return tl::unexpected<Error>(std::move(error));
  };
  const std::string where = offer_.addresses[rail];
  uint8_t traffic_class = role == QueuePairRole::kControl ? options_.control_traffic_class
                                                          : options_.bulk_traffic_class;
  if (traffic_class != 0) {
    (void)verbs_->SetOption(id, RDMA_OPTION_ID, RDMA_OPTION_ID_TOS, &traffic_class,
                            sizeof traffic_class);
  }
  if (verbs_->ResolveAddr(id, bound ? reinterpret_cast<sockaddr*>(&local) : nullptr,
                          reinterpret_cast<sockaddr*>(&target), 2000) != 0) {
    return give_up(FailErrno("Cannot resolve " + where).value());
  }
  if (auto event = Expect(tag, RDMA_CM_EVENT_ADDR_RESOLVED, "Resolving " + where, deadline);
      !event) {
    return give_up(event.error());
  }
  if (verbs_->ResolveRoute(id, 2000) != 0) {
    return give_up(FailErrno("Cannot find a route to " + where).value());
  }
  if (auto event =
          Expect(tag, RDMA_CM_EVENT_ROUTE_RESOLVED, "Finding a route to " + where, deadline);
      !event) {
    return give_up(event.error());
  }
  auto device = domain_->Use(id->verbs);
  if (!device) return give_up(device.error());
  device_events_->Watch((*device)->context);
  if (role == QueuePairRole::kBulk) domain_->AssignRail(rail, *device);
  auto shape =
      role == QueuePairRole::kControl ? control_->ShapeFor(**device) : bulk_->ShapeFor(**device);
  if (!shape) return give_up(shape.error());

  ConnectRequest request;
  request.role = role;
  request.rail = static_cast<uint8_t>(rail);
  request.rail_count = static_cast<uint8_t>(offer_.addresses.size());
  auto generation = NextGeneration(role, rail);
  if (!generation) return give_up(generation.error());
  request.generation = *generation;
  request.slots = static_cast<uint16_t>(options_.slots);
  request.slot_bytes = options_.slot_bytes;
  request.token = token_;
  request.max_frame = options_.max_frame;
  if (role == QueuePairRole::kControl) request.received = control_->received();

  Dialled dialled;
  dialled.tag = tag;
  dialled.generation = *generation;
  auto queue_pair = QueuePair::Make(*verbs_, id, *shape);
  if (!queue_pair) return give_up(queue_pair.error());
  const auto finish = [&]() -> Status {  // the queue pair has the id from here on
    RETURN_IF_ERROR(role == QueuePairRole::kControl ? control_->PostReceives(**queue_pair, **device)
                                                    : bulk_->PostReceives(**queue_pair));
    ASSIGN_OR_RETURN(dialled.reply, FinishDial(id, tag, request, deadline));
    return (*queue_pair)->Settle(options_, 0);
  };
  if (Status finished = finish(); !finished) {
    queue_pair->reset();
    cm_->Forget(tag);
    if (role == QueuePairRole::kControl) control_->TakeBackReceives();
    if (finished.error().code == Code::kTimeout) dial_ms_ = std::min(2 * dial_ms_, kLastDialMs);
    return tl::unexpected<Error>(finished.error());
  }
  dial_ms_ = kFirstDialMs;
  dialled.queue_pair = std::move(*queue_pair);
  return dialled;
}

// Memory is registered once, perhaps while this rail cannot be connected, and its keys are with the
// server from then on. So the rail's device is found before it is dialled, by the address from
// which it will be: that needs no working link. Where even this fails, keys made until the rail
// connects do not name it, and such memory moves by the other rails.
void RdmaConnection::FindDevice(uint32_t rail) {
  auto local = ParseAddress(offer_.addresses[rail], offer_.port);
  if (!local) return;
  if (rail < options_.local_addresses.size() && !options_.local_addresses[rail].empty()) {
    local = ParseAddress(options_.local_addresses[rail], 0);
  } else if (const auto source = SourceFor(*local)) {
    local = *source;
  } else {
    return;
  }
  uint64_t tag = 0;
  auto id = cm_->MakeId(&tag);
  if (!local || !id) return;
  if (verbs_->BindAddr(*id, reinterpret_cast<sockaddr*>(&*local)) == 0 && (*id)->verbs != nullptr) {
    if (auto device = domain_->Use((*id)->verbs)) {
      device_events_->Watch((*device)->context);
      domain_->AssignRail(rail, *device);
    }
  }
  verbs_->DestroyId(*id);
  cm_->Forget(tag);
}

Status RdmaConnection::DialControl(uint32_t rail, Deadline deadline) {
  ASSIGN_OR_RETURN(Dialled dialled, DialQueuePair(QueuePairRole::kControl, rail, deadline));
  {
    std::lock_guard lock(links_mutex_);
    control_tag_ = dialled.tag;
  }
  if (!control_->Install(std::move(dialled.queue_pair), dialled.reply.slots,
                         dialled.reply.received)) {
    Fail("The server says that it has received packets that were never sent.", LogLevel::kWarning);
    return penstock::Fail(Code::kProtocol, close_reason());
  }
  lost_since_ns_.store(0);
  keeper_.Signal();
  return {};
}

Status RdmaConnection::DialRail(uint32_t rail, Deadline deadline) {
  ASSIGN_OR_RETURN(Dialled dialled, DialQueuePair(QueuePairRole::kBulk, rail, deadline));
  {
    std::lock_guard lock(links_mutex_);
    rails_[rail].tag = dialled.tag;
    rails_[rail].since_ns = NowNanoseconds();
  }
  bulk_->Admit(rail, dialled.generation, std::move(dialled.queue_pair));
  return {};
}

Status RdmaConnection::ConnectTo(const Offer& offer, Deadline deadline) {
  offer_ = offer;
  const size_t most = std::min<size_t>(options_.most_rails, kMaxRails);
  if (offer_.addresses.size() > most) offer_.addresses.resize(most);
  if (offer_.addresses.empty()) {
    return penstock::Fail(Code::kInvalidArgument, "The server offers no RDMA address.");
  }
  // Rails first, so that the memory registered next has keys for all of them.
  Error last{Code::kUnavailable, "No rail was tried."};
  const auto again = [&] { return last.code == Code::kTimeout && !deadline.expired(); };
  bool control = false;
  do {
    for (uint32_t rail = 0; rail < offer_.addresses.size() && !control; ++rail) {
      Status dialled = DialControl(rail, deadline);
      control = dialled.has_value();
      if (!control) last = dialled.error();
    }
  } while (!control && again());
  if (!control) return tl::unexpected<Error>(last);
  bool any = false;
  for (uint32_t rail = 0; rail < offer_.addresses.size(); ++rail) FindDevice(rail);
  do {
    for (uint32_t rail = 0; rail < offer_.addresses.size(); ++rail) {
      Status dialled = DialRail(rail, deadline);
      if (dialled) {
        any = true;
        monitors_[rail].Succeeded(NowNanoseconds());
        believed_up_[rail] = true;
        continue;
      }
      last = dialled.error();
      monitors_[rail].Failed(NowNanoseconds());
      if (offer_.addresses.size() > 1) {
        LOG_WARNING("transport", "Rail %u (%s) cannot be used for now: %s", rail,
                    offer_.addresses[rail].c_str(), last.message.c_str());
      }
    }
  } while (!any && again());
  if (!any) return tl::unexpected<Error>(last);
  return {};
}

// --- the mender ---

// Whether the server broke the rail because our memory refused an access. Its word may come up to
// a tenth of a second later than the rail's end.
bool RdmaConnection::PeerRefused(uint32_t rail) {
  for (int look = 0; look < 50 && !stop_.load(); ++look) {
    const uint16_t said = control_->peer_live()[rail];
    if (said == kRailRefused) return true;
    if (control_->goodbye() || closed()) return false;
    usleep(2'000);
    control_->Receive();
  }
  return false;
}

void RdmaConnection::Mend() {
  int64_t pause_ms = kFirstPauseMs;
  while (!stop_.load() && !closed()) {
    {
      std::unique_lock lock(mender_mutex_);
      if (!mend_now_) mender_wake_.wait_for(lock, std::chrono::milliseconds(500));
      mend_now_ = false;
    }
    if (stop_.load() || closed()) return;
    const int64_t now = NowNanoseconds();
    if (hopeful_.exchange(false)) {
      for (RailMonitor& monitor : monitors_) monitor.Hope(now);
    }
    const auto live = bulk_->live();
    if (lost_since_ns_.load() != 0) {
      // Live rails first.
      std::vector<uint32_t> order;
      for (uint32_t rail = 0; rail < offer_.addresses.size(); ++rail) {
        live[rail] != 0 ? void(order.insert(order.begin(), rail)) : order.push_back(rail);
      }
      bool done = false;
      for (const uint32_t rail : order) {
        if (stop_.load() || closed() || done) break;
        Status dialled = DialControl(rail, Deadline::Never());
        done = dialled.has_value();
        if (done) {
          LOG_INFO("transport", "The control queue pair is made anew, over rail %u (%s).", rail,
                   offer_.addresses[rail].c_str());
        } else {
          LOG_DEBUG("transport", "No new control queue pair over rail %u: %s", rail,
                    dialled.error().message.c_str());
        }
      }
      pause_ms = done ? kFirstPauseMs : std::min(2 * pause_ms, kLastPauseMs);
      if (!done) usleep(static_cast<useconds_t>(pause_ms * 1000));
      continue;
    }
    for (uint32_t rail = 0; rail < offer_.addresses.size(); ++rail) {
      if (live[rail] != 0) continue;
      if (believed_up_[rail]) {
        believed_up_[rail] = false;
        if (PeerRefused(rail)) {
          monitors_[rail] = RailMonitor();
          continue;
        }
        // The peer takes its rails down as soon as it hears goodbye.
        if (closed() || leaving_.load() || control_->goodbye()) return;
        monitors_[rail].Failed(now);
        LOG_WARNING("transport", "Rail %u (%s) is down; the others carry its data.", rail,
                    offer_.addresses[rail].c_str());
      }
      if (!monitors_[rail].Due(now) || stop_.load()) continue;
      Status dialled = DialRail(rail, Deadline::Never());
      if (dialled) {
        monitors_[rail].Succeeded(NowNanoseconds());
        believed_up_[rail] = true;
        LOG_INFO("transport", "Rail %u (%s) is used again.", rail, offer_.addresses[rail].c_str());
      } else {
        monitors_[rail].Failed(NowNanoseconds());
        LOG_DEBUG("transport", "Rail %u stays down: %s", rail, dialled.error().message.c_str());
      }
      if (lost_since_ns_.load() != 0) break;
    }
  }
}

Result<std::unique_ptr<Connection>> Dial(std::shared_ptr<Verbs> verbs, const RdmaOptions& options,
                                         const Offer& offer, const Token& token, UniqueFd lifeline,
                                         Deadline deadline) {
  ASSIGN_OR_RETURN(auto cm, CmChannel::Open(verbs));
  auto connection = std::make_unique<RdmaConnection>(std::move(verbs), options, token, true,
                                                     std::move(cm), std::move(lifeline));
  RETURN_IF_ERROR(connection->Prepare());
  RETURN_IF_ERROR(connection->ConnectTo(offer, deadline));
  connection->Start();
  return std::unique_ptr<Connection>(std::move(connection));
}

void AbandonAfterFork(Connection& connection) {
  static_cast<RdmaConnection&>(connection).AbandonAfterFork();
}

}  // namespace penstock::transport::rdma
