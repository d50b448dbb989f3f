#include "server/worker/call_context.h"

#include "server/worker/worker.h"

namespace penstock::server {
namespace {

// The record behind a wire handle. What was never minted ends the session; a destroyed one gives
// `stale`, a tombstone its own error.
template <typename Record>
Record* Resolve(CallContext& call, HandleTable<Record>& table, uint64_t wire, CUresult stale,
                const char* what) {
  const Handle handle{wire};
  if (Record* record = table.Find(handle)) {
    if (record->tombstone == CUDA_SUCCESS) return record;
    call.Refuse(record->tombstone);
    return nullptr;
  }
  const bool possible = handle.null() || table.WasMinted(handle) ||
                        (handle.kind() == table.kind() && call.worker().creations_skipped());
  if (!possible) call.Malformed(what);
  call.Refuse(stale);
  return nullptr;
}

}  // namespace

CUresult CallContext::Malformed(const char* what) {
  malformed_ = true;
  worker_->End(what, true);
  return CUDA_ERROR_INVALID_VALUE;
}

bool CallContext::Device(int32_t wire, CUdevice* device) {
  if (wire < 0 || static_cast<uint32_t>(wire) >= worker_->options().device_count) {
    return Refuse(CUDA_ERROR_INVALID_DEVICE);
  }
  const CUresult result = driver_->cuDeviceGet(device, wire);
  return result == CUDA_SUCCESS || Refuse(result);
}

bool CallContext::ContextState(uint64_t wire, std::shared_ptr<server::ContextState>* context) {
  CUresult error = CUDA_SUCCESS;
  bool minted = true;
  *context = worker_->FindContext(Handle{wire}, &error, &minted);
  if (*context != nullptr) return true;
  if (!minted && wire != 0) Malformed("A call names a context that was never made.");
  return Refuse(error);
}

bool CallContext::Context(uint64_t wire, CUcontext* context) {
  std::shared_ptr<server::ContextState> state;
  if (!ContextState(wire, &state)) return false;
  *context = state->context;
  return true;
}

bool CallContext::Stream(uint64_t wire, CUstream* stream) {
  const Handle handle{wire};
  if (handle.null() || handle == kLegacyStream) {
    const auto& context = worker_->current();
    if (context == nullptr) return Refuse(CUDA_ERROR_INVALID_CONTEXT);
    stream_state_ = context->legacy;
  } else {
    StreamRecord* record =
        Resolve(*this, worker_->objects().streams, wire, CUDA_ERROR_INVALID_HANDLE,
                "A call names a stream that was "
                "never made.");
    if (record == nullptr) return false;
    stream_state_ = record->state;
  }
  *stream = stream_state_->stream;
  return true;
}

bool CallContext::Event(uint64_t wire, CUevent* event) {
  EventRecord* record = Resolve(*this, worker_->objects().events, wire, CUDA_ERROR_INVALID_HANDLE,
                                "A call names an event that was never made.");
  if (record == nullptr) return false;
  *event = record->event;
  return true;
}

bool CallContext::Module(uint64_t wire, CUmodule* module) {
  ModuleRecord* record = Resolve(*this, worker_->objects().modules, wire, CUDA_ERROR_INVALID_HANDLE,
                                 "A call names a module that was never made.");
  if (record == nullptr) return false;
  *module = record->module;
  return true;
}

bool CallContext::Library(uint64_t wire, CUlibrary* library) {
  LibraryRecord* record =
      Resolve(*this, worker_->objects().libraries, wire, CUDA_ERROR_INVALID_HANDLE,
              "A call names a library that was never made.");
  if (record == nullptr) return false;
  *library = record->library;
  return true;
}

bool CallContext::Kernel(uint64_t wire, CUkernel* kernel) {
  FunctionRecord* record =
      Resolve(*this, worker_->objects().kernels, wire, CUDA_ERROR_INVALID_HANDLE,
              "A call names a kernel that was never made.");
  if (record == nullptr) return false;
  *kernel = record->kernel;
  return true;
}

FunctionRecord* CallContext::FindFunction(uint64_t wire, CUfunction* function) {
  if (Handle{wire}.kind() != HandleKind::kKernel) {
    FunctionRecord* record =
        Resolve(*this, worker_->objects().functions, wire, CUDA_ERROR_INVALID_HANDLE,
                "A call names a function that was never made.");
    if (record != nullptr) *function = record->function;
    return record;
  }
  FunctionRecord* record =
      Resolve(*this, worker_->objects().kernels, wire, CUDA_ERROR_INVALID_HANDLE,
              "A call names a kernel that was never made.");
  if (record == nullptr) return nullptr;
  const auto& context = worker_->current();
  if (context == nullptr) {
    Refuse(CUDA_ERROR_INVALID_CONTEXT);
    return nullptr;
  }
  for (const auto& [known, found] : record->by_context) {
    if (known == context->context) {
      *function = found;
      return record;
    }
  }
  const CUresult result = driver_->cuKernelGetFunction(function, record->kernel);
  if (result != CUDA_SUCCESS) {
    Refuse(result);
    return nullptr;
  }
  record->by_context.emplace_back(context->context, *function);
  return record;
}

bool CallContext::FunctionOrKernel(uint64_t wire, CUfunction* function) {
  return FindFunction(wire, function) != nullptr;
}

bool CallContext::MemoryPool(uint64_t wire, CUmemoryPool* pool) {
  const Handle handle{wire};
  if (handle.kind() != HandleKind::kMemoryPool || handle.generation() != 0 ||
      handle.id() >= worker_->options().device_count) {
    if (!handle.null()) Malformed("A call names a memory pool that was never made.");
    return Refuse(CUDA_ERROR_INVALID_VALUE);
  }
  CUdevice device;
  if (!Device(static_cast<int32_t>(handle.id()), &device)) return false;
  const CUresult result = driver_->cuDeviceGetDefaultMemPool(pool, device);
  return result == CUDA_SUCCESS || Refuse(result);
}

bool CallContext::DeviceRange(CUdeviceptr address, uint64_t bytes) {
  if (bytes == 0 || worker_->allocations().Find(address, bytes) != nullptr) return true;
  return Refuse(CUDA_ERROR_INVALID_VALUE);
}

bool CallContext::DeviceRange2D(CUdeviceptr address, uint64_t pitch, uint64_t width,
                                uint64_t height) {
  if (width == 0 || height == 0) return true;
  uint64_t before = 0, bytes = 0;
  if ((height > 1 && pitch < width) || __builtin_mul_overflow(height - 1, pitch, &before) ||
      __builtin_add_overflow(before, width, &bytes)) {
    return Refuse(CUDA_ERROR_INVALID_VALUE);
  }
  return DeviceRange(address, bytes);
}

bool CallContext::DeviceRange3D(CUdeviceptr address, uint64_t pitch, uint64_t rows, uint64_t width,
                                uint64_t height, uint64_t depth) {
  uint64_t slices = 0, all_rows = 0, bytes = 0;
  if (width == 0 || height == 0 || depth == 0) return true;
  if (depth == 1) return DeviceRange2D(address, pitch, width, height);
  if (pitch < width || rows < height || __builtin_mul_overflow(rows, depth - 1, &slices) ||
      __builtin_add_overflow(slices, height - 1, &all_rows) ||
      __builtin_mul_overflow(all_rows, pitch, &bytes) ||
      __builtin_add_overflow(bytes, width, &bytes)) {
    return Refuse(CUDA_ERROR_INVALID_VALUE);
  }
  return DeviceRange(address, bytes);
}

CUresult CallContext::AdoptStream(uint64_t wire, CUresult result, CUstream stream) {
  const auto context = worker_->current();
  if (result == CUDA_SUCCESS && context == nullptr) {
    // The driver still has a context that this session has none of any more.
    worker_->driver().cuStreamDestroy_v2(stream);
    result = CUDA_ERROR_INVALID_CONTEXT;
  }
  StreamRecord record;
  record.tombstone = result;
  if (result == CUDA_SUCCESS) {
    record.state = std::make_shared<StreamState>();
    record.state->handle = Handle{wire};
    record.state->stream = stream;
    record.state->context = context;
  }
  auto state = record.state;
  if (!worker_->objects().streams.Adopt(Handle{wire}, std::move(record))) {
    return Malformed("A stream is made under an impossible handle.");
  }
  if (state != nullptr) context->streams.push_back(std::move(state));
  return result;
}

CUresult CallContext::AdoptEvent(uint64_t wire, CUresult result, CUevent event) {
  EventRecord record;
  record.event = event;
  record.tombstone = result;
  if (worker_->current() != nullptr) record.context = worker_->current()->handle;
  if (!worker_->objects().events.Adopt(Handle{wire}, record)) {
    return Malformed("An event is made under an impossible handle.");
  }
  return result;
}

bool CallContext::TakeStream(uint64_t wire, CUstream* stream) {
  if (Handle{wire}.null() || Handle{wire} == kLegacyStream) {
    return Refuse(CUDA_ERROR_INVALID_HANDLE);
  }
  auto& streams = worker_->objects().streams;
  if (StreamRecord* record = streams.Find(Handle{wire});
      record != nullptr && record->tombstone != CUDA_SUCCESS) {
    Refuse(streams.Remove(Handle{wire})->tombstone);  // destroying it ends the tombstone too
    return false;
  }
  StreamRecord* record = Resolve(*this, streams, wire, CUDA_ERROR_INVALID_HANDLE,
                                 "A call destroys a stream that was never made.");
  if (record == nullptr) return false;
  const std::shared_ptr<StreamState> state = record->state;
  streams.Remove(Handle{wire});
  *stream = state->stream;
  if (auto context = state->context.lock()) std::erase(context->streams, state);
  worker_->progress().Destroy(state);
  return true;
}

bool CallContext::TakeEvent(uint64_t wire, CUevent* event) {
  auto& events = worker_->objects().events;
  if (EventRecord* record = events.Find(Handle{wire});
      record != nullptr && record->tombstone != CUDA_SUCCESS) {
    Refuse(events.Remove(Handle{wire})->tombstone);
    return false;
  }
  EventRecord* record = Resolve(*this, events, wire, CUDA_ERROR_INVALID_HANDLE,
                                "A call destroys an event that was never made.");
  if (record == nullptr) return false;
  *event = record->event;
  events.Remove(Handle{wire});
  worker_->waits().DropEvent(*event);
  return true;
}

}  // namespace penstock::server
