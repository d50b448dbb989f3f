// The commands that only look at settings: config check, env.
#include <cstdio>
#include <nlohmann/json.hpp>

#include "common/env.h"
#include "protocol/hello.h"
#include "tools/penstock/layout.h"
#include "tools/penstock/path_list.h"
#include "tools/penstock/pool.h"
#include "tools/penstock/table.h"

namespace penstock {
namespace {

using nlohmann::ordered_json;

// For a POSIX shell, whatever is in it.
std::string Quoted(const std::string& text) {
  std::string quoted = "'";
  for (const char c : text) quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return quoted + "'";
}

}  // namespace

int CheckConfig(const PoolFlags& flags, const std::string& file) {
  std::string path = file.empty() ? flags.config : file;
  if (path.empty()) path = config::FindPoolFile();
  if (path.empty()) {
    fputs("penstock: No pool file is there: none is named, and the usual places have none.\n",
          stderr);
    return 1;
  }
  auto pool = config::ReadPoolFile(path);
  Status keys;
  if (pool) {
    for (const config::PoolServer& server : pool->servers) {
      if (server.key_file.empty() || !keys) continue;
      if (auto key = ReadKeyFile(server.key_file); !key) {
        keys = Fail(key.error().code, path + ": The key of the server (" + server.name +
                                          ") is not to be had: " + key.error().message);
      }
    }
  }
  if (!pool || !keys) {
    fprintf(stderr, "penstock: %s\n", (pool ? keys.error() : pool.error()).message.c_str());
    return 1;
  }
  ordered_json servers = ordered_json::array();
  std::vector<std::vector<std::string>> rows = {
      {"SERVER", "ADDRESS", "KEY", "TRANSPORT", "GPUS", "SLOTS PER GPU", "MEMORY PER SLOT"}};
  for (const config::PoolServer& server : pool->servers) {
    std::string gpus;
    for (const uint32_t gpu : server.size.gpus)
      gpus += (gpus.empty() ? "" : ",") + std::to_string(gpu);
    rows.push_back(
        {server.name, server.address, server.key_file.empty() ? "-" : server.key_file,
         server.transport.empty() ? "auto" : server.transport, gpus.empty() ? "all" : gpus,
         server.size.given ? std::to_string(server.size.slots_per_gpu) : "-",
         server.size.memory_per_slot == 0 ? "-" : FormatBytes(server.size.memory_per_slot)});
    servers.push_back({{"name", server.name},
                       {"address", server.address},
                       {"key_file", server.key_file},
                       {"transport", server.transport},
                       {"gpus", server.size.gpus},
                       {"slots_per_gpu", server.size.slots_per_gpu},
                       {"memory_per_slot", server.size.memory_per_slot}});
  }
  if (flags.json) {
    fputs((ordered_json{{"path", path}, {"servers", servers}}.dump(2) + "\n").c_str(), stdout);
  } else {
    printf("%s is right.\n%s", path.c_str(), FormatTable(rows).c_str());
  }
  return 0;
}

int PrintEnvironment(const PoolFlags& flags, const std::string& gpus) {
  const auto layout = FindLayout();
  if (!layout) {
    fprintf(stderr, "penstock: %s\n", layout.error().message.c_str());
    return 1;
  }
  const auto pool = FindPool(flags);
  if (!pool) {
    fprintf(stderr, "penstock: %s\n", pool.error().message.c_str());
    return 1;
  }
  std::vector<std::pair<std::string, std::string>> variables;
  variables.emplace_back("LD_PRELOAD", WithEntryFirst(EnvString("LD_PRELOAD"), layout->interposer));
  variables.emplace_back("LD_LIBRARY_PATH",
                         WithEntryFirst(EnvString("LD_LIBRARY_PATH"), layout->library_folder));
  // Triton links its launchers against the library in this folder.
  variables.emplace_back("TRITON_LIBCUDA_PATH", layout->library_folder);
  if (pool->path.empty()) {
    std::string list;
    for (const auto& server : pool->servers) list += (list.empty() ? "" : ",") + server.address;
    variables.emplace_back("PENSTOCK_SERVER", list);
    if (const std::string& key = pool->servers.front().key_file; !key.empty()) {
      variables.emplace_back("PENSTOCK_KEY_FILE", key);
    }
  } else {
    variables.emplace_back("PENSTOCK_CONFIG", pool->path);
  }
  if (!gpus.empty()) variables.emplace_back("PENSTOCK_GPUS", gpus);
  if (flags.json) {
    ordered_json object = ordered_json::object();
    for (const auto& [name, value] : variables) object[name] = value;
    fputs((object.dump(2) + "\n").c_str(), stdout);
    return 0;
  }
  for (const auto& [name, value] : variables) {
    printf("export %s=%s\n", name.c_str(), Quoted(value).c_str());
  }
  return 0;
}

}  // namespace penstock
