// A stream: a queue of operations and a worker thread that runs them in order.
//
// Every stream has its own thread (started at its first operation), so streams run beside each
// other and beside the caller as on a device. An operation may first wait for operations of other
// streams: that is how cuStreamWaitEvent works, and how the legacy default stream keeps order with
// the blocking streams. Such waits only ever point to operations that were enqueued earlier, so
// they cannot form a ring.
//
// The queue holds 1,024 unfinished operations; then the enqueuing thread blocks, as the real
// driver's does at about that number. Code that only works with an endless queue is found here.
#pragma once

#include <cuda.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace simgpu {

class Context;
class Stream;

constexpr uint64_t kQueueEntries = 1024;
constexpr int kLeastPriority = 0;
constexpr int kGreatestPriority = -5;

// "The operation numbered `sequence` of `stream`, and all before it."
struct Point {
  std::shared_ptr<Stream> stream;
  uint64_t sequence = 0;
};

class Stream : public std::enable_shared_from_this<Stream> {
 public:
  using Operation = std::function<void()>;
  enum class Kind { kLegacy, kPerThread, kCreated };

  Stream(const std::shared_ptr<Context>& context, Kind kind, unsigned flags, int priority,
         uint64_t id);
  ~Stream();

  std::shared_ptr<Context> context() const { return context_.lock(); }
  Kind kind() const { return kind_; }
  unsigned flags() const { return flags_; }
  int priority() const { return priority_; }
  uint64_t id() const { return id_; }
  bool non_blocking() const { return (flags_ & CU_STREAM_NON_BLOCKING) != 0; }

  // The last operation that was enqueued.
  Point Last();
  bool Reached(uint64_t sequence) const {
    return completed_.load(std::memory_order_acquire) >= sequence;
  }
  bool Idle() { return Reached(enqueued_.load(std::memory_order_acquire)); }
  // Blocks until the operation is done, or the stream is stopped.
  void WaitFor(uint64_t sequence);

  // Appends an operation that runs after `waits`; returns its number. `always` marks one that runs
  // even after the context has failed (callbacks, bookkeeping). Blocks while the queue is full.
  // Callers use Context::Enqueue, which adds the legacy stream's rules.
  void WaitForSpace();
  // Takes `waits` and `operation` only when it returns true.
  bool TryPush(std::vector<Point>& waits, Operation& operation, bool always, uint64_t* sequence);

  // No more operations will come; the worker ends after the last one.
  void Close();
  // Waits for the worker's end (at once if called from a worker).
  void Join();

 private:
  struct Entry {
    std::vector<Point> waits;
    Operation operation;
    bool always;
  };
  void Work();

  const std::weak_ptr<Context> context_;
  const Kind kind_;
  const unsigned flags_;
  const int priority_;
  const uint64_t id_;

  std::mutex mutex_;
  std::condition_variable work_;  // for the worker: there is an entry, or the stream is closed
  std::condition_variable done_;  // for everybody else: completed_ has grown
  std::deque<Entry> entries_;     // guarded by mutex_
  int waiters_ = 0;               // on done_; guarded by mutex_
  bool closed_ = false;           // guarded by mutex_
  bool started_ = false;          // guarded by mutex_
  std::atomic<uint64_t> enqueued_{0};
  std::atomic<uint64_t> completed_{0};
  std::thread worker_;
};

// The stream a program's handle means for the calling thread: null, CU_STREAM_LEGACY and
// CU_STREAM_PER_THREAD belong to the current context.
CUresult ResolveStream(CUstream handle, std::shared_ptr<Stream>* stream,
                       std::shared_ptr<Context>* context);

// True on a stream's worker thread, where CUDA calls are not allowed.
bool OnWorkerThread();

}  // namespace simgpu
