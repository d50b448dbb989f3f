#include "transport/rdma/bulk_engine.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <list>
#include <map>

#include "common/log.h"
#include "transport/rdma/rail.h"

namespace penstock::transport::rdma {
namespace {

constexpr int64_t kMillisecond = 1'000'000;
constexpr int64_t kDrainMs = 2'000;
constexpr uint64_t kWholeBelow = 1 << 20;  // smaller operations are not cut
constexpr uint32_t kNotifications = 64;    // under way per rail
constexpr uint32_t kPassiveReceives = 256, kActiveReceives = 4;
constexpr uint32_t kRepostBatch = 16;
constexpr uint32_t kMostPosts = 16;
constexpr int kReapBatch = 16;
constexpr size_t kRecentPuts = 256;

int64_t KeepaliveNs(const RdmaOptions& options) {
  return options.keepalive_ms * kMillisecond;
}

bool Covers(uint32_t reached, uint32_t wanted) {
  return static_cast<int32_t>(reached - wanted) >= 0;
}

bool IsRefusal(ibv_wc_status status) {
  return status == IBV_WC_REM_ACCESS_ERR || status == IBV_WC_REM_INV_REQ_ERR ||
         status == IBV_WC_REM_OP_ERR;
}

}  // namespace

struct BulkEngine::State {
  State(std::shared_ptr<Domain> domain, const RdmaOptions& options, bool initiator,
        CompletionQueue& completions, std::function<void()> wake,
        std::function<void()> rails_changed)
      : domain(std::move(domain)),
        verbs(this->domain->verbs()),
        options(options),
        initiator(initiator),
        completions(completions),
        wake(std::move(wake)),
        rails_changed(std::move(rails_changed)),
        epoll(epoll_create1(EPOLL_CLOEXEC)) {}

  struct RecentPut {
    uint64_t address, bytes;
    uint32_t rail;
    uint16_t generation;
    uint32_t sequence;  // of its notification
  };

  const std::shared_ptr<Domain> domain;
  Verbs& verbs;
  const RdmaOptions options;
  const bool initiator;
  CompletionQueue& completions;
  const std::function<void()> wake, rails_changed;
  const int epoll;

  std::mutex mutex;
  std::map<ibv_context*, ibv_comp_channel*> channels;
  std::array<BulkRail, kMaxRails> rails;
  std::list<std::unique_ptr<BulkOperation>> operations;
  std::deque<BulkChunk> queue;
  std::deque<RecentPut> recent_puts;  // that the peer may not see yet
  // The newest notifications of Puts that found no room there: every move waits for those.
  std::array<uint32_t, kMaxRails> forgotten{};
  std::array<uint16_t, kMaxRails> forgotten_generation{};
  std::array<uint32_t, kMaxRails> next_sequence{};
  std::array<uint32_t, kMaxRails> peer_fence{};
  bool closed = false;
  bool changed = false;  // rails_changed is due

  std::array<std::atomic<uint32_t>, kMaxRails> fence{};  // completed, or received when passive
  std::array<std::atomic<uint16_t>, kMaxRails> live{};
  std::atomic<uint64_t> bytes_sent{0}, bytes_received{0}, repeated{0};

