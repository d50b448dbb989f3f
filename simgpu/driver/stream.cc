#include "simgpu/driver/stream.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <chrono>

#include "simgpu/driver/context.h"
#include "simgpu/driver/entry.h"

namespace simgpu {
namespace {

thread_local bool t_on_worker = false;

// Going to sleep and being woken costs about 45 us on each side of a stream, more than a small
// kernel runs. Both sides therefore look again for a while first, giving the processor to whoever
// else wants it; twice the price of the sleep bounds what that can waste, and an idle stream
// sleeps.
constexpr auto kLookAgain = std::chrono::microseconds(100);

template <typename Done>
bool LookAgain(const Done& done) {
  const auto end = std::chrono::steady_clock::now() + kLookAgain;
  do {
    for (int i = 0; i < 8; ++i) {
      if (done()) return true;
      sched_yield();
    }
  } while (std::chrono::steady_clock::now() < end);
  return false;
}

}  // namespace

bool OnWorkerThread() {
  return t_on_worker;
}

Stream::Stream(const std::shared_ptr<Context>& context, Kind kind, unsigned flags, int priority,
               uint64_t id)
    : context_(context), kind_(kind), flags_(flags), priority_(priority), id_(id) {}

Stream::~Stream() {
  // The worker holds a reference while it runs, so it has ended, or is the thread we are on.
  if (worker_.joinable()) worker_.detach();
}

Point Stream::Last() {
  return {shared_from_this(), enqueued_.load(std::memory_order_acquire)};
}

void Stream::WaitFor(uint64_t sequence) {
  if (LookAgain([&] { return Reached(sequence); })) return;
  std::unique_lock lock(mutex_);
  ++waiters_;
  done_.wait(lock, [&] { return Reached(sequence); });
  --waiters_;
}

void Stream::WaitForSpace() {
  auto has_space = [&] { return enqueued_ - completed_ < kQueueEntries; };
  if (has_space()) return;
  std::unique_lock lock(mutex_);
  ++waiters_;
  done_.wait(lock, has_space);
  --waiters_;
}

bool Stream::TryPush(std::vector<Point>& waits, Operation& operation, bool always,
                     uint64_t* sequence) {
  std::unique_lock lock(mutex_);
  if (closed_) {  // another thread has destroyed the stream or its context: nobody would run it
    *sequence = enqueued_;
    return true;
  }
  if (enqueued_ - completed_ >= kQueueEntries) return false;
  entries_.push_back({std::move(waits), std::move(operation), always});
  *sequence = enqueued_.fetch_add(1, std::memory_order_release) + 1;
  if (!started_) {
    started_ = true;
    worker_ = std::thread([self = shared_from_this()] { self->Work(); });
  }
  lock.unlock();
  work_.notify_one();
  return true;
}

void Stream::Work() {
  t_on_worker = true;
  // The program's signals are for the program's threads.
  sigset_t signals;
  sigfillset(&signals);
  for (int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) sigdelset(&signals, fault);
  pthread_sigmask(SIG_SETMASK, &signals, nullptr);
  pthread_setname_np(pthread_self(), "simgpu-stream");
  std::unique_lock lock(mutex_);
  for (;;) {
    work_.wait(lock, [&] { return !entries_.empty() || closed_; });
    if (entries_.empty()) return;
    Entry entry = std::move(entries_.front());
    entries_.pop_front();
    lock.unlock();
    for (const Point& point : entry.waits) point.stream->WaitFor(point.sequence);
    {
      const std::shared_ptr<Context> context = context_.lock();
      const bool alive =
          context != nullptr && context->error() == CUDA_SUCCESS && !context->stopping();
      if (alive || entry.always) entry.operation();
    }
    entry = {};  // drops what the operation held before anybody is told that it is done
    lock.lock();
    completed_.fetch_add(1, std::memory_order_release);
    if (waiters_ > 0) done_.notify_all();
    if (entries_.empty() && !closed_) {
      lock.unlock();
      LookAgain([&] { return enqueued_ != completed_; });
      lock.lock();
    }
  }
}

void Stream::Close() {
  {
    std::lock_guard lock(mutex_);
    closed_ = true;
  }
  work_.notify_all();
}

void Stream::Join() {
  if (worker_.joinable() && worker_.get_id() != std::this_thread::get_id()) worker_.join();
}

CUresult ResolveStream(CUstream handle, std::shared_ptr<Stream>* stream,
                       std::shared_ptr<Context>* context) {
  SIMGPU_RETURN_IF_ERROR(Enter());
  if (handle == nullptr) {
    handle = PerThreadDefaultStream::active() ? CU_STREAM_PER_THREAD : CU_STREAM_LEGACY;
  }
  if (handle == CU_STREAM_LEGACY || handle == CU_STREAM_PER_THREAD) {
    SIMGPU_RETURN_IF_ERROR(EnterContext(context));
    *stream =
        handle == CU_STREAM_LEGACY ? (*context)->legacy_stream() : (*context)->per_thread_stream();
    return CUDA_SUCCESS;
  }
  if (OnWorkerThread()) return CUDA_ERROR_NOT_PERMITTED;
  *stream = state()->streams.Find(handle);
  if (*stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  *context = (*stream)->context();
  if (*context == nullptr || (*context)->stopping()) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
  return (*context)->error();
}

}  // namespace simgpu

using namespace simgpu;

namespace {

CUresult Create(CUstream* handle, unsigned flags, int priority) {
  std::shared_ptr<Context> context;
  SIMGPU_RETURN_IF_ERROR(EnterContext(&context));
  if (handle == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if ((flags & ~static_cast<unsigned>(CU_STREAM_NON_BLOCKING)) != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  // Priorities outside the range are clamped, as cuStreamCreateWithPriority says.
  if (priority > kLeastPriority) priority = kLeastPriority;
  if (priority < kGreatestPriority) priority = kGreatestPriority;
  *handle = state()->streams.Insert(context->AddStream(flags, priority));
  return CUDA_SUCCESS;
}

}  // namespace

SIMGPU_EXPORT cuStreamCreate(CUstream* handle, unsigned int flags) {
  return Create(handle, flags, 0);
}

SIMGPU_EXPORT cuStreamCreateWithPriority(CUstream* handle, unsigned int flags, int priority) {
  return Create(handle, flags, priority);
}

SIMGPU_EXPORT cuStreamDestroy_v2(CUstream handle) {
  SIMGPU_RETURN_IF_ERROR(Enter());
  if (handle == nullptr || handle == CU_STREAM_LEGACY || handle == CU_STREAM_PER_THREAD) {
    return CUDA_ERROR_INVALID_HANDLE;
  }
  const std::shared_ptr<Stream> stream = state()->streams.Remove(handle);
  if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  // What is still queued is executed; the worker then ends by itself.
  if (const std::shared_ptr<Context> context = stream->context()) context->RemoveStream(stream);
  stream->Close();
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT cuStreamSynchronize(CUstream handle) {
  std::shared_ptr<Stream> stream;
  std::shared_ptr<Context> context;
  SIMGPU_RETURN_IF_ERROR(ResolveStream(handle, &stream, &context));
  return context->WaitFor(context->PendingOf(stream));
}

SIMGPU_EXPORT cuStreamQuery(CUstream handle) {
  std::shared_ptr<Stream> stream;
  std::shared_ptr<Context> context;
  SIMGPU_RETURN_IF_ERROR(ResolveStream(handle, &stream, &context));
  if (!context->PendingOf(stream).empty()) return CUDA_ERROR_NOT_READY;
  return context->error();
}

SIMGPU_EXPORT cuStreamGetPriority(CUstream handle, int* priority) {
  std::shared_ptr<Stream> stream;
  std::shared_ptr<Context> context;
  SIMGPU_RETURN_IF_ERROR(ResolveStream(handle, &stream, &context));
  if (priority == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *priority = stream->priority();
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT cuStreamGetFlags(CUstream handle, unsigned int* flags) {
  std::shared_ptr<Stream> stream;
  std::shared_ptr<Context> context;
  SIMGPU_RETURN_IF_ERROR(ResolveStream(handle, &stream, &context));
  if (flags == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *flags = stream->flags();
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT cuStreamGetId(CUstream handle, unsigned long long* id) {
  std::shared_ptr<Stream> stream;
  std::shared_ptr<Context> context;
  SIMGPU_RETURN_IF_ERROR(ResolveStream(handle, &stream, &context));
  if (id == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *id = stream->id();
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT cuStreamGetCtx(CUstream handle, CUcontext* out) {
  std::shared_ptr<Stream> stream;
  std::shared_ptr<Context> context;
  SIMGPU_RETURN_IF_ERROR(ResolveStream(handle, &stream, &context));
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *out = context->handle();
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT cuStreamGetCtx_v2(CUstream handle, CUcontext* out, CUgreenCtx* green) {
  SIMGPU_RETURN_IF_ERROR(cuStreamGetCtx(handle, out));
  if (green != nullptr) *green = nullptr;
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT cuStreamGetDevice(CUstream handle, CUdevice* device) {
  std::shared_ptr<Stream> stream;
  std::shared_ptr<Context> context;
  SIMGPU_RETURN_IF_ERROR(ResolveStream(handle, &stream, &context));
  if (device == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *device = context->device()->ordinal;
  return CUDA_SUCCESS;
}

// Stream attributes are hints to the scheduler and caches of a real device: kept out of here, so
// only their defaults are answered and setting one is accepted without effect.
SIMGPU_EXPORT cuStreamGetAttribute(CUstream handle, CUstreamAttrID attribute,
                                   CUstreamAttrValue* value) {
  std::shared_ptr<Stream> stream;
  std::shared_ptr<Context> context;
  SIMGPU_RETURN_IF_ERROR(ResolveStream(handle, &stream, &context));
  if (value == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *value = {};
  if (attribute == CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY) {
    value->syncPolicy = CU_SYNC_POLICY_AUTO;
  } else if (attribute == CU_LAUNCH_ATTRIBUTE_PRIORITY) {
    value->priority = stream->priority();
  }
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT cuStreamSetAttribute(CUstream handle, CUstreamAttrID,
                                   const CUstreamAttrValue* value) {
  std::shared_ptr<Stream> stream;
  std::shared_ptr<Context> context;
  SIMGPU_RETURN_IF_ERROR(ResolveStream(handle, &stream, &context));
  return value == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

SIMGPU_EXPORT cuStreamCopyAttributes(CUstream target, CUstream source) {
  std::shared_ptr<Stream> stream;
  std::shared_ptr<Context> context;
  SIMGPU_RETURN_IF_ERROR(ResolveStream(target, &stream, &context));
  return ResolveStream(source, &stream, &context);
}

SIMGPU_EXPORT cuStreamAttachMemAsync(CUstream handle, CUdeviceptr address, size_t,
                                     unsigned int flags) {
  std::shared_ptr<Stream> stream;
  std::shared_ptr<Context> context;
  SIMGPU_RETURN_IF_ERROR(ResolveStream(handle, &stream, &context));
  const auto allocation = state()->memory.Find(address);
  if (allocation == nullptr || !allocation->managed()) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const bool known =
      flags == CU_MEM_ATTACH_GLOBAL || flags == CU_MEM_ATTACH_HOST || flags == CU_MEM_ATTACH_SINGLE;
  return known ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

SIMGPU_EXPORT cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus* status) {
  std::shared_ptr<Stream> stream;
  std::shared_ptr<Context> context;
  SIMGPU_RETURN_IF_ERROR(ResolveStream(handle, &stream, &context));
  if (status == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *status = CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT cuStreamGetCaptureInfo_v3(CUstream handle, CUstreamCaptureStatus* status, cuuint64_t*,
                                        CUgraph*, const CUgraphNode**, const CUgraphEdgeData**,
                                        size_t*) {
  return cuStreamIsCapturing(handle, status);
}

SIMGPU_EXPORT cuStreamGetCaptureInfo_v2(CUstream handle, CUstreamCaptureStatus* status, cuuint64_t*,
                                        CUgraph*, const CUgraphNode**, size_t*) {
  return cuStreamIsCapturing(handle, status);
}

SIMGPU_EXPORT cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  SIMGPU_RETURN_IF_ERROR(Enter());
  if (mode == nullptr) return CUDA_ERROR_INVALID_VALUE;
  thread_local CUstreamCaptureMode t_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
  std::swap(*mode, t_mode);
  return CUDA_SUCCESS;
}
