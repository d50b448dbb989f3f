#include "server/worker/worker.h"

#include <sched.h>
#include <cstring>

#include <algorithm>

#include "common/clock.h"
#include "common/env.h"
#include "common/log.h"
#include "server/worker/handlers.h"
#include "server/worker/operations.h"

namespace penstock::server {
namespace {

constexpr int kFramesPerRound = 64;
constexpr uint32_t kMeterRounds = 256;               // between two looks at what the meter shows
constexpr uint64_t kMaxBacklogBytes = 256ull << 20;  // a client that takes no replies is gone

const HandlerEntry kOperations[] = {
    {static_cast<uint32_t>(Operation::kLaunch), "launch", ServeLaunch, 0},
    {static_cast<uint32_t>(Operation::kUpload), "upload", ServeUpload, 0},
    {static_cast<uint32_t>(Operation::kDownload), "download", ServeDownload, kDelivers},
    {static_cast<uint32_t>(Operation::kUploadVolume), "upload of a volume", ServeUploadVolume, 0},
    {static_cast<uint32_t>(Operation::kDownloadVolume), "download of a volume", ServeDownloadVolume,
     kDelivers},
    {static_cast<uint32_t>(Operation::kLoadModule), "module load", ServeLoadModule, 0},
    {static_cast<uint32_t>(Operation::kGetFunction), "function lookup", ServeGetFunction, 0},
    {static_cast<uint32_t>(Operation::kListFunctions), "list of functions", ServeListFunctions, 0},
    {static_cast<uint32_t>(Operation::kLinkCreate), "link", ServeLinkCreate, 0},
    {static_cast<uint32_t>(Operation::kLinkAdd), "input of a link", ServeLinkAdd, 0},
    {static_cast<uint32_t>(Operation::kLinkComplete), "end of a link", ServeLinkComplete, 0},
    {static_cast<uint32_t>(Operation::kLinkRead), "result of a link", ServeLinkRead, 0},
    {static_cast<uint32_t>(Operation::kLinkDestroy), "destroying of a link", ServeLinkDestroy, 0},
    {static_cast<uint32_t>(Operation::kWaitStreamProgress), "wait for progress",
     ServeWaitStreamProgress, 0},
    {static_cast<uint32_t>(Operation::kHostFunction), "host function", ServeHostFunction, 0},
    {static_cast<uint32_t>(Operation::kHostFunctionDone), "host function's end",
     ServeHostFunctionDone, 0},
    {static_cast<uint32_t>(Operation::kBounceDone), "bounce", ServeBounceDone, kNoContext},
};

}  // namespace

class Worker::DispatchedCall : public CallContext {
 public:
  DispatchedCall(Worker& worker, const FrameHeader& header, std::span<std::byte> reply_space) {
    header_ = header;
    worker_ = &worker;
    driver_ = &worker.driver_;
    reply_ = Writer(reply_space);
    token_ = {header.sequence, header.function, header.thread, header.subject,
              (header.flags & kNeedsReply) != 0};
  }
};

void ApplyDisabled(WorkerOptions* options) {
  options->gate = !EnvListContains("PENSTOCK_DISABLE", "gate");
  options->deferred_waits = !EnvListContains("PENSTOCK_DISABLE", "deferred_waits");
  options->thread_errors = !EnvListContains("PENSTOCK_DISABLE", "thread_errors");
}

Worker::Worker(const WorkerOptions& options, const Driver& driver,
               std::unique_ptr<transport::Connection> connection)
    : options_(options),
      driver_(driver),
      connection_(std::move(connection)),
      outbox_(*connection_, options.epoch),
      bounce_(outbox_),
      reaper_(driver_, [this] { connection_->Interrupt(); }),
      executor_([this] { connection_->Interrupt(); }),
      progress_(*this),
      waits_(*this),
      transfers_(*this),
      gpu_direct_(*this),
      host_functions_(*this),
      reply_space_(new std::byte[kMaxFrameBytes]) {
  const auto generated = Handlers();
  handlers_.assign(generated.begin(), generated.end());
  handlers_.insert(handlers_.end(), std::begin(kOperations), std::end(kOperations));
  std::sort(handlers_.begin(), handlers_.end(),
            [](const auto& a, const auto& b) { return a.function < b.function; });
  heard_ns_ = said_ns_ = NowNanoseconds();
}

Worker::~Worker() {
  connection_->Close(0);
}

const HandlerEntry* Worker::FindHandler(uint32_t function) const {
  auto found = std::lower_bound(
      handlers_.begin(), handlers_.end(), function,
      [](const HandlerEntry& entry, uint32_t wanted) { return entry.function < wanted; });
  return found != handlers_.end() && found->function == function ? &*found : nullptr;
}

bool Worker::Run() {
  if (options_.capture_output) {
    if (auto captured = output_.Capture(); !captured) End(captured.error().message, false);
  }
  if (Status demand = gpu_direct_.CheckDemand(); !demand) End(demand.error().message, false);
  while (!ended_ && !stop_.load(std::memory_order_relaxed)) {
    int handled = connection_->Poll(kFramesPerRound, *this);
    const bool moved = Step();
    if (options_.meter != nullptr) {
      options_.meter->calls.store(received_, std::memory_order_relaxed);
      if (++rounds_ % kMeterRounds == 0) Measure();
    }
    if (handled == 0 && !moved && !ended_) {
      CheckSilence();
      handled = Sleep();
    }
    if (handled < 0 && !ended_) {
      LOG_INFO("session", "Session %lu ends: %s", options_.session,
               connection_->close_reason().c_str());
      break;
    }
    if (handled > 0 || moved) idle_rounds_ = 0;
  }
  if (connection_->caps().device_memory) {
    LOG_INFO("session",
             "Session %lu: %lu bytes of bulk data went straight between NICs and devices, %lu "
             "through host memory.",
             options_.session, gpu_direct_.moved().direct.load(),
             gpu_direct_.moved().staged.load());
  }
  // The client reads why, if it was ended from here.
  connection_->Close(200);
  return good_end_;
}

void Worker::Measure() {
  const transport::Counters counters = connection_->counters();
  SessionMeter& meter = *options_.meter;
  meter.received.store(counters.bytes_received + counters.bulk_bytes_received,
                       std::memory_order_relaxed);
  meter.sent.store(counters.bytes_sent + counters.bulk_bytes_sent, std::memory_order_relaxed);
  meter.memory.store(quota_->used(), std::memory_order_relaxed);
}

void Worker::Stop() {
  stop_.store(true);
  connection_->Interrupt();
}

bool Worker::Step() {
  bool moved = executor_.Finish();
  moved = gpu_direct_.Step() || moved;
  moved = progress_.Step() || moved;
  moved = transfers_.Step() || moved;
  moved = host_functions_.Step() || moved;
  moved = bounce_.Step() || moved;
  moved = reaper_.Collect([this](ReapJob& job) {
    for (CUevent event : job.events) ReturnEvent(*job.context, event);
  }) || moved;
  moved = waits_.Step() || moved;
  moved = progress_.Tell(false) || moved;
  moved = outbox_.Pump() || moved;
  while (!held_.empty() && !ended_) {
    FrameHeader header;
    memcpy(&header, held_.front().data(), sizeof header);
    if (MustHold(header)) break;
    const std::vector<std::byte> frame = std::move(held_.front());
    held_.pop_front();
    Dispatch(frame);
    moved = true;
  }
  if (outbox_.backlog_bytes() > kMaxBacklogBytes) End("The client takes no replies.", false);
  return moved;
}

// Nothing has happened in this round. The first rounds only give way to other threads, because an
// answer often follows within microseconds; later ones sleep, the longer the longer nothing came.
int Worker::Sleep() {
  constexpr uint32_t kEagerRounds = 4;
  constexpr int64_t kShortestUs = 20, kLongestUs = 1'000, kHeartbeatUs = 1'000'000;
  if (idle_rounds_ == 0) {
    idle_since_ns_ = NowNanoseconds();
    if (options_.meter != nullptr) Measure();
  }
  const bool expecting = !waits_.empty() || !transfers_.empty() || progress_.active() ||
                         host_functions_.waiting() || outbox_.backlog() || !held_.empty() ||
                         bounce_.waiting();
  ++idle_rounds_;
  if (expecting && idle_rounds_ <= kEagerRounds) {
    sched_yield();
    return 0;
  }
  if (progress_.Tell(true)) return 0;
  int64_t pause_us = kHeartbeatUs;
  if (expecting) {
    pause_us = std::clamp((NowNanoseconds() - idle_since_ns_) / 8'000, kShortestUs, kLongestUs);
  }
  return connection_->Wait(kFramesPerRound, *this, Deadline::AfterMicroseconds(pause_us));
}

void Worker::CheckSilence() {
  const int64_t now = NowNanoseconds();
  // A client that has never sent a heartbeat has promised none; the transport watches its host.
  if (client_beats_ && now - heard_ns_ > options_.silence_ms * 1'000'000) {
    End("The client has been silent for too long.", false);
  }
  if (now - said_ns_ > options_.silence_ms * 1'000'000 / 3 && outbox_.Heartbeat()) said_ns_ = now;
}

bool Worker::OnFrame(std::span<const std::byte> frame) {
  if (ended_) return true;
  heard_ns_ = NowNanoseconds();
  TakeFrame(frame);
  return true;
}

void Worker::TakeFrame(std::span<const std::byte> frame) {
  FrameHeader header;
  if (frame.size() < sizeof header || frame.size() > kMaxFrameBytes) {
    return End("A frame has an impossible size.", true);
  }
  memcpy(&header, frame.data(), sizeof header);
  if (header.bytes != frame.size()) return End("A frame says another size than it has.", true);
  if (header.epoch < options_.epoch) return;  // of an earlier connection
  if (header.epoch > options_.epoch) return End("A frame has a future epoch.", true);
  if (!outbox_.OnAcknowledged(header.acknowledged)) {
    return End("A frame acknowledges what was never sent.", true);
  }
  switch (header.type) {
    case FrameType::kAcknowledge:
      return;
    case FrameType::kHeartbeat:
      client_beats_ = true;
      return;
    case FrameType::kGoodbye:
      LOG_DEBUG("session", "Session %lu: the client says goodbye.", options_.session);
      ended_ = good_end_ = true;
      return;
    case FrameType::kCall:
      break;
    default:
      return End("A frame has a type that no client sends.", true);
  }
  if (header.sequence <= received_) {
    if (header.sequence == 0) End("A call has no sequence number.", true);
    return;  // seen before
  }
  if (header.sequence != received_ + 1) return End("A call is missing in the sequence.", true);
  if (header.thread >= kMaxThreads) return End("A call has an impossible thread index.", true);
  received_ = header.sequence;
  outbox_.OnReceived(header.sequence, header.bytes);
  if (!held_.empty() || MustHold(header)) {
    held_.emplace_back(frame.begin(), frame.end());
    return;
  }
  Dispatch(frame);
}

bool Worker::MustHold(const FrameHeader& header) const {
  const Handle subject{header.subject};
  return IsPrimaryContext(subject) && primary_busy_[subject.id()];
}

void Worker::Dispatch(std::span<const std::byte> frame) {
  FrameHeader header;
  memcpy(&header, frame.data(), sizeof header);
  const HandlerEntry* entry = FindHandler(header.function);
  if (entry == nullptr) return End("A call names a function that is not served.", true);
  DispatchedCall call(*this, header, {reply_space_.get(), kMaxFrameBytes - sizeof header});
  const ReplyToken token = call.token();

  if (entry->flags & kDelivers) {
    auto pending = pending_errors_.find(options_.thread_errors ? header.thread : 0);
    if (pending != pending_errors_.end()) {
      const CUresult error = pending->second.error;
      pending_errors_.erase(pending);
      if (token.needed) {
        ForwardOutput();
        return Answer(token, error);
      }
    }
  }
  CUresult result = CUDA_SUCCESS;
  const Handle subject{header.subject};
  if (entry->flags & kNoContext) {
    // It runs in whatever context is current.
  } else if (subject.null()) {
    result = MakeCurrent(nullptr);
  } else if (current_ == nullptr || current_->handle != subject || !current_->alive) {
    bool minted = true;
    const auto context = FindContext(subject, &result, &minted);
    if (!minted) return End("A call runs in a context that was never made.", true);
    if (context != nullptr) result = MakeCurrent(context);
  }
  if (result == CUDA_SUCCESS) {
    Reader reader(frame.subspan(sizeof header));
    result = entry->handler(call, reader);
    if (call.is_malformed() || ended_) return;
    if (call.stream_state() != nullptr && header.result > 0) {
      progress_.Charge(call.stream_state(), static_cast<uint32_t>(header.result));
    }
  } else {
    creations_skipped_ = true;
  }
  if (LogEnabled(LogLevel::kTrace, "dispatch")) {
    LogWrite(LogLevel::kTrace, "dispatch", "%s -> %s", entry->name,
             result == kDeferred ? "later" : ErrorName(driver_, result));
  }
  if (result == kDeferred) return;
  if (token.needed && !call.reply().ok()) result = CUDA_ERROR_INVALID_VALUE;  // it has no room
  // A context that has failed says so to any call; what its kernel said before comes first.
  if (token.needed && result != CUDA_SUCCESS) ForwardOutput();
  const std::span<const std::byte> body(
      reply_space_.get(), result == CUDA_SUCCESS || call.keeps_body() ? call.reply().used() : 0);
  Answer(token, result, body);
}

void Worker::Answer(const ReplyToken& token, CUresult result, std::span<const std::byte> body) {
  if (token.needed) {
    progress_.Tell(true);
    outbox_.Reply(token, result, body);
    said_ns_ = heard_ns_;
    return;
  }
  if (result == CUDA_SUCCESS) return;
  LOG_DEBUG("dispatch", "A posted call (function 0x%x) of thread %u fails with %s.", token.function,
            token.thread, ErrorName(driver_, result));
  // The first one counts.
  pending_errors_.try_emplace(options_.thread_errors ? token.thread : 0,
                              PendingError{result, token.context});
}

void Worker::ForwardOutput() {
  output_.Forward(outbox_);
}

void Worker::OnBulkDone(uint64_t cookie, transport::BulkStatus status, uint64_t) {
  if (transfers_.OnBulkDone(cookie, status)) return;
  auto pull = pulls_.find(cookie);
  if (pull == pulls_.end()) return;
  auto done = std::move(pull->second);
  pulls_.erase(pull);
  done(status);
}

uint64_t Worker::AddPull(std::function<void(transport::BulkStatus)> done) {
  const uint64_t cookie = kPullCookies | next_pull_++;
  pulls_[cookie] = std::move(done);
  return cookie;
}

void Worker::DropPull(uint64_t cookie) {
  pulls_.erase(cookie);
}

CUresult Worker::MakeCurrent(const std::shared_ptr<ContextState>& context) {
  if (current_ == context) return CUDA_SUCCESS;
  const CUresult result = driver_.cuCtxSetCurrent(context == nullptr ? nullptr : context->context);
  if (result == CUDA_SUCCESS) current_ = context;
  return result;
}

std::shared_ptr<ContextState> Worker::FindContext(Handle handle, CUresult* error, bool* minted) {
  *error = CUDA_SUCCESS;
  *minted = true;
  if (IsPrimaryContext(handle)) {
    const uint32_t device = handle.id();
    *minted = device < options_.device_count;
    *error = *minted ? RetainPrimary(static_cast<CUdevice>(device)) : CUDA_ERROR_INVALID_CONTEXT;
    return *error == CUDA_SUCCESS ? objects_.primaries[device] : nullptr;
  }
  ContextRecord* record = objects_.contexts.Find(handle);
  if (record == nullptr) {
    *minted = objects_.contexts.WasMinted(handle);
    *error = *minted ? CUDA_ERROR_CONTEXT_IS_DESTROYED : CUDA_ERROR_INVALID_CONTEXT;
    return nullptr;
  }
  *error = record->tombstone;
  return record->state;
}

CUresult Worker::RetainPrimary(CUdevice ordinal) {
  if (objects_.primaries[ordinal] != nullptr) return CUDA_SUCCESS;
  CUdevice device;
  if (CUresult result = driver_.cuDeviceGet(&device, ordinal); result != CUDA_SUCCESS) {
    return result;
  }
  if (!context_charges_.Take(device)) return CUDA_ERROR_OUT_OF_MEMORY;
  CUcontext context;
  if (CUresult result = driver_.cuDevicePrimaryCtxRetain(&context, device);
      result != CUDA_SUCCESS) {
    context_charges_.GiveBack(device);
    return result;
  }
  auto state = NewContext(PrimaryContext(static_cast<uint32_t>(ordinal)), context, device);
  state->primary = true;
  objects_.primaries[ordinal] = state;
  return CUDA_SUCCESS;
}

std::shared_ptr<ContextState> Worker::NewContext(Handle handle, CUcontext context,
                                                 CUdevice device) {
  auto state = std::make_shared<ContextState>();
  state->handle = handle;
  state->context = context;
  state->device = device;
  state->legacy = std::make_shared<StreamState>();
  state->legacy->handle = kLegacyStream;
  state->legacy->stream = CU_STREAM_LEGACY;
  state->legacy->context = state;
  return state;
}

void Worker::ForgetContext(const std::shared_ptr<ContextState>& context) {
  context->alive = false;
  waits_.DropContext(*context, CUDA_ERROR_CONTEXT_IS_DESTROYED);
  transfers_.DropContext(*context, CUDA_ERROR_CONTEXT_IS_DESTROYED);
  gpu_direct_.DropContext(context);
  host_functions_.DropContext(*context, CUDA_ERROR_CONTEXT_IS_DESTROYED);
  const auto forget = [](auto& table, const auto& belongs) {
    std::vector<Handle> handles;
    table.ForEach([&](Handle handle, auto& record) {
      if (belongs(record)) handles.push_back(handle);
    });
    for (Handle handle : handles) table.Remove(handle);
    return handles;
  };
  for (const auto& stream : context->streams) {
    stream->destroyed = true;
    objects_.streams.Remove(stream->handle);
  }
  // The slot has its memory back when the context is really gone.
  const auto keep_charges = [&](StreamState& stream) {
    for (auto& [first, charge] : stream.frees) context->charges.push_back(std::move(charge));
    stream.frees.clear();
  };
  for (const auto& stream : context->streams) keep_charges(*stream);
  for (const auto& stream : context->retiring) keep_charges(*stream);
  keep_charges(*context->legacy);
  context->streams.clear();
  context->retiring.clear();
  const Handle own = context->handle;
  forget(objects_.events, [own](const EventRecord& record) { return record.context == own; });
  forget(objects_.links, [own](const LinkRecord& record) { return record.context == own; });
  const auto modules =
      forget(objects_.modules, [own](const ModuleRecord& record) { return record.context == own; });
  for (Handle module : modules) {
    forget(objects_.functions,
           [module](const FunctionRecord& record) { return record.owner == module; });
  }
  objects_.kernels.ForEach([&](Handle, FunctionRecord& record) {
    std::erase_if(record.by_context,
                  [&](const auto& entry) { return entry.first == context->context; });
  });
  allocations_.RemoveIf([&](const Allocation& range) {
    if (range.context != own) return false;
    if (range.charge != nullptr) context->charges.push_back(range.charge);
    return true;
  });
  context->free_events.clear();
  // Its failures must not meet a thread in the next life of a primary context.
  std::erase_if(pending_errors_,
                [own](const auto& entry) { return entry.second.context == own.bits; });
  if (context->primary) {
    objects_.primaries[own.id()] = nullptr;
  } else {
    objects_.contexts.Remove(own);
  }
  if (current_ == context) MakeCurrent(nullptr);
}

void Worker::ContextIsGone(ContextState& context) {
  context.charges.clear();
  context_charges_.GiveBack(context.device);
}

std::vector<std::pair<std::shared_ptr<StreamState>, std::shared_ptr<Quota::Charge>>>
Worker::Freeing(uint32_t device) {
  std::vector<std::pair<std::shared_ptr<StreamState>, std::shared_ptr<Quota::Charge>>> found;
  const auto look = [&](const std::shared_ptr<StreamState>& stream) {
    for (const auto& [first, charge] : stream->frees) {
      if (charge->device() == device) found.emplace_back(stream, charge);
    }
  };
  const auto look_in = [&](const ContextState& context) {
    for (const auto& stream : context.streams) look(stream);
    for (const auto& stream : context.retiring) look(stream);
    look(context.legacy);
  };
  for (const auto& context : objects_.primaries) {
    if (context != nullptr) look_in(*context);
  }
  objects_.contexts.ForEach([&](Handle, const ContextRecord& record) {
    if (record.state != nullptr) look_in(*record.state);
  });
  return found;
}

void Worker::SetPrimaryBusy(CUdevice device, bool busy) {
  primary_busy_[device] = busy;
}

CUresult Worker::PrepareContext(ContextState& context) {
  if (context.arena != nullptr) return CUDA_SUCCESS;
  const auto before = current_;
  CUresult result = driver_.cuCtxSetCurrent(context.context);
  if (result != CUDA_SUCCESS) return result;
  result = driver_.cuStreamCreate(&context.upload_stream, CU_STREAM_NON_BLOCKING);
  if (result == CUDA_SUCCESS) {
    result = driver_.cuStreamCreate(&context.download_stream, CU_STREAM_NON_BLOCKING);
  }
  if (result == CUDA_SUCCESS) {
    // A kernel may have broken the context before anybody copied: then it is the kernel's error.
    auto arena = Arena::Create(driver_, *connection_, &result);
    if (arena) {
      result = CUDA_SUCCESS;
      context.arena = std::move(*arena);
      context.upload_word = context.arena->TakeWord();
      context.download_word = context.arena->TakeWord();
    } else {
      LOG_ERROR("worker", "%s", arena.error().message.c_str());
    }
  }
  if (before == nullptr || before->context != context.context) {
    driver_.cuCtxSetCurrent(before == nullptr ? nullptr : before->context);
  }
  return result;
}

CUresult Worker::TakeEvent(ContextState& context, CUevent* event) {
  *event = nullptr;
  if (context.free_events.empty()) return driver_.cuEventCreate(event, CU_EVENT_DISABLE_TIMING);
  *event = context.free_events.back();
  context.free_events.pop_back();
  return CUDA_SUCCESS;
}

void Worker::ReturnEvent(ContextState& context, CUevent event) {
  if (context.alive) context.free_events.push_back(event);
}

void Worker::End(const std::string& reason, bool malformed) {
  if (ended_) return;
  ended_ = true;
  good_end_ = false;
  if (malformed) {
    LOG_ERROR("session", "Session %lu is ended, its client breaks the protocol: %s",
              options_.session, reason.c_str());
  } else {
    LOG_WARNING("session", "Session %lu is ended: %s", options_.session, reason.c_str());
  }
  outbox_.Goodbye(reason);
}

}  // namespace penstock::server
