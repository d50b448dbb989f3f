// rdma_cm, the part without a peer: channels, events, ids, addresses, options.
#include <arpa/inet.h>

#include "tests/transport/fake_verbs/state.h"

namespace penstock::transport::rdma::fake {

namespace {

bool SameAddress(const sockaddr* a, const sockaddr* b) {
  if (a->sa_family != b->sa_family) return false;
  if (a->sa_family == AF_INET) {
    return reinterpret_cast<const sockaddr_in*>(a)->sin_addr.s_addr ==
           reinterpret_cast<const sockaddr_in*>(b)->sin_addr.s_addr;
  }
  return std::memcmp(&reinterpret_cast<const sockaddr_in6*>(a)->sin6_addr,
                     &reinterpret_cast<const sockaddr_in6*>(b)->sin6_addr, sizeof(in6_addr)) == 0;
}

bool IsWildcard(const sockaddr* a) {
  if (a->sa_family == AF_INET) {
    return reinterpret_cast<const sockaddr_in*>(a)->sin_addr.s_addr == 0;
  }
  return IN6_IS_ADDR_UNSPECIFIED(&reinterpret_cast<const sockaddr_in6*>(a)->sin6_addr);
}

uint16_t PortOf(const sockaddr* a) {  // the same place in both families
  return ntohs(reinterpret_cast<const sockaddr_in*>(a)->sin_port);
}

void SetPort(sockaddr* a, uint16_t port) {
  reinterpret_cast<sockaddr_in*>(a)->sin_port = htons(port);
}

size_t SizeOf(const sockaddr* a) {
  return a->sa_family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
}

int FailWith(int error) {
  errno = error;
  return -1;
}

}  // namespace

FakeDevice* State::FindDevice(const sockaddr* address, const Host* of) const {
  for (Host* host : hosts) {
    if (of != nullptr && host != of) continue;
    for (auto& device : host->devices_) {
      if (!device->addressed) continue;
      if (SameAddress(reinterpret_cast<sockaddr*>(&device->address), address)) return device.get();
    }
  }
  return nullptr;
}

rdma_event_channel* Host::CreateEventChannel() {
  std::lock_guard lock(state_->mutex);
  if ((errno = Enter(Call::kCreateEventChannel)) != 0) return nullptr;
  auto* channel = new FakeEventChannel{};
  channel->fd = channel->events.fd();
  channel->host = this;
  state_->event_channels.insert(channel);
  return channel;
}

void Host::DestroyEventChannel(rdma_event_channel* channel) {
  std::lock_guard lock(state_->mutex);
  auto* fake = static_cast<FakeEventChannel*>(channel);
  if (fake->users != 0) {
    state_->Violate("An event channel is destroyed while it has ids (" +
                    std::to_string(fake->users) + ").");
    return;
  }
  state_->event_channels.erase(fake);
  delete fake;
}

FakeId* State::FindId(uint64_t number) const {
  const auto found = ids.find(number);
  return found != ids.end() && !found->second->zombie ? found->second : nullptr;
}

FakeId* State::MakeId(Host& host, FakeEventChannel& channel, void* context) {
  auto* id = new FakeId{};
  id->host = &host;
  id->number = next_id++;
  id->channel = &channel;
  id->context = context;
  id->ps = RDMA_PS_TCP;
  id->qp_type = IBV_QPT_RC;
  ++channel.users;
  ids[id->number] = id;
  return id;
}

void State::SetDevice(FakeId& id, FakeDevice& device) {
  id.device = &device;
  id.verbs = device.contexts.front().get();
  id.port_num = 1;
  std::memcpy(&id.route.addr.src_storage, &device.address, sizeof device.address);
  SetPort(&id.route.addr.src_addr, id.local_port);
}

int Host::CreateId(rdma_event_channel* channel, rdma_cm_id** id, void* id_context) {
  std::lock_guard lock(state_->mutex);
  if (const int error = Enter(Call::kCreateId)) return FailWith(error);
  *id = state_->MakeId(*this, *static_cast<FakeEventChannel*>(channel), id_context);
  return 0;
}

int Host::DestroyId(rdma_cm_id* id) {
  std::lock_guard lock(state_->mutex);
  auto& fake = *static_cast<FakeId*>(id);
  if (fake.zombie) {
    state_->Violate("An id is destroyed twice.");
    return FailWith(EINVAL);
  }
  if (id->qp != nullptr) {
    state_->Violate("An id is destroyed before its queue pair.");
    auto* qp = fake.fake_qp();
    state_->RemoveQp(*qp);
    state_->qps.erase(qp->qp_num);
    delete qp;
    id->qp = nullptr;
  }
  if (fake.unacknowledged != 0) {
    state_->Violate("An id is destroyed with unacknowledged events (" +
                    std::to_string(fake.unacknowledged) + "): real rdma_cm waits for ever.");
  }
  state_->HangUp(fake);
  state_->FreeId(fake);
  return 0;
}

// The id is gone for its owner: what waits in its channel is forgotten, requests are rejected.
void State::FreeId(FakeId& id) {
  FakeEventChannel& channel = *id.fake_channel();
  for (FakeEvent* event : channel.events.Remove([&](FakeEvent* e) { return e->owner == &id; })) {
    if (event->event == RDMA_CM_EVENT_CONNECT_REQUEST) {
      auto& child = *static_cast<FakeId*>(event->id);
      HangUp(child);
      FreeId(child);
    }
    delete event;
  }
  id.zombie = true;
  --channel.users;
  if (id.unacknowledged > 0) return;
  ids.erase(id.number);
  delete &id;
}

int Host::BindAddr(rdma_cm_id* id, sockaddr* address) {
  std::lock_guard lock(state_->mutex);
  if (const int error = Enter(Call::kBindAddr)) return FailWith(error);
  auto& fake = *static_cast<FakeId*>(id);
  if (fake.phase != IdPhase::kIdle) return FailWith(EINVAL);
  FakeDevice* device = nullptr;
  if (!IsWildcard(address)) {
    device = state_->FindDevice(address, this);
    if (device == nullptr) return FailWith(EADDRNOTAVAIL);
    if (device->removed) return FailWith(ENODEV);
  }
  auto taken = [&](uint16_t port) {
    return std::any_of(state_->ids.begin(), state_->ids.end(), [&](auto& entry) {
      const FakeId& other = *entry.second;
      return other.host == this && !other.zombie && !other.passive && other.local_port == port &&
             (other.device == nullptr || device == nullptr || other.device == device);
    });
  };
  uint16_t port = PortOf(address);
  if (port != 0 && taken(port)) return FailWith(EADDRINUSE);
  while (port == 0 || taken(port)) port = next_port_++;
  fake.local_port = port;
  fake.phase = IdPhase::kBound;
  if (device != nullptr) {
    state_->SetDevice(fake, *device);
  } else {
    std::memcpy(&id->route.addr.src_storage, address, SizeOf(address));
    SetPort(&id->route.addr.src_addr, port);
  }
  return 0;
}

int Host::ResolveAddr(rdma_cm_id* id, sockaddr* source, sockaddr* target, int) {
  std::lock_guard lock(state_->mutex);
  if (const int error = Enter(Call::kResolveAddr)) return FailWith(error);
  auto& fake = *static_cast<FakeId*>(id);
  if (fake.phase != IdPhase::kIdle && fake.phase != IdPhase::kBound) return FailWith(EINVAL);
  FakeDevice* device = fake.device;
  if (device == nullptr && source != nullptr && !IsWildcard(source)) {
    device = state_->FindDevice(source, this);
    if (device == nullptr) return FailWith(EADDRNOTAVAIL);
  }
  // Without a source the first device that lives; a real system asks its routing table.
  if (device == nullptr) device = state_->FindDevice(target, this);
  for (auto& candidate : devices_) {
    if (device == nullptr && !candidate->removed) device = candidate.get();
  }
  if (device == nullptr || device->removed) return FailWith(ENODEV);
  if (fake.local_port == 0) fake.local_port = next_port_++;
  std::memcpy(&fake.target, target, SizeOf(target));
  std::memcpy(&id->route.addr.dst_storage, target, SizeOf(target));
  fake.target_port = PortOf(target);
  fake.phase = IdPhase::kAddressResolved;
  fake.device = device;
  const bool known = state_->FindDevice(target, nullptr) != nullptr;
  state_->After(static_cast<int64_t>(state_->Below(200)),
                [s = state_.get(), number = fake.number, known] {
                  if (known) {
                    s->RaiseSimple(number, RDMA_CM_EVENT_ADDR_RESOLVED);
                  } else {
                    s->RaiseSimple(number, RDMA_CM_EVENT_ADDR_ERROR, -EHOSTUNREACH);
                  }
                });
  return 0;
}

int Host::ResolveRoute(rdma_cm_id* id, int) {
  std::lock_guard lock(state_->mutex);
  if (const int error = Enter(Call::kResolveRoute)) return FailWith(error);
  auto& fake = *static_cast<FakeId*>(id);
  if (fake.phase != IdPhase::kAddressResolved || id->verbs == nullptr) return FailWith(EINVAL);
  if (fake.device->removed) return FailWith(ENODEV);
  fake.phase = IdPhase::kRouteResolved;
  state_->After(static_cast<int64_t>(state_->Below(200)), [s = state_.get(), number = fake.number] {
    s->RaiseSimple(number, RDMA_CM_EVENT_ROUTE_RESOLVED);
  });
  return 0;
}

int Host::SetOption(rdma_cm_id* id, int level, int option, void* value, size_t bytes) {
  std::lock_guard lock(state_->mutex);
  if (const int error = Enter(Call::kSetOption)) return FailWith(error);
  if (level != RDMA_OPTION_ID) return FailWith(ENOSYS);
  switch (option) {
    case RDMA_OPTION_ID_ACK_TIMEOUT:
      if (bytes != 1) return FailWith(EINVAL);
      static_cast<FakeId*>(id)->timeout = *static_cast<uint8_t*>(value) & 31;
      return 0;
    case RDMA_OPTION_ID_TOS:
      return bytes == 1 ? 0 : FailWith(EINVAL);
    case RDMA_OPTION_ID_REUSEADDR:
    case RDMA_OPTION_ID_AFONLY:
      return bytes == sizeof(int) ? 0 : FailWith(EINVAL);
    default:
      return FailWith(ENOSYS);
  }
}

FakeEvent* State::MakeEvent(FakeId& id, rdma_cm_event_type type, int status, size_t data_size) {
  auto* event = new FakeEvent{};
  event->id = &id;
  event->owner = &id;
  event->event = type;
  event->status = status;
  if (data_size != 0) {
    event->param.conn.private_data = event->data.data();
    event->param.conn.private_data_len = static_cast<uint8_t>(data_size);
  }
  return event;
}

void State::Raise(FakeId& id, FakeEvent* event) {
  id.fake_channel()->events.Push(event);
}

void State::RaiseSimple(uint64_t number, rdma_cm_event_type type, int status, size_t data_size) {
  FakeId* id = FindId(number);
  if (id == nullptr || id->host->dead_) return;
  Raise(*id, MakeEvent(*id, type, status, data_size));
}

int Host::GetCmEvent(rdma_event_channel* channel, rdma_cm_event** event) {
  auto& fake = *static_cast<FakeEventChannel*>(channel);
  for (;;) {
    {
      std::lock_guard lock(state_->mutex);
      if (!fake.events.empty()) {
        FakeEvent* next = fake.events.Pop();
        ++next->owner->unacknowledged;
        state_->OnEventRead(*next);
        *event = next;
        return 0;
      }
    }
    if (!AwaitReadable(channel->fd)) return -1;
  }
}

int Host::AckCmEvent(rdma_cm_event* event) {
  std::lock_guard lock(state_->mutex);
  auto* fake = static_cast<FakeEvent*>(event);
  FakeId* owner = fake->owner;
  delete fake;
  if (--owner->unacknowledged == 0 && owner->zombie) {
    state_->ids.erase(owner->number);
    delete owner;
  }
  return 0;
}

uint16_t Host::GetSrcPort(rdma_cm_id* id) {
  std::lock_guard lock(state_->mutex);
  return htons(static_cast<FakeId*>(id)->local_port);
}

}  // namespace penstock::transport::rdma::fake
