#include "common/result.h"

#include <cerrno>
#include <cstring>

namespace penstock {

const char* CodeName(Code code) {
  switch (code) {
    case Code::kInvalidArgument:
      return "invalid argument";
    case Code::kProtocol:
      return "protocol violation";
    case Code::kUnavailable:
      return "unavailable";
    case Code::kResourceExhausted:
      return "resource exhausted";
    case Code::kUnauthenticated:
      return "unauthenticated";
    case Code::kTimeout:
      return "timeout";
    case Code::kUnsupported:
      return "unsupported";
    case Code::kSystem:
      return "system error";
    case Code::kInternal:
      return "internal error";
  }
  return "unknown code";
}

tl::unexpected<Error> FailErrno(std::string what) {
  const int saved = errno;
  char text[128];
  // The GNU strerror_r returns the text; it may or may not use the buffer.
  const char* reason = strerror_r(saved, text, sizeof text);
  return Fail(Code::kSystem, what + ": " + reason + ".");
}

}  // namespace penstock
