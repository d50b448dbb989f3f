#include "server/worker/host_functions.h"

#include <algorithm>

#include "common/clock.h"
#include "common/log.h"
#include "server/worker/worker.h"

namespace penstock::server {
namespace {

constexpr int64_t kAskEveryNs = 50'000'000;  // whether a context that is late has failed

bool AfterOrAt(uint32_t value, uint32_t wanted) {
  return static_cast<int32_t>(value - wanted) >= 0;
}

}  // namespace

CUresult HostFunctions::Enqueue(CallContext& call, const HostFunctionCommand& command) {
  if (command.id == 0) return call.Malformed("A host function has no number.");
  if (entries_.size() >= kMaxHostFunctions) {
    return call.Malformed("More host functions are under way than a program can have.");
  }
  // Threads of the client mint and post side by side, so a newer number may come first.
  if (command.id <= newest_ &&
      std::any_of(entries_.begin(), entries_.end(),
                  [&](const Entry& entry) { return entry.id == command.id; })) {
    return call.Malformed("Two host functions have the same number.");
  }
  newest_ = std::max(newest_, command.id);
  CUstream stream;
  Entry entry;
  entry.id = command.id;
  CUresult result = CUDA_SUCCESS;
  if (call.Stream(command.stream, &stream)) {
    entry.stream = call.stream_state();
    entry.context = entry.stream->context.lock();
    result = entry.context == nullptr ? CUDA_ERROR_INVALID_HANDLE : PutGate(entry);
  } else {
    if (call.is_malformed()) return call.error();
    result = call.error();
  }
  if (result == CUDA_SUCCESS) {
    entry.asked_ns = NowNanoseconds();
    entries_.push_back(std::move(entry));
    ++waiting_;
    return CUDA_SUCCESS;
  }
  // With a reply the client hears it at once, and forgets the function.
  if (call.token().needed) return result;
  if (entry.context != nullptr) {
    const CUresult health = Health(*entry.context);
    if (health != CUDA_SUCCESS) GiveUp(*entry.context, health);
  }
  worker_.outbox().HostFunction(entry.id, result);
  return result;
}

CUresult HostFunctions::PutGate(Entry& entry) {
  if (CUresult result = worker_.MakeCurrent(entry.context); result != CUDA_SUCCESS) return result;
  if (CUresult result = worker_.PrepareContext(*entry.context); result != CUDA_SUCCESS) {
    return result;
  }
  StreamState& stream = *entry.stream;
  if (CUresult result = worker_.progress().EnsureWords(stream); result != CUDA_SUCCESS) {
    return result;
  }
  if (!worker_.options().gate) return CUDA_SUCCESS;
  const Driver& driver = worker_.driver();
  const Arena& arena = *entry.context->arena;
  CUresult result = worker_.TakeEvent(*entry.context, &entry.event);
  if (result == CUDA_SUCCESS) result = driver.cuEventRecord(entry.event, stream.stream);
  if (result == CUDA_SUCCESS) {
    result = driver.cuStreamWriteValue32_v2(
        stream.stream, arena.DeviceAddress(stream.words.reached), stream.gates + 1, 0);
  }
  if (result == CUDA_SUCCESS) {
    entry.gate = ++stream.gates;
    result = driver.cuStreamWaitValue32_v2(stream.stream, arena.DeviceAddress(stream.words.go),
                                           entry.gate, CU_STREAM_WAIT_VALUE_GEQ);
  }
  entry.gated = result == CUDA_SUCCESS;
  if (!entry.gated && entry.event != nullptr) {
    worker_.ReturnEvent(*entry.context, entry.event);
  }
  return result;
}

bool HostFunctions::Reached(const Entry& entry) const {
  return !entry.gated ||
         AfterOrAt(entry.context->arena->Load(entry.stream->words.reached), entry.gate);
}

CUresult HostFunctions::Health(const ContextState& context) const {
  if (context.upload_stream == nullptr) return CUDA_SUCCESS;
  const CUresult result = worker_.driver().cuStreamQuery(context.upload_stream);
  return result == CUDA_ERROR_NOT_READY ? CUDA_SUCCESS : result;
}

void HostFunctions::Tell(Entry& entry, CUresult status) {
  if (entry.event != nullptr) {
    // It is over, so this returns at once; the driver delivers what kernels have printed here, as
    // it does before a callback of its own.
    if (status == CUDA_SUCCESS) worker_.driver().cuEventSynchronize(entry.event);
    worker_.ReturnEvent(*entry.context, entry.event);
    entry.event = nullptr;
    worker_.ForwardOutput();
  }
  entry.told = true;
  --waiting_;
  worker_.outbox().HostFunction(entry.id, status);
}

bool HostFunctions::Step() {
  if (waiting_ == 0) return false;
  bool moved = false;
  std::shared_ptr<ContextState> failed;
  CUresult error = CUDA_SUCCESS;
  for (Entry& entry : entries_) {
    if (entry.told) continue;
    if (Reached(entry)) {
      Tell(entry, CUDA_SUCCESS);
      moved = true;
      continue;
    }
    const int64_t now = NowNanoseconds();
    if (now - entry.asked_ns < kAskEveryNs) continue;
    entry.asked_ns = now;
    error = Health(*entry.context);
    if (error != CUDA_SUCCESS) {
      failed = entry.context;
      break;
    }
  }
  if (failed == nullptr) return moved;
  LOG_DEBUG("host", "A context with host functions has failed with %s.",
            ErrorName(worker_.driver(), error));
  GiveUp(*failed, error);
  return true;
}

void HostFunctions::GiveUp(const ContextState& context, CUresult error) {
  for (Place place = entries_.begin(); place != entries_.end();) {
    if (place->told || place->context.get() != &context) {
      ++place;
      continue;
    }
    // The stream may have got there before its context failed.
    const bool reached = Reached(*place);
    Tell(*place, reached ? CUDA_SUCCESS : error);
    place = reached ? std::next(place) : Erase(place);
  }
}

void HostFunctions::DropContext(const ContextState& context, CUresult error) {
  GiveUp(context, error);
  for (Place place = entries_.begin(); place != entries_.end();) {
    place = place->context.get() == &context ? Erase(place) : std::next(place);
  }
}

void HostFunctions::OpenGate(const Entry& entry) {
  Arena& arena = *entry.context->arena;
  const WordIndex go = entry.stream->words.go;
  // Whatever has gates in a stream passes them in order, so the word only grows.
  if (entry.gated && go != 0 && !AfterOrAt(arena.Load(go), entry.gate)) {
    arena.Store(go, entry.gate);
  }
}

HostFunctions::Place HostFunctions::Erase(Place place) {
  OpenGate(*place);
  return entries_.erase(place);
}

CUresult HostFunctions::Done(CallContext& call, uint64_t id) {
  const Place place = std::find_if(entries_.begin(), entries_.end(),
                                   [id](const Entry& entry) { return entry.id == id; });
  if (place == entries_.end()) {
    if (id == 0 || id > newest_) return call.Malformed("A host function ends that never was.");
    return CUDA_SUCCESS;  // its context went away meanwhile
  }
  if (!place->told) return call.Malformed("A host function ends before its turn.");
  Erase(place);
  return CUDA_SUCCESS;
}

}  // namespace penstock::server
