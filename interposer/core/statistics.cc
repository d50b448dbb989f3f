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

bool WriteStatistics(const std::string& path, const char* transport_name,
                     const transport::Counters& transport, const SessionCounters& session) {
  nlohmann::ordered_json functions = nlohmann::ordered_json::object();
  uint64_t calls = 0, posted = 0, local = 0;
  uint64_t round_trips = session.hello_round_trips + session.window_waits;
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
      {"transport", transport_name},
      {"calls", calls},
      {"round_trips", round_trips},
      {"handshake_round_trips", session.hello_round_trips.load()},
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
      {"bulk_copies", session.bulk_copies.load() + transport.bulk_copies},
      {"window_waits", session.window_waits.load()},
      {"staging_waits", session.staging_waits.load()},
      {"ring_waits", session.ring_waits.load()},
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