  void Finish(BulkOperation& operation);
  void MaybeFinish(BulkOperation& operation);
  void DropQueued(BulkOperation& operation);
  void Remember(const BulkOperation& put, uint32_t rail, uint32_t sequence);
  void OrderAfterPuts(BulkOperation& operation);
  bool Eligible(const BulkChunk& chunk, uint32_t rail) const;
  void PumpAll();
  void Pump(uint32_t rail, uint64_t most);
  bool PostList(uint32_t rail, ibv_send_wr* requests, uint32_t count);
  void Notify(BulkOperation& operation, uint32_t rail);
  void NotifyWhereDue(BulkOperation& operation);
  bool Reap(uint32_t rail);
  void OnDone(uint32_t rail, const BulkRequest& request);
  void OnFailed(uint32_t rail, const BulkRequest& request, ibv_wc_status status);
  bool ReapReceives(uint32_t rail);
  void BreakRail(uint32_t rail, const std::string& reason);
  bool Drained(uint32_t rail) const;
  void FinishDrain(uint32_t rail);
  void Keepalive(uint32_t rail, int64_t now);
  bool PollAll();
};

// --- operations ---

void BulkEngine::State::Finish(BulkOperation& operation) {
  const uint64_t bytes = operation.status == BulkStatus::kOk ? operation.bytes : 0;
  completions.Push({operation.cookie, operation.status, bytes});
  operations.remove_if([&](const auto& each) { return each.get() == &operation; });
}

void BulkEngine::State::MaybeFinish(BulkOperation& operation) {
  if (operation.chunks_left > 0) return;
  for (uint32_t rail = 0; rail < kMaxRails; ++rail) {
    if (operation.notifying[rail]) return;
    if (operation.put && operation.status == BulkStatus::kOk &&
        !(operation.carried[rail].empty() && operation.promised[rail].empty())) {
      return;
    }
  }
  Finish(operation);
}

void BulkEngine::State::DropQueued(BulkOperation& operation) {
  const size_t before = queue.size();
  std::erase_if(queue, [&](const BulkChunk& chunk) { return chunk.operation == &operation; });
  operation.chunks_left -= before - queue.size();
  operation.chunks_queued = 0;
}

bool BulkEngine::State::Eligible(const BulkChunk& chunk, uint32_t rail) const {
  const BulkOperation& operation = *chunk.operation;
  if ((operation.key.rails & 1u << rail) == 0) return false;
  if (!operation.after_puts) return true;
  for (uint32_t other = 0; other < kMaxRails; ++other) {
    if (operation.after[other] == 0 || other == rail) continue;
    if (!Covers(peer_fence[other], operation.after[other])) return false;
  }
  // The same queue pair keeps the order by itself; a newer one does not.
  return operation.after[rail] == 0 || operation.after_generation[rail] == rails[rail].generation ||
         Covers(peer_fence[rail], operation.after[rail]);
}

// A Put that is reported may still be on its way into the peer's memory. Until the peer has said
// that it saw the notification, another queue pair could overtake it there.
void BulkEngine::State::Remember(const BulkOperation& put, uint32_t rail, uint32_t sequence) {
  if (recent_puts.size() == kRecentPuts) {
    const RecentPut& oldest = recent_puts.front();
    const bool alone = forgotten[oldest.rail] == 0 ||
                       Covers(peer_fence[oldest.rail], forgotten[oldest.rail]) ||
                       forgotten_generation[oldest.rail] == oldest.generation;
    forgotten[oldest.rail] = oldest.sequence;
    forgotten_generation[oldest.rail] = alone ? oldest.generation : 0;
    recent_puts.pop_front();
  }
  recent_puts.push_back({put.remote, put.bytes, rail, rails[rail].generation, sequence});
}

void BulkEngine::State::OrderAfterPuts(BulkOperation& operation) {
  const auto order = [&](uint32_t rail, uint32_t sequence, uint16_t generation) {
    if (sequence == 0 || Covers(peer_fence[rail], sequence)) return;
    const bool mixed = operation.after[rail] != 0 && operation.after_generation[rail] != generation;
    operation.after_puts = true;
    operation.after[rail] = sequence;
    operation.after_generation[rail] = mixed ? 0 : generation;
  };
  for (uint32_t rail = 0; rail < kMaxRails; ++rail) {
    order(rail, forgotten[rail], forgotten_generation[rail]);
  }
  for (const RecentPut& recent : recent_puts) {
    if (recent.address < operation.remote + operation.bytes &&
        operation.remote < recent.address + recent.bytes) {
      order(recent.rail, recent.sequence, recent.generation);
    }
  }
}

// --- posting ---

bool BulkEngine::State::PostList(uint32_t rail, ibv_send_wr* requests, uint32_t count) {
  BulkRail& state = rails[rail];
  ibv_send_wr* bad = nullptr;
  const int error = verbs.PostSend(state.queue_pair->qp(), requests, &bad);
  if (error == 0) return true;
  const uint32_t done = bad == nullptr ? 0 : static_cast<uint32_t>(bad - requests);
  state.queue_pair->ledger().Untake(count - done);
  // What was not posted goes back to the head, in its order.
  for (uint32_t i = count; i > done; --i) {
    const BulkRequest request = state.under_way.back();
    state.under_way.pop_back();
    if (request.kind == BulkRequest::Kind::kChunk) {
      state.bytes_under_way -= request.chunk.bytes;
      --state.chunks_under_way;
      ++request.chunk.operation->chunks_queued;
      if (request.chunk.operation->put) {
        std::erase_if(request.chunk.operation->carried[rail],
                      [&](const BulkChunk& chunk) { return chunk.offset == request.chunk.offset; });
      }
      queue.push_front(request.chunk);
    } else if (request.kind == BulkRequest::Kind::kNotification) {
      BulkOperation& operation = *request.chunk.operation;
      operation.notifying[rail] = false;
      operation.carried[rail] = std::move(operation.promised[rail]);
      operation.promised[rail].clear();
      --state.notifications_under_way;
    }
  }
  char text[128];
  if (error != ENOMEM && error != EAGAIN) {
    BreakRail(rail, std::string("Cannot post: ") + strerror_r(error, text, sizeof text) + ".");
  }
  return false;
}

// The least loaded rail first, and each at first no more than its share, so that a move of a few
// chunks uses all rails. Then whoever has room takes what is left.
void BulkEngine::State::PumpAll() {
  if (queue.empty()) return;
  std::array<uint32_t, kMaxRails> order = {0, 1, 2, 3};
  uint32_t live_rails = 0;
  for (const BulkRail& rail : rails) live_rails += rail.state == BulkRail::State::kLive ? 1 : 0;
  const auto load = [&](uint32_t rail) {
    return rails[rail].state == BulkRail::State::kLive ? rails[rail].bytes_under_way : UINT64_MAX;
  };
  std::sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) { return load(a) < load(b); });
  for (uint32_t i = 0; i < live_rails; ++i) {
    const uint64_t left = live_rails - i;
    Pump(order[i], (queue.size() + left - 1) / left);
  }
  for (uint32_t i = 0; i < live_rails && live_rails > 1; ++i) Pump(order[i], UINT64_MAX);
}

