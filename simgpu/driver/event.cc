#include "simgpu/driver/event.h"

#include <time.h>

#include "simgpu/driver/entry.h"

namespace simgpu {
namespace {

int64_t Now() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1'000'000'000LL + now.tv_nsec;
}

}  // namespace

void RecordInto(const std::shared_ptr<Context>& context, const std::shared_ptr<Stream>& stream,
                Event& event, std::vector<Point> points) {
  auto recording = std::make_shared<Recording>();
  recording->point = context->Enqueue(
      stream, [recording] { recording->time_ns.store(Now(), std::memory_order_release); },
      std::move(points), /*always=*/true);
  event.set_recording(std::move(recording));
}

}  // namespace simgpu

#undef cuEventElapsedTime

using namespace simgpu;

namespace {

CUresult FindEvent(CUevent handle, std::shared_ptr<Event>* event,
                   std::shared_ptr<Context>* context) {
  SIMGPU_RETURN_IF_ERROR(Enter());
  if (OnWorkerThread()) return CUDA_ERROR_NOT_PERMITTED;
  *event = state()->events.Find(handle);
  if (*event == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  *context = (*event)->context();
  return *context == nullptr ? CUDA_ERROR_CONTEXT_IS_DESTROYED : CUDA_SUCCESS;
}

CUresult Record(CUevent event_handle, CUstream stream_handle) {
  std::shared_ptr<Event> event;
  std::shared_ptr<Context> event_context;
  SIMGPU_RETURN_IF_ERROR(FindEvent(event_handle, &event, &event_context));
  std::shared_ptr<Stream> stream;
  std::shared_ptr<Context> context;
  SIMGPU_RETURN_IF_ERROR(ResolveStream(stream_handle, &stream, &context));
  if (context != event_context) return CUDA_ERROR_INVALID_HANDLE;
  RecordInto(context, stream, *event, {});
  return CUDA_SUCCESS;
}

}  // namespace

SIMGPU_EXPORT cuEventCreate(CUevent* handle, unsigned int flags) {
  std::shared_ptr<Context> context;
  SIMGPU_RETURN_IF_ERROR(EnterContext(&context));
  constexpr unsigned kKnown = CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING;
  if (handle == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if ((flags & CU_EVENT_INTERPROCESS) != 0) return CUDA_ERROR_NOT_SUPPORTED;
  if ((flags & ~kKnown) != 0) return CUDA_ERROR_INVALID_VALUE;
  *handle = state()->events.Insert(std::make_shared<Event>(context, flags));
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT cuEventDestroy_v2(CUevent handle) {
  SIMGPU_RETURN_IF_ERROR(Enter());
  return state()->events.Remove(handle) == nullptr ? CUDA_ERROR_INVALID_HANDLE : CUDA_SUCCESS;
}

SIMGPU_EXPORT cuEventRecord(CUevent event, CUstream stream) {
  return Record(event, stream);
}

SIMGPU_EXPORT cuEventRecordWithFlags(CUevent event, CUstream stream, unsigned int flags) {
  if ((flags & ~static_cast<unsigned>(CU_EVENT_RECORD_EXTERNAL)) != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  return Record(event, stream);
}

SIMGPU_EXPORT cuEventQuery(CUevent handle) {
  std::shared_ptr<Event> event;
  std::shared_ptr<Context> context;
  SIMGPU_RETURN_IF_ERROR(FindEvent(handle, &event, &context));
  SIMGPU_RETURN_IF_ERROR(context->error());
  const std::shared_ptr<Recording> recording = event->recording();
  if (recording != nullptr && !recording->point.stream->Reached(recording->point.sequence)) {
    return CUDA_ERROR_NOT_READY;
  }
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT cuEventSynchronize(CUevent handle) {
  std::shared_ptr<Event> event;
  std::shared_ptr<Context> context;
  SIMGPU_RETURN_IF_ERROR(FindEvent(handle, &event, &context));
  const std::shared_ptr<Recording> recording = event->recording();
  if (recording == nullptr) return context->error();
  return context->WaitFor({recording->point});
}

SIMGPU_EXPORT cuEventElapsedTime(float* milliseconds, CUevent start_handle, CUevent end_handle) {
  std::shared_ptr<Event> start;
  std::shared_ptr<Event> end;
  std::shared_ptr<Context> context;
  SIMGPU_RETURN_IF_ERROR(FindEvent(start_handle, &start, &context));
  SIMGPU_RETURN_IF_ERROR(FindEvent(end_handle, &end, &context));
  if (milliseconds == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (!start->timing() || !end->timing()) return CUDA_ERROR_INVALID_HANDLE;
  SIMGPU_RETURN_IF_ERROR(context->error());
  const auto from = start->recording();
  const auto to = end->recording();
  if (from == nullptr || to == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  for (const auto& recording : {from, to}) {
    if (!recording->point.stream->Reached(recording->point.sequence)) return CUDA_ERROR_NOT_READY;
  }
  *milliseconds = static_cast<float>(static_cast<double>(to->time_ns - from->time_ns) / 1e6);
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT cuEventElapsedTime_v2(float* milliseconds, CUevent start, CUevent end) {
  return cuEventElapsedTime(milliseconds, start, end);
}

SIMGPU_EXPORT cuStreamWaitEvent(CUstream stream_handle, CUevent event_handle, unsigned int flags) {
  std::shared_ptr<Event> event;
  std::shared_ptr<Context> event_context;
  SIMGPU_RETURN_IF_ERROR(FindEvent(event_handle, &event, &event_context));
  std::shared_ptr<Stream> stream;
  std::shared_ptr<Context> context;
  SIMGPU_RETURN_IF_ERROR(ResolveStream(stream_handle, &stream, &context));
  if ((flags & ~static_cast<unsigned>(CU_EVENT_WAIT_EXTERNAL)) != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const std::shared_ptr<Recording> recording = event->recording();
  if (recording == nullptr) return CUDA_SUCCESS;
  context->Enqueue(stream, [] {}, {recording->point});
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT cuCtxRecordEvent(CUcontext context_handle, CUevent event_handle) {
  std::shared_ptr<Event> event;
  std::shared_ptr<Context> event_context;
  SIMGPU_RETURN_IF_ERROR(FindEvent(event_handle, &event, &event_context));
  std::shared_ptr<Context> context;
  SIMGPU_RETURN_IF_ERROR(FindContext(context_handle, &context));
  SIMGPU_RETURN_IF_ERROR(context->error());
  if (context != event_context) return CUDA_ERROR_INVALID_HANDLE;
  RecordInto(context, context->legacy_stream(), *event, context->PendingOfAll());
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT cuCtxWaitEvent(CUcontext context_handle, CUevent event_handle) {
  std::shared_ptr<Event> event;
  std::shared_ptr<Context> event_context;
  SIMGPU_RETURN_IF_ERROR(FindEvent(event_handle, &event, &event_context));
  std::shared_ptr<Context> context;
  SIMGPU_RETURN_IF_ERROR(FindContext(context_handle, &context));
  SIMGPU_RETURN_IF_ERROR(context->error());
  const std::shared_ptr<Recording> recording = event->recording();
  if (recording == nullptr) return CUDA_SUCCESS;
  context->HoldAll(recording->point);
  return CUDA_SUCCESS;
}
