#include "server/worker/reaper.h"

#include <chrono>

#include "common/log.h"
#include "server/worker/objects.h"

namespace penstock::server {

Reaper::Reaper(const Driver& driver, std::function<void()> wake)
    : driver_(driver), wake_(std::move(wake)), thread_([this] { Loop(); }) {}

Reaper::~Reaper() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void Reaper::Submit(std::shared_ptr<ReapJob> job) {
  outstanding_.push_back(job);
  {
    std::lock_guard lock(mutex_);
    incoming_.push_back(std::move(job));
  }
  changed_.notify_one();
}

std::vector<std::shared_ptr<ReapJob>> Reaper::Outstanding(uint32_t thread) {
  std::vector<std::shared_ptr<ReapJob>> jobs;
  for (auto& job : outstanding_) {
    if (thread != kAnyThread && job->thread != thread) continue;
    if (!job->done.load(std::memory_order_acquire)) jobs.push_back(job);
  }
  return jobs;
}

// True when the job is done, with whatever result.
bool Reaper::TryRun(ReapJob& job) {
  driver_.cuCtxSetCurrent(job.context == nullptr ? nullptr : job.context->context);
  for (CUevent event : job.events) {
    // An error is the context's own; freeing then frees nothing, and says so below.
    if (driver_.cuEventQuery(event) == CUDA_ERROR_NOT_READY) return false;
  }
  for (const auto& held : job.holds) {
    if (held.use_count() > 1) return false;
  }
  job.holds.clear();
  job.result = job.free(driver_);
  if (job.result != CUDA_SUCCESS) {
    LOG_DEBUG("reaper", "%s fails with %s.", job.what, ErrorName(driver_, job.result));
  }
  job.done.store(true, std::memory_order_release);
  wake_();
  return true;
}

void Reaper::Loop() {
  constexpr auto kShortest = std::chrono::microseconds(50),
                 kLongest = std::chrono::microseconds(2000);
  auto pause = kShortest;
  std::vector<std::shared_ptr<ReapJob>> waiting;
  std::unique_lock lock(mutex_);
  while (true) {
    if (waiting.empty()) {
      changed_.wait(lock, [this] { return stopping_ || !incoming_.empty(); });
    } else {
      changed_.wait_for(lock, pause, [this] { return stopping_ || !incoming_.empty(); });
      pause = std::min(pause * 2, kLongest);
    }
    if (stopping_) return;
    if (!incoming_.empty()) pause = kShortest;
    waiting.insert(waiting.end(), incoming_.begin(), incoming_.end());
    incoming_.clear();
    lock.unlock();
    std::erase_if(waiting, [this](const auto& job) { return TryRun(*job); });
    lock.lock();
  }
}

}  // namespace penstock::server
