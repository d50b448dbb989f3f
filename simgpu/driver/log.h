// One line on stderr, "simgpu: ...". SIMGPU_LOG=debug shows the chatty ones too.
#pragma once

namespace simgpu {

void LogWarning(const char* format, ...) __attribute__((format(printf, 1, 2)));
void LogDebug(const char* format, ...) __attribute__((format(printf, 1, 2)));

}  // namespace simgpu
