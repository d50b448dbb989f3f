#include "transport/tcp/bulk.h"

#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "common/clock.h"
#include "transport/thread.h"

namespace penstock::transport::tcp {
namespace {

constexpr size_t kScrapBytes = 64 << 10;
constexpr size_t kMaxUnfinished = 4096;   // moves accepted and not yet reported
constexpr uint64_t kSmallPut = 64 << 10;  // what a caller may be asked to hand to the socket itself
// Of a payload that is on its way, the thread sleeps until there is so much: woken for each
// segment, it would wake more often than it copies.
constexpr int kReceiveTogether = 256 << 10;
constexpr int kStepsPerTurn = 16;  // messages sent, or reads made, before the other direction

}  // namespace

BulkEngine::BulkEngine(Lifeline& life, CompletionQueue& completions,
                       std::shared_ptr<RegionTable> regions, const TcpOptions& options)
    : life_(life),
      completions_(completions),
      regions_(std::move(regions)),
      chunk_bytes_(std::clamp<uint64_t>(options.bulk_chunk, 4096, kMaxBulkChunk)),
      window_bytes_(std::max(options.bulk_window, chunk_bytes_)),
      tick_ms_(std::max(20, options.peer_timeout_ms / 5)),
      chunks_(kMaxBulkChunksInFlight),
      scrap_(new std::byte[kScrapBytes]),
      zeros_(new std::byte[kScrapBytes]()) {
  for (uint32_t slot = kMaxBulkChunksInFlight; slot > 0; --slot) free_chunks_.push_back(slot - 1);
}

BulkEngine::~BulkEngine() {
  Stop();
}

void BulkEngine::Start() {
  if (StartThread(thread_, "penstock-bulk", [this] { Run(); })) return;
  life_.Close("The system has no thread for bulk data.", LogLevel::kError);
  FinishAll();
}

void BulkEngine::Stop() {
  waker_.Signal();
  if (thread_.joinable()) thread_.join();
}

Outcome BulkEngine::Submit(BulkType type, std::shared_ptr<Region> local, uint64_t local_offset,
                           const MemoryKey& key, uint64_t remote_offset, uint64_t bytes,
                           uint64_t cookie) {
  KeyBlob blob;
  const bool sound = local->Contains(local_offset, bytes) && ParseKey(key, &blob) &&
                     remote_offset + bytes >= bytes;
  bool alone;
  {
    std::lock_guard lock(submit_mutex_);
    if (!accepting_ || life_.closed()) return Outcome::kClosed;
    if (bytes == 0 || !sound) {
      completions_.Push({cookie, bytes == 0 ? BulkStatus::kOk : BulkStatus::kRefused, 0});
      return Outcome::kOk;
    }
    if (unfinished_ >= kMaxUnfinished) return Outcome::kAgain;
    ++unfinished_;
    auto move = std::make_unique<Move>();
    move->type = type;
    move->local = std::move(local);
    move->local_offset = local_offset;
    move->key = blob;
    move->remote_offset = remote_offset;
    move->bytes = bytes;
    move->cookie = cookie;
    alone = submitted_.empty();
    submitted_.push_back(std::move(move));
  }
  if (!alone || (type == kPut && bytes > kSmallPut)) {
    waker_.Signal();
    return Outcome::kOk;
  }
  // If the engine rests, the request leaves on this thread, which saves a small move a wake-up.
  std::unique_lock turn(turn_mutex_, std::try_to_lock);
  if (turn.owns_lock() && outgoing_.empty() && to_issue_.empty()) {
    TakeSubmissions();
    StartChunks();
    Send();
    if (outgoing_.empty() && to_issue_.empty()) return Outcome::kOk;
  }
  waker_.Signal();
  return Outcome::kOk;
}

void BulkEngine::Run() {
  std::unique_lock turn(turn_mutex_);
  bool blocked = false;  // the socket took less than we had
  next_tick_ns_ = NowNanoseconds() + tick_ms_ * 1'000'000LL;
  while (!life_.closed()) {
    pollfd entries[2] = {{life_.bulk(), POLLIN, 0}, {waker_.fd(), POLLIN, 0}};
    if (!outgoing_.empty()) entries[0].events |= POLLOUT;
    AwaitBytes(incoming_.left >= kReceiveTogether ? kReceiveTogether : 1);
    const int64_t to_tick_ms = (next_tick_ns_ - NowNanoseconds() + 999'999) / 1'000'000;
    turn.unlock();
    poll(entries, 2, static_cast<int>(std::max<int64_t>(0, to_tick_ms)));
    turn.lock();
    if (entries[0].revents & ~POLLOUT) Receive();
    if (entries[0].revents & POLLOUT) blocked = false;
    if (entries[1].revents != 0) {
      waker_.Clear();
      TakeSubmissions();
    }
    StartChunks();
    if (!outgoing_.empty() && !blocked) blocked = !Send();
    if (NowNanoseconds() >= next_tick_ns_) {
      next_tick_ns_ = NowNanoseconds() + tick_ms_ * 1'000'000LL;
      WatchPeer();
    }
  }
  FinishAll();
}

// The kernel wakes this end all the same when the peer cannot send more, or sends no more.
void BulkEngine::AwaitBytes(int bytes) {
  if (bytes == awaited_bytes_) return;
  awaited_bytes_ = bytes;
  setsockopt(life_.bulk(), SOL_SOCKET, SO_RCVLOWAT, &bytes, sizeof bytes);
}

void BulkEngine::TakeSubmissions() {
  std::lock_guard lock(submit_mutex_);
  for (auto& move : submitted_) {
    to_issue_.push_back(move.get());
    Move* const key = move.get();
    moves_.emplace(key, std::move(move));
  }
  submitted_.clear();
}

// --- active: chunks out ---

void BulkEngine::StartChunks() {
  // Of Puts, no more payload is queued than keeps the socket busy: a queue would only delay
  // replies.
  while (!to_issue_.empty() && !free_chunks_.empty() && bytes_in_flight_ < window_bytes_ &&
         payload_queued_ < 2 * chunk_bytes_) {
    Move& move = *to_issue_.front();
    to_issue_.pop_front();
    StartChunk(move);
    if (move.issued < move.bytes) to_issue_.push_back(&move);
  }
}

void BulkEngine::StartChunk(Move& move) {
  const uint32_t slot = free_chunks_.back();
  free_chunks_.pop_back();
  Chunk& chunk = chunks_[slot];
  chunk.move = &move;
  chunk.offset = move.issued;
  chunk.bytes = std::min(chunk_bytes_, move.bytes - move.issued);
  chunk.sent = chunk.data_received = false;
  ++chunk.sequence;
  Outgoing message;
  message.header = {.type = move.type,
                    .status = 0,
                    .slot = slot,
                    .sequence = chunk.sequence,
                    .bytes = chunk.bytes,
                    .offset = move.remote_offset + chunk.offset,
                    .move_bytes = move.bytes,
                    .move_offset = move.remote_offset,
                    .key_slot = move.key.slot,
                    .key_generation = move.key.generation,
                    .key_secret = move.key.secret};
  if (move.type == kPut) {
    message.region = move.local;
    message.offset = move.local_offset + chunk.offset;
    message.bytes = chunk.bytes;
    payload_queued_ += chunk.bytes;
  }
  outgoing_.push_back(std::move(message));
  move.issued += chunk.bytes;
  ++move.in_flight;
  bytes_in_flight_ += chunk.bytes;
}

// The move is reported with this status once its chunks under way are answered.
void BulkEngine::Spoil(Move& move, BulkStatus status) {
  if (move.status != BulkStatus::kOk) return;
  move.status = status;
  to_issue_.erase(std::remove(to_issue_.begin(), to_issue_.end(), &move), to_issue_.end());
}

void BulkEngine::FinishIfDone(Move& move) {
  const bool ok = move.status == BulkStatus::kOk;
  if (move.in_flight > 0 || (ok && move.issued < move.bytes)) return;
  const Completion completion = {move.cookie, move.status, ok ? move.bytes : 0};
  moves_.erase(&move);
  {
    std::lock_guard lock(submit_mutex_);
    --unfinished_;
  }
  completions_.Push(completion);
}

// --- sending ---

bool BulkEngine::Send() {
  for (int step = 0; step < kStepsPerTurn && !outgoing_.empty(); ++step) {
    if (!SendOne(outgoing_.front())) return false;
    OnSent(outgoing_.front());
    outgoing_.pop_front();
    StartChunks();
  }
  return true;
}

void BulkEngine::OnSent(const Outgoing& message) {
  if (message.reply) {
    --replies_queued_;
    return;
  }
  chunks_[message.header.slot].sent = true;
  payload_queued_ -= message.bytes;
}

bool BulkEngine::SendOne(Outgoing& message) {
  constexpr uint64_t kHeader = sizeof(BulkHeader);
  const uint64_t payload_end = kHeader + message.bytes;
  const uint64_t total = payload_end + (message.has_trailer ? kHeader : 0);
  while (message.sent < total) {
    iovec parts[3];
    int count = 0;
    uint64_t at = message.sent;
    if (at < kHeader) {
      parts[count++] = {reinterpret_cast<std::byte*>(&message.header) + at, kHeader - at};
      at = kHeader;
    }
    std::unique_lock<std::mutex> touching;
    if (at < payload_end) {
      const uint64_t done = at - kHeader;
      touching = std::unique_lock(message.region->mutex);
      if (message.region->alive) {
        parts[count++] = {message.region->address + message.offset + done, message.bytes - done};
        at = payload_end;
      } else {
        // The header has promised these bytes, so something must follow it.
        touching.unlock();
        parts[count++] = {zeros_.get(), std::min<uint64_t>(kScrapBytes, message.bytes - done)};
        at += parts[count - 1].iov_len;
        message.trailer.status = kWireRefused;
        if (!message.reply) Spoil(*chunks_[message.header.slot].move, BulkStatus::kCancelled);
      }
    }
    if (message.has_trailer && at >= payload_end && at < total) {
      const uint64_t done = at - payload_end;
      parts[count++] = {reinterpret_cast<std::byte*>(&message.trailer) + done, kHeader - done};
      at = total;
    }
    msghdr request = {};
    request.msg_iov = parts;
    request.msg_iovlen = count;
    const ssize_t sent = sendmsg(life_.bulk(), &request, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (touching.owns_lock()) touching.unlock();
    if (sent < 0) {
      if (errno == EINTR) continue;
      if (errno != EAGAIN) PeerLeft(errno);
      return false;
    }
    const uint64_t before = message.sent;
    message.sent += sent;
    const uint64_t payload =
        std::clamp(message.sent, kHeader, payload_end) - std::clamp(before, kHeader, payload_end);
    bytes_sent_.store(bytes_sent() + payload, std::memory_order_relaxed);
    if (message.sent < at) return false;
  }
  return true;
}

// --- receiving ---

void BulkEngine::Receive() {
  for (int step = 0; step < kStepsPerTurn && !life_.closed(); ++step) {
    if (!ReceiveOne()) break;
  }
}

bool BulkEngine::ReceiveOne() {
  // One call reads the rest of a payload and the header behind it.
  iovec parts[2];
  int count = 0;
  uint64_t wanted = 0;
  std::unique_lock<std::mutex> touching;
  if (incoming_.left > 0) {
    wanted = incoming_.left;
    std::byte* place = nullptr;
    if (incoming_.region != nullptr) {
      touching = std::unique_lock(incoming_.region->mutex);
      if (incoming_.region->alive) place = incoming_.region->address + incoming_.offset;
    }
    if (place == nullptr) {
      if (touching.owns_lock()) touching.unlock();
      incoming_.region = nullptr;
      incoming_.spoiled = true;
      place = scrap_.get();
      wanted = std::min<uint64_t>(wanted, kScrapBytes);
    }
    parts[count++] = {place, wanted};
  }
  uint64_t asked = wanted;
  if (wanted == incoming_.left) {
    const size_t rest = sizeof header_ - header_got_;
    parts[count++] = {reinterpret_cast<std::byte*>(&header_) + header_got_, rest};
    asked += rest;
  }
  msghdr request = {};
  request.msg_iov = parts;
  request.msg_iovlen = count;
  const ssize_t got = recvmsg(life_.bulk(), &request, MSG_DONTWAIT);
  if (touching.owns_lock()) touching.unlock();
  if (got <= 0) {
    if (got < 0 && errno == EINTR) return true;
    if (got < 0 && errno == EAGAIN) return false;
    PeerLeft(got == 0 ? 0 : errno);
    return false;
  }
  const uint64_t payload = std::min<uint64_t>(got, wanted);
  if (payload > 0) {
    incoming_.offset += payload;
    incoming_.left -= payload;
    bytes_received_.store(bytes_received() + payload, std::memory_order_relaxed);
    if (incoming_.left == 0) OnPayload();
  }
  header_got_ += got - payload;
  if (header_got_ == sizeof header_) {
    header_got_ = 0;
    OnHeader(header_);
  }
  return static_cast<uint64_t>(got) == asked;
}

void BulkEngine::OnHeader(const BulkHeader& header) {
  switch (header.type) {
    case kGet:
      return ServeGet(header);
    case kPut:
      return ServePut(header);
    case kData:
      return OnData(header);
    case kDone:
      return OnDone(header);
  }
  Violation("message type (" + std::to_string(header.type) + ")");
}

void BulkEngine::OnPayload() {
  if (!incoming_.spoiled) received_chunks_.fetch_add(1, std::memory_order_release);
  incoming_.region = nullptr;
  if (incoming_.header.type == kPut) {
    Reply(incoming_.header, incoming_.spoiled ? kWireRefused : kWireOk);
    return;
  }
  Chunk& chunk = chunks_[incoming_.header.slot];
  chunk.data_received = true;
  if (incoming_.spoiled) Spoil(*chunk.move, BulkStatus::kCancelled);
}

// --- passive ---

namespace {

bool SoundRange(const BulkHeader& h) {
  return h.bytes > 0 && h.bytes <= kMaxBulkChunk && h.offset >= h.move_offset &&
         h.move_bytes >= h.bytes && h.offset - h.move_offset <= h.move_bytes - h.bytes;
}

KeyBlob KeyOf(const BulkHeader& h) {
  return {kKeyKind, h.key_slot, h.key_generation, 0, h.key_secret};
}

}  // namespace

void BulkEngine::ServeGet(const BulkHeader& header) {
  if (!SoundRange(header)) return Violation("get of (" + std::to_string(header.bytes) + ") bytes");
  auto region =
      regions_->Find(KeyOf(header), header.move_offset, header.move_bytes, Access::kPeerReads);
  if (region == nullptr) return Reply(header, kWireRefused);
  if (++replies_queued_ > kMaxBulkChunksInFlight) return Violation("number of open requests");
  Outgoing message;
  message.header = {
      .type = kData, .slot = header.slot, .sequence = header.sequence, .bytes = header.bytes};
  message.region = std::move(region);
  message.offset = header.offset;
  message.bytes = header.bytes;
  message.has_trailer = true;
  message.trailer = {
      .type = kDone, .status = kWireOk, .slot = header.slot, .sequence = header.sequence};
  message.reply = true;
  outgoing_.push_back(std::move(message));
}

void BulkEngine::ServePut(const BulkHeader& header) {
  if (!SoundRange(header)) return Violation("put of (" + std::to_string(header.bytes) + ") bytes");
  auto region =
      regions_->Find(KeyOf(header), header.move_offset, header.move_bytes, Access::kPeerWrites);
  incoming_.header = header;
  incoming_.spoiled = region == nullptr;
  incoming_.region = std::move(region);
  incoming_.offset = header.offset;
  incoming_.left = header.bytes;
}

void BulkEngine::Reply(const BulkHeader& request, WireStatus status) {
  if (++replies_queued_ > kMaxBulkChunksInFlight) return Violation("number of open requests");
  Outgoing message;
  message.header = {
      .type = kDone, .status = status, .slot = request.slot, .sequence = request.sequence};
  message.reply = true;
  outgoing_.push_back(std::move(message));
}

// --- active: answers in ---

BulkEngine::Chunk* BulkEngine::FindChunk(const BulkHeader& header) {
  if (header.slot >= chunks_.size()) return nullptr;
  Chunk& chunk = chunks_[header.slot];
  const bool open = chunk.move != nullptr && chunk.sent && chunk.sequence == header.sequence;
  return open ? &chunk : nullptr;
}

void BulkEngine::OnData(const BulkHeader& header) {
  Chunk* const chunk = FindChunk(header);
  if (chunk == nullptr || chunk->move->type != kGet || chunk->data_received ||
      chunk->bytes != header.bytes) {
    return Violation("data (" + std::to_string(header.bytes) + " bytes) that nobody asked for");
  }
  incoming_.header = header;
  incoming_.spoiled = false;
  incoming_.region = chunk->move->local;
  incoming_.offset = chunk->move->local_offset + chunk->offset;
  incoming_.left = header.bytes;
}

void BulkEngine::OnDone(const BulkHeader& header) {
  Chunk* const chunk = FindChunk(header);
  if (chunk == nullptr) return Violation("answer to no request");
  Move& move = *chunk->move;
  if (header.status > kWireRefused ||
      (header.status == kWireOk && move.type == kGet && !chunk->data_received)) {
    return Violation("answer with status (" + std::to_string(header.status) + ")");
  }
  bytes_in_flight_ -= chunk->bytes;
  chunk->move = nullptr;
  free_chunks_.push_back(header.slot);
  --move.in_flight;
  if (header.status == kWireRefused) Spoil(move, BulkStatus::kRefused);
  FinishIfDone(move);
}

// --- the end ---

void BulkEngine::PeerLeft(int error) {
  char text[128];
  life_.Close(error == 0 ? "The peer closed the connection."
                         : std::string("The connection broke: ") +
                               strerror_r(error, text, sizeof text) + ".",
              LogLevel::kInfo, Lifeline::Control::kReadOn);
}

void BulkEngine::Violation(const std::string& what) {
  life_.Close("The peer breaks the bulk protocol: " + what + ".", LogLevel::kWarning);
}

// TCP_USER_TIMEOUT would be the simple way to notice a dead host while bytes are unacknowledged,
// but the kernel also applies it to a live peer whose receive window stays closed, so a program
// that computes for ten seconds without reading its replies would lose its session. Nor does the
// age of the last acknowledgement tell, for the kernel asks ever more rarely. What tells is that we
// asked after the last acknowledgement and have had no answer, five ticks in a row. (An idle
// connection has keepalive.)
void BulkEngine::WatchPeer() {
  const bool silent = PeerSilent(life_.control()) || PeerSilent(life_.bulk());
  silent_ticks_ = silent ? silent_ticks_ + 1 : 0;
  if (silent_ticks_ < 5) return;
  life_.Close("The peer's host acknowledges nothing any more (for " +
                  std::to_string(silent_ticks_ * tick_ms_) + " ms).",
              LogLevel::kWarning);
}

bool BulkEngine::PeerSilent(int fd) const {
  int queued = 0;
  tcp_info info = {};
  socklen_t size = sizeof info;
  if (ioctl(fd, SIOCOUTQ, &queued) != 0 || queued == 0) return false;
  if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return false;
  // Nothing in flight, but bytes queued: the window is closed, and probes go out.
  if (info.tcpi_unacked == 0) return info.tcpi_probes >= 3;
  return info.tcpi_last_ack_recv > info.tcpi_last_data_sent + tick_ms_ / 2;
}

void BulkEngine::FinishAll() {
  std::vector<uint64_t> cookies;
  {
    std::lock_guard lock(submit_mutex_);
    accepting_ = false;
    for (const auto& move : submitted_) cookies.push_back(move->cookie);
    submitted_.clear();
  }
  for (const auto& entry : moves_) cookies.push_back(entry.second->cookie);
  moves_.clear();
  outgoing_.clear();
  incoming_ = {};
  for (const uint64_t cookie : cookies) completions_.Push({cookie, BulkStatus::kClosed, 0});
  finished_.store(true, std::memory_order_release);
  life_.receiver().Signal();
}

}  // namespace penstock::transport::tcp
