// The handlers that are generated from codegen/spec, by function id. The worker's dispatch table is
// made of these and of the hand-written operations.
#pragma once

#include <span>

#include "server/worker/call_context.h"

namespace penstock::server {

std::span<const HandlerEntry> Handlers();

}  // namespace penstock::server
