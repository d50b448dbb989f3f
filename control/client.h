// The asking half of the control plane: one question over a socket that has gone through the hello.
#pragma once

#include <cstdint>

#include "common/result.h"
#include "common/unique_fd.h"
#include "control/status.h"

namespace penstock::control {

// Each takes the socket, asks, waits at most so long, and closes. kUnavailable or kTimeout.
Result<Status> AskStatus(UniqueFd socket, int64_t limit_ms);
// The number of sessions that are still there.
Result<uint32_t> AskDrain(UniqueFd socket, int64_t limit_ms);
penstock::Status AskResume(UniqueFd socket, int64_t limit_ms);

}  // namespace penstock::control