void BulkEngine::State::Pump(uint32_t rail, uint64_t most) {
  BulkRail& state = rails[rail];
  while (state.state == BulkRail::State::kLive && !queue.empty() && most > 0) {
    ibv_send_wr requests[kMostPosts] = {};
    ibv_sge parts[kMostPosts];
    uint32_t count = 0;
    SendLedger& ledger = state.queue_pair->ledger();
    std::vector<BulkOperation*> posted_whole;
    for (auto next = queue.begin(); next != queue.end() && count < kMostPosts && count < most;) {
      if (state.chunks_under_way >= options.bulk_depth || ledger.free() <= kReservedSendSlots)
        break;
      const BulkChunk chunk = *next;
      uint32_t lkey = 0;
      if (!Eligible(chunk, rail) || !domain->LocalKey(*chunk.operation->region, rail, &lkey)) {
        ++next;
        continue;
      }
      next = queue.erase(next);
      BulkOperation& operation = *chunk.operation;
      --operation.chunks_queued;
      ibv_send_wr& request = requests[count];
      parts[count] = {operation.local + chunk.offset, static_cast<uint32_t>(chunk.bytes), lkey};
      request.wr_id = ledger.Take();
      request.sg_list = &parts[count];
      request.num_sge = 1;
      request.opcode = operation.put ? IBV_WR_RDMA_WRITE : IBV_WR_RDMA_READ;
      request.send_flags = IBV_SEND_SIGNALED;
      request.wr.rdma.remote_addr = operation.remote + chunk.offset;
      request.wr.rdma.rkey = operation.key.rkey[rail];
      if (count > 0) requests[count - 1].next = &request;
      ++count;
      state.under_way.push_back({request.wr_id, BulkRequest::Kind::kChunk, chunk, 0});
      state.bytes_under_way += chunk.bytes;
      ++state.chunks_under_way;
      if (operation.put) {
        operation.carried[rail].push_back(chunk);
        if (operation.chunks_queued == 0) posted_whole.push_back(&operation);
      }
    }
    if (count == 0) return;
    most -= count;
    state.active_ns = NowNanoseconds();
    if (!PostList(rail, requests, count)) return;
    // A Put that only this rail carries is notified right behind its bytes.
    for (BulkOperation* operation : posted_whole) NotifyWhereDue(*operation);
  }
}

