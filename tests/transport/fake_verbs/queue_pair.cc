// Queue pairs as their owner sees them: made, posted to, modified, broken, destroyed.
#include "tests/transport/fake_verbs/state.h"

namespace penstock::transport::rdma::fake {

int Host::CreateQp(rdma_cm_id* id, ibv_pd* pd, ibv_qp_init_attr* attributes) {
  std::lock_guard lock(state_->mutex);
  auto& owner = *static_cast<FakeId*>(id);
  errno = Enter(Call::kCreateQp);
  if (errno == 0 && (owner.device == nullptr || id->qp != nullptr || pd == nullptr ||
                     attributes->send_cq == nullptr || attributes->recv_cq == nullptr ||
                     attributes->qp_type != IBV_QPT_RC || attributes->srq != nullptr)) {
    errno = EINVAL;
  }
  if (errno == 0 && (pd->context != id->verbs || attributes->send_cq->context != id->verbs ||
                     attributes->recv_cq->context != id->verbs)) {
    state_->Violate("A queue pair is made from objects of another device context.");
    errno = EINVAL;
  }
  if (errno == 0 && owner.device->removed) errno = EIO;
  ibv_qp_cap& cap = attributes->cap;
  if (errno == 0 && (cap.max_inline_data > state_->options.most_inline || cap.max_send_wr > 16384 ||
                     cap.max_recv_wr > 16384 || cap.max_send_sge > 16 || cap.max_recv_sge > 16)) {
    errno = EINVAL;
  }
  if (errno != 0) return -1;
  auto* qp = new FakeQp{};
  qp->host = this;
  qp->context = id->verbs;
  qp->qp_context = attributes->qp_context;
  qp->pd = pd;
  qp->send_cq = attributes->send_cq;
  qp->recv_cq = attributes->recv_cq;
  qp->qp_num = state_->next_qp;
  state_->next_qp += 1 + static_cast<uint32_t>(state_->Below(100));
  qp->state = IBV_QPS_INIT;
  qp->qp_type = IBV_QPT_RC;
  qp->device = owner.device;
  qp->owner = &owner;
  qp->cap = cap;
  qp->signal_all = attributes->sq_sig_all != 0;
  ++qp->fake_pd()->users;
  ++qp->send()->users;
  ++qp->receive()->users;
  state_->qps[qp->qp_num] = qp;
  id->qp = qp;
  id->pd = pd;
  id->send_cq = attributes->send_cq;
  id->recv_cq = attributes->recv_cq;
  return 0;
}

void Host::DestroyQp(rdma_cm_id* id) {
  std::lock_guard lock(state_->mutex);
  auto* qp = static_cast<FakeQp*>(id->qp);
  if (qp == nullptr) {
    state_->Violate("A queue pair is destroyed twice.");
    return;
  }
  id->qp = nullptr;
  state_->RemoveQp(*qp);
  state_->qps.erase(qp->qp_num);
  delete qp;
}

int Host::PostSend(ibv_qp* qp, ibv_send_wr* list, ibv_send_wr** bad) {
  std::lock_guard lock(state_->mutex);
  auto& fake = *static_cast<FakeQp*>(qp);
  for (ibv_send_wr* wr = list; wr != nullptr; wr = wr->next) {
    int error = Enter(Call::kPostSend, wr->opcode);
    const bool is_inline = (wr->send_flags & IBV_SEND_INLINE) != 0;
    SendRequest request;
    if (error == 0) {
      request.wr = *wr;
      request.wr.next = nullptr;
      request.sges.assign(wr->sg_list, wr->sg_list + std::max(wr->num_sge, 0));
      request.bytes = State::Total(request.sges);
      switch (wr->opcode) {
        case IBV_WR_SEND:
        case IBV_WR_SEND_WITH_IMM:
        case IBV_WR_RDMA_WRITE:
        case IBV_WR_RDMA_WRITE_WITH_IMM:
          break;
        case IBV_WR_RDMA_READ:
          if (is_inline) error = EINVAL;
          break;
        default:
          error = EINVAL;
      }
      if (qp->state != IBV_QPS_RTS && qp->state != IBV_QPS_ERR) {
        state_->Violate("A request is posted to a queue pair that cannot send (state " +
                        std::to_string(qp->state) + ").");
        error = EINVAL;
      }
      if (wr->num_sge < 0 || static_cast<uint32_t>(wr->num_sge) > fake.cap.max_send_sge) {
        error = EINVAL;
      }
      if (is_inline && request.bytes > fake.cap.max_inline_data) error = ENOMEM;
      // As mlx5: the tail moves only when a completion has been polled.
      if (fake.posted - fake.freed >= fake.cap.max_send_wr) {
        state_->Violate("A send queue overflows (" + std::to_string(fake.cap.max_send_wr) +
                        " slots).");
        error = ENOMEM;
      }
    }
    if (error != 0) {
      *bad = wr;
      state_->Wake(fake);
      return error;
    }
    request.count = ++fake.posted;
    if (qp->state == IBV_QPS_ERR) {
      state_->CompleteSend(fake, request, IBV_WC_WR_FLUSH_ERR);
      continue;
    }
    if (is_inline) {  // copied now; the key is not looked at
      request.payload.resize(request.bytes);
      State::GatherInline(request.sges, request.payload.data(), request.bytes);
    } else if (!request.reads() && state_->LocalAccess(request.sges, qp->pd, false)) {
      request.digest = state_->Digest(request.sges);
    }
    fake.queue.push_back(std::move(request));
  }
  state_->Wake(fake);
  return 0;
}

int Host::PostRecv(ibv_qp* qp, ibv_recv_wr* list, ibv_recv_wr** bad) {
  std::lock_guard lock(state_->mutex);
  auto& fake = *static_cast<FakeQp*>(qp);
  for (ibv_recv_wr* wr = list; wr != nullptr; wr = wr->next) {
    int error = Enter(Call::kPostRecv);
    if (error == 0 &&
        (wr->num_sge < 0 || static_cast<uint32_t>(wr->num_sge) > fake.cap.max_recv_sge)) {
      error = EINVAL;
    }
    if (error == 0 && fake.receives_posted - fake.receives_freed >= fake.cap.max_recv_wr) {
      state_->Violate("A receive queue overflows (" + std::to_string(fake.cap.max_recv_wr) +
                      " slots).");
      error = ENOMEM;
    }
    if (error != 0) {
      *bad = wr;
      return error;
    }
    ReceiveRequest receive;
    receive.wr_id = wr->wr_id;
    receive.count = ++fake.receives_posted;
    receive.sges.assign(wr->sg_list, wr->sg_list + std::max(wr->num_sge, 0));
    if (qp->state == IBV_QPS_ERR) {
      // mlx5 flushes it, soft-RoCE never mentions it again.
      if (state_->Roll(0.5)) state_->CompleteReceive(fake, receive, IBV_WC_WR_FLUSH_ERR);
      continue;
    }
    // From here on the buffer is the device's: whoever still reads it reads rubbish.
    if (state_->LocalAccess(receive.sges, qp->pd, true)) {
      for (const ibv_sge& sge : receive.sges) {
        std::memset(reinterpret_cast<void*>(sge.addr), 0xb5, sge.length);
      }
    }
    fake.receives.push_back(std::move(receive));
  }
  FakeQp* peer = state_->FindQp(fake.peer);
  if (peer != nullptr) state_->Wake(*peer);
  return 0;
}

int Host::ModifyQp(ibv_qp* qp, ibv_qp_attr* attributes, int mask) {
  std::lock_guard lock(state_->mutex);
  if (const int error = Enter(Call::kModifyQp)) return error;
  auto& fake = *static_cast<FakeQp*>(qp);
  if ((mask & IBV_QP_STATE) != 0 && attributes->qp_state == IBV_QPS_ERR) {
    state_->FailQp(fake, IBV_WC_WR_FLUSH_ERR);
    return 0;
  }
  const bool same = (mask & IBV_QP_STATE) == 0 || attributes->qp_state == qp->state;
  // rdma_cm has chosen the path's MTU. Whoever changes it gets what was asked for.
  const int allowed = IBV_QP_STATE | IBV_QP_MIN_RNR_TIMER | IBV_QP_ACCESS_FLAGS | IBV_QP_PATH_MTU;
  if (!same || (mask & ~allowed) != 0 || qp->state != IBV_QPS_RTS) return EINVAL;
  if ((mask & IBV_QP_MIN_RNR_TIMER) != 0) fake.min_rnr_timer = attributes->min_rnr_timer & 31;
  if ((mask & IBV_QP_PATH_MTU) != 0) fake.mtu = 128u << attributes->path_mtu;
  if ((mask & IBV_QP_ACCESS_FLAGS) != 0)
    fake.access = static_cast<int>(attributes->qp_access_flags);
  return 0;
}

int Host::QueryQp(ibv_qp* qp, ibv_qp_attr* attributes, int, ibv_qp_init_attr* init) {
  std::lock_guard lock(state_->mutex);
  if (const int error = Enter(Call::kQueryQp)) return error;
  const auto& fake = *static_cast<FakeQp*>(qp);
  *attributes = {};
  attributes->qp_state = attributes->cur_qp_state = qp->state;
  int mtu = IBV_MTU_256;
  while (mtu < IBV_MTU_4096 && (128u << mtu) < fake.mtu) ++mtu;
  attributes->path_mtu = static_cast<ibv_mtu>(mtu);
  attributes->dest_qp_num = fake.peer;
  attributes->qp_access_flags = static_cast<unsigned>(fake.access);
  attributes->cap = fake.cap;
  attributes->port_num = 1;
  attributes->timeout = fake.timeout;
  attributes->retry_cnt = fake.retry_count;
  attributes->rnr_retry = fake.rnr_retry;
  attributes->min_rnr_timer = fake.min_rnr_timer;
  attributes->max_rd_atomic = fake.most_reads;
  attributes->max_dest_rd_atomic = fake.most_peer_reads;
  if (init != nullptr) {
    *init = {};
    init->qp_context = qp->qp_context;
    init->send_cq = qp->send_cq;
    init->recv_cq = qp->recv_cq;
    init->cap = fake.cap;
    init->qp_type = IBV_QPT_RC;
    init->sq_sig_all = fake.signal_all;
  }
  return 0;
}

FakeQp* State::FindQp(uint32_t number) const {
  const auto found = qps.find(number);
  return found != qps.end() ? found->second : nullptr;
}

void State::Wake(FakeQp& qp) {
  if (qp.active) return;
  qp.active = true;
  active.push_back(&qp);
  wake.notify_all();
}

// To the error state. The first request that is not done takes `status`, everything else flushes.
void State::FailQp(FakeQp& qp, ibv_wc_status status) {
  if (qp.state == IBV_QPS_ERR) return;
  qp.state = IBV_QPS_ERR;
  // What the peer's device has told its owner to be done must be done; the rest never happened.
  while (!qp.inbound.empty()) {
    Inbound& inbound = qp.inbound.front();
    SendRequest* request = FindFlight(qp, inbound.request);
    if (!inbound.late && (request == nullptr || request->acknowledged)) {
      PlaceAll(qp, inbound);
      if (inbound.receives) Complete(*qp.receive(), inbound.completion);
    } else if (inbound.receives) {
      CompleteReceive(qp, inbound.receive, IBV_WC_WR_FLUSH_ERR);
    }
    qp.inbound.pop_front();
  }
  // What has left is in the peer's memory now or never: once this queue pair is in the error state,
  // nothing of it is placed any more.
  FakeQp* peer = FindQp(qp.peer);
  if (peer != nullptr && peer->peer == qp.qp_num) {
    for (Inbound& inbound : peer->inbound) {
      const SendRequest* request = FindFlight(*peer, inbound.request);
      if (holds_late_writes && inbound.write && request != nullptr && !request->acknowledged) {
        inbound.late = true;
      } else {
        PlaceAll(*peer, inbound);
      }
    }
    Deliver(*peer);
    Wake(*peer);
  }
  for (auto* requests : {&qp.flight, &qp.queue}) {
    for (const SendRequest& request : *requests) {
      CompleteSend(qp, request, std::exchange(status, IBV_WC_WR_FLUSH_ERR));
    }
    requests->clear();
  }
  for (const ReceiveRequest& receive : qp.receives) {
    CompleteReceive(qp, receive, IBV_WC_WR_FLUSH_ERR);
  }
  qp.receives.clear();
}

// Takes a queue pair out of everything but the table of all.
void State::RemoveQp(FakeQp& qp) {
  if (qp.state != IBV_QPS_ERR) FailQp(qp, IBV_WC_WR_FLUSH_ERR);
  std::erase(active, &qp);
  for (FakeCq* cq : {qp.send(), qp.receive()}) {
    if (cqs.count(cq) == 0) continue;
    ForgetCompletions(*cq, qp);
    --cq->users;
  }
  if (pds.count(qp.fake_pd()) != 0) --qp.fake_pd()->users;
}

}  // namespace penstock::transport::rdma::fake
