#include "transport/rdma/bulk_engine.h"

#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "transport/rdma/bulk_state.h"
#include "transport/rdma/completion_channel.h"

namespace penstock::transport::rdma {
namespace {

constexpr uint64_t kWholeBelow = 1 << 20;  // smaller operations are not cut
constexpr uint32_t kPassiveReceives = 256, kActiveReceives = 4;

}  // namespace

BulkEngine::State::State(std::shared_ptr<Domain> domain, const RdmaOptions& options, bool initiator,
                         CompletionQueue& completions, std::function<void()> wake,
                         std::function<void()> rails_changed)
    : domain(std::move(domain)),
      verbs(this->domain->verbs()),
      options(options),
      initiator(initiator),
      completions(completions),
      wake(std::move(wake)),
      rails_changed(std::move(rails_changed)),
      epoll(epoll_create1(EPOLL_CLOEXEC)) {
  operation_pool.Prepare(64);
  chunk_pool.Prepare(256);
  recent_puts.reserve(kRecentPuts + 1);
}

BulkEngine::State::Turn::~Turn() {
  while (!state_.spent.empty()) {
    std::vector<Spent> spent;
    spent.swap(state_.spent);
    lock_.unlock();
    for (Spent& each : spent) each.queue_pair.reset();
    lock_.lock();
    for (const Spent& each : spent) {
      if (each.drained) state_.FinishDrain(each.rail);
    }
  }
  const bool wake = std::exchange(state_.wants_wake, false);
  const bool changed = std::exchange(state_.changed, false);
  lock_.unlock();
  if (wake) state_.wake();
  if (changed) state_.rails_changed();
}

BulkEngine::BulkEngine(std::shared_ptr<Domain> domain, const RdmaOptions& options, bool initiator,
                       CompletionQueue& completions, std::function<void()> wake,
                       std::function<void()> rails_changed)
    : state_(std::make_unique<State>(std::move(domain), options, initiator, completions,
                                     std::move(wake), std::move(rails_changed))) {}

BulkEngine::~BulkEngine() {
  Close(0);
  for (const auto& [context, channel] : state_->channels) {
    state_->verbs.DestroyCompChannel(channel);
  }
  close(state_->epoll);
}

Result<QueuePairShape> BulkEngine::ShapeFor(Domain::Device& device) {
  std::lock_guard lock(state_->mutex);
  ibv_comp_channel*& channel = state_->channels[device.context];
  if (channel == nullptr) {
    channel = MakeCompletionChannel(state_->verbs, device.context, state_->epoll);
    if (channel == nullptr) {
      state_->channels.erase(device.context);
      return FailErrno("Device (" + device.name + ") has no completion channel for bulk data");
    }
  }
  QueuePairShape shape;
  shape.pd = device.pd;
  shape.send_channel = shape.receive_channel = channel;
  shape.send_depth = BulkSendDepth(state_->options);
  shape.receive_depth = state_->initiator ? kActiveReceives : kPassiveReceives;
  shape.send_sge = 1;
  shape.reads = state_->initiator;
  return shape;
}

Status BulkEngine::PostReceives(QueuePair& queue_pair) {
  for (uint32_t i = 0; i < queue_pair.receive_depth(); ++i) {
    ibv_recv_wr request = {};  // for notifications, which bring no bytes
    ibv_recv_wr* bad = nullptr;
    if (const int error = state_->verbs.PostRecv(queue_pair.qp(), &request, &bad)) {
      errno = error;
      return FailErrno("Cannot post a receive for bulk notifications");
    }
  }
  return {};
}

void BulkEngine::Admit(uint32_t rail, uint16_t generation, std::unique_ptr<QueuePair> queue_pair) {
  if (rail >= kMaxRails) return;
  State::Turn turn(*state_);
  if (state_->closed) return state_->Discard(rail, generation, std::move(queue_pair));
  BulkRail& state = state_->rails[rail];
  state_->BreakRail(rail, "A newer queue pair takes its place.");
  state_->Discard(rail, state.successor_generation, std::move(state.successor));
  state.successor = std::move(queue_pair);
  state.successor_generation = generation;
  state_->live[rail].store(generation, std::memory_order_release);
  state_->changed = state_->wants_wake = true;
  if (state.state == BulkRail::State::kDown) state_->InstallSuccessor(rail);
}

void BulkEngine::Drop(uint32_t rail, uint16_t generation, const std::string& reason) {
  if (rail >= kMaxRails) return;
  State::Turn turn(*state_);
  BulkRail& state = state_->rails[rail];
  if (state.successor != nullptr) {
    if (state.successor_generation != generation) return;
    state_->Discard(rail, generation, std::move(state.successor));
    state_->live[rail].store(0, std::memory_order_release);
    state_->changed = true;
  } else if (state.generation == generation) {
    state_->BreakRail(rail, reason);
  }
}

void BulkEngine::OnDeviceEvent(const DeviceEvent& event) {
  std::array<uint16_t, kMaxRails> ended{};
  {
    std::lock_guard lock(state_->mutex);
    for (uint32_t rail = 0; rail < kMaxRails; ++rail) {
      const BulkRail& state = state_->rails[rail];
      if (state.successor != nullptr) {
        if (event.Ends(*state.successor)) ended[rail] = state.successor_generation;
      } else if (state.queue_pair != nullptr && event.Ends(*state.queue_pair)) {
        ended[rail] = state.generation;
      }
    }
  }
  for (uint32_t rail = 0; rail < kMaxRails; ++rail) {
    if (ended[rail] != 0) Drop(rail, ended[rail], EventName(event.type));
  }
}

bool BulkEngine::LivesWithout(const DeviceEvent& event) const {
  std::lock_guard lock(state_->mutex);
  return std::any_of(state_->rails.begin(), state_->rails.end(), [&event](const BulkRail& state) {
    return state.state == BulkRail::State::kLive && !event.Ends(*state.queue_pair);
  });
}

std::array<uint16_t, kMaxRails> BulkEngine::live() const {
  std::array<uint16_t, kMaxRails> live;
  for (uint32_t rail = 0; rail < kMaxRails; ++rail) {
    live[rail] = state_->live[rail].load(std::memory_order_acquire);
  }
  return live;
}

std::array<uint16_t, kMaxRails> BulkEngine::ended() const {
  std::array<uint16_t, kMaxRails> ended;
  for (uint32_t rail = 0; rail < kMaxRails; ++rail) {
    ended[rail] = state_->ended[rail].load(std::memory_order_acquire);
  }
  return ended;
}

Outcome BulkEngine::Get(MemoryRegion& target, uint64_t target_offset, const MemoryKey& source,
                        uint64_t source_offset, uint64_t bytes, uint64_t cookie) {
  return Submit(false, target, target_offset, source, source_offset, bytes, cookie);
}

Outcome BulkEngine::Put(MemoryRegion& source, uint64_t source_offset, const MemoryKey& target,
                        uint64_t target_offset, uint64_t bytes, uint64_t cookie) {
  return Submit(true, source, source_offset, target, target_offset, bytes, cookie);
}

Outcome BulkEngine::Submit(bool put, MemoryRegion& local, uint64_t local_offset,
                           const MemoryKey& remote, uint64_t remote_offset, uint64_t bytes,
                           uint64_t cookie) {
  RdmaKeyBlob key;
  std::memcpy(&key, remote.blob.data(), sizeof key);
  const RdmaRegion* region = state_->domain->Own(local);
  const auto wanted = static_cast<uint8_t>(put ? Access::kPeerWrites : Access::kPeerReads);
  const bool allowed = remote.bytes == sizeof key && key.kind == kRdmaKeyKind && key.rails != 0 &&
                       key.rails >> kMaxRails == 0 && (key.access & wanted) != 0 &&
                       remote_offset <= key.bytes && bytes <= key.bytes - remote_offset &&
                       key.address + key.bytes >= key.address && local_offset <= local.size() &&
                       bytes <= local.size() - local_offset && region != nullptr;
  {
    State::Turn turn(*state_);
    if (state_->closed || !state_->initiator) return Outcome::kClosed;
    if (!allowed || bytes == 0) {
      state_->completions.Push({cookie, allowed ? BulkStatus::kOk : BulkStatus::kRefused, 0});
      return Outcome::kOk;
    }
    if (state_->operations.size() >= kMostOperations) return Outcome::kAgain;
    BulkOperation& operation = state_->operation_pool.Take();
    operation.cookie = cookie;
    operation.put = put;
    operation.region = region;
    operation.local = reinterpret_cast<uintptr_t>(local.address()) + local_offset;
    operation.remote = key.address + remote_offset;
    operation.bytes = bytes;
    operation.key = key;
    operation.piece = bytes < kWholeBelow
                          ? bytes
                          : std::clamp<uint64_t>(state_->options.bulk_chunk, 4096, 1 << 20);
    operation.chunks_left = operation.chunks_queued = (bytes - 1) / operation.piece + 1;
    state_->OrderAfterPuts(operation);
    state_->operations.PushBack(operation);
    state_->waiting.PushBack(operation);
    state_->queued += operation.chunks_queued;
    state_->PumpAll();
  }
  return Outcome::kOk;
}

void BulkEngine::OnPeerState(const std::array<uint32_t, kMaxRails>& fence,
                             const std::array<uint16_t, kMaxRails>& ended) {
  State::Turn turn(*state_);
  state_->OnPeerEnded(ended);
  if (state_->initiator) state_->OnPeerFence(fence);
}

std::array<uint32_t, kMaxRails> BulkEngine::fence() const {
  std::array<uint32_t, kMaxRails> fence;
  for (uint32_t rail = 0; rail < kMaxRails; ++rail) {
    fence[rail] = state_->fence[rail].load(std::memory_order_acquire);
  }
  return fence;
}

bool BulkEngine::FenceReached(const std::array<uint32_t, kMaxRails>& fence) {
  if (state_->initiator) return true;
  for (int attempt = 0; attempt < 2; ++attempt) {
    bool reached = true;
    for (uint32_t rail = 0; rail < kMaxRails; ++rail) {
      reached = reached && Covers(state_->fence[rail].load(std::memory_order_acquire), fence[rail]);
    }
    if (reached) return true;
    if (attempt == 0) {
      State::Turn turn(*state_);
      for (uint32_t rail = 0; rail < kMaxRails; ++rail) state_->ReapReceives(rail);
    }
  }
  return false;
}

bool BulkEngine::Poll() {
  State::Turn turn(*state_);
  return state_->PollAll();
}

bool BulkEngine::Arm() {
  {
    std::lock_guard lock(state_->mutex);
    for (const auto& [context, channel] : state_->channels) {
      ibv_cq* cq = nullptr;
      void* cq_context = nullptr;
      while (state_->verbs.GetCqEvent(channel, &cq, &cq_context) == 0) {
        const auto owner =
            std::find_if(state_->rails.begin(), state_->rails.end(), [cq](const BulkRail& rail) {
              return rail.queue_pair != nullptr &&
                     (rail.queue_pair->send_cq() == cq || rail.queue_pair->receive_cq() == cq);
            });
        if (owner != state_->rails.end()) {
          owner->queue_pair->CountEvent(cq);
        } else {
          state_->verbs.AckCqEvents(cq, 1);
        }
      }
    }
    for (const BulkRail& rail : state_->rails) {
      if (rail.queue_pair == nullptr) continue;
      state_->verbs.ReqNotifyCq(rail.queue_pair->send_cq(), 0);
      state_->verbs.ReqNotifyCq(rail.queue_pair->receive_cq(), 0);
    }
  }
  return !Poll();
}

int BulkEngine::event_fd() const {
  return state_->epoll;
}

bool BulkEngine::failed() const {
  return state_->failed.load(std::memory_order_acquire);
}
const std::string& BulkEngine::failure() const {
  return state_->failure;
}

Deadline BulkEngine::next_tick() const {
  std::lock_guard lock(state_->mutex);
  const bool soon = state_->post_again || !state_->discarded.empty();
  Deadline next = soon ? Deadline::After(1) : Deadline::Never();
  if (const BulkOperation* first = state_->late.first()) {
    next = Earlier(next, Deadline::AtNanoseconds(first->late_until_ns));
  }
  for (const BulkRail& rail : state_->rails) {
    if (rail.state == BulkRail::State::kDraining) next = Earlier(next, Deadline::After(1));
    if (rail.state == BulkRail::State::kLive && state_->initiator && rail.under_way.empty()) {
      next = Earlier(next, Deadline::AtNanoseconds(rail.active_ns + KeepaliveNs(state_->options)));
    }
  }
  return next;
}

void BulkEngine::Close(int drain_ms) {
  {
    State::Turn turn(*state_);
    if (!std::exchange(state_->closed, true)) {
      for (BulkOperation* each = state_->operations.first(); each != nullptr;
           each = Operations::After(*each)) {
        each->status = BulkStatus::kClosed;
        state_->DropQueued(*each);
      }
    }
    for (uint32_t rail = 0; rail < kMaxRails; ++rail) {
      BulkRail& state = state_->rails[rail];
      state_->BreakRail(rail, "The connection ends.");
      state_->Discard(rail, state.successor_generation, std::move(state.successor));
    }
    for (State::Discarded& each : state_->discarded) {
      state_->spent.push_back({std::move(each.queue_pair), each.rail, false});
    }
    state_->discarded.clear();
  }
  const Deadline deadline = Deadline::After(drain_ms);
  for (bool idle = false; !idle; usleep(100)) {
    State::Turn turn(*state_);
    idle = true;
    for (uint32_t rail = 0; rail < kMaxRails; ++rail) {
      state_->Reap(rail);
      idle = idle && state_->rails[rail].under_way.empty();
    }
    if (deadline.expired()) break;
  }
  {
    State::Turn turn(*state_);
    for (uint32_t rail = 0; rail < kMaxRails; ++rail) {
      if (state_->rails[rail].state == BulkRail::State::kDraining) state_->EndDrain(rail);
    }
  }
  State::Turn turn(*state_);
  while (!state_->operations.empty()) {
    state_->operations.first()->status = BulkStatus::kClosed;
    state_->Finish(*state_->operations.first());
  }
}

uint64_t BulkEngine::bytes_sent() const {
  return state_->bytes_sent.load();
}
uint64_t BulkEngine::bytes_received() const {
  return state_->bytes_received.load();
}
uint64_t BulkEngine::chunks_repeated() const {
  return state_->repeated.load();
}

}  // namespace penstock::transport::rdma