// Notifications follow the bytes on the same queue pair. With several rails they wait until all
// bytes are done, so that a chunk that must go again never comes after its notification.
void BulkEngine::State::NotifyWhereDue(BulkOperation& operation) {
  if (!operation.put || operation.status != BulkStatus::kOk || operation.chunks_queued > 0) return;
  uint32_t used = 0;
  for (const auto& chunks : operation.carried) used += chunks.empty() ? 0 : 1;
  if (used > 1 && operation.chunks_left > 0) return;
  for (uint32_t rail = 0; rail < kMaxRails; ++rail) {
    if (!operation.carried[rail].empty() && !operation.notifying[rail]) Notify(operation, rail);
  }
}

void BulkEngine::State::Notify(BulkOperation& operation, uint32_t rail) {
  BulkRail& state = rails[rail];
  if (state.state != BulkRail::State::kLive) return;  // its chunks go again
  SendLedger& ledger = state.queue_pair->ledger();
  // Left for later when there is no room: every completion looks again.
  if (state.notifications_under_way >= kNotifications || ledger.free() == 0) return;
  const uint32_t sequence = ++next_sequence[rail];
  ibv_send_wr request = {};
  request.wr_id = ledger.Take();
  request.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
  request.send_flags = IBV_SEND_SIGNALED;
  request.imm_data = htonl(sequence);
  state.under_way.push_back(
      {request.wr_id, BulkRequest::Kind::kNotification, {&operation, 0, 0}, sequence});
  ++state.notifications_under_way;
  operation.notifying[rail] = true;
  operation.promised[rail] = std::move(operation.carried[rail]);
  operation.carried[rail].clear();
  PostList(rail, &request, 1);
}

void BulkEngine::State::Keepalive(uint32_t rail, int64_t now) {
  BulkRail& state = rails[rail];
  if (!initiator || state.state != BulkRail::State::kLive || !state.under_way.empty() ||
      now - state.active_ns < KeepaliveNs(options)) {
    return;
  }
  state.active_ns = now;
  ibv_send_wr request = {};
  request.wr_id = state.queue_pair->ledger().Take();
  request.opcode = IBV_WR_RDMA_WRITE;
  request.send_flags = IBV_SEND_SIGNALED;
  state.under_way.push_back({request.wr_id, BulkRequest::Kind::kKeepalive, {}, 0});
  PostList(rail, &request, 1);
}

// --- completions ---

void BulkEngine::State::OnDone(uint32_t rail, const BulkRequest& request) {
  BulkRail& state = rails[rail];
  if (request.kind == BulkRequest::Kind::kKeepalive) return;
  BulkOperation& operation = *request.chunk.operation;
  if (request.kind == BulkRequest::Kind::kChunk) {
    state.bytes_under_way -= request.chunk.bytes;
    --state.chunks_under_way;
    --operation.chunks_left;
    (operation.put ? bytes_sent : bytes_received).fetch_add(request.chunk.bytes);
    if (operation.chunks_left == 0) NotifyWhereDue(operation);
  } else {
    --state.notifications_under_way;
    operation.notifying[rail] = false;
    operation.promised[rail].clear();
    fence[rail].store(request.sequence, std::memory_order_release);
    Remember(operation, rail, request.sequence);
    NotifyWhereDue(operation);  // chunks that came to the rail since
  }
  MaybeFinish(operation);
}

void BulkEngine::State::OnFailed(uint32_t rail, const BulkRequest& request, ibv_wc_status status) {
  BulkRail& state = rails[rail];
  if (state.state == BulkRail::State::kLive) {
    BreakRail(rail, std::string("A request failed (") + CompletionName(status) + ").");
  }
  if (request.kind == BulkRequest::Kind::kKeepalive) return;
  BulkOperation& operation = *request.chunk.operation;
  if (request.kind == BulkRequest::Kind::kNotification) {
    --state.notifications_under_way;
    operation.notifying[rail] = false;  // what it stood for goes again
    return;
  }
  state.bytes_under_way -= request.chunk.bytes;
  --state.chunks_under_way;
  if (operation.put) {
    for (auto* chunks : {&operation.carried[rail], &operation.promised[rail]}) {
      std::erase_if(*chunks,
                    [&](const BulkChunk& chunk) { return chunk.offset == request.chunk.offset; });
    }
  }
  // Only the request at fault has such a status, those behind it are flushed.
  if (IsRefusal(status)) {
    operation.status = BulkStatus::kRefused;
    live[rail].store(kRailRefused, std::memory_order_release);
    changed = true;
    --operation.chunks_left;
    DropQueued(operation);
    return;  // finished with the drain
  }
  state.again.push_back(request.chunk);
}

