#include "interposer/core/statistics.h"

#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <nlohmann/json.hpp>

#include "common/log.h"

namespace penstock::interposer {
namespace {

constinit FunctionCounters g_counters[kFunctionCount];

std::string ExpandPid(std::string path) {
  const size_t place = path.find("%p");
  if (place != std::string::npos) path.replace(place, 2, std::to_string(getpid()));
  return path;
}

}  // namespace

FunctionCounters& CountersOf(Function function) {
  return g_counters[FunctionIndex(function)];
}

void ForgetStatistics() {
  for (FunctionCounters& counters : g_counters) {
    counters.calls = 0;
    counters.round_trips = 0;
    counters.posted = 0;
  }
}

void SessionTotals::Add(transport::Connection& its, const SessionCounters& session) {
  const std::string name = its.caps().name;
  if (("+" + transport + "+").find("+" + name + "+") == std::string::npos) {
    transport += (transport.empty() ? "" : "+") + name;
  }
  ++sessions;
  transport::Counters counters = its.counters();
  if (!its.caps().sees_bulk) {
    counters.bulk_bytes_sent = session.bulk_sent;
    counters.bulk_bytes_received = session.bulk_received;
  }
  connection.frames_sent += counters.frames_sent;
  connection.frames_received += counters.frames_received;
  connection.packets_sent += counters.packets_sent;
  connection.packets_received += counters.packets_received;
  connection.bytes_sent += counters.bytes_sent;
  connection.bytes_received += counters.bytes_received;
  connection.bulk_bytes_sent += counters.bulk_bytes_sent;
  connection.bulk_bytes_received += counters.bulk_bytes_received;
  connection.bulk_copies += counters.bulk_copies;
  hello_round_trips += session.hello_round_trips;
  bulk_copies += session.bulk_copies;
  window_waits += session.window_waits;
  staging_waits += session.staging_waits;
  ring_waits += session.ring_waits;
}

bool WriteStatistics(const std::string& path, const SessionTotals& totals) {
  const transport::Counters& transport = totals.connection;
  nlohmann::ordered_json functions = nlohmann::ordered_json::object();
  uint64_t calls = 0, posted = 0, local = 0;
  uint64_t round_trips = totals.hello_round_trips + totals.window_waits;
  for (uint32_t index = 0; index < kFunctionCount; ++index) {
    const FunctionCounters& counters = g_counters[index];
    const uint64_t here = counters.calls, trips = counters.round_trips, sent = counters.posted;
    if (here == 0 && trips == 0 && sent == 0) continue;
    calls += here;
    round_trips += trips;
    posted += sent;
    if (here > trips + sent) local += here - trips - sent;
    functions[kFunctionTexts[index].name] = {
        {"calls", here}, {"round_trips", trips}, {"posted", sent}};
  }
  const nlohmann::ordered_json document = {
      {"pid", getpid()},
      {"transport", totals.transport},
      {"sessions", totals.sessions},
      {"calls", calls},
      {"round_trips", round_trips},
      {"handshake_round_trips", totals.hello_round_trips},
      {"posted", posted},
      {"local", local},
      {"frames_sent", transport.frames_sent},
      {"frames_received", transport.frames_received},
      {"packets_sent", transport.packets_sent},
      {"packets_received", transport.packets_received},
      {"bytes_sent", transport.bytes_sent + transport.bulk_bytes_sent},
      {"bytes_received", transport.bytes_received + transport.bulk_bytes_received},
      {"bulk_bytes_sent", transport.bulk_bytes_sent},
      {"bulk_bytes_received", transport.bulk_bytes_received},
      {"bulk_copies", totals.bulk_copies + transport.bulk_copies},
      {"window_waits", totals.window_waits},
      {"staging_waits", totals.staging_waits},
      {"ring_waits", totals.ring_waits},
      {"functions", functions},
  };
  const std::string target = ExpandPid(path);
  FILE* file = fopen(target.c_str(), "we");
  if (file == nullptr) {
    LOG_WARNING("stats", "Cannot write the statistics (PENSTOCK_STATS=%s): %s.", target.c_str(),
                strerror(errno));
    return false;
  }
  const std::string text = document.dump(2) + "\n";
  const bool ok = fwrite(text.data(), 1, text.size(), file) == text.size();
  return fclose(file) == 0 && ok;
}

}  // namespace penstock::interposer
