// Streams. Creating and destroying are posted: the client mints the handle.
#include "commands.gen.h"
#include "custom_client.gen.h"
#include "interposer/core/call.h"
#include "interposer/core/client.h"

namespace penstock::interposer {
namespace {

CUresult Create(Call& call, CUstream* result, unsigned flags, int priority) {
  if (!call.ready() || !call.Out(result)) return call.result();
  if ((flags & ~unsigned{CU_STREAM_NON_BLOCKING}) != 0) return CUDA_ERROR_INVALID_VALUE;
  // As documented, a priority outside the range becomes the nearest one.
  const Device& device = *call.client().FindDevice(static_cast<CUdevice>(call.context().device));
  if (priority > device.info.least_priority) priority = device.info.least_priority;
  if (priority < device.info.greatest_priority) priority = device.info.greatest_priority;
  StreamRecord* const stream =
      call.objects().streams.Mint([&](StreamRecord& record, Handle handle) {
        record.context = &call.context();
        record.flags = flags;
        record.priority = priority;
        record.id = handle.id() + kMaxDevices;
      });
  if (stream == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
  commands::CuStreamCreateWithPriority command{};
  command.phStream = stream->handle.bits;
  command.flags = flags;
  command.priority = priority;
  const CUresult posted = call.Post(command);
  if (posted != CUDA_SUCCESS) {
    call.objects().streams.Remove(stream->handle);
    return posted;
  }
  if ((flags & CU_STREAM_NON_BLOCKING) != 0) ++call.context().non_blocking_streams;
  *result = reinterpret_cast<CUstream>(stream->handle.bits);
  return CUDA_SUCCESS;
}

// The record behind any stream a program may name.
StreamRecord* Find(Call& call, CUstream stream, bool per_thread) {
  uint64_t wire = 0;
  return call.ready() && call.Stream(stream, per_thread, &wire) ? call.stream() : nullptr;
}

}  // namespace

CUresult CuStreamCreate(CUstream* stream, unsigned int flags) {
  Call call(Function::kCuStreamCreate, Call::kContext);
  return Create(call, stream, flags, 0);
}

CUresult CuStreamCreateWithPriority(CUstream* stream, unsigned int flags, int priority) {
  Call call(Function::kCuStreamCreateWithPriority, Call::kContext);
  return Create(call, stream, flags, priority);
}

CUresult CuStreamDestroy(CUstream stream) {
  Call call(Function::kCuStreamDestroy, Call::kContext);
  if (!call.ready()) return call.result();
  const Handle handle{reinterpret_cast<uint64_t>(stream)};
  const StreamRecord* const record = call.objects().streams.Find(handle);
  if (record == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  ContextRecord* const context = record->context;
  if (!call.Bind(context, CUDA_ERROR_INVALID_HANDLE)) return call.result();
  const bool non_blocking = (record->flags & CU_STREAM_NON_BLOCKING) != 0;
  // Its work goes on, but nobody sees it finish any more.
  if (!non_blocking && record->downloading()) {
    ++context->orphans;
    ++context->downloads_posted;
  }
  call.objects().plan.OrphanUses(*record);
  if (!call.objects().streams.Remove(handle)) return CUDA_ERROR_INVALID_HANDLE;
  if (non_blocking) --context->non_blocking_streams;
  commands::CuStreamDestroy command{};
  command.hStream = handle.bits;
  return call.Post(command);
}

CUresult CuStreamGetPriority(CUstream stream, int* priority, bool per_thread) {
  Call call(Function::kCuStreamGetPriority, Call::kContext);
  const StreamRecord* const record = Find(call, stream, per_thread);
  if (record == nullptr || !call.Out(priority)) return call.result();
  *priority = record->priority;
  return CUDA_SUCCESS;
}

CUresult CuStreamGetId(CUstream stream, unsigned long long* id, bool per_thread) {
  Call call(Function::kCuStreamGetId, Call::kContext);
  const StreamRecord* const record = Find(call, stream, per_thread);
  if (record == nullptr || !call.Out(id)) return call.result();
  *id = record->id;
  return CUDA_SUCCESS;
}

CUresult CuStreamGetFlags(CUstream stream, unsigned int* flags, bool per_thread) {
  Call call(Function::kCuStreamGetFlags, Call::kContext);
  const StreamRecord* const record = Find(call, stream, per_thread);
  if (record == nullptr || !call.Out(flags)) return call.result();
  *flags = record->flags;
  return CUDA_SUCCESS;
}

CUresult CuStreamGetDevice(CUstream stream, CUdevice* device, bool per_thread) {
  Call call(Function::kCuStreamGetDevice, Call::kContext);
  const StreamRecord* const record = Find(call, stream, per_thread);
  if (record == nullptr || !call.Out(device)) return call.result();
  *device = static_cast<CUdevice>(record->context->device);
  return CUDA_SUCCESS;
}

CUresult CuStreamGetCtx(CUstream stream, CUcontext* context, bool per_thread) {
  Call call(Function::kCuStreamGetCtx, Call::kContext);
  const StreamRecord* const record = Find(call, stream, per_thread);
  if (record == nullptr || !call.Out(context)) return call.result();
  *context = reinterpret_cast<CUcontext>(record->context->handle.bits);
  return CUDA_SUCCESS;
}

CUresult CuStreamGetCtx_v2(CUstream stream, CUcontext* context, CUgreenCtx* green,
                           bool per_thread) {
  Call call(Function::kCuStreamGetCtx_v2, Call::kContext);
  const StreamRecord* const record = Find(call, stream, per_thread);
  if (record == nullptr || !call.Out(context)) return call.result();
  *context = reinterpret_cast<CUcontext>(record->context->handle.bits);
  if (green != nullptr) *green = nullptr;
  return CUDA_SUCCESS;
}

// --- Capture: not forwarded yet, so nothing captures, and the queries say so. -------------------

CUresult CuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus* status, bool per_thread) {
  Call call(Function::kCuStreamIsCapturing, Call::kContext);
  if (Find(call, stream, per_thread) == nullptr || !call.Out(status)) return call.result();
  *status = CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}

CUresult CuStreamGetCaptureInfo(CUstream stream, CUstreamCaptureStatus* status, cuuint64_t* id,
                                bool per_thread) {
  Call call(Function::kCuStreamGetCaptureInfo, Call::kContext);
  if (Find(call, stream, per_thread) == nullptr || !call.Out(status)) return call.result();
  *status = CU_STREAM_CAPTURE_STATUS_NONE;
  if (id != nullptr) *id = 0;
  return CUDA_SUCCESS;
}

CUresult CuStreamGetCaptureInfo_v2(CUstream stream, CUstreamCaptureStatus* status, cuuint64_t* id,
                                   CUgraph* graph, const CUgraphNode** dependencies,
                                   size_t* dependency_count, bool per_thread) {
  Call call(Function::kCuStreamGetCaptureInfo_v2, Call::kContext);
  if (Find(call, stream, per_thread) == nullptr || !call.Out(status)) return call.result();
  *status = CU_STREAM_CAPTURE_STATUS_NONE;
  if (id != nullptr) *id = 0;
  if (graph != nullptr) *graph = nullptr;
  if (dependencies != nullptr) *dependencies = nullptr;
  if (dependency_count != nullptr) *dependency_count = 0;
  return CUDA_SUCCESS;
}

CUresult CuStreamGetCaptureInfo_v3(CUstream stream, CUstreamCaptureStatus* status, cuuint64_t* id,
                                   CUgraph* graph, const CUgraphNode** dependencies,
                                   const CUgraphEdgeData** edges, size_t* dependency_count,
                                   bool per_thread) {
  Call call(Function::kCuStreamGetCaptureInfo_v3, Call::kContext);
  if (Find(call, stream, per_thread) == nullptr || !call.Out(status)) return call.result();
  *status = CU_STREAM_CAPTURE_STATUS_NONE;
  if (id != nullptr) *id = 0;
  if (graph != nullptr) *graph = nullptr;
  if (dependencies != nullptr) *dependencies = nullptr;
  if (edges != nullptr) *edges = nullptr;
  if (dependency_count != nullptr) *dependency_count = 0;
  return CUDA_SUCCESS;
}

CUresult CuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  Call call(Function::kCuThreadExchangeStreamCaptureMode, Call::kInitialised);
  if (!call.ready() || !call.Out(mode)) return call.result();
  if (*mode > CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_ERROR_INVALID_VALUE;
  std::swap(call.thread().capture_mode, *mode);
  return CUDA_SUCCESS;
}

}  // namespace penstock::interposer