bool BulkEngine::State::Reap(uint32_t rail) {
  BulkRail& state = rails[rail];
  bool any = false;
  while (state.queue_pair != nullptr) {
    ibv_wc completions_[kReapBatch];
    const int got = verbs.PollCq(state.queue_pair->send_cq(), kReapBatch, completions_);
    if (got <= 0) break;
    any = true;
    for (int i = 0; i < got; ++i) {
      if (!state.queue_pair->ledger().Complete(completions_[i].wr_id)) continue;
      while (!state.under_way.empty() && state.under_way.front().id <= completions_[i].wr_id) {
        const BulkRequest request = state.under_way.front();
        state.under_way.pop_front();
        if (completions_[i].status == IBV_WC_SUCCESS) {
          OnDone(rail, request);
        } else {
          OnFailed(rail, request, completions_[i].status);
        }
      }
    }
    if (got < kReapBatch) break;
  }
  return any;
}

bool BulkEngine::State::ReapReceives(uint32_t rail) {
  BulkRail& state = rails[rail];
  bool any = false;
  while (state.queue_pair != nullptr) {
    ibv_wc completions_[kReapBatch];
    const int got = verbs.PollCq(state.queue_pair->receive_cq(), kReapBatch, completions_);
    if (got <= 0) break;
    any = true;
    for (int i = 0; i < got; ++i) {
      ++state.receives_missing;
      if (completions_[i].status != IBV_WC_SUCCESS) {
        // The initiator learns more from the request that failed.
        if (state.state == BulkRail::State::kLive && !initiator) {
          BreakRail(rail, std::string("A receive failed (") +
                              CompletionName(completions_[i].status) + ").");
        }
        continue;
      }
      if (!initiator && completions_[i].opcode == IBV_WC_RECV_RDMA_WITH_IMM) {
        const uint32_t sequence = ntohl(completions_[i].imm_data);
        if (Covers(sequence, fence[rail].load())) {
          fence[rail].store(sequence, std::memory_order_release);
        }
      }
    }
    if (got < kReapBatch) break;
  }
  if (state.state == BulkRail::State::kLive && state.receives_missing >= kRepostBatch) {
    for (; state.receives_missing > 0; --state.receives_missing) {
      ibv_recv_wr request = {};
      ibv_recv_wr* bad = nullptr;
      if (verbs.PostRecv(state.queue_pair->qp(), &request, &bad) != 0) break;
    }
  }
  return any;
}

// --- failure ---

void BulkEngine::State::BreakRail(uint32_t rail, const std::string& reason) {
  BulkRail& state = rails[rail];
  if (state.state != BulkRail::State::kLive) return;
  LOG_INFO("transport", "Rail %u (generation %u) fails: %s", rail, state.generation,
           reason.c_str());
  state.state = BulkRail::State::kDraining;
  state.drain_until_ns = NowNanoseconds() + kDrainMs * kMillisecond;
  state.queue_pair->Break();
  live[rail].store(0, std::memory_order_release);
  changed = true;
  wake();
}

// The receiver of notifications looks at every receive, too: one of them may be a notification that
// the sender knows to be done, and waits for us to count.
bool BulkEngine::State::Drained(uint32_t rail) const {
  const BulkRail& state = rails[rail];
  return state.under_way.empty() &&
         (initiator || state.receives_missing >= state.queue_pair->receive_depth());
}

void BulkEngine::State::FinishDrain(uint32_t rail) {
  BulkRail& state = rails[rail];
  ReapReceives(rail);
  state.queue_pair.reset();  // from here on nothing of it touches any memory
  while (!state.under_way.empty()) {
    const BulkRequest request = state.under_way.front();
    state.under_way.pop_front();
    OnFailed(rail, request, IBV_WC_WR_FLUSH_ERR);
  }
  state.state = BulkRail::State::kDown;
  state.receives_missing = 0;
  // Bytes whose notification did not come through go again, too.
  std::vector<BulkChunk> again = std::move(state.again);
  state.again.clear();
  for (const auto& operation : operations) {
    if (operation->status != BulkStatus::kOk) continue;
    for (const auto* chunks : {&operation->promised[rail], &operation->carried[rail]}) {
      again.insert(again.end(), chunks->begin(), chunks->end());
      operation->chunks_left += chunks->size();
    }
  }
  for (const auto& operation : operations) {
    operation->carried[rail].clear();
    operation->promised[rail].clear();
  }
  for (auto chunk = again.rbegin(); chunk != again.rend(); ++chunk) {
    if (chunk->operation->status == BulkStatus::kOk) {
      queue.push_front(*chunk);
      ++chunk->operation->chunks_queued;
      repeated.fetch_add(1);
    } else {
      --chunk->operation->chunks_left;
    }
  }
  std::vector<BulkOperation*> all;
  for (const auto& operation : operations) all.push_back(operation.get());
  for (BulkOperation* operation : all) {
    if (operation->chunks_left == 0) MaybeFinish(*operation);
  }
}

