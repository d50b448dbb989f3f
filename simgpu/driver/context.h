// A context: streams, loaded modules and memory of one user of a device, and what its kernels see.
#pragma once

#include <cuda.h>

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "simgpu/driver/device.h"
#include "simgpu/driver/stream.h"
#include "simgpu/exec/executor.h"
#include "simgpu/exec/heap.h"

namespace simgpu {

class Event;
class Module;

class Context : public MemoryMap, public std::enable_shared_from_this<Context> {
 public:
  Context(Device* device, bool primary, unsigned flags);
  ~Context() override;
  // Ends all work, then frees everything. Called once, when the handle goes.
  void Destroy();

  Device* device() const { return device_; }
  bool primary() const { return primary_; }
  uint64_t id() const { return id_; }
  CUcontext handle() const { return handle_; }
  void set_handle(CUcontext handle) { handle_ = handle; }
  unsigned flags() const { return flags_; }
  void set_flags(unsigned flags) { flags_ = flags; }

  // --- errors: the first that a kernel causes stays, and every later call returns it.
  CUresult error() const { return static_cast<CUresult>(error_.load(std::memory_order_acquire)); }
  void Poison(CUresult error);
  // Set when the context is going away. First waits on memory words give up (`draining`); work
  // behind one that did, and all work after a while, is skipped (`stopping`).
  bool draining() const { return draining_.load(std::memory_order_acquire); }
  bool stopping() const { return stopping_.load(std::memory_order_acquire); }
  void Stop() { stopping_.store(true, std::memory_order_release); }
  const std::atomic<bool>* stop_flag() const { return &stop_kernels_; }

  // --- streams
  std::shared_ptr<Stream> legacy_stream();
  std::shared_ptr<Stream> per_thread_stream();
  std::shared_ptr<Stream> AddStream(unsigned flags, int priority);
  void RemoveStream(const std::shared_ptr<Stream>& stream);
  // The one way work gets into a stream. Adds the waits that keep legacy and blocking streams in
  // order. Blocks while the stream's queue is full.
  Point Enqueue(const std::shared_ptr<Stream>& stream, Stream::Operation operation,
                std::vector<Point> waits = {}, bool always = false);
  // What a synchronisation with this stream waits for: for the legacy stream also all blocking
  // ones.
  std::vector<Point> PendingOf(const std::shared_ptr<Stream>& stream);
  std::vector<Point> PendingOfAll();
  // Waits for them, then hands out printed text; the context's error, if any.
  CUresult WaitFor(const std::vector<Point>& points);
  CUresult Synchronise() { return WaitFor(PendingOfAll()); }
  // Makes all later work of all streams wait for the point.
  void HoldAll(const Point& point);

  // --- kernel printf: kept until a call that synchronises, then written to stdout.
  void Print(std::string_view text);
  void FlushPrint();

  // --- settings
  CUresult GetLimit(CUlimit limit, size_t* value);
  CUresult SetLimit(CUlimit limit, size_t value);
  std::atomic<int> cache_config{CU_FUNC_CACHE_PREFER_NONE};
  std::atomic<int> attachments{1};  // cuCtxAttach
  std::atomic<int> shared_config{CU_SHARED_MEM_CONFIG_DEFAULT_BANK_SIZE};

  // --- peers
  CUresult EnablePeer(const std::shared_ptr<Context>& peer);
  CUresult DisablePeer(const std::shared_ptr<Context>& peer);

  // --- modules; unloaded with the context
  void AddModule(CUmodule handle);
  void RemoveModule(CUmodule handle);

  // --- MemoryMap: what kernels of this context may touch
  bool Find(uint64_t address, Range* range) const override;
  uint64_t generation() const override;
  uint64_t AllocateVariable(uint64_t bytes, uint64_t alignment, bool read_only) override;
  void FreeVariable(uint64_t address) override;
  DeviceHeap* heap() override { return &heap_; }

 private:
  void ReleaseThread(uint64_t thread_key);
  friend struct ThreadStreams;

  Device* const device_;
  const bool primary_;
  const uint64_t id_;
  CUcontext handle_ = nullptr;
  std::atomic<unsigned> flags_;
  std::atomic<int> error_{CUDA_SUCCESS};
  std::atomic<bool> draining_{false};
  std::atomic<bool> stopping_{false};
  std::atomic<bool> stop_kernels_{false};

  // Held while an operation is enqueued into a legacy or blocking stream, so that all see one
  // order.
  std::mutex order_mutex_;
  std::mutex streams_mutex_;
  std::shared_ptr<Stream> legacy_;                          // guarded by streams_mutex_
  std::map<uint64_t, std::shared_ptr<Stream>> per_thread_;  // guarded by streams_mutex_
  std::set<std::shared_ptr<Stream>> streams_;               // guarded by streams_mutex_
  std::set<std::shared_ptr<Stream>> closed_;  // destroyed, perhaps still busy; streams_mutex_
  std::atomic<bool> legacy_used_{false};

  std::mutex print_mutex_;
  std::string printed_;  // guarded by print_mutex_

  std::mutex settings_mutex_;
  std::map<CUlimit, size_t> limits_;  // guarded by settings_mutex_
  std::set<const Context*> peers_;    // guarded by peers_mutex_
  mutable std::mutex peers_mutex_;
  std::atomic<uint64_t> peer_generation_{0};
  std::atomic<bool> has_peers_{false};

  DeviceHeap heap_;

  std::mutex modules_mutex_;
  std::set<CUmodule> modules_;  // guarded by modules_mutex_
};

// --- the calling thread's stack of contexts

CUcontext CurrentHandle();
void SetCurrentHandle(CUcontext handle);
bool PushHandle(CUcontext handle);  // false if the stack is full
bool PopHandle(CUcontext* handle);  // false if it is empty

// The context behind a handle: CUDA_ERROR_INVALID_CONTEXT for garbage and destroyed ones,
// CUDA_ERROR_CONTEXT_IS_DESTROYED for a primary context that is not active.
CUresult FindContext(CUcontext handle, std::shared_ptr<Context>* context);

// Makes the device's primary context active without retaining it; the caller holds primary_mutex.
std::shared_ptr<Context> ActivatePrimary(Device* device);

// In calls named _ptds and _ptsz the null stream means the per-thread one.
class PerThreadDefaultStream {
 public:
  PerThreadDefaultStream();
  ~PerThreadDefaultStream();
  static bool active();
};

}  // namespace simgpu
