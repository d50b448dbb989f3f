#include "transport/rdma/cm.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "common/unique_fd.h"

namespace penstock::transport::rdma {

const char* EventName(rdma_cm_event_type type) {
  switch (type) {
    case RDMA_CM_EVENT_ADDR_ERROR:
      return "no RDMA device leads to the address";
    case RDMA_CM_EVENT_ROUTE_ERROR:
      return "there is no route";
    case RDMA_CM_EVENT_CONNECT_ERROR:
      return "the connection fails";
    case RDMA_CM_EVENT_UNREACHABLE:
      return "the peer cannot be reached";
    case RDMA_CM_EVENT_REJECTED:
      return "the peer rejects it";
    case RDMA_CM_EVENT_DISCONNECTED:
      return "the peer disconnected";
    case RDMA_CM_EVENT_DEVICE_REMOVAL:
      return "the device is removed";
    case RDMA_CM_EVENT_ADDR_CHANGE:
      return "the address has changed";
    default:
      return "an unexpected event";
  }
}

Result<std::unique_ptr<CmChannel>> CmChannel::Open(std::shared_ptr<Verbs> verbs) {
  rdma_event_channel* channel = verbs->CreateEventChannel();
  if (channel == nullptr) {
    return FailErrno("Cannot open the RDMA connection manager (/dev/infiniband/rdma_cm)");
  }
  fcntl(channel->fd, F_SETFL, fcntl(channel->fd, F_GETFL) | O_NONBLOCK);
  return std::unique_ptr<CmChannel>(new CmChannel(std::move(verbs), channel));
}

CmChannel::~CmChannel() {
  for (const CmEvent& event : mailbox_) {
    if (event.request != nullptr) verbs_->DestroyId(event.request);
  }
  verbs_->DestroyEventChannel(channel_);
}

Result<rdma_cm_id*> CmChannel::MakeId(uint64_t* tag) {
  {
    std::lock_guard lock(mutex_);
    *tag = next_tag_++;
  }
  rdma_cm_id* id = nullptr;
  if (verbs_->CreateId(channel_, &id, reinterpret_cast<void*>(*tag)) != 0) {
    return FailErrno("Cannot make an RDMA connection");
  }
  return id;
}

uint64_t CmChannel::Adopt(rdma_cm_id* id) {
  std::lock_guard lock(mutex_);
  id->context = reinterpret_cast<void*>(next_tag_);
  return next_tag_++;
}

void CmChannel::Read() {
  rdma_cm_event* event = nullptr;
  while (verbs_->GetCmEvent(channel_, &event) == 0) {
    CmEvent copy;
    copy.type = event->event;
    copy.status = event->status;
    if (event->event == RDMA_CM_EVENT_CONNECT_REQUEST) {
      copy.request = event->id;
      copy.peer_reads = event->param.conn.initiator_depth;
      copy.tag =
          event->listen_id == nullptr ? 0 : reinterpret_cast<uintptr_t>(event->listen_id->context);
    } else {
      copy.tag = reinterpret_cast<uintptr_t>(event->id->context);
    }
    if (event->param.conn.private_data != nullptr) {
      copy.private_bytes = event->param.conn.private_data_len;
      std::memcpy(copy.private_data.data(), event->param.conn.private_data, copy.private_bytes);
    }
    verbs_->AckCmEvent(event);
    mailbox_.push_back(copy);
  }
}

Result<CmEvent> CmChannel::Wait(uint64_t tag, Deadline deadline, const std::atomic<bool>* cancel) {
  for (;;) {
    {
      std::lock_guard lock(mutex_);
      Read();
      const auto found = std::find_if(mailbox_.begin(), mailbox_.end(),
                                      [tag](const CmEvent& event) { return event.tag == tag; });
      if (found != mailbox_.end()) {
        const CmEvent event = *found;
        mailbox_.erase(found);
        return event;
      }
    }
    if (deadline.expired() || (cancel != nullptr && cancel->load())) {
      return Fail(Code::kTimeout, "The peer does not answer in time.");
    }
    // Another thread may read our event from the channel, so the sleep is short.
    pollfd ready = {channel_->fd, POLLIN, 0};
    poll(&ready, 1, Earlier(deadline, Deadline::After(10)).poll_timeout_ms());
  }
}

std::optional<CmEvent> CmChannel::TakeAny() {
  std::lock_guard lock(mutex_);
  Read();
  for (auto event = mailbox_.begin(); event != mailbox_.end(); ++event) {
    if (std::find(awaited_.begin(), awaited_.end(), event->tag) != awaited_.end()) continue;
    const CmEvent taken = *event;
    mailbox_.erase(event);
    return taken;
  }
  return std::nullopt;
}

void CmChannel::Forget(uint64_t tag) {
  std::lock_guard lock(mutex_);
  Read();
  std::erase_if(mailbox_, [tag](const CmEvent& event) { return event.tag == tag; });
}

Dialling::Dialling(CmChannel& channel, uint64_t tag) : channel_(channel), tag_(tag) {
  std::lock_guard lock(channel_.mutex_);
  channel_.awaited_.push_back(tag_);
}

Dialling::~Dialling() {
  std::lock_guard lock(channel_.mutex_);
  std::erase(channel_.awaited_, tag_);
}

Result<sockaddr_storage> ParseAddress(const std::string& text, uint16_t port) {
  sockaddr_storage storage = {};
  auto* const four = reinterpret_cast<sockaddr_in*>(&storage);
  auto* const six = reinterpret_cast<sockaddr_in6*>(&storage);
  if (inet_pton(AF_INET, text.c_str(), &four->sin_addr) == 1) {
    four->sin_family = AF_INET;
    four->sin_port = htons(port);
    return storage;
  }
  if (inet_pton(AF_INET6, text.c_str(), &six->sin6_addr) == 1) {
    six->sin6_family = AF_INET6;
    six->sin6_port = htons(port);
    return storage;
  }
  return Fail(Code::kInvalidArgument, "An RDMA address (" + text + ") is no IPv4 or IPv6 address.");
}

std::string FormatAddress(const sockaddr* address) {
  char text[INET6_ADDRSTRLEN] = "";
  if (address->sa_family == AF_INET) {
    inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in*>(address)->sin_addr, text, sizeof text);
  } else if (address->sa_family == AF_INET6) {
    inet_ntop(AF_INET6, &reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr, text,
              sizeof text);
  }
  return text;
}

std::optional<sockaddr_storage> SourceFor(const sockaddr_storage& target) {
  // Connecting a datagram socket sends nothing; it only looks up the route.
  const UniqueFd probe(socket(target.ss_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  sockaddr_storage source = {};
  socklen_t size = sizeof source;
  if (!probe.valid() ||
      connect(probe.get(), reinterpret_cast<const sockaddr*>(&target), sizeof target) != 0 ||
      getsockname(probe.get(), reinterpret_cast<sockaddr*>(&source), &size) != 0) {
    return std::nullopt;
  }
  (source.ss_family == AF_INET ? reinterpret_cast<sockaddr_in*>(&source)->sin_port
                               : reinterpret_cast<sockaddr_in6*>(&source)->sin6_port) = 0;
  return source;
}

}  // namespace penstock::transport::rdma
