#include "server/worker/executor.h"

namespace penstock::server {

Executor::Executor(std::function<void()> wake)
    : wake_(std::move(wake)), thread_([this] { Loop(); }) {}

Executor::~Executor() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void Executor::Run(std::function<void()> job, std::function<void()> finish) {
  ++outstanding_;
  {
    std::lock_guard lock(mutex_);
    queue_.push_back({std::move(job), std::move(finish)});
  }
  changed_.notify_one();
}

bool Executor::Finish() {
  if (outstanding_ == 0) return false;
  std::deque<Job> done;
  {
    std::lock_guard lock(mutex_);
    done.swap(done_);
  }
  for (Job& job : done) {
    --outstanding_;
    job.finish();
  }
  return !done.empty();
}

void Executor::Loop() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
    if (stopping_) return;
    Job job = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    job.run();
    lock.lock();
    done_.push_back(std::move(job));
    wake_();
  }
}

}  // namespace penstock::server
