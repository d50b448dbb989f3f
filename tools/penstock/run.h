// `penstock run`: the program with our libcuda.so.1 in front of it.
#pragma once

#include <string>
#include <vector>

namespace penstock {

constexpr int kOwnFailure = 125;  // the exit status when Penstock itself fails

struct RunOptions {
  std::string gpus;       // a number, or "all"; empty: one, or all of a simulated server
  std::string server;     // HOST:PORT, several with commas; empty: the pool file says
  std::string config;     // the pool file; empty: none
  std::string key_file;   // empty: no key
  std::string transport;  // auto, shm, rdma or tcp; empty: as PENSTOCK_TRANSPORT says
  bool wait = false;      // until the server has a GPU free
  bool simulate = false;
  std::vector<std::string> program;  // with its arguments
};

// Returns the exit status for main(): the program's own, 128 + n if signal n ended it, 127 and 126
// if it cannot be found or executed (as a shell does), 125 if Penstock itself fails. With a server
// it does not return at all: this process becomes the program.
int Run(const RunOptions& options);

}  // namespace penstock
