// A link at run time (cuLink*), as the executor and the dispatch thread share it.
#pragma once

#include <cuda.h>

#include <cstring>
#include <string>
#include <vector>

#include "protocol/operations.h"
#include "server/driver.h"

namespace penstock::server {

// The driver writes to logs and values for as long as the link lives. Touched by the executor alone
// once it is made, but for `image` after the link is complete.
struct Link {
  explicit Link(const Driver& its_driver) : driver(its_driver) {}
  ~Link() {
    if (state != nullptr) driver.cuLinkDestroy(state);
  }
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  const Driver& driver;
  CUlinkState state = nullptr;
  std::string info_log, error_log;  // of their capacities
  std::vector<CUjit_option> names;
  std::vector<void*> values;
  std::string image;
  bool complete = false;  // of the dispatch thread: the image is there
};

// What a log holds by now.
inline std::string TextOf(const std::string& log) {
  return std::string(log.data(), strnlen(log.data(), log.size()));
}

// False for options that hold addresses, which no client sends.
bool OptionIsScalar(const JitOption& option);

}  // namespace penstock::server
