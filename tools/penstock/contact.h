// From a server of the pool to a socket on which its daemon answers questions.
#pragma once

#include "common/result.h"
#include "common/unique_fd.h"
#include "config/pool_file.h"

namespace penstock {

// kUnavailable or kTimeout if it cannot be reached, kUnauthenticated if a key is wrong.
Result<UniqueFd> Contact(const config::PoolServer& server);

// How long a daemon may take to answer one question.
inline constexpr int64_t kAnswerMs = 10'000;

}  // namespace penstock
