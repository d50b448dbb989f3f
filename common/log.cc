#include "common/log.h"

#include <unistd.h>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace penstock {
namespace {

struct Config {
  LogLevel level = LogLevel::kWarning;
  char areas[256] = "";  // ",session,transport," or empty for all
};

Config Parse(const char* spec) {
  Config config;
  if (spec == nullptr || *spec == '\0') return config;
  static constexpr const char* kNames[] = {"error", "warning", "info", "debug", "trace"};
  const size_t level_length = strcspn(spec, ",");
  bool known = false;
  for (int i = 0; i < 5; ++i) {
    if (strlen(kNames[i]) == level_length && strncmp(spec, kNames[i], level_length) == 0) {
      config.level = static_cast<LogLevel>(i);
      known = true;
    }
  }
  if (!known) {
    // Not through the log: its level is what is being decided.
    dprintf(STDERR_FILENO,
            "penstock: The log level (%.*s) is unknown; it is one of error, warning, info, debug, "
            "trace.\n",
            static_cast<int>(level_length), spec);
  }
  if (spec[level_length] == ',') {
    snprintf(config.areas, sizeof config.areas, "%s,", spec + level_length);
  }
  return config;
}

Config& Current() {
  // Leaked: log lines may be written after static destructors have run.
  static Config* config = new Config(Parse(getenv("PENSTOCK_LOG")));
  return *config;
}

const char* log_name = "penstock";
int log_descriptor = STDERR_FILENO;

}  // namespace

bool LogEnabled(LogLevel level, const char* area) {
  const Config& config = Current();
  if (level > config.level) return false;
  if (level <= LogLevel::kWarning || config.areas[0] == '\0') return true;
  char wanted[64];
  snprintf(wanted, sizeof wanted, ",%s,", area);
  return strstr(config.areas, wanted) != nullptr;
}

void LogWrite(LogLevel level, const char* area, const char* format, ...) {
  char line[2048];
  int used = snprintf(line, sizeof line, "%s[%d] %c %s: ", log_name, getpid(),
                      "EWIDT"[static_cast<int>(level)], area);
  va_list arguments;
  va_start(arguments, format);
  const int body = vsnprintf(line + used, sizeof line - used - 1, format, arguments);
  va_end(arguments);
  used += body < 0 ? 0 : body;
  if (used > static_cast<int>(sizeof line) - 2) used = sizeof line - 2;
  line[used++] = '\n';
  // One write per line, so that lines of several processes do not mix.
  [[maybe_unused]] const ssize_t written = write(log_descriptor, line, used);
}

void SetLogSpec(const char* spec) {
  Current() = Parse(spec);
}
void SetLogName(const char* name) {
  log_name = name;
}
void SetLogDescriptor(int descriptor) {
  log_descriptor = descriptor;
}

}  // namespace penstock
