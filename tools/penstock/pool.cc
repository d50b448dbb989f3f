#include "tools/penstock/pool.h"

#include <cstdio>
#include <future>
#include <nlohmann/json.hpp>
#include <set>

#include "common/env.h"
#include "control/client.h"
#include "tools/penstock/contact.h"
#include "tools/penstock/table.h"

namespace penstock {
namespace {

using config::PoolServer;
using nlohmann::ordered_json;

int Complain(const Error& error) {
  fprintf(stderr, "penstock: %s\n", error.message.c_str());
  return 1;
}

struct Answer {
  const PoolServer* server;
  Result<control::Status> status;
};

Result<control::Status> Ask(const PoolServer& server) {
  ASSIGN_OR_RETURN(UniqueFd socket, Contact(server));
  return control::AskStatus(std::move(socket), kAnswerMs);
}

// All at once: a server that is not there costs the others nothing.
std::vector<Answer> AskAll(const config::PoolFile& pool) {
  std::vector<std::future<Result<control::Status>>> asked;
  for (const PoolServer& server : pool.servers) {
    asked.push_back(std::async(std::launch::async, [&server] { return Ask(server); }));
  }
  std::vector<Answer> answers;
  for (size_t i = 0; i < asked.size(); ++i) {
    answers.push_back({&pool.servers[i], asked[i].get()});
  }
  return answers;
}

// The servers that did not answer, on stderr, below the table.
int Rest(const std::vector<Answer>& answers) {
  int result = 0;
  for (const Answer& answer : answers) {
    if (answer.status) continue;
    fprintf(stderr, "penstock: The server (%s) is not heard: %s\n", answer.server->name.c_str(),
            answer.status.error().message.c_str());
    result = 1;
  }
  return result;
}

std::string StateOf(const control::Status& status) {
  if (!status.driver_error.empty()) return "no driver";
  return status.draining ? "draining" : "up";
}

// How the programs on this GPU come there: "2 rdma, 1 tcp".
std::string PathsOf(const control::Status& status, uint32_t gpu, size_t* sessions) {
  std::map<std::string, int> count;
  *sessions = 0;
  for (const control::Session& session : status.sessions) {
    if (std::find(session.gpus.begin(), session.gpus.end(), gpu) == session.gpus.end()) continue;
    ++*sessions;
    if (!session.path.empty()) ++count[session.path];
  }
  std::string text;
  for (const auto& [path, number] : count) {
    text += (text.empty() ? "" : ", ") + std::to_string(number) + " " + path;
  }
  return text;
}

std::string Numbers(const std::vector<uint32_t>& gpus) {
  std::string text;
  for (const uint32_t gpu : gpus) text += (text.empty() ? "" : ",") + std::to_string(gpu);
  return text;
}

template <typename AskOne>
int TellServer(const PoolFlags& flags, const std::string& name, AskOne ask) {
  const auto pool = FindPool(flags);
  if (!pool) return Complain(pool.error());
  for (const PoolServer& server : pool->servers) {
    if (server.name != name && server.address != name) continue;
    auto socket = Contact(server);
    if (!socket) return Complain(socket.error());
    return ask(server, std::move(*socket));
  }
  return Complain({Code::kInvalidArgument, "The pool has no server (" + name + ")."});
}

}  // namespace

Result<config::PoolFile> FindPool(const PoolFlags& flags) {
  std::string listed = flags.server;
  if (listed.empty() && flags.config.empty()) listed = EnvString("PENSTOCK_SERVER");
  const std::string key_file =
      flags.key_file.empty() ? EnvString("PENSTOCK_KEY_FILE") : flags.key_file;
  config::PoolFile pool;
  if (listed.empty()) {
    const std::string file = flags.config.empty() ? config::FindPoolFile() : flags.config;
    if (file.empty()) {
      return Fail(
          Code::kInvalidArgument,
          "No pool is configured. Name servers with --server or PENSTOCK_SERVER, or write a "
          "pool file (penstock config --help).");
    }
    ASSIGN_OR_RETURN(pool, config::ReadPoolFile(file));
  }
  for (size_t begin = 0; begin < listed.size();) {
    const size_t comma = std::min(listed.find(',', begin), listed.size());
    PoolServer server;
    server.address = listed.substr(begin, comma - begin);
    RETURN_IF_ERROR(config::ParseEndpoint(server.address).map([](const auto&) {}));
    server.name = server.address;
    pool.servers.push_back(std::move(server));
    begin = comma + 1;
  }
  if (!key_file.empty()) {
    for (PoolServer& server : pool.servers) server.key_file = key_file;
  }
  return pool;
}

int ListGpus(const PoolFlags& flags) {
  const auto pool = FindPool(flags);
  if (!pool) return Complain(pool.error());
  const std::vector<Answer> answers = AskAll(*pool);
  std::vector<std::vector<std::string>> rows = {
      {"SERVER", "STATE", "GPU", "MODEL", "MEMORY", "SLOTS", "SESSIONS", "PATH"}};
  ordered_json servers = ordered_json::array();
  for (const Answer& answer : answers) {
    ordered_json entry = {{"name", answer.server->name}, {"address", answer.server->address}};
    if (!answer.status) {
      rows.push_back({answer.server->name, "down", "-", "-", "-", "-", "-", "-"});
      entry["state"] = "down";
      entry["error"] = answer.status.error().message;
      servers.push_back(entry);
      continue;
    }
    const control::Status& status = *answer.status;
    entry["state"] = StateOf(status);
    entry["host"] = status.host;
    entry["version"] = status.version;
    entry["driver_version"] = status.driver_version;
    if (!status.driver_error.empty()) entry["error"] = status.driver_error;
    entry["sessions"] = status.sessions.size();
    entry["most_sessions"] = status.most_sessions;
    entry["gpus"] = ordered_json::array();
    if (status.gpus.empty()) {
      rows.push_back({answer.server->name, StateOf(status), "-", "-", "-", "-", "-", "-"});
    }
    for (const control::Gpu& gpu : status.gpus) {
      size_t sessions = 0;
      const std::string paths = PathsOf(status, gpu.ordinal, &sessions);
      const uint64_t memory = gpu.slot_memory != 0 ? gpu.slot_memory : gpu.memory;
      rows.push_back(
          {answer.server->name, StateOf(status), std::to_string(gpu.ordinal), gpu.name,
           FormatBytes(memory) + (gpu.slot_memory != 0 ? " a slot" : ""),
           gpu.slots == 0 ? "-" : std::to_string(gpu.slots_taken) + "/" + std::to_string(gpu.slots),
           std::to_string(sessions), paths.empty() ? "-" : paths});
      entry["gpus"].push_back({{"ordinal", gpu.ordinal},
                               {"name", gpu.name},
                               {"uuid", gpu.uuid},
                               {"memory", gpu.memory},
                               {"slots", gpu.slots},
                               {"slots_taken", gpu.slots_taken},
                               {"slot_memory", gpu.slot_memory},
                               {"sessions", sessions},
                               {"path", paths}});
    }
    servers.push_back(entry);
  }
  const std::string text = flags.json ? servers.dump(2) + "\n" : FormatTable(rows);
  fputs(text.c_str(), stdout);
  return Rest(answers);
}

int ShowSessions(const PoolFlags& flags) {
  const auto pool = FindPool(flags);
  if (!pool) return Complain(pool.error());
  const std::vector<Answer> answers = AskAll(*pool);
  std::vector<std::vector<std::string>> rows = {{"SERVER", "SESSION", "HOST", "PID", "PROGRAM",
                                                 "GPU", "MEMORY", "CALLS", "RECEIVED", "SENT",
                                                 "PATH", "SINCE"}};
  ordered_json sessions = ordered_json::array();
  for (const Answer& answer : answers) {
    if (!answer.status) continue;
    for (const control::Session& session : answer.status->sessions) {
      rows.push_back({answer.server->name, std::to_string(session.id), session.host,
                      std::to_string(session.pid), session.program, Numbers(session.gpus),
                      FormatBytes(session.memory), std::to_string(session.calls),
                      FormatBytes(session.received), FormatBytes(session.sent),
                      session.path.empty() ? "-" : session.path, FormatSeconds(session.seconds)});
      sessions.push_back({{"server", answer.server->name},
                          {"session", session.id},
                          {"host", session.host},
                          {"pid", session.pid},
                          {"program", session.program},
                          {"peer", session.peer},
                          {"gpus", session.gpus},
                          {"memory", session.memory},
                          {"calls", session.calls},
                          {"bytes_received", session.received},
                          {"bytes_sent", session.sent},
                          {"path", session.path},
                          {"seconds", session.seconds}});
    }
  }
  const std::string text = flags.json        ? sessions.dump(2) + "\n"
                           : rows.size() > 1 ? FormatTable(rows)
                                             : "No program uses the pool.\n";
  fputs(text.c_str(), stdout);
  return Rest(answers);
}

int Drain(const PoolFlags& flags, const std::string& name) {
  return TellServer(flags, name, [&](const PoolServer& server, UniqueFd socket) {
    const auto sessions = control::AskDrain(std::move(socket), kAnswerMs);
    if (!sessions) return Complain(sessions.error());
    if (flags.json) {
      fputs((ordered_json{{"server", server.name}, {"sessions", *sessions}}.dump(2) + "\n").c_str(),
            stdout);
    } else {
      printf("%s takes no new programs; %u are still there.\n", server.name.c_str(), *sessions);
    }
    return 0;
  });
}

int Resume(const PoolFlags& flags, const std::string& name) {
  return TellServer(flags, name, [&](const PoolServer& server, UniqueFd socket) {
    const auto resumed = control::AskResume(std::move(socket), kAnswerMs);
    if (!resumed) return Complain(resumed.error());
    if (flags.json) {
      fputs((ordered_json{{"server", server.name}}.dump(2) + "\n").c_str(), stdout);
    } else {
      printf("%s takes programs again.\n", server.name.c_str());
    }
    return 0;
  });
}

}  // namespace penstock
