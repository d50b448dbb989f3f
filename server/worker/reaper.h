// Frees what may synchronise: the driver's cuMemFree and cuModuleUnload wait until the device is
// idle. A free is posted by the client, so the dispatch thread records an event in every busy
// stream of the context and hands the free over; this thread waits for the events and then frees,
// so its own call finds nothing to wait for. Frees overtake each other: one behind a long kernel
// does not hold up one of another context.
#pragma once

#include <cuda.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "server/driver.h"

namespace penstock::server {

struct ContextState;

struct ReapJob {
  std::shared_ptr<ContextState> context;
  std::vector<CUevent> events;               // waited for first
  std::vector<std::shared_ptr<void>> holds;  // then for nobody else to hold these, which go first
  std::function<CUresult(const Driver&)> free;
  const char* what = "";
  uint32_t thread = 0;  // of the client, whose later questions must see the effect
  CUresult result = CUDA_SUCCESS;
  std::atomic<bool> done{false};
};

class Reaper {
 public:
  // `wake` is called, on the thread, when a job is done.
  Reaper(const Driver& driver, std::function<void()> wake);
  ~Reaper();

  void Submit(std::shared_ptr<ReapJob> job);
  // Jobs that are not done, of one client thread or (kAnyThread) of all.
  static constexpr uint32_t kAnyThread = UINT32_MAX;
  std::vector<std::shared_ptr<ReapJob>> Outstanding(uint32_t thread);
  // Dispatch thread: forgets what is done, calling visit for each.
  template <typename Visitor>
  bool Collect(Visitor visit) {
    bool any = false;
    for (size_t i = 0; i < outstanding_.size();) {
      if (!outstanding_[i]->done.load(std::memory_order_acquire)) {
        ++i;
        continue;
      }
      visit(*outstanding_[i]);
      outstanding_.erase(outstanding_.begin() + i);
      any = true;
    }
    return any;
  }
  bool idle() const { return outstanding_.empty(); }

 private:
  void Loop();
  bool TryRun(ReapJob& job);

  const Driver& driver_;
  const std::function<void()> wake_;
  std::vector<std::shared_ptr<ReapJob>> outstanding_;  // dispatch thread only
  std::mutex mutex_;                                   // guards incoming_, stopping_
  std::condition_variable changed_;
  std::vector<std::shared_ptr<ReapJob>> incoming_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace penstock::server
