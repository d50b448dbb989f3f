#include "interposer/core/call.h"

#include "common/log.h"
#include "interposer/core/client.h"
#include "interposer/core/session.h"

namespace penstock::interposer {
namespace {

Handle HandleOf(const void* object) {
  return Handle{reinterpret_cast<uint64_t>(object)};
}

// Errors after which CUDA says of the context that it must be destroyed.
bool IsSticky(CUresult error) {
  switch (error) {
    case CUDA_ERROR_ECC_UNCORRECTABLE:
    case CUDA_ERROR_NVLINK_UNCORRECTABLE:
    case CUDA_ERROR_CONTAINED:
    case CUDA_ERROR_ILLEGAL_ADDRESS:
    case CUDA_ERROR_LAUNCH_TIMEOUT:
    case CUDA_ERROR_ASSERT:
    case CUDA_ERROR_HARDWARE_STACK_ERROR:
    case CUDA_ERROR_ILLEGAL_INSTRUCTION:
    case CUDA_ERROR_MISALIGNED_ADDRESS:
    case CUDA_ERROR_INVALID_ADDRESS_SPACE:
    case CUDA_ERROR_INVALID_PC:
    case CUDA_ERROR_LAUNCH_FAILED:
    case CUDA_ERROR_TENSOR_MEMORY_LEAK:
      return true;
    default:
      return false;
  }
}

bool RecordsEvent(Function function) {
  return function == Function::kCuEventRecord || function == Function::kCuEventRecordWithFlags;
}

bool SynchronizesContext(Function function) {
  return function == Function::kCuCtxSynchronize || function == Function::kCuCtxSynchronize_v2;
}

}  // namespace

Call::Call(Function function, Need need) : function_(function) {
  CountersOf(function).calls.fetch_add(1, std::memory_order_relaxed);
  client_ = Client::Get();
  if (client_ == nullptr) {
    if (need != kNothing) result_ = CUDA_ERROR_NOT_INITIALIZED;
    return;
  }
  objects_ = &client_->objects();
  session_ = &client_->session();
  thread_ = &ThisThread();
  if (need == kNothing) return;
  const Handle current = thread_->current();
  if (!current.null()) {
    ContextRecord* const context = client_->FindContext(current);
    if (context != nullptr && context->active.load(std::memory_order_acquire)) {
      context_ = target_ = context;
      session_ = context->session;
    }
  }
  // One server of several that is gone takes with it what lives there, and nothing else.
  if (need == kContext || client_->sessions().size() == 1) {
    result_ = session_->state();
    if (result_ != CUDA_SUCCESS) return;
  }
  if (need != kContext) return;
  if (thread_->in_host_function) {
    result_ = CUDA_ERROR_NOT_PERMITTED;
    return;
  }
  if (context_ == nullptr) {
    result_ = current.null() ? CUDA_ERROR_INVALID_CONTEXT : CUDA_ERROR_CONTEXT_IS_DESTROYED;
    return;
  }
  result_ = context_->sticky.load(std::memory_order_relaxed);
}

Call::Call(const Call& origin, Session& session, ContextRecord* context)
    : function_(origin.function_),
      client_(origin.client_),
      objects_(origin.objects_),
      session_(&session),
      context_(context),
      target_(context),
      thread_(origin.thread_) {
  result_ = session.state();
  if (result_ == CUDA_SUCCESS && context != nullptr) {
    result_ = context->sticky.load(std::memory_order_relaxed);
  }
}

bool Call::GoTo(Session& session, ContextRecord* context) {
  session_ = &session;
  target_ = context;
  bound_ = true;
  const CUresult state = session.state();
  return state == CUDA_SUCCESS || Refuse(state);
}

bool Call::Bind(ContextRecord* context, CUresult error) {
  if (context == nullptr) return true;
  if (context->session == session_) {
    bound_ = true;
    if (target_ == nullptr) target_ = context;
    return true;
  }
  return bound_ ? Refuse(error) : GoTo(*context->session, context);
}

uint64_t Call::WireContext() const {
  return target_ == nullptr ? 0 : target_->wire.bits;
}

// --- Checks -------------------------------------------------------------------------------------

bool Call::Out(const void* pointer) {
  return pointer != nullptr || Refuse(CUDA_ERROR_INVALID_VALUE);
}

bool Call::Permitted() {
  return !thread_->in_host_function || Refuse(CUDA_ERROR_NOT_PERMITTED);
}

bool Call::Device(CUdevice device, int32_t* wire) {
  const interposer::Device* const found = client_->FindDevice(device);
  if (found == nullptr) return Refuse(CUDA_ERROR_INVALID_DEVICE);
  *wire = static_cast<int32_t>(found->wire);
  if (found->session == session_) {
    bound_ = true;
    return true;
  }
  return bound_ ? Refuse(CUDA_ERROR_INVALID_DEVICE) : GoTo(*found->session, nullptr);
}

bool Call::Context(CUcontext context, uint64_t* wire) {
  const Handle handle = HandleOf(context);
  ContextRecord* const record = client_->FindContext(handle);
  if (record == nullptr) return Refuse(CUDA_ERROR_INVALID_CONTEXT);
  if (!record->active) return Refuse(CUDA_ERROR_CONTEXT_IS_DESTROYED);
  *wire = record->wire.bits;
  return Bind(record, CUDA_ERROR_INVALID_CONTEXT);
}

bool Call::ContextOrCurrent(CUcontext context, uint64_t* wire) {
  if (context != nullptr) return Context(context, wire);
  if (context_ == nullptr) return Refuse(CUDA_ERROR_INVALID_CONTEXT);
  *wire = context_->wire.bits;
  return Bind(context_, CUDA_ERROR_INVALID_CONTEXT);
}

bool Call::Stream(CUstream stream, bool per_thread, uint64_t* wire) {
  if (stream != nullptr && stream != CU_STREAM_LEGACY && stream != CU_STREAM_PER_THREAD) {
    stream_ = objects_->streams.Find(HandleOf(stream));
    if (stream_ == nullptr) return Refuse(CUDA_ERROR_INVALID_HANDLE);
  } else {
    // Of the context that the call is about: the current one, unless something else was named.
    ContextRecord* const home = target_ != nullptr ? target_ : context_;
    if (home == nullptr) return Refuse(CUDA_ERROR_INVALID_CONTEXT);
    if (stream == CU_STREAM_LEGACY || (stream == nullptr && !per_thread)) {
      stream_ = &home->legacy;
    } else {
      stream_ = client_->PerThreadStream(*thread_, *home);
      if (stream_ == nullptr) {
        const CUresult state = home->session->state();
        return Refuse(state != CUDA_SUCCESS ? state : CUDA_ERROR_OUT_OF_MEMORY);
      }
    }
  }
  *wire = stream_->handle.bits;
  return Bind(stream_->context, CUDA_ERROR_INVALID_HANDLE) && EventFits();
}

// Streams wait for events of any context, but record only those of their own.
bool Call::EventFits() {
  return event_ == nullptr || !RecordsEvent(function_) || event_->context == stream_->context ||
         Refuse(CUDA_ERROR_INVALID_HANDLE);
}

bool Call::Event(CUevent event, uint64_t* wire) {
  *wire = HandleOf(event).bits;
  event_ = objects_->events.Find(HandleOf(event));
  return event_ != nullptr ? Bind(event_->context, CUDA_ERROR_INVALID_HANDLE)
                           : Refuse(CUDA_ERROR_INVALID_HANDLE);
}

bool Call::Module(CUmodule module, uint64_t* wire) {
  *wire = HandleOf(module).bits;
  const ModuleRecord* const record = objects_->modules.Find(HandleOf(module));
  return record != nullptr ? Bind(record->context, CUDA_ERROR_INVALID_HANDLE)
                           : Refuse(CUDA_ERROR_INVALID_HANDLE);
}

FunctionRecord* Call::FindFunction(CUfunction function) {
  const Handle handle = HandleOf(function);
  if (FunctionRecord* const record = objects_->functions.Find(handle)) {
    return Bind(record->context, CUDA_ERROR_INVALID_HANDLE) ? record : nullptr;
  }
  FunctionRecord* const kernel = objects_->kernels.Find(handle);
  if (kernel != nullptr) return KernelHere(*kernel);
  Refuse(CUDA_ERROR_INVALID_HANDLE);
  return nullptr;
}

FunctionRecord* Call::FindKernel(CUkernel kernel) {
  FunctionRecord* const record = objects_->kernels.Find(HandleOf(kernel));
  if (record != nullptr) return KernelHere(*record);
  Refuse(CUDA_ERROR_INVALID_HANDLE);
  return nullptr;
}

ModuleRecord* Call::FindLibrary(CUlibrary library) {
  ModuleRecord* const record = objects_->libraries.Find(HandleOf(library));
  if (record != nullptr) return LibraryHere(*record);
  Refuse(CUDA_ERROR_INVALID_HANDLE);
  return nullptr;
}

bool Call::FunctionOrKernel(CUfunction function, uint64_t* wire) {
  const FunctionRecord* const record = FindFunction(function);
  if (record == nullptr) return false;
  *wire = record->handle.bits;
  return true;
}

bool Call::Library(CUlibrary library, uint64_t* wire) {
  const ModuleRecord* const record = FindLibrary(library);
  if (record == nullptr) return false;
  *wire = record->handle.bits;
  return true;
}

bool Call::Kernel(CUkernel kernel, uint64_t* wire) {
  const FunctionRecord* const record = FindKernel(kernel);
  if (record == nullptr) return false;
  *wire = record->handle.bits;
  return true;
}

bool Call::MemoryPool(CUmemoryPool pool, uint64_t* wire) {
  // Only the default pools exist.
  const Handle handle = HandleOf(pool);
  const std::vector<interposer::Device>& devices = client_->devices();
  if (handle.id() >= devices.size() || handle != DefaultMemoryPool(handle.id())) {
    return Refuse(CUDA_ERROR_INVALID_VALUE);
  }
  int32_t device = 0;
  if (!Device(static_cast<CUdevice>(handle.id()), &device)) return false;
  *wire = DefaultMemoryPool(static_cast<uint32_t>(device)).bits;
  return true;
}

bool Call::DeviceRange(CUdeviceptr address, uint64_t bytes) {
  if (bytes == 0) nothing_ = true;
  ContextRecord* owner = nullptr;
  return bytes == 0 || (objects_->plan.DeviceRange(address, bytes, session_->index(), &owner)
                            ? Bind(owner, CUDA_ERROR_INVALID_VALUE)
                            : Refuse(CUDA_ERROR_INVALID_VALUE));
}

bool Call::DeviceRange2D(CUdeviceptr address, uint64_t pitch, uint64_t width, uint64_t height) {
  if (width == 0 || height == 0) {
    nothing_ = true;
    return true;
  }
  uint64_t rows = 0, bytes = 0;
  if ((height > 1 && pitch < width) || __builtin_mul_overflow(pitch, height - 1, &rows) ||
      __builtin_add_overflow(rows, width, &bytes)) {
    return Refuse(CUDA_ERROR_INVALID_VALUE);
  }
  return DeviceRange(address, bytes);
}

// --- Sending ------------------------------------------------------------------------------------

// The server's limits are checked here first: what does not fit is the program's mistake.
bool Call::Fits(const OutgoingCall& call) {
  if (call.FrameBytes() <= session_->connection().caps().max_frame) return true;
  LOG_WARNING("call", "The arguments of %s (%llu bytes) exceed the largest frame (%u).",
              FunctionName(function_), static_cast<unsigned long long>(call.FrameBytes()),
              session_->connection().caps().max_frame);
  return false;
}

// A fault in a kernel spoils its context: later calls fail with it without asking the server.
CUresult Call::Noted(CUresult result) {
  if (__builtin_expect(IsSticky(result), false)) {
    ContextRecord* const context = stream_ != nullptr ? stream_->context : target_;
    if (context != nullptr) context->sticky = result;
  }
  return result;
}

// --- Synchronous uploads that are only posted ---------------------------------------------------
//
// A synchronous upload has happened when the call returns; posted, it is only on its way. On the
// legacy stream it stands before all that follows on streams which wait for that one. What follows
// on the others (non-blocking streams) must be held back until it is done, and holding back must
// not deadlock: if the upload itself stands behind a kernel, that kernel may be waiting for just
// such work of another thread. So, once a context has non-blocking streams, only uploads that stand
// behind nothing but other uploads are posted; the rest are calls, as they are with a local driver.
//
// And a synchronous upload is a point of synchronisation: a program may rely on it to read pinned
// memory that an asynchronous download before it fills. With such a download under way it is a
// call.

bool Call::DownloadsDone(ContextRecord& context) const {
  const uint64_t posted = context.downloads_posted.load(std::memory_order_acquire);
  if (context.downloads_done.load(std::memory_order_relaxed) == posted) return true;
  if (context.legacy.downloading() || context.orphans != context.orphans_done) return false;
  bool done = true;
  objects_->streams.ForEach([&](const StreamRecord& stream) {
    if (stream.context == &context && (stream.flags & CU_STREAM_NON_BLOCKING) == 0 &&
        stream.downloading()) {
      done = false;
    }
  });
  if (done) context.downloads_done.store(posted, std::memory_order_relaxed);
  return done;
}

void Call::DownloadPosted() {
  std::atomic<uint64_t>& last = stream_->downloads;
  uint64_t seen = last.load(std::memory_order_relaxed);
  while (seen < issued_ && !last.compare_exchange_weak(seen, issued_)) {
  }
  stream_->context->downloads_posted.fetch_add(1, std::memory_order_release);
}

bool Call::MayPostUpload() const {
  ContextRecord& context = *context_;
  if (stream_ != &context.legacy || !DownloadsDone(context)) return false;
  if (context.non_blocking_streams.load(std::memory_order_relaxed) == 0) return true;
  if (context.legacy.finished.load(std::memory_order_relaxed) <
      context.others_posted.load(std::memory_order_relaxed)) {
    return false;
  }
  bool idle = true;
  objects_->streams.ForEach([&](const StreamRecord& stream) {
    if (stream.context == &context && (stream.flags & CU_STREAM_NON_BLOCKING) == 0 &&
        stream.finished.load() < stream.issued.load()) {
      idle = false;
    }
  });
  return idle;
}

void Call::UploadPosted() {
  std::atomic<uint64_t>& last = context_->uploads_posted;
  uint64_t seen = last.load(std::memory_order_relaxed);
  while (seen < issued_ && !last.compare_exchange_weak(seen, issued_)) {
  }
}

CUresult Call::OrderAfterUploads() {
  if (stream_ == nullptr || (stream_->flags & CU_STREAM_NON_BLOCKING) == 0) return CUDA_SUCCESS;
  // These touch no memory, so what was uploaded does not matter to them.
  if (function_ == Function::kCuEventRecord || function_ == Function::kCuEventRecordWithFlags ||
      function_ == Function::kCuStreamWaitEvent || function_ == Function::kCuStreamSynchronize ||
      function_ == Function::kCuStreamQuery) {
    return CUDA_SUCCESS;
  }
  ContextRecord& context = *stream_->context;
  const uint64_t value = context.uploads_posted.load(std::memory_order_relaxed);
  if (context.legacy.finished.load(std::memory_order_relaxed) >= value) return CUDA_SUCCESS;
  OutgoingCall origin;
  origin.thread = thread_->index;
  return session_->WaitForProgress(origin, &context.legacy, value);
}

CUresult Call::PostBytes(uint32_t function, const void* command, size_t bytes,
                         std::span<const std::span<const std::byte>> sections, uint32_t cost) {
  if (nothing_) return CUDA_SUCCESS;
  if (session_->synchronous()) {
    // The reply says that the driver has taken it, not that it is done: the window holds as ever.
    ReplyWaiter waiter;
    return Exchange(function, command, bytes, sections, cost, &waiter);
  }
  OutgoingCall call;
  call.function = function;
  call.context = WireContext();
  call.thread = thread_->index;
  call.cost = stream_ == nullptr ? 0 : cost;
  call.command = command;
  call.command_bytes = bytes;
  call.sections = sections;
  if (!Fits(call)) return CUDA_ERROR_INVALID_VALUE;
  const CUresult ordered = OrderAfterUploads();
  if (ordered != CUDA_SUCCESS) return Noted(ordered);
  CountersOf(function_).posted.fetch_add(1, std::memory_order_relaxed);
  const CUresult result = session_->Post(call, stream_);
  issued_ = call.issued;
  // (A synchronous upload overtakes nobody: it is noted by itself.)
  if (function_ != Function::kCuMemcpyHtoD && call.cost != 0 &&
      stream_ == &stream_->context->legacy) {
    stream_->context->others_posted.store(issued_, std::memory_order_relaxed);
  }
  return Noted(result);
}

CUresult Call::Exchange(uint32_t function, const void* command, size_t bytes,
                        std::span<const std::span<const std::byte>> sections, uint32_t cost,
                        ReplyWaiter* waiter) {
  OutgoingCall call;
  call.function = function;
  call.context = WireContext();
  call.thread = thread_->index;
  call.command = command;
  call.command_bytes = bytes;
  call.sections = sections;
  if (!Fits(call)) return CUDA_ERROR_INVALID_VALUE;
  const CUresult ordered = OrderAfterUploads();
  if (ordered != CUDA_SUCCESS) return Noted(ordered);
  call.cost = stream_ == nullptr ? 0 : cost;
  const CUresult room = session_->TakeWindow(call, stream_);
  if (room != CUDA_SUCCESS) return Noted(room);
  issued_ = call.issued;
  CountersOf(function_).round_trips.fetch_add(1, std::memory_order_relaxed);
  // Waiting for the legacy stream or the whole context brings the output of kernels with it.
  if (context_ != nullptr && (stream_ == &context_->legacy || SynchronizesContext(function_))) {
    context_->launched.store(false, std::memory_order_relaxed);
  }
  return Noted(session_->Invoke(call, waiter));
}

CUresult Call::InvokeBytes(uint32_t function, const void* command, size_t bytes,
                           std::span<const std::span<const std::byte>> sections, void* reply,
                           size_t reply_bytes, std::vector<std::byte>* tail, PieceServer* pieces) {
  ReplyWaiter waiter;
  waiter.pieces = pieces;
  waiter.fixed = {static_cast<std::byte*>(reply), reply_bytes};
  waiter.tail = tail;
  return Exchange(function, command, bytes, sections, 0, &waiter);
}

CUresult Call::InvokeInto(uint32_t function, const void* command, size_t bytes,
                          std::span<std::byte> target) {
  ReplyWaiter waiter;
  waiter.direct = target;
  return Exchange(function, command, bytes, {}, 0, &waiter);
}

}  // namespace penstock::interposer
