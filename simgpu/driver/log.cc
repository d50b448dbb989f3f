#include "simgpu/driver/log.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace simgpu {
namespace {

void Write(const char* format, va_list arguments) {
  char line[2048];
  std::vsnprintf(line, sizeof(line), format, arguments);
  std::fprintf(stderr, "simgpu: %s\n", line);
}

}  // namespace

void LogWarning(const char* format, ...) {
  static const bool silent = [] {
    const char* level = getenv("SIMGPU_LOG");
    return level != nullptr && std::strcmp(level, "none") == 0;
  }();
  if (silent) return;
  va_list arguments;
  va_start(arguments, format);
  Write(format, arguments);
  va_end(arguments);
}

void LogDebug(const char* format, ...) {
  static const bool enabled = [] {
    const char* level = getenv("SIMGPU_LOG");
    return level != nullptr && std::strcmp(level, "debug") == 0;
  }();
  if (!enabled) return;
  va_list arguments;
  va_start(arguments, format);
  Write(format, arguments);
  va_end(arguments);
}

}  // namespace simgpu
