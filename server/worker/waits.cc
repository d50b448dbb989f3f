#include "server/worker/waits.h"

#include "common/clock.h"
#include "server/worker/worker.h"

namespace penstock::server {

CUresult Waits::ForStreams(CallContext& call, const std::shared_ptr<ContextState>& context,
                           const std::vector<std::shared_ptr<StreamState>>& streams,
                           const std::vector<std::shared_ptr<StreamState>>& retiring) {
  const Driver& driver = worker_.driver();
  if (!worker_.options().deferred_waits) {
    // For tests: what happens when the dispatch thread blocks.
    for (const auto& stream : streams) {
      const CUresult result = driver.cuStreamSynchronize(stream->stream);
      if (result != CUDA_SUCCESS) return result;
    }
    return CUDA_SUCCESS;
  }
  Wait wait;
  wait.token = call.token();
  wait.context = context;
  wait.reveals_output = true;
  wait.retiring = retiring;
  for (const auto& stream : streams) {
    worker_.progress().Mark(stream);
    CUevent event = nullptr;
    CUresult result = worker_.TakeEvent(*context, &event);
    if (result == CUDA_SUCCESS) {
      wait.events.push_back(event);
      result = driver.cuEventRecord(event, stream->stream);
    }
    if (result != CUDA_SUCCESS) {
      for (CUevent taken : wait.events) worker_.ReturnEvent(*context, taken);
      return result;
    }
  }
  Add(std::move(wait));
  return kDeferred;
}

CUresult Waits::ForEvent(CallContext& call, const std::shared_ptr<ContextState>& context,
                         CUevent event) {
  if (!worker_.options().deferred_waits) return worker_.driver().cuEventSynchronize(event);
  Wait wait;
  wait.token = call.token();
  wait.context = context;
  wait.user_event = event;
  wait.reveals_output = true;
  Add(std::move(wait));
  return kDeferred;
}

CUresult Waits::ForProgress(CallContext& call, const std::shared_ptr<StreamState>& stream,
                            uint64_t cost) {
  worker_.progress().CatchUp(stream, cost);
  if (CUresult result = worker_.progress().Mark(stream); result != CUDA_SUCCESS) {
    // A context that has failed accepts no mark; nobody may wait for it for ever.
    worker_.progress().GiveUp(stream);
    return result;
  }
  Wait wait;
  wait.token = call.token();
  wait.context = stream->context.lock();
  wait.stream = stream;
  wait.cost = cost;
  Add(std::move(wait));
  return kDeferred;
}

void Waits::Add(Wait wait) {
  wait.since_ns = NowNanoseconds();
  const CUresult result = Ask(wait);
  if (result == CUDA_ERROR_NOT_READY) {
    waits_.push_back(std::move(wait));
  } else {
    End(std::move(wait), result);
  }
}

CUresult Waits::Ask(Wait& wait) {
  const Driver& driver = worker_.driver();
  while (!wait.events.empty()) {
    const CUevent event = wait.events.back();
    const CUresult result = driver.cuEventQuery(event);
    if (result != CUDA_SUCCESS) return result;
    // It is over, so this returns at once; the driver delivers what kernels have printed here.
    if (wait.reveals_output) driver.cuEventSynchronize(event);
    worker_.ReturnEvent(*wait.context, event);
    wait.events.pop_back();
  }
  if (wait.user_event != nullptr) {
    const CUresult result = driver.cuEventQuery(wait.user_event);
    if (result != CUDA_SUCCESS) return result;
    driver.cuEventSynchronize(wait.user_event);
  }
  // A context that has failed moves no word any more, but says so.
  const auto not_ready = [&](const ContextState& context) {
    constexpr int64_t kSuspiciousNs = 50'000'000;
    if (NowNanoseconds() - wait.since_ns <= kSuspiciousNs || context.upload_stream == nullptr) {
      return CUDA_ERROR_NOT_READY;
    }
    const CUresult result = driver.cuStreamQuery(context.upload_stream);
    return result == CUDA_SUCCESS ? CUDA_ERROR_NOT_READY : result;
  };
  if (wait.stream != nullptr && wait.stream->finished < wait.cost) {
    const auto context = wait.stream->context.lock();
    if (context == nullptr) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    const CUresult result = not_ready(*context);
    if (result != CUDA_ERROR_NOT_READY) worker_.progress().GiveUp(wait.stream);
    return result;
  }
  while (!wait.retiring.empty()) {
    if (!wait.retiring.back()->unseen.empty()) return not_ready(*wait.context);
    wait.retiring.pop_back();
  }
  while (!wait.freeing.empty()) {
    const auto& [stream, charge] = wait.freeing.back();
    const auto context = stream->context.lock();
    // Nothing more is to be had of a context that has failed.
    if (!charge->released() && context != nullptr && not_ready(*context) == CUDA_ERROR_NOT_READY) {
      return CUDA_ERROR_NOT_READY;
    }
    wait.freeing.pop_back();
  }
  for (const auto& job : wait.reaping) {
    if (!job->done.load(std::memory_order_acquire)) return CUDA_ERROR_NOT_READY;
  }
  return CUDA_SUCCESS;
}

void Waits::End(Wait wait, CUresult result) {
  for (CUevent event : wait.events) worker_.ReturnEvent(*wait.context, event);
  std::vector<std::byte> body;
  if (result == CUDA_SUCCESS && wait.finish != nullptr) {
    if (wait.context != nullptr) worker_.MakeCurrent(wait.context);
    result = wait.finish(&body);
  }
  if (result == kDeferred) return;
  if (wait.reveals_output) worker_.ForwardOutput();
  worker_.Answer(wait.token, result, body);
}

void Waits::DropEvent(CUevent event) {
  for (size_t i = 0; i < waits_.size();) {
    if (waits_[i].user_event != event) {
      ++i;
      continue;
    }
    Wait wait = std::move(waits_[i]);
    waits_.erase(waits_.begin() + i);
    End(std::move(wait), CUDA_ERROR_INVALID_HANDLE);
  }
}

void Waits::DropContext(const ContextState& context, CUresult error) {
  for (size_t i = 0; i < waits_.size();) {
    if (waits_[i].context.get() != &context) {
      ++i;
      continue;
    }
    Wait wait = std::move(waits_[i]);
    waits_.erase(waits_.begin() + i);
    wait.events.clear();  // they die with the context
    // Nobody waits for a posted copy: its failure would meet the thread in the context's next life.
    if (wait.token.needed) End(std::move(wait), error);
  }
}

bool Waits::Step() {
  bool any = false;
  for (size_t i = 0; i < waits_.size();) {
    const CUresult result = Ask(waits_[i]);
    if (result == CUDA_ERROR_NOT_READY) {
      ++i;
      continue;
    }
    Wait wait = std::move(waits_[i]);
    waits_.erase(waits_.begin() + i);
    End(std::move(wait), result);
    any = true;
  }
  return any;
}

}  // namespace penstock::server
