// The pool that the commands speak of, and those that ask its daemons: ls, status, drain, resume.
#pragma once

#include <string>

#include "common/result.h"
#include "config/pool_file.h"

namespace penstock {

// What --config, --server and --key say; each may be empty.
struct PoolFlags {
  std::string config, server, key_file;
  bool json = false;
};

// As a program would choose: the flags, then PENSTOCK_SERVER, then a pool file (PENSTOCK_CONFIG and
// the places after it). A pool that was listed has the path "".
Result<config::PoolFile> FindPool(const PoolFlags& flags);

// Each prints to stdout and returns the exit status: 0, or 1 if a server does not answer.
int ListGpus(const PoolFlags& flags);
int ShowSessions(const PoolFlags& flags);
// `server` is a name or an address of the pool.
int Drain(const PoolFlags& flags, const std::string& server);
int Resume(const PoolFlags& flags, const std::string& server);

// `penstock config check [FILE]`: 0 if the file is right.
int CheckConfig(const PoolFlags& flags, const std::string& file);
// `penstock env`: lines for a shell to evaluate.
int PrintEnvironment(const PoolFlags& flags, const std::string& gpus);

}  // namespace penstock
