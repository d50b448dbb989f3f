// An event: the last point of a stream that was recorded into it.
#pragma once

#include <cuda.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "simgpu/driver/stream.h"

namespace simgpu {

// One recording: where it stands, and when it was reached.
struct Recording {
  std::atomic<int64_t> time_ns{0};  // 0 until reached
  Point point;
};

class Event {
 public:
  Event(const std::shared_ptr<Context>& context, unsigned flags)
      : context_(context), flags_(flags) {}
  std::shared_ptr<Context> context() const { return context_.lock(); }
  bool timing() const { return (flags_ & CU_EVENT_DISABLE_TIMING) == 0; }

  // Null if it was never recorded: such an event counts as complete.
  std::shared_ptr<Recording> recording() const {
    std::lock_guard lock(mutex_);
    return recording_;
  }
  void set_recording(std::shared_ptr<Recording> recording) {
    std::lock_guard lock(mutex_);
    recording_ = std::move(recording);
  }

 private:
  const std::weak_ptr<Context> context_;
  const unsigned flags_;
  mutable std::mutex mutex_;
  std::shared_ptr<Recording> recording_;  // guarded by mutex_
};

// The point of a stream that has everything before it done when `points` are reached.
void RecordInto(const std::shared_ptr<Context>& context, const std::shared_ptr<Stream>& stream,
                Event& event, std::vector<Point> points);

}  // namespace simgpu
