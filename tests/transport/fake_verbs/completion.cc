// Completion queues and channels: when a completion becomes visible, and who is told.
#include "tests/transport/fake_verbs/state.h"

namespace penstock::transport::rdma::fake {

ibv_comp_channel* Host::CreateCompChannel(ibv_context* context) {
  std::lock_guard lock(state_->mutex);
  if ((errno = Enter(Call::kCreateCompChannel)) != 0) return nullptr;
  auto* channel = new FakeChannel{};
  channel->context = context;
  channel->fd = channel->events.fd();
  channel->host = this;
  state_->channels.insert(channel);
  return channel;
}

int Host::DestroyCompChannel(ibv_comp_channel* channel) {
  std::lock_guard lock(state_->mutex);
  auto* fake = static_cast<FakeChannel*>(channel);
  if (fake->users != 0) {
    state_->Violate("A completion channel is freed while it has queues (" +
                    std::to_string(fake->users) + ").");
    return EBUSY;
  }
  state_->channels.erase(fake);
  delete fake;
  return 0;
}

ibv_cq* Host::CreateCq(ibv_context* context, int entries, void* cq_context,
                       ibv_comp_channel* channel, int vector) {
  std::lock_guard lock(state_->mutex);
  if ((errno = Enter(Call::kCreateCq)) != 0) return nullptr;
  if (entries < 1 || entries > 65535 || vector != 0) {
    errno = EINVAL;
    return nullptr;
  }
  if (static_cast<FakeContext*>(context)->fake_device->removed) {
    errno = EIO;
    return nullptr;
  }
  auto* cq = new FakeCq{};
  cq->context = context;
  cq->channel = channel;
  cq->cq_context = cq_context;
  cq->cqe = entries;
  cq->host = this;
  cq->fake_channel = static_cast<FakeChannel*>(channel);
  if (cq->fake_channel != nullptr) ++cq->fake_channel->users;
  state_->cqs.insert(cq);
  return cq;
}

int Host::DestroyCq(ibv_cq* cq) {
  std::lock_guard lock(state_->mutex);
  auto* fake = static_cast<FakeCq*>(cq);
  if (fake->users != 0) {
    state_->Violate("A completion queue is freed while a queue pair uses it.");
    return EBUSY;
  }
  if (fake->unacknowledged != 0) {
    state_->Violate("A completion queue is freed with unacknowledged events (" +
                    std::to_string(fake->unacknowledged) + "): real verbs wait for ever.");
  }
  if (fake->fake_channel != nullptr) {
    fake->fake_channel->events.Remove([&](FakeCq* entry) { return entry == fake; });
    --fake->fake_channel->users;
  }
  state_->cqs.erase(fake);
  delete fake;
  return 0;
}

int Host::PollCq(ibv_cq* cq, int entries, ibv_wc* completions) {
  std::lock_guard lock(state_->mutex);
  auto& fake = *static_cast<FakeCq*>(cq);
  if (Enter(Call::kPollCq) != 0 || fake.overrun) return -1;
  int n = 0;
  for (; n < entries && !fake.ready.empty(); ++n) {
    const Completion& completion = fake.ready.front();
    completions[n] = completion.wc;
    FakeQp& qp = *completion.qp;
    uint64_t& freed = completion.send ? qp.freed : qp.receives_freed;
    freed = std::max(freed, completion.covers);
    fake.ready.pop_front();
  }
  return n;
}

int Host::ReqNotifyCq(ibv_cq* cq, int solicited_only) {
  std::lock_guard lock(state_->mutex);
  if (const int error = Enter(Call::kReqNotifyCq)) return error;
  auto& fake = *static_cast<FakeCq*>(cq);
  // It was there a moment before: no event for it, and the user must poll once more.
  while (!fake.held.empty() && fake.held.front().slips) {
    Completion completion = std::move(fake.held.front());
    fake.held.pop_front();
    state_->MakeReady(fake, std::move(completion));
  }
  if (solicited_only == 0) {
    fake.armed = FakeCq::Armed::kAll;
  } else if (fake.armed == FakeCq::Armed::kNo) {
    fake.armed = FakeCq::Armed::kSolicited;
  }
  return 0;
}

int Host::GetCqEvent(ibv_comp_channel* channel, ibv_cq** cq, void** cq_context) {
  auto& fake = *static_cast<FakeChannel*>(channel);
  for (;;) {
    {
      std::lock_guard lock(state_->mutex);
      if (!fake.events.empty()) {
        FakeCq* entry = fake.events.Pop();
        ++entry->unacknowledged;
        *cq = entry;
        *cq_context = entry->cq_context;
        return 0;
      }
    }
    if (!AwaitReadable(channel->fd)) return -1;
  }
}

void Host::AckCqEvents(ibv_cq* cq, unsigned int count) {
  std::lock_guard lock(state_->mutex);
  auto& fake = *static_cast<FakeCq*>(cq);
  fake.unacknowledged -= count;
  if (fake.unacknowledged < 0) {
    state_->Violate("More events are acknowledged than were read.");
    fake.unacknowledged = 0;
  }
}

// Enters a completion, perhaps not at once. Those of one queue stay in order.
void State::Complete(FakeCq& cq, Completion completion) {
  const bool hold = completion.send ? holds_sends : holds_receives;
  const bool slips = Roll(options.slip);
  if (hold || !cq.held.empty() || slips || Roll(options.delay)) {
    const uint64_t most_us = slips ? 2000 : static_cast<uint64_t>(options.delay_us);
    completion.due = NowNanoseconds() + static_cast<int64_t>(Below(most_us + 1)) * 1000;
    if (!cq.held.empty()) completion.due = std::max(completion.due, cq.held.back().due);
    completion.slips = slips && !hold;
    cq.held.push_back(std::move(completion));
    At(cq.held.back().due, [this, at = &cq] {
      if (cqs.count(at) != 0) Release(*at);
    });
    return;
  }
  MakeReady(cq, std::move(completion));
}

void State::Release(FakeCq& cq) {
  while (!cq.held.empty()) {
    Completion& first = cq.held.front();
    if (first.send ? holds_sends : holds_receives) return;
    if (first.due > NowNanoseconds()) return;  // each has a timer of its own
    Completion completion = std::move(first);
    cq.held.pop_front();
    MakeReady(cq, std::move(completion));
  }
}

void State::MakeReady(FakeCq& cq, Completion completion) {
  if (cq.overrun) return;
  if (cq.ready.size() >= static_cast<size_t>(cq.cqe)) {
    Violate("A completion queue overflows (" + std::to_string(cq.cqe) + " entries).");
    cq.overrun = true;
    Async(*static_cast<FakeContext*>(cq.context)->fake_device, IBV_EVENT_CQ_ERR, &cq);
    return;
  }
  const bool urgent = completion.solicited || completion.wc.status != IBV_WC_SUCCESS;
  cq.ready.push_back(std::move(completion));
  if (cq.armed == FakeCq::Armed::kNo || cq.fake_channel == nullptr) return;
  if (cq.armed == FakeCq::Armed::kSolicited && !urgent) return;
  cq.armed = FakeCq::Armed::kNo;
  if (lose > 0) {
    --lose;
  } else if (!Roll(options.lose_notification)) {
    cq.fake_channel->events.Push(&cq);
  }
}

void State::ForgetCompletions(FakeCq& cq, const FakeQp& qp) {
  for (auto* list : {&cq.ready, &cq.held}) {
    std::erase_if(*list, [&](const Completion& completion) { return completion.qp == &qp; });
  }
}

}  // namespace penstock::transport::rdma::fake
