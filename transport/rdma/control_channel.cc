#include "transport/rdma/control_channel.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "common/log.h"
#include "transport/rdma/completion_channel.h"

namespace penstock::transport::rdma {
namespace {

constexpr int kReapBatch = 16;
constexpr int kQuietRounds = 250;  // of 200 us

}  // namespace

ControlChannel::ControlChannel(std::shared_ptr<Domain> domain, BulkEngine& bulk,
                               const RdmaOptions& options, Waker& receiver, Waker& keeper,
                               int receiver_epoll, int keeper_epoll)
    : domain_(std::move(domain)),
      verbs_(domain_->verbs()),
      bulk_(bulk),
      options_(options),
      receiver_(receiver),
      keeper_(keeper),
      receiver_epoll_(receiver_epoll),
      keeper_epoll_(keeper_epoll),
      ring_bytes_(RetainedRing::CapacityFor(options.ring_bytes, options.max_frame)),
      pacer_(options.packets_at_once),
      slot_states_(options.slots, SlotState::kFree),
      arrived_(kMostSlots),
      free_slots_(options.slots),
      joined_(new std::byte[RetainedRing::PadTo8(options.max_frame)]) {}

ControlChannel::~ControlChannel() {
  queue_pair_.reset();
  for (const auto& state : devices_) {
    if (state->memory != nullptr) verbs_.DeregMr(state->memory);
    for (ibv_comp_channel* channel : {state->send_channel, state->receive_channel}) {
      if (channel != nullptr) verbs_.DestroyCompChannel(channel);
    }
  }
  if (memory_ != nullptr) munmap(memory_, memory_bytes_);
}

Status ControlChannel::Start() {
  if (options_.slots < 2 * kReservedCredits || options_.slots > kMostSlots ||
      options_.slot_bytes < 512 || options_.slot_bytes > 65536 || options_.slot_bytes % 8 != 0 ||
      options_.send_depth < 2 * kReservedSendSlots) {
    return Fail(Code::kInvalidArgument, "The sizes of an rdma connection make no sense.");
  }
  const size_t headers = kRecords * sizeof(PacketHeader);
  const size_t slots = size_t{options_.slots} * options_.slot_bytes;
  memory_bytes_ = ring_bytes_ + headers + slots;
  void* memory =
      mmap(nullptr, memory_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return FailErrno("Cannot map the buffers of an rdma connection");
  memory_ = static_cast<std::byte*>(memory);
  headers_ = reinterpret_cast<PacketHeader*>(memory_ + ring_bytes_);
  slots_ = memory_ + ring_bytes_ + headers;
  ring_ = std::make_unique<RetainedRing>(memory_, ring_bytes_);
  return {};
}

// --- the queue pair ---

Result<ControlChannel::DeviceState*> ControlChannel::StateFor(Domain::Device& device) {
  std::lock_guard lock(receive_mutex_);
  for (const auto& state : devices_) {
    if (state->device == &device) return state.get();
  }
  auto state = std::make_unique<DeviceState>();
  state->device = &device;
  ASSIGN_OR_RETURN(state->memory, domain_->RegisterLocal(device, memory_, memory_bytes_));
  state->send_channel = MakeCompletionChannel(verbs_, device.context, keeper_epoll_);
  state->receive_channel = MakeCompletionChannel(verbs_, device.context, receiver_epoll_);
  devices_.push_back(std::move(state));  // the destructor frees what there is
  DeviceState* made = devices_.back().get();
  if (made->send_channel == nullptr || made->receive_channel == nullptr) {
    return FailErrno("Device (" + device.name + ") has no completion channel for a connection");
  }
  return made;
}

Result<QueuePairShape> ControlChannel::ShapeFor(Domain::Device& device) {
  ASSIGN_OR_RETURN(DeviceState * state, StateFor(device));
  QueuePairShape shape;
  shape.pd = device.pd;
  shape.send_channel = state->send_channel;
  shape.receive_channel = state->receive_channel;
  shape.send_depth = options_.send_depth;
  shape.receive_depth = options_.slots;
  shape.send_sge = 2;
  shape.inline_bytes = options_.inline_bytes;
  return shape;
}

Status ControlChannel::PostReceives(QueuePair& queue_pair, Domain::Device& device) {
  ASSIGN_OR_RETURN(DeviceState * state, StateFor(device));
  std::lock_guard lock(receive_mutex_);
  for (uint32_t slot = 0; slot < options_.slots; ++slot) {
    if (slot_states_[slot] != SlotState::kFree) continue;
    ibv_sge part = {reinterpret_cast<uintptr_t>(slots_ + size_t{slot} * options_.slot_bytes),
                    options_.slot_bytes, state->memory->lkey};
    ibv_recv_wr request = {};
    request.wr_id = slot;
    request.sg_list = &part;
    request.num_sge = 1;
    ibv_recv_wr* bad = nullptr;
    if (const int error = verbs_.PostRecv(queue_pair.qp(), &request, &bad)) {
      errno = error;
      return FailErrno("Cannot post a receive on " + device.name);
    }
    slot_states_[slot] = SlotState::kPosted;
    --free_slots_;
  }
  CountReposted();
  return {};
}

// A packet counts as acknowledged when its slot, or one that was free instead, is posted.
void ControlChannel::CountReposted() {
  if (given_back_ <= free_slots_) return;
  const uint64_t count = given_back_ - free_slots_;
  if (count > reposted_.load(std::memory_order_relaxed)) {
    reposted_.store(count, std::memory_order_release);
  }
}

void ControlChannel::TakeBackReceives() {
  std::lock_guard lock(receive_mutex_);
  for (SlotState& state : slot_states_) {
    if (state == SlotState::kPosted) {
      state = SlotState::kFree;
      ++free_slots_;
    }
  }
}

const ControlChannel::DeviceState* ControlChannel::StateOf(const QueuePair& queue_pair) const {
  for (const auto& state : devices_) {
    if (state->device->context == queue_pair.id()->verbs) return state.get();
  }
  return nullptr;
}

bool ControlChannel::Install(std::unique_ptr<QueuePair> queue_pair, uint32_t peer_slots,
                             uint64_t peer_received) {
  std::lock_guard receive(receive_mutex_);
  std::lock_guard lock(send_mutex_);
  if (peer_received > numbered_ || peer_received < acknowledged_ ||
      peer_slots < 2 * kReservedCredits || peer_slots > kMostSlots) {
    return false;
  }
  queue_pair_ = std::move(queue_pair);
  device_ = StateOf(*queue_pair_);
  for (uint64_t number = released_ + 1; number <= numbered_; ++number) {
    packets_[number % kRecords].request = 0;  // no earlier queue pair touches it any more
  }
  peer_slots_ = peer_slots;
  posted_ = peer_received;
  unsignalled_ = 0;
  send_armed_ = false;
  up_.store(true, std::memory_order_release);
  verbs_.ReqNotifyCq(queue_pair_->receive_cq(), 0);
  PostData(true);
  receiver_.Signal();  // something may have arrived before the notification was asked for
  return true;         // a queue pair that has broken at once is replaced like any other
}

void ControlChannel::Remove() {
  {
    std::lock_guard lock(send_mutex_);
    if (queue_pair_ == nullptr) return;
    up_.store(false, std::memory_order_release);
    queue_pair_->Break();
    // The last packets may have been sent without asking for a completion. This request is flushed,
    // which tells that all before it are done.
    SendLedger& ledger = queue_pair_->ledger();
    if (!ledger.idle() && ledger.free() > 0) {
      ibv_send_wr marker = {};
      marker.wr_id = ledger.Take();
      marker.opcode = IBV_WR_RDMA_WRITE;
      marker.send_flags = IBV_SEND_SIGNALED;
      ibv_send_wr* bad = nullptr;
      if (verbs_.PostSend(queue_pair_->qp(), &marker, &bad) != 0) ledger.Untake(1);
    }
  }
  // What arrived before the end counts, so everything posted should come back first. Not all of it
  // has to: soft-RoCE never flushes a receive that is posted after the error. Destroying the queue
  // pair ends all access as well.
  const Deadline deadline = Deadline::After(500);
  for (int quiet = 0; !Flushed() && quiet < kQuietRounds && !deadline.expired(); usleep(200)) {
    quiet = Receive() ? 0 : quiet + 1;
  }
  {
    std::lock_guard receive(receive_mutex_);
    std::lock_guard lock(send_mutex_);
    queue_pair_.reset();
  }
  TakeBackReceives();
}

bool ControlChannel::Flushed() {
  std::lock_guard receive(receive_mutex_);
  std::lock_guard lock(send_mutex_);
  // Some completions show only to who asks for events.
  verbs_.ReqNotifyCq(queue_pair_->send_cq(), 0);
  verbs_.ReqNotifyCq(queue_pair_->receive_cq(), 0);
  Reap();
  return queue_pair_->ledger().idle() &&
         std::none_of(slot_states_.begin(), slot_states_.end(),
                      [](SlotState state) { return state == SlotState::kPosted; });
}

bool ControlChannel::installed() const {
  std::lock_guard lock(send_mutex_);
  return queue_pair_ != nullptr;
}

std::string ControlChannel::down_reason() const {
  std::lock_guard lock(send_mutex_);
  return down_reason_;
}

uint64_t ControlChannel::received() const {
  std::lock_guard lock(receive_mutex_);
  return received_;
}

void ControlChannel::FailLink(const std::string& reason) {
  if (!up_.exchange(false)) return;
  down_reason_ = reason;
  keeper_.Signal();
}

void ControlChannel::ReportDown(const std::string& reason) {
  Receive();  // what came before counts
  std::lock_guard lock(send_mutex_);
  FailLink(reason + ".");
}

void ControlChannel::OnDeviceEvent(const DeviceEvent& event) {
  std::lock_guard lock(send_mutex_);
  if (queue_pair_ == nullptr || !event.Ends(*queue_pair_)) return;
  FailLink(std::string("Its device says: ") + EventName(event.type) + ".");
}

// --- sending ---

Outcome ControlChannel::Reserve(uint32_t bytes, std::byte** slot) {
  for (int attempt = 0;; ++attempt) {
    {
      std::lock_guard lock(send_mutex_);
      if (closed_) return Outcome::kClosed;
      *slot = ring_->Reserve(bytes);
      if (*slot != nullptr) return Outcome::kOk;
      if (attempt > 0) {
        wants_room_ = true;
        return Outcome::kAgain;
      }
      Reap();
      PostData(true);
    }
    Receive();  // the peer's acknowledgements make room, and nobody else may be looking
  }
}

uint32_t ControlChannel::Commit(uint32_t used, uint32_t flags) {
  std::lock_guard lock(send_mutex_);
  const uint32_t length = ring_->FirstWord();
  if (length != used || used < 8 || used > ring_->reserved_bytes()) return length;
  ring_->Commit(used);
  frames_sent_.store(frames_sent_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  bytes_sent_.store(bytes_sent_.load(std::memory_order_relaxed) + used, std::memory_order_relaxed);
  PostData((flags & kFlush) != 0);
  return used;
}

uint32_t ControlChannel::reserved_bytes() const {
  std::lock_guard lock(send_mutex_);
  return ring_->reserved_bytes();
}

void ControlChannel::Flush() {
  std::lock_guard lock(send_mutex_);
  PostData(true);
}

uint32_t ControlChannel::credits() const {
  const uint64_t under_way = numbered_ - acknowledged_;
  return under_way >= peer_slots_ ? 0 : peer_slots_ - static_cast<uint32_t>(under_way);
}

void ControlChannel::NumberPacket(const RetainedRing::Run& run, uint16_t flags) {
  Packet& packet = packets_[++numbered_ % kRecords];
  packet.offset = run.offset;
  packet.bytes = run.bytes;
  packet.end = run.end;
  packet.flags = flags;
  packet.request = 0;
}

// What may leave now, leaves. What is left is the keeper's, who is woken by the send queue's next
// completion, or looks by time when it is the peer's acknowledgement that is missing.
void ControlChannel::PostData(bool flush) {
  for (int rounds = 0; rounds < 64 && up_.load(std::memory_order_relaxed); ++rounds) {
    CutAndPost(flush);
    if (ring_->all_cut() && posted_ == numbered_) return;
    if (!up_.load(std::memory_order_relaxed)) return;
    if (pacer_.gathering() && posted_ == numbered_ && !starved_.load(std::memory_order_relaxed)) {
      return;  // the keeper knows
    }
    if (!send_armed_) send_armed_ = verbs_.ReqNotifyCq(queue_pair_->send_cq(), 0) == 0;
    if (Reap()) continue;  // a completion that came before the request announces nothing
    if (starved_.load(std::memory_order_relaxed) || !send_armed_ || queue_pair_->ledger().idle()) {
      keeper_.Signal();
    }
    return;
  }
}

void ControlChannel::CutAndPost(bool flush) {
  const uint32_t room = options_.slot_bytes - sizeof(PacketHeader);
  SendLedger& ledger = queue_pair_->ledger();
  starved_.store(false, std::memory_order_relaxed);
  while (PostNumbered() && !ring_->all_cut()) {
    if (ledger.posted() - ledger.done() >= options_.packets_at_once) Reap();
    uint32_t made = 0;
    while (!ring_->all_cut() && made < kMostPosts) {
      const uint64_t in_flight = ledger.posted() - ledger.done() + made;
      if (!flush && ring_->uncut() < room) {
        const bool known = pacer_.gathering();
        if (pacer_.Gather(NowNanoseconds())) {
          if (!known) keeper_.Signal();
          break;
        }
        if (in_flight >= options_.packets_at_once) break;
      }
      if (credits() <= kReservedCredits || numbered_ - released_ >= kRecords - 8) {
        starved_.store(true, std::memory_order_relaxed);
        break;
      }
      if (ledger.free() <= kReservedSendSlots + made) break;
      const RetainedRing::Run run = ring_->Next(room);
      ring_->Cut(run);
      NumberPacket(run, 0);
      ++made;
    }
    if (made == 0) return;
  }
}

// Posts the packets that have a number and are not posted, as many as there are slots for. False if
// some are left.
bool ControlChannel::PostNumbered() {
  SendLedger& ledger = queue_pair_->ledger();
  while (posted_ < numbered_) {
    if (ledger.free() == 0) Reap();
    if (!up_.load(std::memory_order_relaxed)) return false;
    ibv_send_wr requests[kMostPosts];
    ibv_sge parts[kMostPosts][2];
    uint32_t count = 0;
    const auto fence = bulk_.fence();
    const auto live = bulk_.live();
    const auto ended = bulk_.ended();
    const uint64_t acknowledged = reposted_.load(std::memory_order_acquire);
    while (count < kMostPosts && posted_ + count < numbered_ && ledger.free() > 0) {
      const uint64_t number = posted_ + count + 1;
      Packet& packet = packets_[number % kRecords];
      PacketHeader& header = headers_[number % kRecords];
      header = {};
      header.payload = static_cast<uint16_t>(packet.bytes);
      header.flags = packet.flags;
      header.number = number;
      header.acknowledged = acknowledged;
      header.fence = fence;
      header.rail_live = live;
      header.rail_ended = ended;
      const uint32_t lkey = device_->memory->lkey;
      parts[count][0] = {reinterpret_cast<uintptr_t>(&header), sizeof header, lkey};
      parts[count][1] = {reinterpret_cast<uintptr_t>(memory_ + packet.offset), packet.bytes, lkey};
      ibv_send_wr& request = requests[count];
      request = {};
      request.wr_id = ledger.Take();
      request.sg_list = parts[count];
      request.num_sge = packet.bytes > 0 ? 2 : 1;
      request.opcode = IBV_WR_SEND;
      request.send_flags = IBV_SEND_SOLICITED;
      const bool is_inline = sizeof header + packet.bytes <= queue_pair_->inline_bytes();
      if (is_inline) request.send_flags |= IBV_SEND_INLINE;
      // An inline packet's bytes are the device's already; only its queue slot waits.
      packet.request = is_inline ? 0 : request.wr_id;
      if (!is_inline || packet.flags != 0 || ++unsignalled_ >= options_.packets_at_once / 2) {
        request.send_flags |= IBV_SEND_SIGNALED;
        unsignalled_ = 0;
      }
      if (count > 0) requests[count - 1].next = &request;
      ++count;
    }
    if (count == 0) return false;
    ibv_send_wr* bad = nullptr;
    const int64_t began = NowNanoseconds();
    const int error = verbs_.PostSend(queue_pair_->qp(), requests, &bad);
    uint32_t done = count;
    if (error != 0) {
      done = bad == nullptr ? 0 : static_cast<uint32_t>(bad - requests);
      ledger.Untake(count - done);
    }
    uint64_t with_frames = 0;
    for (uint32_t i = 0; i < done; ++i) with_frames += requests[i].num_sge > 1 ? 1 : 0;
    posted_ += done;
    if (with_frames > 0) {
      pacer_.Posted(began, NowNanoseconds(), static_cast<uint32_t>(with_frames));
    }
    packets_sent_.store(packets_sent_.load(std::memory_order_relaxed) + with_frames,
                        std::memory_order_relaxed);
    if (done > 0) acknowledged_to_peer_ = acknowledged;
    if (error != 0) {
      if (error == ENOMEM || error == EAGAIN) return false;  // from the bad one on, later
      char text[128];
      FailLink(std::string("Cannot post a packet: ") + strerror_r(error, text, sizeof text) + ".");
      return false;
    }
  }
  return true;
}

// Takes send completions. True if there were any.
bool ControlChannel::Reap() {
  if (queue_pair_ == nullptr) return false;
  ibv_wc completions[kReapBatch];
  bool any = false;
  for (;;) {
    const int got = verbs_.PollCq(queue_pair_->send_cq(), kReapBatch, completions);
    if (got < 0) FailLink("The send queue's completions cannot be read.");
    if (got <= 0) break;
    any = true;
    for (int i = 0; i < got; ++i) {
      queue_pair_->ledger().Complete(completions[i].wr_id);
      if (completions[i].status != IBV_WC_SUCCESS && up_.load(std::memory_order_relaxed)) {
        FailLink(std::string("A packet was not delivered (") +
                 CompletionName(completions[i].status) + ").");
      }
    }
    if (got < kReapBatch) break;
  }
  if (any) ReleasePackets();
  return any;
}

void ControlChannel::ReleasePackets() {
  uint64_t end = 0;
  while (released_ < acknowledged_) {
    const Packet& packet = packets_[(released_ + 1) % kRecords];
    if (packet.request != 0 && queue_pair_ != nullptr &&
        packet.request > queue_pair_->ledger().done()) {
      break;
    }
    ++released_;
    if (packet.bytes > 0) end = packet.end;
  }
  if (end != 0) {
    ring_->Release(end);
    if (wants_room_) receiver_.Signal();  // who waits for room sleeps there
    wants_room_ = false;
  }
}

void ControlChannel::SendHeaderOnly(uint16_t flags) {
  if (!up_.load(std::memory_order_relaxed) || credits() == 0) return;
  if (numbered_ - released_ >= kRecords - 1) return;
  NumberPacket({}, flags);
  PostNumbered();
}

void ControlChannel::Announce() {
  std::lock_guard lock(send_mutex_);
  if (!closed_) SendHeaderOnly(0);
}

void ControlChannel::SendGoodbye() {
  std::lock_guard lock(send_mutex_);
  if (goodbye_sent_) return;
  goodbye_sent_ = true;
  SendHeaderOnly(kPacketGoodbye);
}

bool ControlChannel::drained() {
  std::lock_guard lock(send_mutex_);
  Reap();
  if (!up_.load(std::memory_order_relaxed)) return false;
  PostData(true);
  if (!ring_->all_cut() || posted_ < numbered_) return false;
  // Unsignalled ones at the end were inline, so that nothing of ours is needed for them.
  return queue_pair_->ledger().posted() - queue_pair_->ledger().done() <= unsignalled_;
}

void ControlChannel::Close() {
  std::lock_guard lock(send_mutex_);
  closed_ = true;
}

// --- keeper ---

void ControlChannel::OnSendEvent() {
  std::lock_guard receive(receive_mutex_);
  std::lock_guard lock(send_mutex_);
  for (const auto& state : devices_) {
    ibv_cq* cq = nullptr;
    void* context = nullptr;
    while (state->send_channel != nullptr &&
           verbs_.GetCqEvent(state->send_channel, &cq, &context) == 0) {
      if (queue_pair_ != nullptr && cq == queue_pair_->send_cq()) {
        queue_pair_->CountEvent(cq);
        send_armed_ = false;
      } else {
        verbs_.AckCqEvents(cq, 1);
      }
    }
  }
}

void ControlChannel::Pump() {
  if (starved()) Receive();
  std::lock_guard lock(send_mutex_);
  if (queue_pair_ == nullptr || !up_.load(std::memory_order_relaxed)) return;
  Reap();
  PostData(pacer_.Look(NowNanoseconds(), !ring_->all_cut() || posted_ < numbered_));
}

Deadline ControlChannel::next_pump() const {
  std::lock_guard lock(send_mutex_);
  if (!up_.load(std::memory_order_relaxed)) return Deadline::Never();
  if (pacer_.gathering()) return Deadline::AtNanoseconds(pacer_.next_look());
  return starved() ? Deadline::After(1) : Deadline::Never();
}

void ControlChannel::Keepalive() {
  std::lock_guard lock(send_mutex_);
  if (queue_pair_ == nullptr || !up_.load(std::memory_order_relaxed)) return;
  Reap();
  SendLedger& ledger = queue_pair_->ledger();
  const bool watched = ledger.posted() - ledger.done() > unsignalled_;  // something signalled
  if (watched || ledger.free() == 0) return;
  ibv_send_wr request = {};
  request.wr_id = ledger.Take();
  request.opcode = IBV_WR_RDMA_WRITE;  // of nothing: the peer's device answers, nothing changes
  request.send_flags = IBV_SEND_SIGNALED;
  ibv_send_wr* bad = nullptr;
  if (const int error = verbs_.PostSend(queue_pair_->qp(), &request, &bad)) {
    ledger.Untake(1);
    char text[128];
    if (error != ENOMEM) {
      FailLink(std::string("Cannot post: ") + strerror_r(error, text, sizeof text) + ".");
    }
    return;
  }
  unsignalled_ = 0;
}

// --- receiver ---

bool ControlChannel::Malformed(const std::string& reason) {
  if (!is_malformed_.load(std::memory_order_relaxed)) {
    malformed_ = reason;
    is_malformed_.store(true, std::memory_order_release);
    receiver_.Signal();
  }
  return false;
}

bool ControlChannel::Receive() {
  bool any = false;
  uint64_t acknowledged = 0;
  {
    std::lock_guard lock(receive_mutex_);
    if (queue_pair_ == nullptr || is_malformed_.load(std::memory_order_relaxed)) return false;
    ibv_wc completions[kReapBatch];
    for (;;) {
      const int got = verbs_.PollCq(queue_pair_->receive_cq(), kReapBatch, completions);
      if (got <= 0) {
        if (got < 0) {
          std::lock_guard send(send_mutex_);
          FailLink("The receive queue's completions cannot be read.");
        }
        break;
      }
      any = true;
      for (int i = 0; i < got; ++i) {
        const ibv_wc& done = completions[i];
        if (done.wr_id >= options_.slots || slot_states_[done.wr_id] != SlotState::kPosted)
          continue;
        const uint32_t slot = static_cast<uint32_t>(done.wr_id);
        if (done.status != IBV_WC_SUCCESS) {
          slot_states_[slot] = SlotState::kFree;
          ++free_slots_;
          std::lock_guard send(send_mutex_);
          Reap();  // if a request of ours failed, that is the better reason
          FailLink(std::string("A receive failed (") + CompletionName(done.status) + ").");
          continue;
        }
        slot_states_[slot] = SlotState::kHeld;
        if (!TakePacket(slot, done.byte_len, &acknowledged)) return true;
      }
      if (got < kReapBatch) break;
    }
  }
  if (acknowledged > 0) OnAcknowledged(acknowledged);
  return any;
}

// The slot may be posted again, and so written, before this returns.
bool ControlChannel::TakePacket(uint32_t slot, uint32_t bytes, uint64_t* acknowledged) {
  PacketHeader header;
  if (bytes < sizeof header || bytes > options_.slot_bytes) {
    return Malformed("A packet has an impossible size (" + std::to_string(bytes) + ").");
  }
  std::memcpy(&header, slots_ + size_t{slot} * options_.slot_bytes, sizeof header);
  if (header.magic != kPacketMagic || header.payload != bytes - sizeof header ||
      header.payload % 8 != 0) {
    return Malformed("A packet's header does not fit its size (" + std::to_string(bytes) + ").");
  }
  const auto slot_back = [&] {
    slot_states_[slot] = SlotState::kFree;
    ++free_slots_;
  };
  if (header.number <= received_) {  // repeated after a failover
    slot_back();
    PostFreeSlots();
    return true;
  }
  if (header.number != received_ + 1) {
    return Malformed("A packet (" + std::to_string(header.number) + ") is out of order, after " +
                     std::to_string(received_) + ".");
  }
  {
    std::lock_guard send(send_mutex_);
    if (header.acknowledged > numbered_) {
      return Malformed("A packet acknowledges (" + std::to_string(header.acknowledged) +
                       ") what was never sent.");
    }
  }
  *acknowledged = std::max(*acknowledged, header.acknowledged);
  bulk_.OnPeerState(header.fence, header.rail_ended);
  received_ = header.number;
  if (header.rail_live != peer_live_) {
    peer_live_ = header.rail_live;
    keeper_.Signal();
  }
  if (header.flags & kPacketGoodbye) {
    goodbye_.store(true, std::memory_order_release);
    receiver_.Signal();
  }
  if (header.payload == 0) {
    slot_back();
    ++given_back_;
    PostFreeSlots();
    return true;
  }
  packets_received_.store(packets_received_.load(std::memory_order_relaxed) + 1,
                          std::memory_order_relaxed);
  arrived_[arrived_head_ % kMostSlots] = {slot, header.payload, header.fence};
  ++arrived_head_;
  return true;
}

void ControlChannel::OnAcknowledged(uint64_t acknowledged) {
  std::lock_guard lock(send_mutex_);
  if (acknowledged <= acknowledged_) return;
  acknowledged_ = acknowledged;
  ReleasePackets();
  if (starved_.load(std::memory_order_relaxed)) PostData(false);
}

// Posts the slots that hold nothing, in batches.
void ControlChannel::PostFreeSlots() {
  const bool idle = arrived_head_ == arrived_tail_;
  if (free_slots_ == 0 || (free_slots_ < kRepostBatch && !idle)) return;
  if (queue_pair_ == nullptr || !up_.load(std::memory_order_relaxed)) return;
  ibv_recv_wr requests[kMostPosts];
  ibv_sge parts[kMostPosts];
  uint32_t which[kMostPosts];
  uint32_t slot = 0;
  while (free_slots_ > 0) {
    uint32_t count = 0;
    for (; slot < options_.slots && count < kMostPosts; ++slot) {
      if (slot_states_[slot] != SlotState::kFree) continue;
      parts[count] = {reinterpret_cast<uintptr_t>(slots_ + size_t{slot} * options_.slot_bytes),
                      options_.slot_bytes, device_->memory->lkey};
      requests[count] = {};
      requests[count].wr_id = slot;
      requests[count].sg_list = &parts[count];
      requests[count].num_sge = 1;
      if (count > 0) requests[count - 1].next = &requests[count];
      which[count++] = slot;
    }
    if (count == 0) return;
    ibv_recv_wr* bad = nullptr;
    const int error = verbs_.PostRecv(queue_pair_->qp(), requests, &bad);
    const uint32_t done =
        error == 0 ? count : (bad == nullptr ? 0 : static_cast<uint32_t>(bad - requests));
    for (uint32_t i = 0; i < done; ++i) slot_states_[which[i]] = SlotState::kPosted;
    free_slots_ -= done;
    CountReposted();
    if (error != 0) {
      std::lock_guard send(send_mutex_);
      FailLink("Cannot post receives again.");
      return;
    }
  }
}

void ControlChannel::GiveBack(uint32_t slot) {
  std::lock_guard lock(receive_mutex_);
  slot_states_[slot] = SlotState::kFree;
  ++free_slots_;
  ++given_back_;
  PostFreeSlots();
}

void ControlChannel::ReturnCredits() {
  std::lock_guard lock(send_mutex_);
  const uint64_t unsaid = reposted_.load(std::memory_order_acquire) - acknowledged_to_peer_;
  // The peer's ring holds at least four of the largest frames, and waits for this to have room.
  if (unsaid >= options_.slots / 2 || unsaid * options_.slot_bytes >= options_.max_frame) {
    SendHeaderOnly(0);
  }
}

bool ControlChannel::deliverable() {
  if (is_malformed_.load(std::memory_order_acquire)) return true;
  if (has_current_) return true;
  Arrived next;
  {
    std::lock_guard lock(receive_mutex_);
    if (arrived_head_ == arrived_tail_) return false;
    next = arrived_[arrived_tail_ % kMostSlots];
  }
  return bulk_.FenceReached(next.fence);
}

int ControlChannel::Deliver(int budget, Handler& handler, bool* fine) {
  *fine = true;
  int handled = 0;
  while (handled < budget) {
    if (!has_current_) {
      Arrived next;
      {
        std::lock_guard lock(receive_mutex_);
        if (arrived_head_ == arrived_tail_) break;
        next = arrived_[arrived_tail_ % kMostSlots];
      }
      if (!bulk_.FenceReached(next.fence)) break;
      {
        std::lock_guard lock(receive_mutex_);
        ++arrived_tail_;
      }
      current_ = next;
      current_at_ = 0;
      has_current_ = true;
    }
    const std::byte* payload =
        slots_ + size_t{current_.slot} * options_.slot_bytes + sizeof(PacketHeader);
    const uint32_t left = current_.payload - current_at_;
    const std::byte* frame = nullptr;
    uint32_t length = 0;
    if (joined_wanted_ > 0) {
      const uint32_t part = std::min(
          left, static_cast<uint32_t>(RetainedRing::PadTo8(joined_wanted_)) - joined_bytes_);
      std::memcpy(joined_.get() + joined_bytes_, payload + current_at_, part);
      joined_bytes_ += part;
      current_at_ += part;
      if (joined_bytes_ == RetainedRing::PadTo8(joined_wanted_)) {
        frame = joined_.get();
        length = joined_wanted_;
        joined_wanted_ = joined_bytes_ = 0;
      }
    } else {
      std::memcpy(&length, payload + current_at_, sizeof length);
      if (length < 8 || length > options_.max_frame) {
        std::lock_guard lock(receive_mutex_);
        *fine =
            Malformed("The peer sent a frame with a bad length (" + std::to_string(length) + ").");
        return handled;
      }
      if (RetainedRing::PadTo8(length) <= left) {
        frame = payload + current_at_;
        current_at_ += static_cast<uint32_t>(RetainedRing::PadTo8(length));
      } else {
        joined_wanted_ = length;
        continue;
      }
    }
    if (frame != nullptr) {
      frames_received_.store(frames_received_.load(std::memory_order_relaxed) + 1,
                             std::memory_order_relaxed);
      bytes_received_.store(bytes_received_.load(std::memory_order_relaxed) + length,
                            std::memory_order_relaxed);
      ++handled;
      if (!handler.OnFrame({frame, length})) {
        std::lock_guard lock(receive_mutex_);
        *fine =
            Malformed("The peer sent a malformed frame (" + std::to_string(length) + " bytes).");
        return handled;
      }
    }
    if (current_at_ == current_.payload) {
      has_current_ = false;
      GiveBack(current_.slot);
      ReturnCredits();
    }
  }
  if (is_malformed_.load(std::memory_order_acquire)) *fine = false;
  return handled;
}

bool ControlChannel::Arm() {
  {
    std::lock_guard lock(receive_mutex_);
    if (queue_pair_ != nullptr && verbs_.ReqNotifyCq(queue_pair_->receive_cq(), 0) != 0) {
      return true;  // the sleep is short anyway
    }
  }
  Receive();
  return !deliverable();
}

void ControlChannel::OnReceiveEvent() {
  std::lock_guard lock(receive_mutex_);
  for (const auto& state : devices_) {
    ibv_cq* cq = nullptr;
    void* context = nullptr;
    while (state->receive_channel != nullptr &&
           verbs_.GetCqEvent(state->receive_channel, &cq, &context) == 0) {
      if (queue_pair_ != nullptr && cq == queue_pair_->receive_cq()) {
        queue_pair_->CountEvent(cq);
      } else {
        verbs_.AckCqEvents(cq, 1);
      }
    }
  }
}

bool ControlChannel::all_delivered() {
  if (has_current_) return false;
  std::lock_guard lock(receive_mutex_);
  return arrived_head_ == arrived_tail_;
}

bool ControlChannel::waiting() {
  std::lock_guard lock(receive_mutex_);
  return arrived_head_ != arrived_tail_;
}

std::array<uint16_t, kMaxRails> ControlChannel::peer_live() {
  std::lock_guard lock(receive_mutex_);
  return peer_live_;
}

void ControlChannel::AbandonAfterFork() {
  for (const auto& state : devices_) {
    for (ibv_comp_channel* channel : {state->send_channel, state->receive_channel}) {
      if (channel != nullptr) close(channel->fd);
    }
  }
}

}  // namespace penstock::transport::rdma
