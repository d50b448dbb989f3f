// The answering half of the control plane: a thread with an event loop of its own, so that nothing
// here can hold up the supervisor, which only hands it sockets.
//
// A socket comes here after the hello. It is closed after kConnectionMs whatever it does, and when
// there are too many the new one is closed.
#pragma once

#include <memory>

#include "common/result.h"
#include "common/unique_fd.h"
#include "control/status.h"

namespace penstock::control {

// What the daemon answers with. Called on the control thread.
class Answers {
 public:
  virtual ~Answers() = default;
  virtual Status Report() = 0;
  // The number of sessions that are there.
  virtual uint32_t Drain() = 0;
  virtual void Resume() = 0;
};

class Server {
 public:
  // `answers` must outlive it.
  static Result<std::unique_ptr<Server>> Start(Answers& answers);
  ~Server();

  // Takes part in no blocking: the supervisor may hold what Answers waits for.
  void Serve(UniqueFd socket);

 private:
  Server() = default;
  struct Loop;
  std::unique_ptr<Loop> loop_;
};

}  // namespace penstock::control
