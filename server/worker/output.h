// What kernels print. The driver writes it to the worker's stdout (assertions: stderr), which are
// therefore pipes; it is forwarded to the client's program before the reply of the call that
// natively makes it visible.
//
// A thread empties the pipes all the time, because the driver would block on a full one inside a
// call of the dispatch thread.
#pragma once

#include <mutex>
#include <string>
#include <thread>

#include "common/result.h"
#include "common/unique_fd.h"

namespace penstock::server {

class Outbox;

class Output {
 public:
  Output() = default;
  ~Output();
  // Replaces descriptors 1 and 2 of the process by pipes. Log lines must have been redirected.
  Status Capture();
  // Sends everything that has been written to them so far.
  void Forward(Outbox& outbox);

 private:
  void Loop();
  void Drain(int index);

  static constexpr size_t kMostWaiting = 64u << 20;  // beyond it, output is lost and counted

  UniqueFd pipes_[2];
  UniqueFd stop_;
  std::mutex mutex_;  // guards waiting_ and reading from the pipes
  std::string waiting_[2];
  std::thread thread_;
};

}  // namespace penstock::server
