#include "interposer/core/acquire.h"

#include <algorithm>
#include <optional>

#include "common/env.h"
#include "common/log.h"
#include "interposer/core/records.h"

namespace penstock::interposer {
namespace {

std::vector<std::string> SplitAtCommas(const std::string& list) {
  std::vector<std::string> parts;
  for (size_t begin = 0; begin <= list.size();) {
    const size_t comma = std::min(list.find(',', begin), list.size());
    if (comma > begin) parts.push_back(list.substr(begin, comma - begin));
    begin = comma + 1;
  }
  return parts;
}

Result<uint32_t> WantedGpus() {
  const std::string text = EnvString("PENSTOCK_GPUS");
  if (text == "all") return 0;
  const int64_t gpus = EnvInteger("PENSTOCK_GPUS", text.empty() ? 1 : -1);
  if (gpus < 0 || gpus > kMaxDevices) {
    return Fail(Code::kInvalidArgument, "The number of GPUs (PENSTOCK_GPUS=" + text +
                                            ") is neither \"all\" nor between 0 and " +
                                            std::to_string(kMaxDevices) + ".");
  }
  return static_cast<uint32_t>(gpus);
}

bool IsFull(const Error& error) {
  return error.code == Code::kResourceExhausted;
}

// Of several servers: what each has, until there is enough.
Result<std::vector<Connected>> Collect(const Pool& pool) {
  std::vector<Connected> taken;
  uint32_t have = 0, offered = 0;
  bool full = false;
  std::optional<Error> broken;
  for (ConnectOptions options : pool.servers) {
    options.gpus = pool.gpus == 0 ? 0 : pool.gpus - have;
    options.fewer = true;
    Result<Connected> connected = Connect(options);
    if (!connected) {
      if (IsFull(connected.error())) {
        full = true;
        continue;
      }
      LOG_WARNING("session", "The server (%s) is passed over: %s", options.server.c_str(),
                  connected.error().message.c_str());
      if (!broken) broken = connected.error();
      continue;
    }
    const Welcome& welcome = connected->welcome.welcome;
    have += welcome.server.device_count;
    offered += welcome.offered;
    taken.push_back(std::move(*connected));
    if (pool.gpus != 0 && have >= pool.gpus) return taken;
  }
  if (pool.gpus == 0 && have > 0) return taken;
  const std::string servers = std::to_string(pool.servers.size()) + " servers";
  if (full || (!broken && offered >= std::max(1u, pool.gpus))) {
    return Fail(Code::kResourceExhausted,
                "Of the GPUs that the program asks for (" + std::to_string(pool.gpus) + ") only (" +
                    std::to_string(have) + ") are free on " + servers + ".");
  }
  if (broken) return tl::unexpected<Error>(*broken);
  return Fail(Code::kUnsupported, "The program asks for more GPUs (" + std::to_string(pool.gpus) +
                                      ") than " + servers + " offer (" + std::to_string(offered) +
                                      ").");
}

}  // namespace

Result<Pool> PoolFromEnvironment() {
  Pool pool;
  ASSIGN_OR_RETURN(pool.gpus, WantedGpus());
  ASSIGN_OR_RETURN(const PathOptions path, PathOptionsFromEnvironment());
  const std::string listed = EnvString("PENSTOCK_SERVER");
  const std::string key_file = EnvString("PENSTOCK_KEY_FILE");
  if (!listed.empty()) {
    pool.source = "PENSTOCK_SERVER=" + listed;
    for (const std::string& address : SplitAtCommas(listed)) {
      ConnectOptions options;
      options.server = address;
      options.key_file = key_file;
      options.path = path;
      pool.servers.push_back(std::move(options));
    }
  } else {
    const std::string file = config::FindPoolFile();
    if (file.empty()) {
      return Fail(Code::kInvalidArgument,
                  "No GPU server is named: PENSTOCK_SERVER is not set, and there is no pool file.");
    }
    pool.source = file;
    ASSIGN_OR_RETURN(const config::PoolFile read, config::ReadPoolFile(file));
    const bool chosen = !EnvString("PENSTOCK_TRANSPORT").empty();
    for (const config::PoolServer& server : read.servers) {
      ConnectOptions options;
      options.server = server.address;
      options.key_file = key_file.empty() ? server.key_file : key_file;
      options.path = path;
      if (!chosen && !server.transport.empty()) {
        ASSIGN_OR_RETURN(options.path.choice,
                         transport::ParseChoice(server.transport, "Transport of the pool file"));
      }
      pool.servers.push_back(std::move(options));
    }
  }
  if (pool.servers.empty() || pool.servers.size() > kMaxServers) {
    return Fail(Code::kInvalidArgument,
                "The number of servers (" + std::to_string(pool.servers.size()) +
                    ") is not between 1 and " + std::to_string(kMaxServers) + " (" + pool.source +
                    ").");
  }
  return pool;
}

Result<std::vector<Connected>> Acquire(const Pool& pool) {
  if (pool.servers.size() > 1) return Collect(pool);
  ConnectOptions options = pool.servers.front();
  options.gpus = pool.gpus;
  options.fewer = pool.gpus == 0;
  ASSIGN_OR_RETURN(Connected connected, Connect(options));
  std::vector<Connected> one;
  one.push_back(std::move(connected));
  return one;
}

}  // namespace penstock::interposer
