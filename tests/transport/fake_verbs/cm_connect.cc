// rdma_cm, the part with a peer: requests, answers, farewells, and devices that go.
#include <arpa/inet.h>

#include "tests/transport/fake_verbs/state.h"

namespace penstock::transport::rdma::fake {

namespace {

constexpr size_t kRequestData = 56, kAcceptData = 196, kRejectData = 148;
constexpr int kNoListener = 8, kConsumerDefined = 28;

int FailWith(int error) {
  errno = error;
  return -1;
}

rdma_conn_param WithoutData(const rdma_conn_param& from) {
  rdma_conn_param copy = from;
  copy.private_data = nullptr;
  copy.private_data_len = 0;
  return copy;
}

std::vector<std::byte> Padded(const void* data, size_t bytes, size_t to) {
  std::vector<std::byte> padded(to);
  if (data != nullptr) std::memcpy(padded.data(), data, bytes);
  return padded;
}

// What rdma_cm gives a queue pair when it connects. The path's MTU is the smaller one of both ends.
void Settle(FakeId& id, const FakeDevice* peer) {
  FakeQp& qp = *id.fake_qp();
  qp.state = IBV_QPS_RTS;
  qp.timeout = id.timeout;
  qp.address_epoch = qp.device->address_epoch;
  qp.mtu = peer == nullptr ? qp.device->mtu : std::min(qp.device->mtu, peer->mtu);
  const rdma_conn_param& active = id.passive ? id.other : id.own;
  qp.retry_count = active.retry_count & 7;
  qp.rnr_retry = id.other.rnr_retry_count & 7;
  qp.most_reads = id.own.initiator_depth;  // whether or not the peer answers as many
  qp.most_peer_reads = id.own.responder_resources;
  qp.access = IBV_ACCESS_REMOTE_WRITE;
  if (id.passive || id.own.responder_resources > 0) {
    qp.access |= IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;
  }
}

}  // namespace

int Host::Listen(rdma_cm_id* id, int) {
  std::lock_guard lock(state_->mutex);
  if (const int error = Enter(Call::kListen)) return FailWith(error);
  auto& fake = *static_cast<FakeId*>(id);
  if (fake.phase != IdPhase::kBound) return FailWith(EINVAL);
  fake.phase = IdPhase::kListening;
  return 0;
}

int Host::Connect(rdma_cm_id* id, rdma_conn_param* parameters) {
  std::lock_guard lock(state_->mutex);
  if (const int error = Enter(Call::kConnect)) return FailWith(error);
  auto& fake = *static_cast<FakeId*>(id);
  if (fake.phase != IdPhase::kRouteResolved || id->qp == nullptr) return FailWith(EINVAL);
  if (parameters->private_data_len > kRequestData) return FailWith(EINVAL);
  if (fake.device->removed) return FailWith(ENODEV);
  fake.data = Padded(parameters->private_data, parameters->private_data_len, kRequestData);
  fake.own = WithoutData(*parameters);
  fake.phase = IdPhase::kConnecting;
  const int64_t give_up = NowNanoseconds() + int64_t{state_->options.unreachable_ms} * 1'000'000;
  state_->After(
      static_cast<int64_t>(state_->Below(300)),
      [s = state_.get(), number = fake.number, give_up] { s->RequestArrives(number, give_up); });
  return 0;
}

void State::RequestArrives(uint64_t number, int64_t give_up) {
  FakeId* id = FindId(number);
  if (id == nullptr || id->phase != IdPhase::kConnecting) return;
  FakeDevice* device = FindDevice(reinterpret_cast<sockaddr*>(&id->target), nullptr);
  if (!Reachable(id->device, device)) {
    if (NowNanoseconds() >= give_up) {
      id->phase = IdPhase::kRouteResolved;
      RaiseSimple(number, RDMA_CM_EVENT_UNREACHABLE, -ETIMEDOUT);
      return;
    }
    After(5000, [this, number, give_up] { RequestArrives(number, give_up); });
    return;
  }
  FakeId* listener = nullptr;
  for (auto& [n, candidate] : ids) {
    if (candidate->host == device->host && candidate->phase == IdPhase::kListening &&
        !candidate->zombie && candidate->local_port == id->target_port &&
        (candidate->device == nullptr || candidate->device == device)) {
      listener = candidate;
    }
  }
  if (listener == nullptr) {
    id->phase = IdPhase::kRouteResolved;
    RaiseSimple(number, RDMA_CM_EVENT_REJECTED, kNoListener, kRejectData);
    return;
  }
  FakeId* child = MakeId(*device->host, *listener->fake_channel(), listener->context);
  child->passive = true;
  child->phase = IdPhase::kRequested;
  child->local_port = listener->local_port;
  SetDevice(*child, *device);
  std::memcpy(&child->route.addr.dst_storage, &id->route.addr.src_storage,
              sizeof(sockaddr_storage));
  child->peer = number;
  child->other = id->own;
  child->timeout = id->timeout;
  id->peer = child->number;
  FakeEvent* event = MakeEvent(*child, RDMA_CM_EVENT_CONNECT_REQUEST, 0, kRequestData);
  std::copy(id->data.begin(), id->data.end(), event->data.begin());
  event->listen_id = listener;
  event->owner = listener;
  event->param.conn.responder_resources = id->own.initiator_depth;
  event->param.conn.initiator_depth = id->own.responder_resources;
  event->param.conn.retry_count = id->own.retry_count;
  event->param.conn.rnr_retry_count = id->own.rnr_retry_count;
  event->param.conn.qp_num = id->qp != nullptr ? id->qp->qp_num : 0;
  Raise(*listener, event);
}

int Host::Accept(rdma_cm_id* id, rdma_conn_param* parameters) {
  std::lock_guard lock(state_->mutex);
  if (const int error = Enter(Call::kAccept)) return FailWith(error);
  auto& fake = *static_cast<FakeId*>(id);
  if (fake.phase != IdPhase::kRequested || id->qp == nullptr) return FailWith(EINVAL);
  if (fake.device->removed) return FailWith(ENODEV);
  State& s = *state_;
  FakeId* active = s.FindId(fake.peer);
  if (parameters->private_data_len > kAcceptData) {
    if (active != nullptr) {
      active->phase = IdPhase::kRouteResolved;
      s.RaiseSimple(fake.peer, RDMA_CM_EVENT_REJECTED, kConsumerDefined, kRejectData);
    }
    fake.phase = IdPhase::kDisconnected;
    return FailWith(EINVAL);
  }
  fake.own = WithoutData(*parameters);
  if (active != nullptr && active->qp != nullptr) fake.fake_qp()->peer = active->qp->qp_num;
  fake.phase = IdPhase::kAccepted;
  Settle(fake, active == nullptr ? nullptr : active->device);
  auto data = Padded(parameters->private_data, parameters->private_data_len, kAcceptData);
  s.After(static_cast<int64_t>(s.Below(300)), [&s, number = fake.number, data = std::move(data)] {
    FakeId* passive = s.FindId(number);
    if (passive == nullptr || passive->phase != IdPhase::kAccepted) return;
    FakeId* active = s.FindId(passive->peer);
    if (active == nullptr || active->phase != IdPhase::kConnecting ||
        !s.Reachable(active->device, passive->device)) {
      passive->phase = IdPhase::kDisconnected;
      s.RaiseSimple(number, RDMA_CM_EVENT_UNREACHABLE, -ETIMEDOUT);
      return;
    }
    active->other = passive->own;
    FakeEvent* event = s.MakeEvent(*active, RDMA_CM_EVENT_ESTABLISHED, 0, kAcceptData);
    std::copy(data.begin(), data.end(), event->data.begin());
    event->param.conn.responder_resources = passive->own.initiator_depth;
    event->param.conn.initiator_depth = passive->own.responder_resources;
    if (passive->qp != nullptr) event->peer_qp = passive->qp->qp_num;
    event->param.conn.qp_num = event->peer_qp;
    s.Raise(*active, event);
  });
  return 0;
}

// What librdmacm itself does when its user reads an event.
void State::OnEventRead(FakeEvent& event) {
  auto& id = *static_cast<FakeId*>(event.id);
  if (event.event == RDMA_CM_EVENT_ADDR_RESOLVED && id.device != nullptr) {
    SetDevice(id, *id.device);
  } else if (event.event == RDMA_CM_EVENT_REJECTED && id.qp != nullptr) {
    FailQp(*id.fake_qp(), IBV_WC_WR_FLUSH_ERR);
  } else if (event.event == RDMA_CM_EVENT_ESTABLISHED && !id.passive &&
             id.phase == IdPhase::kConnecting) {
    id.phase = IdPhase::kConnected;
    if (id.qp != nullptr && id.qp->state == IBV_QPS_INIT) {
      id.fake_qp()->peer = event.peer_qp;
      FakeQp* peer = FindQp(event.peer_qp);
      Settle(id, peer == nullptr ? nullptr : peer->device);
      Wake(*id.fake_qp());
      if (peer != nullptr) Wake(*peer);
    }
    // The passive side may learn of it late, after the first message.
    const uint64_t delay_us = Roll(0.3) && options.reorder ? 4000 : 200;
    After(static_cast<int64_t>(Below(delay_us)), [this, number = id.peer] {
      FakeId* passive = FindId(number);
      if (passive == nullptr || passive->phase != IdPhase::kAccepted) return;
      passive->phase = IdPhase::kConnected;
      RaiseSimple(number, RDMA_CM_EVENT_ESTABLISHED);
    });
  }
}

int Host::Reject(rdma_cm_id* id, const void* private_data, uint8_t bytes) {
  std::lock_guard lock(state_->mutex);
  if (const int error = Enter(Call::kReject)) return FailWith(error);
  auto& fake = *static_cast<FakeId*>(id);
  if (fake.phase != IdPhase::kRequested || bytes > kRejectData) return FailWith(EINVAL);
  fake.phase = IdPhase::kDisconnected;
  State& s = *state_;
  s.After(static_cast<int64_t>(s.Below(300)), [&s, number = fake.peer,
                                               data = Padded(private_data, bytes, kRejectData)] {
    FakeId* active = s.FindId(number);
    if (active == nullptr || active->phase != IdPhase::kConnecting) return;
    active->phase = IdPhase::kRouteResolved;
    FakeEvent* event = s.MakeEvent(*active, RDMA_CM_EVENT_REJECTED, kConsumerDefined, kRejectData);
    std::copy(data.begin(), data.end(), event->data.begin());
    s.Raise(*active, event);
  });
  return 0;
}

int Host::Disconnect(rdma_cm_id* id) {
  std::lock_guard lock(state_->mutex);
  if (const int error = Enter(Call::kDisconnect)) return FailWith(error);
  auto& fake = *static_cast<FakeId*>(id);
  if (fake.device != nullptr && fake.device->removed) return FailWith(ENXIO);
  if (id->qp != nullptr) state_->FailQp(*fake.fake_qp(), IBV_WC_WR_FLUSH_ERR);
  if (fake.phase != IdPhase::kConnected && fake.phase != IdPhase::kAccepted) {
    return FailWith(EINVAL);
  }
  FakeId* peer = state_->FindId(fake.peer);
  const bool answered = peer != nullptr && state_->Reachable(fake.device, peer->device);
  state_->HangUp(fake);
  if (answered) {  // otherwise nothing comes for a very long time
    state_->After(static_cast<int64_t>(state_->Below(2000)), [s = state_.get(), n = fake.number] {
      s->RaiseSimple(n, RDMA_CM_EVENT_DISCONNECTED);
      s->After(20'000, [s, n] { s->RaiseSimple(n, RDMA_CM_EVENT_TIMEWAIT_EXIT); });
    });
  }
  return 0;
}

// This end leaves: the other one is told if the packets pass.
void State::HangUp(FakeId& id) {
  const IdPhase phase = std::exchange(id.phase, IdPhase::kDisconnected);
  FakeId* peer = FindId(id.peer);
  if (peer == nullptr || !Reachable(id.device, peer->device)) return;
  if (phase == IdPhase::kRequested) {
    if (peer->phase != IdPhase::kConnecting) return;
    peer->phase = IdPhase::kRouteResolved;
    RaiseSimple(id.peer, RDMA_CM_EVENT_REJECTED, kConsumerDefined, kRejectData);
    return;
  }
  if (phase == IdPhase::kConnecting) {  // the request was answered to nobody
    if (peer->phase != IdPhase::kAccepted) return;
    peer->phase = IdPhase::kDisconnected;
    RaiseSimple(id.peer, RDMA_CM_EVENT_REJECTED, kConsumerDefined, kRejectData);
    return;
  }
  if (phase != IdPhase::kConnected && phase != IdPhase::kAccepted) return;
  After(static_cast<int64_t>(Below(3000)), [this, number = id.peer] {
    FakeId* other = FindId(number);
    if (other == nullptr) return;
    if (other->phase == IdPhase::kConnecting) {
      other->phase = IdPhase::kRouteResolved;
      RaiseSimple(number, RDMA_CM_EVENT_REJECTED, kConsumerDefined, kRejectData);
      return;
    }
    if (other->phase != IdPhase::kConnected && other->phase != IdPhase::kAccepted) return;
    other->phase = IdPhase::kDisconnected;
    RaiseSimple(number, RDMA_CM_EVENT_DISCONNECTED);
    After(20'000, [this, number] { RaiseSimple(number, RDMA_CM_EVENT_TIMEWAIT_EXIT); });
  });
}

void State::RemoveDevice(FakeDevice& device) {
  device.removed = true;
  Async(device, IBV_EVENT_DEVICE_FATAL);
  for (auto& [number, qp] : qps) {
    if (qp->device == &device) FailQp(*qp, IBV_WC_WR_FLUSH_ERR);
    Wake(*qp);
  }
  for (auto& [number, id] : ids) {
    if (id->device == &device && !id->zombie) RaiseSimple(number, RDMA_CM_EVENT_DEVICE_REMOVAL);
  }
}

}  // namespace penstock::transport::rdma::fake
