#include "config/pool_file.h"

#include <unistd.h>

#include <charconv>
#include <set>

#include "common/env.h"
#include "config/toml_reader.h"

namespace penstock::config {
namespace {

constexpr const char* kSystemFile = "/etc/penstock/pool.toml";

// A file that is named without a folder lies beside the pool file.
std::string Beside(const std::string& pool_file, const std::string& name) {
  if (name.empty() || name.front() == '/') return name;
  const size_t slash = pool_file.rfind('/');
  return slash == std::string::npos ? name : pool_file.substr(0, slash + 1) + name;
}

bool IsTransport(const std::string& text) {
  return text.empty() || text == "auto" || text == "shm" || text == "rdma" || text == "tcp";
}

}  // namespace

Result<Endpoint> ParseEndpoint(const std::string& text) {
  const size_t colon = text.rfind(':');
  const auto fail = [&] {
    return Fail(Code::kInvalidArgument, "The server (" + text + ") is not of the form HOST:PORT.");
  };
  if (colon == std::string::npos || colon == 0) return fail();
  Endpoint endpoint;
  endpoint.host = text.substr(0, colon);
  if (endpoint.host.front() == '[') {
    if (endpoint.host.back() != ']' || endpoint.host.size() < 3) return fail();
    endpoint.host = endpoint.host.substr(1, endpoint.host.size() - 2);
  } else if (endpoint.host.find(':') != std::string::npos) {
    return fail();
  }
  const char* const first = text.data() + colon + 1;
  const char* const last = text.data() + text.size();
  const auto [end, error] = std::from_chars(first, last, endpoint.port);
  if (error != std::errc() || end != last || endpoint.port == 0) return fail();
  return endpoint;
}

Result<PoolFile> ReadPoolFile(const std::string& path) {
  ASSIGN_OR_RETURN(const toml::table table, ParseTomlFile(path));
  PoolFile pool;
  pool.path = path;
  PoolServer common;
  TomlReader reader(path, table);
  reader.Take("key-file", &common.key_file);
  reader.Take("transport", &common.transport);
  if (!IsTransport(common.transport)) {
    reader.Refuse("transport", "Value of transport (" + common.transport +
                                   ") is none of auto, shm, rdma and tcp.");
  }
  const std::vector<const toml::table*> sections = reader.TakeTables("server");
  RETURN_IF_ERROR(reader.Finish());
  if (sections.empty()) {
    return Fail(Code::kInvalidArgument, path + ": The pool has no [[server]].");
  }
  std::set<std::string> names, addresses;
  for (const toml::table* const section : sections) {
    PoolServer server = common;
    TomlReader its(path, *section);
    its.Take("name", &server.name);
    its.Take("address", &server.address);
    its.Take("key-file", &server.key_file);
    its.Take("transport", &server.transport);
    its.Take("gpus", &server.size.gpus);
    its.Take("slots-per-gpu", &server.size.slots_per_gpu);
    its.Take("memory-per-slot", &server.size.memory_per_slot);
    server.size.given = section->contains("gpus") || section->contains("slots-per-gpu") ||
                        section->contains("memory-per-slot");
    const Result<Endpoint> endpoint = ParseEndpoint(server.address);
    if (!endpoint) {
      its.Refuse("address",
                 server.address.empty() ? "The server has no address." : endpoint.error().message);
    } else if (server.name.empty()) {
      server.name = endpoint->host;
    }
    if (!names.insert(server.name).second) {
      its.Refuse("name", "There are two servers of the name (" + server.name + ").");
    }
    if (!addresses.insert(server.address).second) {
      its.Refuse("address", "There are two servers of the address (" + server.address + ").");
    }
    if (!IsTransport(server.transport)) {
      its.Refuse("transport", "Value of transport (" + server.transport +
                                  ") is none of auto, shm, rdma and tcp.");
    }
    if (server.size.slots_per_gpu == 0) {
      its.Refuse("slots-per-gpu", "Value of slots-per-gpu is 0; there is at least one slot.");
    }
    RETURN_IF_ERROR(its.Finish());
    server.key_file = Beside(path, server.key_file);
    pool.servers.push_back(std::move(server));
  }
  return pool;
}

std::string FindPoolFile() {
  const std::string named = EnvString("PENSTOCK_CONFIG");
  if (!named.empty()) return named;
  std::string home = EnvString("XDG_CONFIG_HOME");
  if (home.empty() && !EnvString("HOME").empty()) home = EnvString("HOME") + "/.config";
  if (!home.empty()) {
    const std::string own = home + "/penstock/pool.toml";
    if (access(own.c_str(), R_OK) == 0) return own;
  }
  return access(kSystemFile, R_OK) == 0 ? kSystemFile : "";
}

}  // namespace penstock::config
