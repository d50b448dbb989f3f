// One error vocabulary for everything inside Penstock.
//
// A function that can fail returns Result<T>; the error carries a code for the caller to act on and
// a sentence for a person to read. CUDA's CUresult exists only at the two edges (interposer and
// driver) and is not used here.
#pragma once

#include <string>
#include <utility>

#include <tl/expected.hpp>

namespace penstock {

enum class Code {
  kInvalidArgument,    // our caller asked for something impossible
  kProtocol,           // the peer sent something no honest peer sends: end the session
  kUnavailable,        // the peer cannot be reached, or not any more
  kResourceExhausted,  // a limit was hit; the message names it
  kUnauthenticated,    // the peer does not hold the key
  kTimeout,
  kUnsupported,
  kSystem,    // the operating system refused; the message has strerror
  kInternal,  // our own mistake
};

const char* CodeName(Code code);

struct Error {
  Code code;
  std::string message;  // a full sentence, present tense, values in parentheses after their noun
};

template <typename T>
using Result = tl::expected<T, Error>;
using Status = Result<void>;

inline tl::unexpected<Error> Fail(Code code, std::string message) {
  return tl::unexpected<Error>(Error{code, std::move(message)});
}

// Fail(kSystem) with strerror(errno) appended: "Cannot open (/x): No such file or directory."
tl::unexpected<Error> FailErrno(std::string what);

}  // namespace penstock

// Pass an error up: RETURN_IF_ERROR(Step());  ASSIGN_OR_RETURN(auto value, Compute());
#define PENSTOCK_CONCAT_(a, b) a##b
#define PENSTOCK_CONCAT(a, b) PENSTOCK_CONCAT_(a, b)
#define RETURN_IF_ERROR(expression)                                                   \
  do {                                                                                \
    auto penstock_status = (expression);                                              \
    if (!penstock_status)                                                             \
      return ::tl::unexpected<::penstock::Error>(std::move(penstock_status).error()); \
  } while (0)
#define ASSIGN_OR_RETURN(target, expression) \
  PENSTOCK_ASSIGN_OR_RETURN_(PENSTOCK_CONCAT(penstock_result_, __LINE__), target, expression)
#define PENSTOCK_ASSIGN_OR_RETURN_(result, target, expression)                        \
  auto result = (expression);                                                         \
  if (!result) return ::tl::unexpected<::penstock::Error>(std::move(result).error()); \
  target = std::move(*result)
