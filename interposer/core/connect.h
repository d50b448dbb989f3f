// From a server's address to a session's connection: dial, hello, key, bulk socket.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "common/result.h"
#include "config/pool_file.h"
#include "interposer/core/path.h"
#include "protocol/hello.h"
#include "transport/transport.h"

namespace penstock::interposer {

struct ConnectOptions {
  std::string server;    // HOST:PORT
  std::string key_file;  // empty for none
  uint32_t gpus = 1;     // 0 for all
  bool fewer = false;    // takes what is free of them rather than nothing
  PathOptions path;
};

struct Connected {
  std::string server;  // HOST:PORT
  std::unique_ptr<transport::Connection> connection;
  ParsedWelcome welcome;
  uint64_t round_trips = 0;
  bool host_functions = false;  // the server has kFeatureHostFunctions
  bool bounce = false;          // kFeatureBounce
  bool volumes = false;         // kFeatureVolumes
  // For the child of a fork: lets go of the connection without ending the parent's.
  void (*abandon)(transport::Connection&) = nullptr;
};

// The error's code tells trouble on the way (kUnavailable, kTimeout, kSystem) from a refusal.
Result<Connected> Connect(const ConnectOptions& options);

}  // namespace penstock::interposer
