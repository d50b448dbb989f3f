#include "simgpu/driver/context.h"

#include <algorithm>
#include <chrono>
#include <cstdio>

#include "interop/export_tables.h"
#include "simgpu/driver/entry.h"
#include "simgpu/driver/log.h"
#include "simgpu/driver/module.h"

namespace simgpu {
namespace {

std::atomic<uint64_t> g_next_context_id{1};
std::atomic<uint64_t> g_next_stream_id{1};

// How long a context that is destroyed waits for its work before it tells kernels to stop.
constexpr auto kDestroyPatience = std::chrono::seconds(5);

// The stack of current contexts. A plain array: it is used by the runtime's exit handler, after
// thread-local objects have been destroyed. CUDA names no limit; real programs nest a few.
constexpr int kStackDepth = 128;
thread_local CUcontext t_stack[kStackDepth];
thread_local int t_depth = 0;

thread_local int t_per_thread_default = 0;

uint64_t ThreadKey() {
  static std::atomic<uint64_t> next{1};
  thread_local const uint64_t key = next++;
  return key;
}

}  // namespace

// Ends a thread's per-thread streams when the thread ends.
struct ThreadStreams {
  std::vector<std::weak_ptr<Context>> contexts;
  ~ThreadStreams() {
    for (const auto& weak : contexts) {
      if (const auto context = weak.lock()) context->ReleaseThread(ThreadKey());
    }
  }
};

CUcontext CurrentHandle() {
  return t_depth == 0 ? nullptr : t_stack[t_depth - 1];
}

void SetCurrentHandle(CUcontext handle) {
  // cuCtxSetCurrent: null pops the top, anything else replaces it.
  if (handle == nullptr) {
    if (t_depth > 0) --t_depth;
    return;
  }
  if (t_depth == 0) ++t_depth;
  t_stack[t_depth - 1] = handle;
}

bool PushHandle(CUcontext handle) {
  if (t_depth == kStackDepth) return false;
  t_stack[t_depth++] = handle;
  return true;
}

bool PopHandle(CUcontext* handle) {
  if (t_depth == 0) return false;
  *handle = t_stack[--t_depth];
  return true;
}

PerThreadDefaultStream::PerThreadDefaultStream() {
  ++t_per_thread_default;
}
PerThreadDefaultStream::~PerThreadDefaultStream() {
  --t_per_thread_default;
}
bool PerThreadDefaultStream::active() {
  return t_per_thread_default > 0;
}

CUresult FindContext(CUcontext handle, std::shared_ptr<Context>* context) {
  State* const s = state();
  *context = s->contexts.Find(handle);
  if (*context != nullptr) return CUDA_SUCCESS;
  for (const auto& device : s->devices) {
    if (device->primary_handle == handle) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
  }
  return CUDA_ERROR_INVALID_CONTEXT;
}

std::shared_ptr<Context> ActivatePrimary(Device* device) {
  if (device->primary_context == nullptr) {
    device->primary_context = std::make_shared<Context>(device, true, device->primary_flags);
    device->primary_context->set_handle(device->primary_handle);
    state()->contexts.Set(device->primary_handle, device->primary_context);
  }
  return device->primary_context;
}

CUresult EnterFailedContext(std::shared_ptr<Context>* context) {
  SIMGPU_RETURN_IF_ERROR(Enter());
  if (OnWorkerThread()) return CUDA_ERROR_NOT_PERMITTED;
  const CUcontext handle = CurrentHandle();
  if (handle == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  const CUresult result = FindContext(handle, context);
  return result == CUDA_ERROR_INVALID_CONTEXT ? CUDA_ERROR_CONTEXT_IS_DESTROYED : result;
}

CUresult EnterContext(std::shared_ptr<Context>* context) {
  SIMGPU_RETURN_IF_ERROR(EnterFailedContext(context));
  return (*context)->error();
}

Context::Context(Device* device, bool primary, unsigned flags)
    : device_(device), primary_(primary), id_(g_next_context_id++), flags_(flags) {
  limits_ = {{CU_LIMIT_STACK_SIZE, 1024},
             {CU_LIMIT_PRINTF_FIFO_SIZE, 1 << 20},
             {CU_LIMIT_MALLOC_HEAP_SIZE, DeviceHeap::kDefaultBytes},
             {CU_LIMIT_DEV_RUNTIME_SYNC_DEPTH, 2},
             {CU_LIMIT_DEV_RUNTIME_PENDING_LAUNCH_COUNT, 2048},
             {CU_LIMIT_MAX_L2_FETCH_GRANULARITY, 128},
             {CU_LIMIT_PERSISTING_L2_CACHE_SIZE, 0}};
}

Context::~Context() = default;

void Context::Poison(CUresult error) {
  int expected = CUDA_SUCCESS;
  error_.compare_exchange_strong(expected, error, std::memory_order_acq_rel);
}

std::shared_ptr<Stream> Context::legacy_stream() {
  std::lock_guard lock(streams_mutex_);
  if (legacy_ == nullptr) {
    legacy_ = std::make_shared<Stream>(shared_from_this(), Stream::Kind::kLegacy, 0, 0,
                                       g_next_stream_id++);
    streams_.insert(legacy_);
  }
  return legacy_;
}

std::shared_ptr<Stream> Context::per_thread_stream() {
  thread_local ThreadStreams t_streams;
  std::lock_guard lock(streams_mutex_);
  std::shared_ptr<Stream>& stream = per_thread_[ThreadKey()];
  if (stream == nullptr) {
    stream = std::make_shared<Stream>(shared_from_this(), Stream::Kind::kPerThread, 0, 0,
                                      g_next_stream_id++);
    streams_.insert(stream);
    t_streams.contexts.push_back(weak_from_this());
  }
  return stream;
}

void Context::ReleaseThread(uint64_t thread_key) {
  std::shared_ptr<Stream> stream;
  {
    std::lock_guard lock(streams_mutex_);
    const auto found = per_thread_.find(thread_key);
    if (found == per_thread_.end()) return;
    stream = found->second;
    per_thread_.erase(found);
  }
  RemoveStream(stream);
  stream->Close();
}

std::shared_ptr<Stream> Context::AddStream(unsigned flags, int priority) {
  auto stream = std::make_shared<Stream>(shared_from_this(), Stream::Kind::kCreated, flags,
                                         priority, g_next_stream_id++);
  std::lock_guard lock(streams_mutex_);
  streams_.insert(stream);
  return stream;
}

void Context::RemoveStream(const std::shared_ptr<Stream>& stream) {
  std::lock_guard lock(streams_mutex_);
  streams_.erase(stream);
  std::erase_if(closed_, [](const auto& closed) { return closed->Idle(); });
  if (!stream->Idle()) closed_.insert(stream);
}

Point Context::Enqueue(const std::shared_ptr<Stream>& stream, Stream::Operation operation,
                       std::vector<Point> waits, bool always) {
  uint64_t sequence = 0;
  if (stream->non_blocking()) {
    while (!stream->TryPush(waits, operation, always, &sequence)) stream->WaitForSpace();
    return {stream, sequence};
  }
  for (;;) {
    stream->WaitForSpace();
    std::unique_lock order(order_mutex_);
    std::vector<Point> all = waits;
    if (stream->kind() == Stream::Kind::kLegacy) {
      legacy_used_ = true;
      std::lock_guard lock(streams_mutex_);
      for (const auto* set : {&streams_, &closed_}) {
        for (const auto& other : *set) {
          if (other != stream && !other->non_blocking() && !other->Idle()) {
            all.push_back(other->Last());
          }
        }
      }
    } else if (legacy_used_) {
      std::lock_guard lock(streams_mutex_);
      if (legacy_ != nullptr && !legacy_->Idle()) all.push_back(legacy_->Last());
    }
    if (stream->TryPush(all, operation, always, &sequence)) return {stream, sequence};
  }
}

std::vector<Point> Context::PendingOf(const std::shared_ptr<Stream>& stream) {
  std::vector<Point> points;
  if (!stream->Idle()) points.push_back(stream->Last());
  if (stream->kind() == Stream::Kind::kLegacy) {
    std::lock_guard lock(streams_mutex_);
    for (const auto* set : {&streams_, &closed_}) {
      for (const auto& other : *set) {
        if (other != stream && !other->non_blocking() && !other->Idle()) {
          points.push_back(other->Last());
        }
      }
    }
  }
  return points;
}

std::vector<Point> Context::PendingOfAll() {
  std::vector<Point> points;
  std::lock_guard lock(streams_mutex_);
  for (const auto* set : {&streams_, &closed_}) {
    for (const auto& stream : *set) {
      if (!stream->Idle()) points.push_back(stream->Last());
    }
  }
  return points;
}

CUresult Context::WaitFor(const std::vector<Point>& points) {
  for (const Point& point : points) point.stream->WaitFor(point.sequence);
  FlushPrint();
  return error();
}

void Context::HoldAll(const Point& point) {
  std::vector<std::shared_ptr<Stream>> streams;
  {
    std::lock_guard lock(streams_mutex_);
    streams.assign(streams_.begin(), streams_.end());
  }
  for (const auto& stream : streams) {
    if (stream != point.stream) Enqueue(stream, [] {}, {point});
  }
}

void Context::Print(std::string_view text) {
  size_t limit = 0;
  GetLimit(CU_LIMIT_PRINTF_FIFO_SIZE, &limit);
  std::lock_guard lock(print_mutex_);
  printed_.append(text);
  // The real buffer is a ring: the oldest output is lost.
  if (printed_.size() > limit) printed_.erase(0, printed_.size() - limit);
}

void Context::FlushPrint() {
  std::string text;
  {
    std::lock_guard lock(print_mutex_);
    text.swap(printed_);
  }
  if (text.empty()) return;
  std::fwrite(text.data(), 1, text.size(), stdout);
  std::fflush(stdout);
}

CUresult Context::GetLimit(CUlimit limit, size_t* value) {
  std::lock_guard lock(settings_mutex_);
  const auto found = limits_.find(limit);
  if (found == limits_.end()) return CUDA_ERROR_UNSUPPORTED_LIMIT;
  *value = found->second;
  return CUDA_SUCCESS;
}

CUresult Context::SetLimit(CUlimit limit, size_t value) {
  std::lock_guard lock(settings_mutex_);
  const auto found = limits_.find(limit);
  if (found == limits_.end()) return CUDA_ERROR_UNSUPPORTED_LIMIT;
  // Once a kernel has used the heap, its size is fixed.
  if (limit == CU_LIMIT_MALLOC_HEAP_SIZE && !heap_.SetSize(value)) return CUDA_ERROR_INVALID_VALUE;
  found->second = value;
  return CUDA_SUCCESS;
}

CUresult Context::EnablePeer(const std::shared_ptr<Context>& peer) {
  std::lock_guard lock(peers_mutex_);
  if (!peers_.insert(peer.get()).second) return CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
  has_peers_ = true;
  ++peer_generation_;
  return CUDA_SUCCESS;
}

CUresult Context::DisablePeer(const std::shared_ptr<Context>& peer) {
  std::lock_guard lock(peers_mutex_);
  if (peers_.erase(peer.get()) == 0) return CUDA_ERROR_PEER_ACCESS_NOT_ENABLED;
  ++peer_generation_;
  return CUDA_SUCCESS;
}

void Context::AddModule(CUmodule handle) {
  std::lock_guard lock(modules_mutex_);
  modules_.insert(handle);
}

void Context::RemoveModule(CUmodule handle) {
  std::lock_guard lock(modules_mutex_);
  modules_.erase(handle);
}

bool Context::Find(uint64_t address, Range* range) const {
  const std::shared_ptr<Allocation> found = state()->memory.Find(address);
  if (found == nullptr) return false;
  bool visible = found->context_key == this || found->host_accessible() ||
                 (found->pool != nullptr && found->device == device_);
  if (!visible && has_peers_) {
    std::lock_guard lock(peers_mutex_);
    visible = peers_.contains(found->context_key);
  }
  if (!visible) return false;
  *range = {found->begin, found->end(), found->read_only};
  return true;
}

uint64_t Context::generation() const {
  return state()->memory.generation() + peer_generation_.load(std::memory_order_acquire);
}

uint64_t Context::AllocateVariable(uint64_t bytes, uint64_t alignment, bool read_only) {
  auto allocation = std::make_shared<Allocation>();
  allocation->bytes = bytes;
  allocation->kind = MemoryKind::kVariable;
  allocation->read_only = read_only;
  allocation->device = device_;
  allocation->context = weak_from_this();
  allocation->context_key = this;
  allocation->charged_bytes = (bytes + 511) / 512 * 512;
  if (!device_->Charge(allocation->charged_bytes)) return 0;
  const uint64_t address = state()->memory.Allocate(allocation, alignment);
  if (address == 0) device_->Refund(allocation->charged_bytes);
  return address;
}

void Context::FreeVariable(uint64_t address) {
  const auto removed = state()->memory.Remove(address);
  if (removed != nullptr) device_->Refund(removed->charged_bytes);
}

void Context::Destroy() {
  // Queued work still runs, as it does when a program ends with cudaDeviceReset.
  draining_.store(true, std::memory_order_release);
  std::vector<std::shared_ptr<Stream>> streams;
  {
    std::lock_guard lock(streams_mutex_);
    streams.assign(streams_.begin(), streams_.end());
    streams.insert(streams.end(), closed_.begin(), closed_.end());
    streams_.clear();
    closed_.clear();
    per_thread_.clear();
    legacy_.reset();
  }
  for (const auto& stream : streams) stream->Close();
  const auto patience = std::chrono::steady_clock::now() + kDestroyPatience;
  for (const auto& stream : streams) {
    while (!stream->Idle() && std::chrono::steady_clock::now() < patience) {
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  }
  Stop();
  stop_kernels_ = true;
  for (const auto& stream : streams) stream->Join();
  FlushPrint();

  std::set<CUmodule> modules;
  {
    std::lock_guard lock(modules_mutex_);
    modules.swap(modules_);
  }
  for (CUmodule module : modules) UnloadModule(module);
  heap_.Release(*this);
  for (const auto& allocation : state()->memory.OfContext(this)) {
    if (allocation->kind == MemoryKind::kVariable ||
        allocation->kind == MemoryKind::kManagedVariable) {
      continue;  // freed with its Program
    }
    if (state()->memory.Remove(allocation->begin) != nullptr) {
      allocation->device->Refund(allocation->charged_bytes);
    }
  }
}

}  // namespace simgpu