bool BulkEngine::State::PollAll() {
  bool any = false;
  const int64_t now = NowNanoseconds();
  for (uint32_t rail = 0; rail < kMaxRails; ++rail) {
    BulkRail& state = rails[rail];
    if (state.state == BulkRail::State::kDown) continue;
    any = Reap(rail) || any;
    any = ReapReceives(rail) || any;
    if (state.state == BulkRail::State::kDraining &&
        (Drained(rail) || now >= state.drain_until_ns)) {
      FinishDrain(rail);
      any = true;
      continue;
    }
    Keepalive(rail, now);
  }
  if (any && initiator && !closed) {
    for (const auto& operation : operations) NotifyWhereDue(*operation);
    PumpAll();
  }
  return any;
}

// --- the face ---

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
    channel = state_->verbs.CreateCompChannel(device.context);
    if (channel == nullptr) {
      state_->channels.erase(device.context);
      return FailErrno("Device (" + device.name + ") has no completion channel for bulk data");
    }
    fcntl(channel->fd, F_SETFL, fcntl(channel->fd, F_GETFL) | O_NONBLOCK);
    epoll_event event = {};
    event.events = EPOLLIN;
    event.data.fd = channel->fd;
    epoll_ctl(state_->epoll, EPOLL_CTL_ADD, channel->fd, &event);
  }
  QueuePairShape shape;
  shape.pd = device.pd;
  shape.send_channel = shape.receive_channel = channel;
  shape.send_depth = state_->options.bulk_depth + kNotifications + 2 * kReservedSendSlots;
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
  {
    std::lock_guard lock(state_->mutex);
    if (state_->closed) return;
    BulkRail& state = state_->rails[rail];
    state_->BreakRail(rail, "A newer queue pair takes its place.");
    const Deadline deadline = Deadline::After(kDrainMs);
    while (state.state == BulkRail::State::kDraining) {
      state_->Reap(rail);
      state_->ReapReceives(rail);
      if (state_->Drained(rail) || deadline.expired()) {
        state_->FinishDrain(rail);
      } else {
        usleep(100);
      }
    }
    state.state = BulkRail::State::kLive;
    state.generation = generation;
    state.queue_pair = std::move(queue_pair);
    state.active_ns = NowNanoseconds();
    state.receives_missing = 0;
    state_->live[rail].store(generation, std::memory_order_release);
    state_->changed = false;
    for (const auto& operation : state_->operations) state_->NotifyWhereDue(*operation);
    state_->PumpAll();
  }
  state_->wake();
  state_->rails_changed();
}

void BulkEngine::Drop(uint32_t rail, uint16_t generation, const std::string& reason) {
  if (rail >= kMaxRails) return;
  bool changed;
  {
    std::lock_guard lock(state_->mutex);
    BulkRail& state = state_->rails[rail];
    if (state.state != BulkRail::State::kLive || state.generation != generation) return;
    state_->BreakRail(rail, reason);
    changed = std::exchange(state_->changed, false);
  }
  if (changed) state_->rails_changed();
}

