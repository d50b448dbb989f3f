// A penstockd of one's own: started on the loopback address with the simulated GPU, for one
// program, and ended with it.
#pragma once

#include <sys/types.h>

#include <string>

#include "common/result.h"
#include "tools/penstock/layout.h"

namespace penstock {

class PrivateDaemon {
 public:
  // Returns when the daemon accepts connections. gpus is the number of simulated devices, 0 for the
  // simulator's own choice.
  static Result<PrivateDaemon> Start(const Layout& layout, int gpus);

  PrivateDaemon(PrivateDaemon&& other) noexcept;
  PrivateDaemon& operator=(PrivateDaemon&&) = delete;
  // Ends the daemon (SIGTERM, then SIGKILL) and removes its files.
  ~PrivateDaemon();

  const std::string& address() const { return address_; }  // HOST:PORT
  const std::string& key_file() const { return key_file_; }
  pid_t pid() const { return pid_; }
  // To be called when waitpid has reported the daemon's end: there is nothing to end any more.
  void Forget() { pid_ = -1; }

 private:
  PrivateDaemon() = default;
  Status WaitForPort(const std::string& port_file);

  pid_t pid_ = -1;
  std::string folder_;  // a temporary folder that holds the port file and the key
  std::string address_;
  std::string key_file_;
};

}  // namespace penstock
