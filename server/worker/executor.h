// A thread for driver calls that take long and have no query form: loading modules with their JIT,
// making and destroying contexts. Jobs run one after another; what is left to do for a finished one
// runs on the dispatch thread, from Finish().
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

namespace penstock::server {

class Executor {
 public:
  // `wake` is called, on the thread, when a job has run.
  explicit Executor(std::function<void()> wake);
  ~Executor();

  void Run(std::function<void()> job, std::function<void()> finish);
  // Runs the finishing halves of what is done. True if there was any.
  bool Finish();
  bool idle() const { return outstanding_ == 0; }

 private:
  void Loop();

  struct Job {
    std::function<void()> run, finish;
  };
  const std::function<void()> wake_;
  std::mutex mutex_;  // guards queue_, done_, stopping_
  std::condition_variable changed_;
  std::deque<Job> queue_, done_;
  bool stopping_ = false;
  size_t outstanding_ = 0;  // dispatch thread only
  std::thread thread_;
};

}  // namespace penstock::server
