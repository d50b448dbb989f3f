// How work requests travel: transmitted in order, placed in any order, completed in order.
//
// A request goes from the queue of its queue pair into `flight` when it is transmitted. At the
// peer, SENDs and WRITEs become `inbound` messages whose pieces are placed at random; a receive
// completes when its own message and all before it are in place. READs fetch their pieces from the
// peer's memory once the WRITEs before them are in place. A request is done when it has been
// acknowledged and all before it are done.
#include "tests/transport/fake_verbs/state.h"

namespace penstock::transport::rdma::fake {

namespace {

constexpr size_t kPiecesPerStep = 16;
constexpr size_t kMostInFlight = 32;

int64_t ReceiverNotReadyNanoseconds(uint8_t timer) {
  static const int kMicroseconds[32] = {
      655360, 10,    20,    30,    40,    60,     80,     120,    160,    240,   320,
      480,    640,   960,   1280,  1920,  2560,   3840,   5120,   7680,   10240, 15360,
      20480,  30720, 40960, 61440, 81920, 122880, 163840, 245760, 327680, 491520};
  return int64_t{kMicroseconds[timer & 31]} * 1000;
}

ibv_wc_opcode OpcodeOf(ibv_wr_opcode opcode) {
  switch (opcode) {
    case IBV_WR_RDMA_READ:
      return IBV_WC_RDMA_READ;
    case IBV_WR_RDMA_WRITE:
    case IBV_WR_RDMA_WRITE_WITH_IMM:
      return IBV_WC_RDMA_WRITE;
    default:
      return IBV_WC_SEND;
  }
}

bool IsWrite(ibv_wr_opcode opcode) {
  return opcode == IBV_WR_RDMA_WRITE || opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
}

bool HasImmediate(ibv_wr_opcode opcode) {
  return opcode == IBV_WR_SEND_WITH_IMM || opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
}

}  // namespace

bool State::PathUp(const FakeQp& qp) const {
  const FakeQp* peer = FindQp(qp.peer);
  return peer != nullptr && peer->peer == qp.qp_num && peer->state == IBV_QPS_RTS &&
         qp.address_epoch == qp.device->address_epoch &&
         peer->address_epoch == peer->device->address_epoch && Reachable(qp.device, peer->device);
}

bool State::WritesHeld(const FakeQp& responder) const {
  if (holds_writes) return true;
  if (held_from.empty()) return false;
  const FakeQp* sender = FindQp(responder.peer);
  return sender != nullptr && held_from.count(sender->device->address_text) != 0;
}

// One bounded piece of work. False when there is nothing to do until somebody wakes it.
bool State::Step(FakeQp& qp) {
  bool more = PlacePieces(qp);
  Deliver(qp);
  if (qp.state != IBV_QPS_RTS) return more;
  if (qp.queue.empty() && qp.flight.empty()) return more;
  if (!PathUp(qp)) {
    if (Finish(qp)) return more;
    if (qp.state != IBV_QPS_RTS || (qp.queue.empty() && qp.flight.empty())) return more;
    const int64_t now = NowNanoseconds();
    if (qp.stalled_since == 0) qp.stalled_since = now;
    if (qp.retry_count == 7 || qp.timeout == 0) return more;  // for ever
    const double limit =
        4096.0 * double(uint64_t{1} << qp.timeout) * (qp.retry_count + 1) * options.time_scale;
    const int64_t end = qp.stalled_since + static_cast<int64_t>(limit);
    if (now >= end) {
      FailQp(qp, IBV_WC_RETRY_EXC_ERR);
      return more;
    }
    At(end, [this, number = qp.qp_num] {
      if (FakeQp* found = FindQp(number)) Wake(*found);
    });
    return more;
  }
  qp.stalled_since = 0;
  for (int i = 0; i < 4 && Transmit(qp); ++i) more = true;
  if (FetchPieces(qp)) more = true;
  if (Finish(qp)) more = true;
  return more;
}

// The pieces of a message in the reverse of the order in which they move.
std::vector<uint32_t> State::Pieces(uint64_t bytes, uint64_t* piece_bytes) {
  const uint64_t size = options.reorder ? options.mtu : uint64_t{64} << 10;
  *piece_bytes = size;
  std::vector<uint32_t> pieces((bytes + size - 1) / size);
  for (size_t i = 0; i < pieces.size(); ++i)
    pieces[i] = static_cast<uint32_t>(pieces.size() - 1 - i);
  if (options.reorder) std::shuffle(pieces.begin(), pieces.end(), random);
  return pieces;
}

const RequestFault* State::TakeFault(const FakeQp& qp, ibv_wr_opcode opcode) {
  static thread_local RequestFault taken;
  for (auto it = faults.begin(); it != faults.end(); ++it) {
    if ((it->host != nullptr && it->host != qp.host) || it->opcode != opcode) continue;
    if (--it->nth > 0) continue;
    taken = *it;
    faults.erase(it);
    return &taken;
  }
  return nullptr;
}

bool State::Transmit(FakeQp& qp) {
  if (qp.queue.empty() || qp.refused || qp.flight.size() >= kMostInFlight) return false;
  if (NowNanoseconds() < qp.not_before) return false;
  SendRequest& next = qp.queue.front();
  const bool device = options.device_memory == DeviceMemory::kStuck && UsesDevice(next.sges);
  if (device && !next.is_inline()) return false;
  const auto reads = static_cast<size_t>(std::count_if(
      qp.flight.begin(), qp.flight.end(), [](const SendRequest& r) { return r.reads(); }));
  if ((next.wr.send_flags & IBV_SEND_FENCE) != 0 && reads > 0) return false;
  if (next.reads() && qp.most_reads != 0 && reads >= qp.most_reads) {
    if (!std::exchange(next.held_up, true)) ++reads_held_up;
    return false;
  }
  FakeQp& peer = *FindQp(qp.peer);
  const bool receives = !IsWrite(next.wr.opcode) || HasImmediate(next.wr.opcode);
  if (receives && !next.reads() && peer.receives.empty()) {
    ++receiver_not_ready;
    if (qp.rnr_retry != 7 && ++qp.rnr_tries > qp.rnr_retry) {
      next.status = IBV_WC_RNR_RETRY_EXC_ERR;
    } else {
      qp.not_before = NowNanoseconds() + ReceiverNotReadyNanoseconds(peer.min_rnr_timer);
      At(qp.not_before, [this, number = qp.qp_num] {
        if (FakeQp* found = FindQp(number)) Wake(*found);
      });
      return false;
    }
  } else {
    qp.rnr_tries = 0;
  }
  qp.flight.push_back(std::move(next));
  qp.queue.pop_front();
  SendRequest& request = qp.flight.back();
  const RequestFault* fault = TakeFault(qp, request.wr.opcode);
  if (request.status == IBV_WC_SUCCESS && !request.is_inline() &&
      !LocalAccess(request.sges, qp.pd, request.reads())) {
    request.status = IBV_WC_LOC_PROT_ERR;
  } else if (request.reads() && qp.most_reads == 0) {
    request.status = IBV_WC_LOC_QP_OP_ERR;
  }
  if (request.status == IBV_WC_SUCCESS && fault != nullptr) request.status = fault->status;
  const bool arrives = request.status == IBV_WC_SUCCESS || (fault != nullptr && fault->arrives);
  if (arrives) {
    const ibv_wc_status scripted = request.status;
    Arrive(qp, peer, request);
    if (scripted != IBV_WC_SUCCESS) request.status = scripted;
  }
  if (request.status != IBV_WC_SUCCESS) qp.refused = true;
  Wake(qp);
  Wake(peer);
  return true;
}

// The message is at the peer's device, which accepts it or breaks the connection.
bool State::Arrive(FakeQp& qp, FakeQp& peer, SendRequest& request) {
  const ibv_send_wr& wr = request.wr;
  auto refuse = [&](ibv_wc_status status) {
    request.status = status;
    // The refusal acknowledges everything before it.
    for (Inbound& inbound : peer.inbound) PlaceAll(peer, inbound);
    for (SendRequest& earlier : qp.flight) {
      if (&earlier == &request) break;
      while (earlier.status == IBV_WC_SUCCESS && !earlier.pieces.empty()) {
        FetchPiece(qp, peer, earlier);
      }
      earlier.acknowledged = true;
    }
    FailQp(peer, IBV_WC_WR_FLUSH_ERR);
    return false;
  };
  if (std::min<uint64_t>(request.bytes, qp.mtu) > peer.device->mtu) {  // its first packet
    return refuse(IBV_WC_REM_INV_REQ_ERR);
  }
  if (request.reads()) {
    if ((peer.access & IBV_ACCESS_REMOTE_READ) == 0) return refuse(IBV_WC_REM_INV_REQ_ERR);
    if (!RemoteAccess(peer, wr.wr.rdma.remote_addr, request.bytes, wr.wr.rdma.rkey,
                      IBV_ACCESS_REMOTE_READ)) {
      return refuse(IBV_WC_REM_ACCESS_ERR);
    }
    const auto open = std::count_if(qp.flight.begin(), qp.flight.end(), [](const SendRequest& r) {
      return r.reads() && !r.acknowledged;
    });
    if (open > peer.most_peer_reads) return refuse(IBV_WC_REM_INV_REQ_ERR);
    request.pieces = Pieces(request.bytes, &request.piece_bytes);
    return true;
  }
  Inbound inbound;
  inbound.request = request.count;
  inbound.write = IsWrite(wr.opcode);
  inbound.receives = !inbound.write || HasImmediate(wr.opcode);
  if (inbound.write) {
    if ((peer.access & IBV_ACCESS_REMOTE_WRITE) == 0) return refuse(IBV_WC_REM_INV_REQ_ERR);
    if (!RemoteAccess(peer, wr.wr.rdma.remote_addr, request.bytes, wr.wr.rdma.rkey,
                      IBV_ACCESS_REMOTE_WRITE)) {
      return refuse(IBV_WC_REM_ACCESS_ERR);
    }
    inbound.targets = {
        {wr.wr.rdma.remote_addr, static_cast<uint32_t>(request.bytes), wr.wr.rdma.rkey}};
  }
  if (inbound.receives) {
    inbound.receive = std::move(peer.receives.front());
    peer.receives.pop_front();
    if (!inbound.write) {
      ibv_wc_status wrong = IBV_WC_SUCCESS;
      if (request.bytes > Total(inbound.receive.sges)) wrong = IBV_WC_LOC_LEN_ERR;
      if (!LocalAccess(inbound.receive.sges, peer.pd, true)) wrong = IBV_WC_LOC_PROT_ERR;
      if (wrong != IBV_WC_SUCCESS) {
        CompleteReceive(peer, inbound.receive, wrong);
        return refuse(wrong == IBV_WC_LOC_LEN_ERR ? IBV_WC_REM_INV_REQ_ERR : IBV_WC_REM_OP_ERR);
      }
      inbound.targets = inbound.receive.sges;
    }
    Completion& completion = inbound.completion;
    completion.qp = &peer;
    completion.covers = inbound.receive.count;
    completion.solicited = (wr.send_flags & IBV_SEND_SOLICITED) != 0;
    ibv_wc& wc = completion.wc;
    wc.wr_id = inbound.receive.wr_id;
    wc.status = IBV_WC_SUCCESS;
    wc.opcode = inbound.write ? IBV_WC_RECV_RDMA_WITH_IMM : IBV_WC_RECV;
    wc.byte_len = static_cast<uint32_t>(request.bytes);
    wc.qp_num = peer.qp_num;
    wc.src_qp = qp.qp_num;
    if (HasImmediate(wr.opcode)) {
      wc.wc_flags = IBV_WC_WITH_IMM;
      wc.imm_data = wr.imm_data;
    }
  }
  inbound.payload = request.payload;
  if (!request.is_inline()) {
    inbound.payload.resize(request.bytes);
    Gather(request.sges, 0, inbound.payload.data(), request.bytes);
  }
  inbound.pieces = Pieces(request.bytes, &inbound.piece_bytes);
  request.placed = inbound.pieces.empty();
  request.acknowledged = request.placed || (inbound.write && Roll(options.early_completion));
  peer.inbound.push_back(std::move(inbound));
  return true;
}

void State::FetchPiece(FakeQp& qp, const FakeQp& peer, SendRequest& request) {
  const uint64_t offset = request.pieces.back() * request.piece_bytes;
  const uint64_t n = std::min(request.piece_bytes, request.bytes - offset);
  request.pieces.pop_back();
  const uint64_t from = request.wr.wr.rdma.remote_addr + offset;
  if (!RemoteAccess(peer, from, n, request.wr.wr.rdma.rkey, IBV_ACCESS_REMOTE_READ)) {
    request.status = IBV_WC_REM_ACCESS_ERR;
    qp.refused = true;
  } else if (!LocalAccess(request.sges, qp.pd, true)) {
    request.status = IBV_WC_LOC_PROT_ERR;
    qp.refused = true;
  } else {
    Scatter(request.sges, offset, reinterpret_cast<const std::byte*>(from), n);
  }
}

// The requester's side of READs. A WRITE may overtake an earlier READ, but a READ sees the WRITEs
// of its queue pair that were posted before it.
bool State::FetchPieces(FakeQp& qp) {
  const FakeQp& peer = *FindQp(qp.peer);
  uint64_t oldest_unplaced = UINT64_MAX;
  for (const Inbound& inbound : peer.inbound) {
    if (!inbound.pieces.empty()) oldest_unplaced = std::min(oldest_unplaced, inbound.request);
  }
  bool any = false;
  for (size_t done = 0; done < kPiecesPerStep; ++done) {
    std::vector<SendRequest*> open;
    for (SendRequest& request : qp.flight) {
      if (!request.reads() || request.status != IBV_WC_SUCCESS) continue;
      if (request.pieces.empty()) {
        request.acknowledged = true;
      } else if (request.count < oldest_unplaced) {
        open.push_back(&request);
      }
    }
    if (open.empty()) break;
    SendRequest& request = *open[options.reorder ? Below(open.size()) : 0];
    FetchPiece(qp, peer, request);
    any = true;
    if (request.pieces.empty()) request.acknowledged = true;
  }
  return any;
}

void State::Place(FakeQp& qp, Inbound& inbound, uint32_t piece) {
  const uint64_t size = inbound.piece_bytes;
  const uint64_t offset = piece * size;
  const uint64_t n = std::min<uint64_t>(size, inbound.payload.size() - offset);
  if (qp.host->dead_) return;
  if (inbound.write) {
    const ibv_sge& target = inbound.targets[0];
    if (!RemoteAccess(qp, target.addr + offset, n, target.lkey, IBV_ACCESS_REMOTE_WRITE)) return;
  } else if (!LocalAccess(inbound.targets, qp.pd, true)) {
    return;
  }
  Scatter(inbound.targets, offset, inbound.payload.data() + offset, n);
}

void State::PlaceAll(FakeQp& qp, Inbound& inbound) {
  for (const uint32_t piece : inbound.pieces) Place(qp, inbound, piece);
  inbound.pieces.clear();
}

bool State::PlacePieces(FakeQp& qp) {
  bool any = false;
  const bool writes_held = WritesHeld(qp);
  for (size_t done = 0; done < kPiecesPerStep; ++done) {
    std::vector<Inbound*> open;
    for (Inbound& inbound : qp.inbound) {
      const bool held = inbound.write && (inbound.late ? holds_late_writes : writes_held);
      if (!inbound.pieces.empty() && !held) open.push_back(&inbound);
      if (open.size() == kMostInFlight || (!options.reorder && !open.empty())) break;
    }
    if (open.empty()) break;
    Inbound& inbound = *open[Below(open.size())];
    Place(qp, inbound, inbound.pieces.back());
    inbound.pieces.pop_back();
    any = true;
  }
  return any;
}

// Hands over what is in place, in order.
void State::Deliver(FakeQp& qp) {
  FakeQp* sender = FindQp(qp.peer);
  for (const Inbound& inbound : qp.inbound) {
    if (!inbound.pieces.empty()) continue;
    SendRequest* request = FindFlight(qp, inbound.request);
    if (request == nullptr || request->placed) continue;
    request->placed = true;
    Wake(*sender);
  }
  while (!qp.inbound.empty() && qp.inbound.front().pieces.empty()) {
    Inbound& first = qp.inbound.front();
    if (first.receives) Complete(*qp.receive(), std::move(first.completion));
    qp.inbound.pop_front();
    if (sender != nullptr) Wake(*sender);  // a READ may have waited for it
  }
}

SendRequest* State::FindFlight(const FakeQp& responder, uint64_t request) const {
  FakeQp* sender = FindQp(responder.peer);
  if (sender == nullptr || sender->peer != responder.qp_num) return nullptr;
  for (SendRequest& candidate : sender->flight) {
    if (candidate.count == request) return &candidate;
  }
  return nullptr;
}

// Completes what is done, in order. True if anything was.
bool State::Finish(FakeQp& qp) {
  bool any = false;
  while (!qp.flight.empty()) {
    SendRequest& first = qp.flight.front();
    if (first.status != IBV_WC_SUCCESS) {
      FailQp(qp, first.status);
      return true;
    }
    if (first.placed && !first.acknowledged && PathUp(qp)) first.acknowledged = true;
    if (!first.acknowledged) break;
    CompleteSend(qp, first, IBV_WC_SUCCESS);
    qp.flight.pop_front();
    any = true;
  }
  return any;
}

void State::CompleteSend(FakeQp& qp, const SendRequest& request, ibv_wc_status status) {
  if (!request.is_inline() && !request.reads() && request.digest != 0 && !qp.host->dead_ &&
      LocalAccess(request.sges, qp.pd, false) && Digest(request.sges) != request.digest) {
    Violate("The buffer of a request (wr_id " + std::to_string(request.wr.wr_id) +
            ") is changed before its completion.");
  }
  const bool success = status == IBV_WC_SUCCESS;
  if (success && !qp.signal_all && (request.wr.send_flags & IBV_SEND_SIGNALED) == 0) return;
  Completion completion;
  completion.qp = &qp;
  completion.send = true;
  completion.covers = request.count;
  completion.wc.wr_id = request.wr.wr_id;
  completion.wc.status = status;
  completion.wc.qp_num = qp.qp_num;
  // Undefined after an error, by the manual.
  completion.wc.opcode = success ? OpcodeOf(request.wr.opcode) : static_cast<ibv_wc_opcode>(0x7f);
  completion.wc.byte_len = success ? static_cast<uint32_t>(request.bytes) : 0xdeadbeef;
  Complete(*qp.send(), std::move(completion));
}

void State::CompleteReceive(FakeQp& qp, const ReceiveRequest& receive, ibv_wc_status status) {
  Completion completion;
  completion.qp = &qp;
  completion.covers = receive.count;
  completion.wc.wr_id = receive.wr_id;
  completion.wc.status = status;
  completion.wc.qp_num = qp.qp_num;
  completion.wc.opcode = static_cast<ibv_wc_opcode>(0x7f);
  completion.wc.byte_len = 0xdeadbeef;
  Complete(*qp.receive(), std::move(completion));
}

}  // namespace penstock::transport::rdma::fake
