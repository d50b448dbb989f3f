// What a worker gives up before it runs anything for its client.
//
// A worker executes its tenant's code in effect: kernels reach raw pointers. So it runs as a user
// of its own (where the daemon is root), has no capabilities and cannot gain privileges, cannot be
// inspected by, inspect or signal other processes, opens no sockets to the outside, makes no
// processes, starts no programs, and has only its own descriptors. Real drivers use
// system calls in ways that nobody documents, so the filter names what is forbidden instead of what
// is allowed; forbidden calls fail with EPERM.
#pragma once

#include "common/result.h"
#include "server/session_parameters.h"

namespace penstock::server {

// Before the driver starts: user, limits, no new privileges, not dumpable.
Status Isolate(const SessionParameters& parameters);
// After the driver has started, which may have run helper programs: the system call filter, for all
// threads.
Status ForbidSystemCalls();

}  // namespace penstock::server