std::array<uint16_t, kMaxRails> BulkEngine::live() const {
  std::array<uint16_t, kMaxRails> live;
  for (uint32_t rail = 0; rail < kMaxRails; ++rail) {
    live[rail] = state_->live[rail].load(std::memory_order_acquire);
  }
  return live;
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
  const auto wanted = static_cast<uint8_t>(put ? Access::kPeerWrites : Access::kPeerReads);
  const bool allowed = remote.bytes == sizeof key && key.kind == kRdmaKeyKind && key.rails != 0 &&
                       (key.access & wanted) != 0 && remote_offset <= key.bytes &&
                       bytes <= key.bytes - remote_offset &&
                       key.address + key.bytes >= key.address && local_offset <= local.size() &&
                       bytes <= local.size() - local_offset;
  bool changed;
  {
    std::lock_guard lock(state_->mutex);
    if (state_->closed || !state_->initiator) return Outcome::kClosed;
    if (!allowed || bytes == 0) {
      state_->completions.Push({cookie, allowed ? BulkStatus::kOk : BulkStatus::kRefused, 0});
      return Outcome::kOk;
    }
    auto operation = std::make_unique<BulkOperation>();
    operation->cookie = cookie;
    operation->put = put;
    operation->region = &local;
    operation->local = reinterpret_cast<uintptr_t>(local.address()) + local_offset;
    operation->remote = key.address + remote_offset;
    operation->bytes = bytes;
    operation->key = key;
    state_->OrderAfterPuts(*operation);
    const uint64_t piece = bytes < kWholeBelow
                               ? bytes
                               : std::clamp<uint64_t>(state_->options.bulk_chunk, 4096, 1 << 20);
    for (uint64_t offset = 0; offset < bytes; offset += piece) {
      state_->queue.push_back({operation.get(), offset, std::min(piece, bytes - offset)});
      ++operation->chunks_left;
      ++operation->chunks_queued;
    }
    state_->operations.push_back(std::move(operation));
    state_->PumpAll();
    changed = std::exchange(state_->changed, false);
  }
  if (changed) state_->rails_changed();
  return Outcome::kOk;
}

void BulkEngine::OnPeerFence(const std::array<uint32_t, kMaxRails>& fence) {
  if (!state_->initiator) return;
  bool wake = false;
  {
    std::lock_guard lock(state_->mutex);
    if (fence == state_->peer_fence) return;
    for (uint32_t rail = 0; rail < kMaxRails; ++rail) {
      // More than was ever sent is a lie, which harms the liar's own order only.
      if (Covers(fence[rail], state_->peer_fence[rail])) state_->peer_fence[rail] = fence[rail];
    }
    std::erase_if(state_->recent_puts, [&](const State::RecentPut& recent) {
      return Covers(state_->peer_fence[recent.rail], recent.sequence);
    });
    wake = !state_->queue.empty();
    if (wake) state_->PumpAll();
  }
  if (wake) state_->wake();
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
      std::lock_guard lock(state_->mutex);
      for (uint32_t rail = 0; rail < kMaxRails; ++rail) state_->ReapReceives(rail);
    }
  }
  return false;
}

bool BulkEngine::Poll() {
  bool any, changed;
  {
    std::lock_guard lock(state_->mutex);
    any = state_->PollAll();
    changed = std::exchange(state_->changed, false);
  }
  if (changed) state_->rails_changed();
  return any;
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

Deadline BulkEngine::next_tick() const {
  std::lock_guard lock(state_->mutex);
  Deadline next = Deadline::Never();
  for (const BulkRail& rail : state_->rails) {
    if (rail.state == BulkRail::State::kDraining) next = Earlier(next, Deadline::After(1));
    if (rail.state == BulkRail::State::kLive && state_->initiator && rail.under_way.empty()) {
      next = Earlier(next, Deadline::AtNanoseconds(rail.active_ns + KeepaliveNs(state_->options)));
    }
  }
  return next;
}

void BulkEngine::Close(int drain_ms) {
  std::lock_guard lock(state_->mutex);
  if (!std::exchange(state_->closed, true)) {
    state_->queue.clear();
    for (const auto& operation : state_->operations) {
      operation->chunks_left -= operation->chunks_queued;
      operation->chunks_queued = 0;
      operation->status = BulkStatus::kClosed;
    }
  }
  for (uint32_t rail = 0; rail < kMaxRails; ++rail) {
    BulkRail& state = state_->rails[rail];
    state_->BreakRail(rail, "The connection ends.");
    if (state.state != BulkRail::State::kDraining) continue;
    const Deadline deadline = Deadline::After(drain_ms);
    while (!state.under_way.empty() && !deadline.expired()) {
      if (!state_->Reap(rail)) usleep(100);
    }
    state_->FinishDrain(rail);
  }
  while (!state_->operations.empty()) {
    state_->operations.front()->status = BulkStatus::kClosed;
    state_->Finish(*state_->operations.front());
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
