// A channel of completion events for a sleeper.
#pragma once

#include "transport/rdma/verbs.h"

namespace penstock::transport::rdma {

// Non-blocking, and one of the things that `epoll` waits for. nullptr with errno on failure.
ibv_comp_channel* MakeCompletionChannel(Verbs& verbs, ibv_context* context, int epoll);

}  // namespace penstock::transport::rdma
