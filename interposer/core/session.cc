#include "interposer/core/session.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <system_error>

#include "common/log.h"
#include "protocol/reader.h"

namespace penstock::interposer {
namespace {

// How often the background thread looks whether something arrived that nobody waits for, and after
// how long a silent client sends a sign of life. Ten wake-ups a second are not measurable.
constexpr auto kTendInterval = std::chrono::milliseconds(100);
constexpr int64_t kHeartbeatNs = 1'000'000'000;
// Unacknowledged frames of the server at which a frame is sent for that alone: well below the bound
// of the protocol, as the server keeps them.
constexpr uint64_t kTellAfter = kAcknowledgeFrames / 2;
// A thread without room looks again after so long even if nothing arrives: the ring also empties
// into the socket, which is not seen here.
constexpr int64_t kRoomPollMs = 1;
// The thread of host functions looks again after so long; what it waits for wakes it before.
constexpr int64_t kRoundMs = 1000;
constexpr int kExitDrainMs = 2000;

constexpr CUresult kLost = CUDA_ERROR_DEVICE_UNAVAILABLE;

}  // namespace

Session::Session(std::unique_ptr<transport::Connection> connection, ParsedWelcome welcome,
                 SessionOptions options, std::shared_ptr<Objects> objects)
    : objects_(objects != nullptr ? std::move(objects)
                                  : std::make_shared<Objects>(options.reserve_addresses)),
      connection_(std::move(connection)),
      welcome_(std::move(welcome)),
      options_(std::move(options)),
      window_(!options_.window              ? UINT64_MAX
              : server().stream_window == 0 ? kStreamWindow
                                            : server().stream_window),
      calls_(*connection_, welcome_.welcome.epoch),
      receiver_(*connection_, *this),
      staging_(*connection_),
      bounce_(*connection_),
      host_functions_(*this) {
  for (uint32_t i = 0; i < kMaxDevices; ++i) {
    primary_contexts[i].Reset();
    primary_contexts[i].handle = primary_contexts[i].wire = PrimaryContext(i);
    primary_contexts[i].session = this;
    primary_contexts[i].server = options_.index;
    primary_contexts[i].primary = true;
    primary_contexts[i].legacy.handle = kLegacyStream;
    primary_contexts[i].legacy.context = &primary_contexts[i];
    primary_contexts[i].legacy.id = i + 1;
    primary_contexts[i].id = i + 1;
    if (i < welcome_.devices.size()) primary_contexts[i].flags = welcome_.devices[i].primary_flags;
  }
  // Signals are the program's; none may land on our thread.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, &before);
  try {
    tender_ = std::thread([this] { Tend(); });
    pthread_setname_np(tender_.native_handle(), "penstock");
  } catch (const std::system_error& error) {
    LOG_WARNING("session", "Cannot start the background thread: %s.", error.what());
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

Session::~Session() {
  End();
}

void Session::End() {
  CUresult alive = CUDA_SUCCESS;
  if (state_.compare_exchange_strong(alive, CUDA_ERROR_DEINITIALIZED)) {
    calls_.SendControl(FrameType::kGoodbye);
    connection_->Close(kExitDrainMs);
    receiver_.Fail(CUDA_ERROR_DEINITIALIZED);
  }
  host_functions_.Stop();
  {
    std::lock_guard lock(tend_mutex_);
    stop_ = true;
  }
  tend_condition_.notify_all();
  if (tender_.joinable()) tender_.join();
}

ContextRecord* Session::FindContext(Handle wire) {
  if (IsPrimaryContext(wire)) return &primary_contexts[wire.id()];
  ContextRecord* const context = objects_->contexts.Find(wire);
  return context != nullptr && context->session == this ? context : nullptr;
}

void Session::Die(const std::string& reason) {
  CUresult alive = CUDA_SUCCESS;
  if (!state_.compare_exchange_strong(alive, kLost)) return;
  LOG_ERROR("session",
            "The session with %s has ended: %s Every further CUDA call returns "
            "CUDA_ERROR_DEVICE_UNAVAILABLE; start the program again.",
            options_.server.c_str(), reason.c_str());
  connection_->Close(0);
  receiver_.Fail(kLost);
  host_functions_.Fail(kLost);
}

// --- Sending ------------------------------------------------------------------------------------

CUresult Session::Send(const OutgoingCall& call, ReplyWaiter* waiter) {
  bool counted = false;
  while (true) {
    const CUresult state = state_.load(std::memory_order_acquire);
    if (state != CUDA_SUCCESS) return state;
    switch (calls_.Send(call, &receiver_, waiter)) {
      case CallStream::Outcome::kSent:
        return CUDA_SUCCESS;
      case CallStream::Outcome::kFull:
        if (!counted) counters_.ring_waits.fetch_add(1, std::memory_order_relaxed);
        counted = true;
        if (!receiver_.PollOnce()) receiver_.WaitForChange(Deadline::After(kRoomPollMs));
        Acknowledge();
        break;
      case CallStream::Outcome::kClosed:
        // The server's goodbye may still wait to be read; whoever receives ends the session.
        if (!receiver_.PollOnce()) receiver_.WaitForChange(Deadline::After(kRoomPollMs));
        break;
    }
  }
}

CUresult Session::Post(OutgoingCall& call, StreamRecord* stream) {
  const CUresult result = TakeWindow(call, stream);
  return result == CUDA_SUCCESS ? Send(call, nullptr) : result;
}

CUresult Session::TakeWindow(OutgoingCall& call, StreamRecord* stream) {
  if (stream == nullptr || call.cost == 0) return CUDA_SUCCESS;
  const uint64_t window = window_;
  const uint64_t issued = stream->issued.load(std::memory_order_relaxed) + call.cost;
  if (issued - stream->finished.load(std::memory_order_relaxed) > window && issued > window) {
    const CUresult result = WaitForProgress(call, stream, issued - window);
    if (result != CUDA_SUCCESS) return result;
  }
  call.issued = stream->issued.fetch_add(call.cost, std::memory_order_relaxed) + call.cost;
  return CUDA_SUCCESS;
}

CUresult Session::Invoke(const OutgoingCall& call, ReplyWaiter* waiter) {
  const CUresult sent = Send(call, waiter);
  if (sent != CUDA_SUCCESS) return sent;
  receiver_.Await(waiter);
  if (calls_.received() - calls_.told() >= kTellAfter) Acknowledge();
  if (waiter->result == CUDA_SUCCESS && !waiter->complete) {
    Die("A reply of the server is too short.");
    return state();
  }
  return waiter->result;
}

CUresult Session::WaitForProgress(const OutgoingCall& origin, StreamRecord* stream,
                                  uint64_t value) {
  if (stream->finished.load(std::memory_order_relaxed) >= value) return CUDA_SUCCESS;
  while (receiver_.PollOnce()) {
    if (stream->finished.load(std::memory_order_relaxed) >= value) return CUDA_SUCCESS;
  }
  counters_.window_waits.fetch_add(1, std::memory_order_relaxed);
  const WaitStreamProgressCommand command{stream->handle.bits, value};
  OutgoingCall wait;
  wait.function = static_cast<uint32_t>(Operation::kWaitStreamProgress);
  wait.context = stream->context->wire.bits;
  wait.thread = origin.thread;
  wait.command = &command;
  wait.command_bytes = sizeof command;
  ReplyWaiter waiter;
  const CUresult result = Invoke(wait, &waiter);
  if (result == CUDA_SUCCESS) stream->Finished(value);
  return result;
}

bool Session::TakeStaging(uint64_t bytes, StagingSlot* slot) {
  bool counted = false;
  while (state() == CUDA_SUCCESS) {
    switch (staging_.Take(bytes, slot)) {
      case Staging::Outcome::kTaken:
        return true;
      case Staging::Outcome::kFailed:
        return false;
      case Staging::Outcome::kNone:
        if (!counted) counters_.staging_waits.fetch_add(1, std::memory_order_relaxed);
        counted = true;
        if (!receiver_.PollOnce()) receiver_.WaitForChange(Deadline::After(50));
        Acknowledge();
        break;
    }
  }
  return false;
}

void Session::WaitForRound(uint64_t seen) {
  receiver_.WaitForRound(seen, Deadline::After(kRoundMs));
  if (calls_.received() - calls_.told() >= kTellAfter) Acknowledge();
}

void Session::BounceDone(const BounceDoneCommand& done, uint32_t thread, bool urgent) {
  OutgoingCall call;
  call.function = static_cast<uint32_t>(Operation::kBounceDone);
  call.thread = thread;
  call.urgent = urgent;
  call.command = &done;
  call.command_bytes = sizeof done;
  Send(call, nullptr);  // if the session has ended, the waiter hears of it
}

// --- Receiving ----------------------------------------------------------------------------------

void Session::OnClosed() {
  Die(last_words_.empty() ? "The connection closed (" + connection_->close_reason() + ")."
                          : last_words_);
}

bool Session::OnFrame(std::span<const std::byte> frame) {
  const bool honest = HandleFrame(frame);
  if (!honest && last_words_.empty()) {
    last_words_ = "The server sends a frame that no server of this protocol sends.";
  }
  return honest;
}

// False ends the connection, which ends the session.
bool Session::HandleFrame(std::span<const std::byte> frame) {
  FrameHeader header;
  if (frame.size() < sizeof header) return false;
  memcpy(&header, frame.data(), sizeof header);
  if (header.bytes != frame.size()) return false;
  if (header.epoch != welcome_.welcome.epoch) return true;
  calls_.PeerAcknowledged(header.acknowledged);
  const std::span<const std::byte> body = frame.subspan(sizeof header);

  if (header.type == FrameType::kReply || header.type == FrameType::kOutput ||
      header.type == FrameType::kHostFunction || header.type == FrameType::kBounce) {
    const uint64_t expected = calls_.received() + 1;
    if (header.sequence < expected) return true;  // seen already
    if (header.sequence > expected) return false;
    calls_.Received(header.sequence);
  }
  switch (header.type) {
    case FrameType::kReply:
      return receiver_.Deliver(header.subject, static_cast<CUresult>(header.result), body);
    case FrameType::kOutput:
      OnOutput(body);
      return true;
    case FrameType::kHostFunction:
      return host_functions_.Reached(header.subject, static_cast<CUresult>(header.result));
    case FrameType::kBounce:
      return OnBounce(header.subject, body);
    case FrameType::kProgress:
      return OnProgress(body);
    case FrameType::kAcknowledge:
    case FrameType::kHeartbeat:
      return true;
    case FrameType::kGoodbye: {
      const char* const text = reinterpret_cast<const char*>(body.data());
      last_words_ = "The server says: " + std::string(text, strnlen(text, body.size()));
      goodbye_ = true;
      return true;
    }
    case FrameType::kCall:
      break;
  }
  return false;
}

StreamRecord* Session::FindStream(const ProgressEntry& entry) {
  if (entry.generation != 0) {
    if (entry.id >> 32 != 0) return nullptr;
    StreamRecord* const stream =
        objects_->streams.Find(entry.generation, static_cast<uint32_t>(entry.id));
    // Another server's streams are none of its business.
    return stream != nullptr && stream->context != nullptr && stream->context->session == this
               ? stream
               : nullptr;
  }
  // A legacy stream, named by its context.
  ContextRecord* const context =
      FindContext(Handle{static_cast<uint64_t>(HandleKind::kContext) << 56 | entry.id});
  return context == nullptr ? nullptr : &context->legacy;
}

bool Session::OnBounce(uint64_t call, std::span<const std::byte> pieces) {
  Reader reader(pieces);
  while (reader.left() > 0) {
    BouncePiece piece;
    if (!reader.Take(&piece) || !receiver_.DeliverPiece(call, piece)) return false;
  }
  return true;
}

bool Session::OnProgress(std::span<const std::byte> entries) {
  Reader reader(entries);
  while (reader.left() > 0) {
    ProgressEntry entry;
    if (!reader.Take(&entry)) return false;
    switch (entry.kind) {
      case ProgressKind::kStream:
        // A stream that is gone is not a fault: the entry was on its way.
        if (StreamRecord* stream = FindStream(entry)) stream->Finished(entry.value);
        break;
      case ProgressKind::kStagingSlot:
        if (!staging_.Released(entry.id, entry.value)) return false;
        break;
      default:
        return false;
    }
  }
  return true;
}

void Session::OnOutput(std::span<const std::byte> body) {
  Reader reader(body);
  OutputHeader output;
  std::span<const std::byte> text;
  if (!reader.Take(&output) || !reader.TakeSection(output.bytes, &text)) return;
  // Through the program's own streams, as the driver does: what it printed before comes before.
  FILE* const stream = output.descriptor == STDOUT_FILENO   ? stdout
                       : output.descriptor == STDERR_FILENO ? stderr
                                                            : nullptr;
  if (stream != nullptr) fwrite(text.data(), 1, text.size(), stream);
}

// --- The background thread ----------------------------------------------------------------------

void Session::Acknowledge() {
  if (calls_.received() != calls_.told()) calls_.SendControl(FrameType::kAcknowledge);
}

void Session::Tend() {
  uint64_t frames_before = 0;
  int64_t last_sent_ns = NowNanoseconds();
  std::unique_lock lock(tend_mutex_);
  while (!stop_) {
    tend_condition_.wait_for(lock, kTendInterval);
    if (stop_ || state() != CUDA_SUCCESS) return;
    lock.unlock();
    while (receiver_.PollOnce()) {
    }
    Acknowledge();
    const uint64_t frames = calls_.frames();
    const int64_t now_ns = NowNanoseconds();
    if (frames != frames_before) {
      frames_before = frames;
      last_sent_ns = now_ns;
    } else if (now_ns - last_sent_ns >= kHeartbeatNs) {
      calls_.SendControl(FrameType::kHeartbeat);
    }
    lock.lock();
  }
}

}  // namespace penstock::interposer
