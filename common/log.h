// Logging to stderr, one line an event: "penstock[pid] W transport: The peer closed ...".
//
// PENSTOCK_LOG=level[,area...] sets the least level (error, warning, info, debug, trace; default
// warning) and, if areas are named, restricts info and below to them. An area is a short word such
// as session, transport, dispatch. Log where an error is decided; callers above only pass it up.
// Never call this on the hot path: formatting happens only when the level is on, but the arguments
// are evaluated.
#pragma once

#include <cstdarg>

namespace penstock {

enum class LogLevel { kError, kWarning, kInfo, kDebug, kTrace };

bool LogEnabled(LogLevel level, const char* area);
void LogWrite(LogLevel level, const char* area, const char* format, ...)
    __attribute__((format(printf, 3, 4)));

// Replaces what PENSTOCK_LOG said; used by programs with a --log flag. Not thread-safe.
void SetLogSpec(const char* spec);
// The word at the start of each line; "penstock" by default. The text must outlive the program.
void SetLogName(const char* name);
// Where lines go; 2 by default. For a process whose stderr belongs to somebody else.
void SetLogDescriptor(int descriptor);

}  // namespace penstock

#define PENSTOCK_LOG_AT(level, area, ...)                                                    \
  do {                                                                                       \
    if (::penstock::LogEnabled(level, area)) ::penstock::LogWrite(level, area, __VA_ARGS__); \
  } while (0)
#define LOG_ERROR(area, ...) PENSTOCK_LOG_AT(::penstock::LogLevel::kError, area, __VA_ARGS__)
#define LOG_WARNING(area, ...) PENSTOCK_LOG_AT(::penstock::LogLevel::kWarning, area, __VA_ARGS__)
#define LOG_INFO(area, ...) PENSTOCK_LOG_AT(::penstock::LogLevel::kInfo, area, __VA_ARGS__)
#define LOG_DEBUG(area, ...) PENSTOCK_LOG_AT(::penstock::LogLevel::kDebug, area, __VA_ARGS__)
#define LOG_TRACE(area, ...) PENSTOCK_LOG_AT(::penstock::LogLevel::kTrace, area, __VA_ARGS__)
