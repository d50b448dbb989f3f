// What a daemon tells of itself, as plain values: control.capnp has the meanings.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace penstock::control {

struct Gpu {
  uint32_t ordinal = 0;
  std::string name, uuid;
  uint64_t memory = 0;
  uint32_t slots = 0, slots_taken = 0;
  uint64_t slot_memory = 0;
};

struct Session {
  uint64_t id = 0;
  std::string host;
  uint32_t pid = 0;
  std::string program, peer;
  std::vector<uint32_t> gpus;
  std::string path;
  uint64_t memory = 0, calls = 0, received = 0, sent = 0;
  double seconds = 0;
};

struct Status {
  std::string host, version;
  int32_t driver_version = 0;
  std::string driver_error;
  bool draining = false;
  uint32_t most_sessions = 0;
  std::vector<Gpu> gpus;
  std::vector<Session> sessions;
};

}  // namespace penstock::control
