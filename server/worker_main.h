// The process of one session, from its start by the supervisor to its end.
#pragma once

namespace penstock::server {

// Returns the exit status: 0 for a session that its client ended.
int WorkerMain();

}  // namespace penstock::server
